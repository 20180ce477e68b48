"""For each claim: under which share of the admissible readings it holds.

A reading gives values for the seeds that were run; it holds if the claim does with more than half
of them.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from heldin.state.files import replacing

from .experiment import Claim, Verdict
from .readings import Choice, ours

__all__ = [
    "Judged",
    "Universe",
    "file_name",
    "judge",
    "merged",
    "read_universe",
    "universe",
    "write_universe",
]

Cell = tuple[int, int, float]  # seeds with which a claim holds, with the other limit; the median
MOST, LEAST = 0.9, 0.1  # of the readings: "holds", "does not hold"


@dataclass(frozen=True)
class Universe:
    """The values of some claims under all readings.

    Attributes:
        experiment: its name.
        size: of the runs, in words.
        seeds: how many there are.
        choices: names, by which readings differ.
        claims: texts of the claims, in order.
        rows: for each reading its values' names, and for each claim the number of seeds with which
            it holds, the same with the other limit, and the median.
    """

    experiment: str
    size: str
    seeds: int
    choices: tuple[str, ...]
    claims: tuple[str, ...]
    rows: Sequence[tuple[tuple[str, ...], Sequence[Cell]]]

    def holds(self, claim: int, beside: bool = False) -> list[bool]:
        """Of each reading, whether it holds with more than half of the seeds."""
        return [2 * cells[claim][int(beside)] > self.seeds for _, cells in self.rows]

    def share(self, claim: int, beside: bool = False) -> float:
        """Of the readings in which a claim holds."""
        return statistics.fmean(self.holds(claim, beside))

    def by_choice(self, claim: int) -> dict[str, dict[str, float]]:
        """The share among the readings that have a value, for each choice and value."""
        held = self.holds(claim)
        found: dict[str, dict[str, list[bool]]] = {name: {} for name in self.choices}
        for (names, _), yes in zip(self.rows, held, strict=True):
            for choice, value in zip(self.choices, names, strict=True):
                found[choice].setdefault(value, []).append(yes)
        return {c: {v: statistics.fmean(b) for v, b in vs.items()} for c, vs in found.items()}


@dataclass(frozen=True)
class Judged:
    """What becomes of a claim under all readings."""

    share: float
    beside: float
    ours: Cell
    choice: str
    spread: tuple[float, float]

    @property
    def verdict(self) -> str:
        """In one line."""
        if self.share >= MOST:
            return "holds"
        return "does not hold" if self.share <= LEAST else "holds under some readings"


def judge(found: Universe, claim: int) -> Judged:
    """The share of readings, and the choice that moves it most."""
    spans = {c: (min(v.values()), max(v.values())) for c, v in found.by_choice(claim).items()}
    choice = max(spans, key=lambda c: spans[c][1] - spans[c][0])
    mine = found.rows[0][1][claim]
    return Judged(found.share(claim), found.share(claim, True), mine, choice, spans[choice])


def universe(
    experiment: str,
    size: str,
    claims: Sequence[Claim],
    choices: Sequence[Choice],
    values: Iterable[tuple[Mapping[str, str], Sequence[Sequence[float]]]],
) -> Universe:
    """From the values of the seeds under each reading, ours first."""
    rows, seeds = [], 0
    for reading, each in values:
        cells = []
        for claim, numbers in zip(claims, each, strict=True):
            seeds = len(numbers)
            verdict = Verdict(claim, {i: float(v) for i, v in enumerate(numbers)})
            known = [v for v in verdict.values.values() if not math.isnan(v)]
            middle = statistics.median(known) if known else math.nan
            cells.append((verdict.held, verdict.held_beside, middle))
        rows.append((tuple(reading[c.name] for c in choices), cells))
    mine = tuple(ours(choices).values())
    rows.sort(key=lambda row: row[0] != mine)
    names = tuple(c.name for c in choices)
    return Universe(experiment, size, seeds, names, tuple(c.text for c in claims), rows)


def merged(before: Universe, found: Universe, claims: Sequence[Claim]) -> Universe:
    """Results of some rates with stored ones of other rates, whose runs need not be there any more.

    Claims of the same text are those of `found`, but for claims about all rates together
    (`Claim.across`), whose values are put together and judged anew. Results that have other
    choices or readings are not put together: then `found` is returned.

    Args:
        before: what is stored.
        found: what is new.
        claims: those of `found`.
    """
    old = dict(before.rows)
    same = before.choices == found.choices and set(old) == {names for names, _ in found.rows}
    if not same or before.seeds != found.seeds:
        return found
    kept = [k for k, text in enumerate(before.claims) if text not in found.claims]
    texts = [*(before.claims[k] for k in kept), *found.claims]
    order = sorted(range(len(texts)), key=lambda k: _rate(texts[k]))

    def cells(names: tuple[str, ...], new: Sequence[Cell]) -> list[Cell]:
        own = list(new)
        for k, claim in enumerate(claims):
            if claim.across is not None and claim.text in before.claims and found.seeds == 1:
                other = old[names][before.claims.index(claim.text)][2]
                verdict = Verdict(claim, {0: claim.across(other, own[k][2])})
                own[k] = verdict.held, verdict.held_beside, verdict.values[0]
        both = [*(old[names][k] for k in kept), *own]
        return [both[k] for k in order]

    rows = [(names, cells(names, new)) for names, new in found.rows]
    return replace(found, claims=tuple(texts[k] for k in order), rows=rows)


def _rate(text: str) -> float:
    """The rate that a claim is about; those about all rates come last.

    >>> _rate("rate 0.01: validation stops"), _rate("up to 80 % in a layer")
    (0.01, inf)
    """
    return float(text.split()[1].strip(":")) if text.startswith("rate ") else math.inf


# --- files -----------------------------------------------------------------------------------


def file_name(found: Universe) -> str:
    """Of its file and its chart, without the ending.

    >>> file_name(Universe("toy", "a tenth, varied", 1, (), (), ()))
    'readings-toy-a-tenth-varied'
    """
    size = found.size.replace(",", "").replace(" ", "-")
    return f"readings-{found.experiment}-{size or 'seeds'}"


def write_universe(path: Path, found: Universe) -> None:
    """As a small CSV file: a column for each choice, and three for each claim."""
    with replacing(path) as part, open(part, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([found.experiment, found.size, found.seeds, len(found.choices)])
        writer.writerow(found.claims)
        writer.writerow(found.choices)
        for names, cells in found.rows:
            numbers = [f"{held} {beside} {value:.4g}" for held, beside, value in cells]
            writer.writerow([*names, *numbers])


def read_universe(path: Path) -> Universe:
    """What `write_universe` has written."""
    with open(path, newline="", encoding="utf-8") as file:
        (experiment, size, seeds, width), claims, choices, *rows = csv.reader(file)
    count = int(width)

    def cell(text: str) -> Cell:
        held, beside, value = text.split()
        return int(held), int(beside), float(value)

    table = [(tuple(row[:count]), [cell(text) for text in row[count:]]) for row in rows]
    return Universe(experiment, size, int(seeds), tuple(choices), tuple(claims), table)
