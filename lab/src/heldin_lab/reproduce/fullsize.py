"""The full-size runs that the page reports: which, in which order, and how far they are.

They take many hours: in the order of the plan, in a few processes of one thread each, and from
their checkpoints when started again. A run that is not over can be looked at as far as its last
checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from heldin.errors import HeldinError

from .data import folder as _folder
from .registry import EXPERIMENTS
from .runner import Task, looking, work

__all__ = ["ALL", "ELEMENTWISE", "PLAN", "TENTHS", "Planned", "make", "named", "tasks"]

PAUSE = 240.0  # seconds between checkpoints
NEWS = 300.0  # seconds between lines that tell how far the runs are
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
    # four fifths of the length, about where the turn is; RMSprop has overfitted long before
    Planned("full-rmsprop", "rmsprop", {"steps": 20_000}, ("SGD with stopping", "SGD")),
    Planned("full-rmsprop", "rmsprop", {"steps": 5_000}, ("RMSprop",)),
    # each of 15,000 steps would need the gradient of all images: 20 hours
    Planned(
        "fifth-gd",
        "mnist-gd",
        {"widths": FIFTH, "flow": True, "steps": 15_000},
        ("evidence", "validation"),
    ),
    Planned("full-sgd", "mnist-sgd", {}, _both(0.003)),
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


ALL = (*TENTHS, *ELEMENTWISE, *PLAN)


def named(names: Sequence[str]) -> tuple[Planned, ...]:
    """The sets of these names, in the order of the plan; all of them if there are no names.

    >>> [planned.name for planned in named(["full-greedy", "tenth-greedy"])]
    ['tenth-greedy', 'full-greedy']
    """
    known = list(dict.fromkeys(planned.name for planned in ALL))
    unknown = [name for name in names if name not in known]
    if unknown:
        raise HeldinError(
            f"reproduce: unknown set of runs {unknown[0]!r}; the plan has {', '.join(known)}"
        )
    return tuple(planned for planned in ALL if not names or planned.name in names)


def tasks(
    plan: Sequence[Planned], out: Path, data: str | Path | None = None
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
                    source, "cpu", place, PAUSE,
                )  # fmt: skip


def make(
    plan: Sequence[Planned],
    out: Path,
    data: str | Path | None = None,
    jobs: int = 1,
    tell: Callable[[str], object] = print,
) -> None:
    """Make the runs that are not finished, in the order of the plan.

    Args:
        plan: sets of runs.
        out: their folder.
        data: folder of datasets.
        jobs: processes, each of one thread.
        tell: gets a line when a run is over, and now and then how far the others are.
    """
    import joblib

    every = [(f"{planned.name}: {task.part}, seed {task.seed}", task)
             for planned, task in tasks(plan, out, data)]  # fmt: skip
    for _, task in every:
        for name in ("runs", "checkpoints"):
            (task.folder / name).mkdir(parents=True, exist_ok=True)
    waiting = {words: task for words, task in every if not task.finished}
    tell(f"{len(every) - len(waiting)} of {len(every)} runs are finished")
    with _news(waiting, tell):
        workers = joblib.Parallel(n_jobs=jobs, batch_size=1, return_as="generator_unordered")
        for words in workers(joblib.delayed(_made)(*each) for each in waiting.items()):
            tell(f"{words}: finished")
    tell("all runs of the plan are finished")


def _made(words: str, task: Task) -> str:
    work(task)
    return words


@contextmanager
def _news(waiting: Mapping[str, Task], tell: Callable[[str], object]) -> Iterator[None]:
    """Tell how far the runs are, from the files that they write."""

    def look() -> None:
        for words, task in waiting.items():
            if not task.table.exists() and task.done:
                tell(f"{words}: step {task.done} of {task.total}")

    with looking(look, NEWS):
        yield
