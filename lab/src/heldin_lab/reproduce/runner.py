"""Running experiments: in parallel, seen from outside, and again from where they were."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from heldin.errors import HeldinError

from . import data as _data
from . import tables as _tables
from .experiment import Experiment
from .outcomes import Outcome, Reproduction
from .registry import EXPERIMENTS
from .report import write_docs, write_report
from .run import Run, described

__all__ = ["Watch", "looking", "reproduce"]

Watch = Callable[[Mapping[str, tuple[int, int]]], object]
"""Gets the steps made and to be made of every experiment, now and then."""

PAUSE = 30.0  # seconds between checkpoints


@dataclass(frozen=True)
class Task:
    """One run, as it is sent to a process."""

    experiment: str
    preset: str
    part: str
    seed: int
    function: Callable[..., None]
    arguments: Mapping[str, Any]
    settings: Any
    data: str
    device: str
    folder: Path
    pause: float

    @property
    def name(self) -> str:
        """Of its files."""
        part = re.sub(r"[^a-z0-9.]+", "-", self.part.lower())
        return f"{self.experiment}-{part}-{self.seed}"

    @property
    def table(self) -> Path:
        """The finished run."""
        return self.folder / "runs" / f"{self.name}.csv"

    @property
    def checkpoint(self) -> Path:
        """The unfinished one."""
        return self.folder / "checkpoints" / f"{self.name}.pt"

    @property
    def finished(self) -> bool:
        """Whether there is a table of this very run."""
        if not self.table.exists():
            return False
        own = json.dumps(described(self.settings), sort_keys=True)
        return bool((_tables.read(self.table)["settings"] == own).all())

    @property
    def total(self) -> int:
        """Steps to be made."""
        rate = self.arguments.get("rate")
        by_rate = hasattr(self.settings, "length") and rate is not None
        return int(self.settings.length(rate) if by_rate else self.settings.steps)

    @property
    def done(self) -> int:
        """Steps made so far."""
        if self.table.exists():
            return self.total
        try:
            return int(self.checkpoint.with_suffix(".step").read_text())
        except (OSError, ValueError):
            return 0


def work(task: Task) -> None:
    """Make a run and write its table.

    On one thread, but for the longest runs: then its numbers do not depend, to the last bit, on
    how many run beside it.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        run = Run(
            task.seed,
            task.settings,
            task.arguments,
            data=task.data,
            device=task.device,
            path=task.checkpoint,
            pause=task.pause,
        )
        task.function(run, **task.arguments)
        _tables.write(
            task.table, run, experiment=task.experiment, preset=task.preset, part=task.part
        )
        run.clear()
    finally:
        torch.set_num_threads(threads)


def chosen(names: Sequence[str]) -> list[Experiment]:
    """Experiments by name, in the order of the paper.

    >>> [experiment.name for experiment in chosen(["wdbc", "toy"])]
    ['toy', 'wdbc']
    """
    unknown = [name for name in names if name not in EXPERIMENTS and name != "all"]
    if unknown:
        raise HeldinError(
            f"reproduce: unknown experiment {unknown[0]!r}; known are all, {', '.join(EXPERIMENTS)}"
        )
    if not names:
        raise HeldinError(
            f"reproduce: name experiments, or all; known are {', '.join(EXPERIMENTS)}"
        )
    return [e for e in EXPERIMENTS.values() if "all" in names or e.name in names]


