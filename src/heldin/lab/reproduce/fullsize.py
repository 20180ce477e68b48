"""The full-size runs that the page reports: which, in which order, and how far they are.

They take many hours: one after the other, on a few threads, from their checkpoints when started
again. A run that is not over can be looked at as far as its last checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .data import folder as _folder
from .registry import EXPERIMENTS
from .runner import Task, work

__all__ = ["ELEMENTWISE", "PLAN", "TENTHS", "Planned", "make", "tasks"]

PAUSE = 240.0  # seconds between checkpoints
TENTH = (784, 250, 200, 150, 100, 50, 10)
FIFTH = (784, 500, 400, 300, 200, 100, 10)


@dataclass(frozen=True)
class Planned:
    """Runs of one experiment at the paper's size, or near it.

    Attributes:
        name: of the set, in file names and on the page.
        experiment: its name.
        changes: of the full preset.
        parts: the runs, in order.
        seeds: of each.
    """

    name: str
    experiment: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    parts: tuple[str, ...] = ()
    seeds: int = 1


def _both(rate: float) -> tuple[str, str]:
    return f"rate {rate:g}, validation", f"rate {rate:g}, evidence"


def _tenth(**changes: Any) -> dict[str, Any]:
    """A tenth of the width, all images, the rates times ten, or so."""
    return {
        "widths": TENTH,
        "rates": (0.03,),
        "budget": None,
        "every": 100,
        "travel": 250.0,
        **changes,
    }


PLAN = (
    Planned("full-sgd", "mnist-sgd", {}, _both(0.01)),
    Planned("full-sgd", "mnist-sgd", {}, _both(0.005)),
    Planned("full-greedy", "greedy", {}, ("rate 0.005, greedy",)),
    Planned("full-rmsprop", "rmsprop", {}, ("SGD", "SGD with stopping", "RMSprop")),
    Planned("fifth-gd", "mnist-gd", {"widths": FIFTH}, ("validation", "evidence")),
    Planned("full-sgd", "mnist-sgd", {}, _both(0.003)),
    # ten times the rate and an eighth of the steps: hours in the place of days
    Planned(
        "tenth-gd",
        "mnist-gd",
        {"widths": TENTH, "rates": (0.1,), "steps": 2500, "every": 25},
        ("validation", "evidence"),
    ),
)
TENTHS = (
    Planned("tenth-sgd", "mnist-sgd", _tenth(), _both(0.03), seeds=3),
    Planned("tenth-sgd-standard", "mnist-sgd", _tenth(pixels="standard"), _both(0.03)),
    Planned("tenth-sgd-glorot", "mnist-sgd", _tenth(init="glorot"), _both(0.03)),
    Planned(
        "tenth-sgd-standard-glorot",
        "mnist-sgd",
        _tenth(pixels="standard", init="glorot"),
        _both(0.03),
    ),
)
ELEMENTWISE = (  # beside the plain runs of TENTHS
    Planned(
        "tenth-greedy",
        "greedy",
        {"widths": TENTH, "rates": (0.03,), "every": 100, "travel": 250.0},
        ("rate 0.03, plain", "rate 0.03, greedy", "rate 0.03, greedy, 0/0 left out"),
    ),
    Planned(
        "tenth-rmsprop",
        "rmsprop",
        {"widths": TENTH, "rates": (0.03,), "every": 100, "steps": 8333, "travel": 250.0},
        ("SGD", "SGD with stopping", "SGD with stopping, 0/0 left out", "RMSprop"),
    ),
)


def tasks(
    plan: tuple[Planned, ...], out: Path, data: str | Path | None = None, threads: int = 1
) -> Iterator[tuple[Planned, Task]]:
    """The runs of a plan, in order."""
    source = str(_folder(data).absolute())
    for planned in plan:
        experiment = EXPERIMENTS[planned.experiment]
        settings = replace(experiment.settings["full"], **planned.changes)
        parts = experiment.parts(settings)
        place = out.absolute() / planned.name
        for seed in range(planned.seeds):
            for part in planned.parts:
                yield planned, Task(
                    experiment.name, "full", part, seed, experiment.run, parts[part], settings,
                    source, "cpu", place, PAUSE, threads,
                )  # fmt: skip


def make(
    plan: tuple[Planned, ...],
    out: Path,
    data: str | Path | None = None,
    threads: int = 1,
    tell: Any = print,
) -> None:
    """Make the runs that are not finished, one after the other."""
    for planned, task in tasks(plan, out, data, threads):
        for name in ("runs", "checkpoints"):
            (task.folder / name).mkdir(parents=True, exist_ok=True)
        if not task.finished:
            tell(f"{planned.name}: {task.part}, seed {task.seed}, from step {task.done}")
            work(task)
    tell("all runs of the plan are finished")
