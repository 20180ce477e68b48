"""The small files of a repository from which the page is written."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .experiment import Claim
from .multiverse import Universe, file_name, merged, read_universe, write_universe
from .tables import read, versions

__all__ = ["FACTORS", "FIFTH", "FULL", "QUICK", "REAL", "SIZES", "TENTH", "VARIED", "Store", "rank"]

FULL, FIFTH, TENTH = "full size", "a fifth of the width", "a tenth of the width"
QUICK = "quick preset"
SIZES = (FULL, FIFTH, TENTH, QUICK, "")
REAL = "real runs"  # of sizes whose claims are not replayed
FACTORS = "factors of RMSprop"  # of sizes at which only these are read in several ways
VARIED = "varied"  # of sizes at which more is varied than in those that decide a verdict


def rank(size: str) -> tuple[int, str]:
    """The larger size first, and what is beside a size after it.

    >>> sorted(["quick preset", "full size, real runs", "", "full size"], key=rank)
    ['full size', 'full size, real runs', 'quick preset', '']
    """
    plain, _, beside = size.partition(", ")
    return (SIZES.index(plain) if plain in SIZES else len(SIZES)), beside


@dataclass(frozen=True)
class Store:
    """A folder of results, and where to tell about new ones.

    Attributes:
        folder: of the files.
        tell: gets a line for each result.
    """

    folder: Path
    tell: Callable[[str], object] = lambda line: None

    def keep(self, found: Universe, claims: Sequence[Claim] = ()) -> None:
        """Store values under all readings; at full size beside those of other rates."""
        if not found.rows:  # no reading that a run so short allows
            return
        path = self.folder / f"{file_name(found)}.csv"
        if found.size.startswith(FULL) and path.exists():
            found = merged(read_universe(path), found, claims)
        write_universe(path, found)
        self.tell(f"{found.experiment}, {found.size or 'all'}: {len(found.rows)} readings")

    def draw(self, name: str, figure: Any) -> None:
        """Store a figure."""
        figure.savefig(self.folder / f"{name}.png", dpi=90, metadata={"Software": None})

    def keep_run(self, name: str, table: Any, total: int) -> None:
        """Store the records of a run that took hours, without what it has logged.

        Args:
            name: of the run.
            table: its records.
            total: its steps.
        """
        same = {"experiment", "preset", "part", "seed", "seconds", "date", "device", "settings"}
        shown = table.loc[:, [c for c in table.columns if c not in same | set(versions())]]
        shown = shown.assign(total=total)
        shown.to_csv(self._run(name), index=False, float_format="%.8g", lineterminator="\n")

    def run(self, name: str, total: int) -> Any:
        """The stored records of a run; None if there are none, or of another length."""
        if not self._run(name).exists():
            return None
        table = read(self._run(name))
        return table if table.total.iloc[0] == total else None

    def _run(self, name: str) -> Path:
        return self.folder / f"run-{name}.csv"

    def facts(self) -> dict[str, Any]:
        """Numbers of the section on what the paper does not say."""
        path = self.folder / "facts.json"
        found: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
        return found

    def keep_facts(self, facts: Mapping[str, Any]) -> None:
        """Store them."""
        text = json.dumps(facts, indent=1) + "\n"
        (self.folder / "facts.json").write_text(text, encoding="utf-8")

    def progress(self) -> list[dict[str, str]]:
        """How far each run is."""
        return self._rows("progress.csv")

    def confirmed(self) -> list[dict[str, str]]:
        """Simulated stops and real ones."""
        return self._rows("confirmed.csv")

    def _rows(self, name: str) -> list[dict[str, str]]:
        path = self.folder / name
        if not path.exists():
            return []
        with open(path, newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))

    def keep_rows(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Store a table, one of its rows or more, as CSV."""
        with open(self.folder / name, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