def reproduce(
    names: Sequence[str] = ("all",),
    *,
    preset: str = "quick",
    out: str | Path = "report",
    seeds: int | None = None,
    resume: bool = False,
    jobs: int | None = None,
    data: str | Path | None = None,
    device: str | None = None,
    watch: Watch | None = None,
    tell: Callable[[str], object] = lambda line: None,
    docs: str | Path | None = None,
    changes: Mapping[str, Mapping[str, Any]] | None = None,
    pause: float = PAUSE,
) -> Reproduction:
    """Run experiments of the paper, check its claims, and write a report.

    Args:
        names: of experiments, or "all".
        preset: "quick" (minutes on two cores) or "full" (the paper's own sizes).
        out: folder for the report (report.html), figures, tables of claims and runs.
        seeds: number of seeds (default: the experiment's own).
        resume: go on with what is in `out`: finished runs are kept, others continue from their
            last checkpoint.
        jobs: number of processes. None leaves it to joblib: one, or what a
            `joblib.parallel_config` around the call says, which is also the way to a cluster
            (`backend="dask"` or "ray"); `out` must then be a folder that all machines see.
        data: folder of datasets (default: HELDIN_DATA, else the user's cache).
        device: where to train (default: a GPU if there is one).
        watch: is told about progress, see `Watch`.
        tell: gets a line for each dataset that is not there.
        docs: Markdown file to write the report to as well; its figures go to a folder
            figures/NAME beside it, small enough for a repository.
        changes: settings to change, by experiment.
        pause: seconds between checkpoints.

    >>> import tempfile
    >>> from heldin_lab.reproduce import reproduce
    >>> found = reproduce(["sketch2d"], out=tempfile.mkdtemp(), device="cpu")
    >>> [verdict.confirmed for verdict in found.outcomes[0].verdicts]
    [True, True]
    """
    experiments = chosen(names)
    if preset not in ("quick", "full"):
        raise HeldinError(f"reproduce: preset must be 'quick' or 'full', got {preset!r}")
    if seeds is not None and seeds < 1:
        raise HeldinError(f"reproduce: seeds must be at least 1, got {seeds}")
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    settings = {
        e.name: _settings(e, preset, seeds, (changes or {}).get(e.name, {})) for e in experiments
    }
    origins, missing = _look(experiments, settings, data)
    lines = [
        f"{', '.join(name for name, other in missing.items() if other == reason)}: {reason}"
        for reason in dict.fromkeys(missing.values())
    ]
    experiments = [e for e in experiments if e.name not in missing]
    if not experiments:
        raise HeldinError("; ".join(lines))
    for line in lines:
        tell(line)
    folder = Path(out)
    for name in ("runs", "checkpoints", "figures"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    # workers may be in another folder or another environment
    source, target = str(_data.folder(data).absolute()), folder.absolute()
    tasks = [
        Task(
            e.name, preset, part, seed, e.run, arguments, settings[e.name],
            source, where, target, pause,
        )
        for e in experiments
        for seed in range(settings[e.name].seeds)
        for part, arguments in e.parts(settings[e.name]).items()
    ]  # fmt: skip
    _make(tasks, resume, jobs, watch)
    outcomes = [
        _judge(e, settings[e.name], [t for t in tasks if t.experiment == e.name], origins)
        for e in experiments
    ]
    command = f"heldin-lab reproduce {' '.join(names)} --preset {preset}"
    command += "" if seeds is None else f" --seeds {seeds}"
    found = Reproduction(preset, outcomes, missing, where, folder / "report.html", command)
    write_report(folder, found)
    if docs is not None:
        write_docs(Path(docs), found)
    return found


def _settings(
    experiment: Experiment, preset: str, seeds: int | None, changes: Mapping[str, Any]
) -> Any:
    settings = experiment.settings[preset]
    if seeds is not None and settings.seeds > 1:  # what is not random stays one run
        settings = replace(settings, seeds=seeds)
    try:
        return replace(settings, **changes)
    except TypeError as error:
        raise HeldinError(f"reproduce: changes of {experiment.name}: {error}") from error


def _look(
    experiments: Sequence[Experiment], settings: Mapping[str, Any], data: str | Path | None
) -> tuple[dict[str, str], dict[str, str]]:
    """Which data each experiment will use, and which experiments have none and why."""
    origins: dict[str, str] = {}
    missing: dict[str, str] = {}
    known: dict[tuple[str, bool], str | HeldinError] = {}
    for e in experiments:
        if e.data is None:
            continue
        key = (e.data, not getattr(settings[e.name], "official", False))
        if key not in known:
            try:
                known[key] = _data.require(key[0], data, part=key[1])
            except HeldinError as error:
                known[key] = error
        found = known[key]
        if isinstance(found, HeldinError):
            missing[e.name] = str(found)
        else:
            origins[e.name] = found
    return origins, missing


def _make(tasks: Sequence[Task], resume: bool, jobs: int | None, watch: Watch | None) -> None:
    import joblib

    for task in tasks:
        if resume and task.finished:
            continue
        task.table.unlink(missing_ok=True)
        task.table.with_suffix(".npz").unlink(missing_ok=True)
        if not resume:
            task.checkpoint.unlink(missing_ok=True)
            task.checkpoint.with_suffix(".step").unlink(missing_ok=True)
    waiting = [task for task in tasks if not task.table.exists()]
    # the long ones first, so that the cores are busy to the end
    waiting.sort(key=lambda task: EXPERIMENTS[task.experiment].data is None)
    with _watched(tasks, watch):
        joblib.Parallel(n_jobs=jobs)(joblib.delayed(work)(task) for task in waiting)


@contextmanager
def _watched(tasks: Sequence[Task], watch: Watch | None) -> Iterator[None]:
    """Tell how far the runs are, from the files they write, wherever they run."""
    if watch is None:
        yield
        return

    def look() -> None:
        found = {task.experiment: (0, 0) for task in tasks}
        for task in tasks:
            done, total = found[task.experiment]
            found[task.experiment] = (done + task.done, total + task.total)
        watch(found)

    with looking(look, 0.5):
        yield


@contextmanager
def looking(look: Callable[[], object], pause: float) -> Iterator[None]:
    """Look at once, every so many seconds while the block runs, and at its end."""
    over = threading.Event()

    def keep_looking() -> None:
        while not over.wait(pause):
            look()

    look()
    thread = threading.Thread(target=keep_looking, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        look()


def _judge(
    experiment: Experiment, settings: Any, tasks: Sequence[Task], origins: Mapping[str, str]
) -> Outcome:
    results: dict[int, dict[str, Any]] = {}
    seconds, finished = 0.0, ""
    for task in tasks:
        table = _tables.read(task.table)
        results.setdefault(task.seed, {})[task.part] = table
        seconds += float(table.cpu_seconds.iloc[0])
        finished = max(finished, table.date.iloc[0])
    verdicts = [claim.judge(results) for claim in experiment.claims(settings)]
    origin = origins.get(experiment.name, "")
    return Outcome(experiment, settings, results, verdicts, origin, seconds, finished)
