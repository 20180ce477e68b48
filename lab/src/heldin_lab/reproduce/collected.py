"""Runs as they lie on disk, finished or not, with what they have logged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from . import tables as _tables
from .ledger import Ledger
from .runner import Task

__all__ = ["Collected", "Found", "collect", "progress"]


@dataclass(frozen=True)
class Found:
    """One run.

    Attributes:
        table: its rows so far.
        log: what it has logged so far.
        finished: whether it is over.
        steps, total: made, and to be made.
        seconds: CPU time so far.
    """

    table: Any
    log: Mapping[str, Any]
    finished: bool
    steps: int
    total: int
    seconds: float


Collected = Mapping[int, Mapping[str, Found]]  # by seed and part


def collect(tasks: Iterable[Task]) -> dict[int, dict[str, Found]]:
    """What there is of some runs; a run that was not begun is absent."""
    found: dict[int, dict[str, Found]] = {}
    for task in tasks:
        one = _finished(task) or _unfinished(task)
        if one is not None:
            found.setdefault(task.seed, {})[task.part] = one
    return found


def _finished(task: Task) -> Found | None:
    if not task.finished:
        return None
    table, total = _tables.read(task.table), task.total
    spent = float(table.cpu_seconds.iloc[0])
    return Found(table, _tables.read_log(task.table), True, total, total, spent)


def _unfinished(task: Task) -> Found | None:
    import pandas

    if not task.checkpoint.exists():
        return None
    state = torch.load(task.checkpoint, map_location="cpu", weights_only=True)
    log: dict[str, Any] = {}
    if "log" in state["parts"]:
        sizes = {
            name: value.numel()
            for name, value in state["parts"]["model"].items()
            if torch.is_tensor(value)
        }
        for prefix, part in (("", "ledger"), ("exact_", "exact")):
            ledger = Ledger(sizes)
            ledger.load_state_dict(state["parts"]["log"][part])
            arrays = ledger.arrays()
            if not prefix:
                log |= arrays
            elif len(arrays["steps"]):
                log |= {"exact_steps": arrays["steps"], "exact_table": arrays["table"]}
    spent = float(state["seconds"]["cpu"])
    table = pandas.DataFrame(state["rows"])
    return Found(table, log, False, int(state["step"]), task.total, spent)


def progress(name: str, found: Collected, tasks: Iterable[Task]) -> list[dict[str, Any]]:
    """How far each run is, as rows of a table."""
    rows = []
    for task in tasks:
        one = found.get(task.seed, {}).get(task.part)
        rows.append(
            {
                "set": name,
                "run": task.part,
                "seed": task.seed,
                "steps": 0 if one is None else one.steps,
                "of": task.total,
                "hours": 0.0 if one is None else round(one.seconds / 3600, 2),
                "least test loss": ""
                if one is None or "test_loss" not in one.table
                else f"{float(one.table.test_loss.min()):.4f}",
            }
        )
    return rows
