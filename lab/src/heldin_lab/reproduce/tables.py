"""Runs as tidy tables: one CSV file each, one row per recorded step."""

from __future__ import annotations

import csv
import json
import math
import platform
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from heldin.state.files import replacing

from .run import Run, described

__all__ = ["at", "last", "least", "read", "read_log", "step_of", "write"]


def write(path: Path, run: Run, **about: Any) -> None:
    """Write a finished run; what is the same in all rows (settings, versions, ...) comes last.

    What it has logged goes beside it, into a file of the same name that ends in npz.

    Args:
        path: of the CSV file.
        run: the run.
        about: what names it: experiment, preset, part.
    """
    import pandas

    table = pandas.DataFrame(run.rows)
    for place, (name, value) in enumerate({**about, "seed": run.seed}.items()):
        table.insert(place, name, value)
    spent = run.seconds
    table["seconds"] = round(spent["wall"], 3)
    table["cpu_seconds"] = round(spent["cpu"], 3)
    table["date"] = datetime.now(timezone.utc).date().isoformat()
    table["device"] = run.device
    for name, value in versions().items():
        table[name] = value
    table["settings"] = json.dumps(described(run.settings), sort_keys=True)
    if run.arrays:
        import numpy

        with replacing(path.with_suffix(".npz")) as part, open(part, "wb") as file:
            numpy.savez_compressed(file, **run.arrays)
    with replacing(path) as part:
        table.to_csv(part, index=False)


def read_log(path: Path) -> dict[str, Any]:
    """What a run has logged beside its table, as numpy arrays; nothing if it logs nothing."""
    import numpy

    if not path.with_suffix(".npz").exists():
        return {}
    with numpy.load(path.with_suffix(".npz")) as found:
        return dict(found)


def read(path: Path) -> Any:
    """A run's table, with the very numbers that were written."""
    import pandas

    with open(path, newline="", encoding="utf-8") as file:
        head, *rows = csv.reader(file)
    columns = dict(zip(head, zip(*rows, strict=True), strict=True))
    return pandas.DataFrame({name: _numbers(values) for name, values in columns.items()})


def _numbers(values: Sequence[str]) -> list[Any]:
    """Numbers if they all are, blanks being nan; to the last bit, whatever pandas would do."""
    try:
        return [float(value) if value else math.nan for value in values]
    except ValueError:
        return list(values)


def versions() -> dict[str, str]:
    """Of what the numbers may depend on."""
    try:
        own = version("heldin")
    except PackageNotFoundError:  # run from a source tree
        own = "unknown"
    return {"heldin": own, "torch": torch.__version__, "python": platform.python_version()}


# --- reading numbers off a table -------------------------------------------------------------


def at(table: Any, quantity: str, mark: str = "stop") -> float:
    """The value in the marked row; nan if no row is marked."""
    found = table.loc[table[mark] == 1, quantity]
    return float(found.iloc[0]) if len(found) else math.nan


def step_of(table: Any, mark: str = "stop") -> float:
    """The step of the marked row; nan if no row is marked."""
    return at(table, "step", mark)


def least(table: Any, quantity: str) -> float:
    """The least value on the path."""
    return float(table[quantity].min())


def last(table: Any, quantity: str) -> float:
    """The value at the end."""
    return float(table[quantity].dropna().iloc[-1])
