"""The study itself: plan, train in parallel, replay, report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import joblib
import numpy as np
import torch

from heldin.errors import HeldinError
from heldin_lab.rules import Folds, LeaveOneOut
from heldin_lab.rules import leave_one_out as _leaveoneout

from . import rules as _rules
from . import run as _run
from .along import log_network
from .data import LEAST_TEST, Role, Table, role, tables
from .logged import LoggedRun, Task
from .networks import KINDS, Kind, network_task
from .report import write_report
from .rules import NETWORK_RULES, RULES, replay
from .run import log, save
from .spec import NOISE, TABLES, WIDTH, Spec, Ways
from .tables import BASE, COLUMNS, SUMMARY, summarise, write
from .witnesses import DISPARITY_BATCHES

__all__ = ["constants", "plan", "quality"]

DEVELOPMENT = 1_000_000  # added to the seed of plans on which constants may be chosen


def plan(
    available: Sequence[Task],
    sizes: Sequence[int],
    runs: int,
    seed: int,
    steps: int = 2500,
    ways: Ways = TABLES,
) -> list[Spec]:
    """What is trained: datasets in turn, everything else drawn from the ways of its kind.

    >>> from heldin_lab.study.data import tables
    >>> [spec.dataset for spec in plan(tables(None), [50], runs=3, seed=0)]
    ['sk_digits', 'sk_wine', 'sk_wdbc']
    """
    large = {n: [t for t in available if t.rows >= n + LEAST_TEST] for n in sizes}
    sizes = [n for n in sizes if large[n]]
    if not sizes:
        raise HeldinError(
            f"study: no dataset has {min(large)} training rows and {LEAST_TEST} test rows; choose "
            "smaller --n, or another --role or --data"
        )
    generator = np.random.default_rng(seed)
    waiting: dict[int, list[Task]] = {n: [] for n in sizes}
    found = []
    for i in range(runs):
        n = sizes[i % len(sizes)]
        if not waiting[n]:
            waiting[n] = [large[n][j] for j in generator.permutation(len(large[n]))]
        found.append(
            Spec(
                waiting[n].pop().name,
                n,
                float(generator.choice(ways.noise)),
                str(generator.choice(ways.models)),
                str(generator.choice(ways.optimizers)),
                1000 * seed + i,
                steps,
            )
        )
    return found


def one_run(spec: Spec, task: Task, rules: Sequence[str], folder: Path) -> list[dict[str, Any]]:
    """Train if there is no log yet, replay the rules, return the rows."""
    torch.set_num_threads(1)
    run = LoggedRun(spec, task, _log_of(spec, task, folder))
    rows = []
    for name in rules:
        outcome = replay(run, name)
        if outcome is not None:
            rows.append({**asdict(spec), **asdict(outcome)})
    return rows


def _log_of(spec: Spec, task: Task, folder: Path) -> dict[str, Any]:
    path = folder / f"{spec.key}.npz"
    if not path.exists():
        save(path, log(spec, task) if isinstance(task, Table) else log_network(spec, task))
    with np.load(path, allow_pickle=False) as file:
        return {key: file[key] for key in file.files}


def chosen_rules(text: str, known: Sequence[str] = tuple(RULES)) -> list[str]:
    """Names of rules from a comma-separated list, or "all".

    >>> chosen_rules("folds, last iterate")
    ['split 20 %', 'folds', 'last iterate']
    """
    if text == "all":
        return list(known)
    names = [part.strip() for part in text.split(",") if part.strip()]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise HeldinError(f"study: unknown rule {unknown[0]!r}; known are all, {', '.join(known)}")
    return list(dict.fromkeys([BASE, *names]))


def quality(
    data: str | Path | None = None,
    *,
    kind: str = "tables",
    sizes: Sequence[int] | None = None,
    runs: int = 150,
    seed: int = 0,
    rules: str = "all",
    out: str | Path = "study",
    datasets: Role = "confirmation",
    jobs: int = 1,
    steps: int | None = None,
    progress: Callable[[Iterable[Any], int], Iterable[Any]] | None = None,
) -> list[dict[str, Any]]:
    """Run the study, write its tables and report, and return the summary.

    Runs that have a log in `out` already are not trained again, so an interrupted study goes on
    where it was, and other rules can be replayed on the same runs.

    Args:
        data: folder of .npz files (X, y, task), and of MNIST in a sub-folder `mnist`; None:
            scikit-learn's bundled datasets.
        kind: "tables", "images", "texts" or "tuning", see `heldin_lab.study.networks`.
        sizes: numbers of training rows (default: those of the kind).
        runs: number of runs.
        seed: of the plan.
        rules: "all", or names separated by commas.
        out: folder for the results.
        datasets: "confirmation" (to report), "development" (to choose constants) or "all": by the
            names of tables; runs of networks are divided by their seeds.
        jobs: processes, through joblib; its other backends carry the runs to a cluster.
        steps: optimiser steps of a run (default: those of the kind).
        progress: wraps the finished runs, given their number, to show how far the study is.
    """
    if kind != "tables" and kind not in KINDS:
        raise HeldinError(f"study: expected tables, {', '.join(KINDS)}, got {kind!r}")
    ways = TABLES if kind == "tables" else KINDS[kind]
    names = chosen_rules(rules, tuple(RULES) if kind == "tables" else NETWORK_RULES)
    folder = Path(out)
    logs = folder / "runs"
    logs.mkdir(parents=True, exist_ok=True)
    available = _available(kind, data, datasets, folder)
    if kind != "tables" and datasets == "development":
        seed += DEVELOPMENT
    specs = plan(available, sizes or ways.sizes, runs, seed, steps or ways.steps, ways)
    by_name = {task.name: task for task in available}
    finished: Iterable[list[dict[str, Any]]] = joblib.Parallel(
        n_jobs=jobs, return_as="generator_unordered"
    )(joblib.delayed(one_run)(spec, by_name[spec.dataset], names, logs) for spec in specs)
    if progress is not None:
        finished = progress(finished, len(specs))
    rows = [row for part in finished for row in part]
    order = {spec.seed: i for i, spec in enumerate(specs)}
    rows.sort(key=lambda row: (order[row["seed"]], names.index(row["rule"])))
    return _write(folder, rows, by_name)


def _available(kind: str, data: str | Path | None, datasets: Role, folder: Path) -> list[Task]:
    if kind in KINDS:
        return [network_task(cast("Kind", kind), data, folder)]
    found: list[Task] = [t for t in tables(data) if datasets == "all" or role(t.name) == datasets]
    if not found:
        raise HeldinError(f"study: no dataset is for {datasets}; use --role all")
    return found


def _write(
    folder: Path, rows: list[dict[str, Any]], by_name: dict[str, Task]
) -> list[dict[str, Any]]:
    summary = summarise(rows)
    groups = {name: summarise(part, resamples=200) for name, part in _parts(rows).items()}
    write(folder / "results.csv", rows, COLUMNS)
    write(folder / "summary.csv", summary, SUMMARY)
    grouped = [{"group": name, **line} for name, lines in groups.items() for line in lines]
    write(folder / "groups.csv", grouped, ("group", *SUMMARY))
    ours = [row for row in rows if row["rule"].startswith(("folds", "leave-one-out"))]
    worst: list[tuple[LoggedRun, dict[str, Any]]] = []
    seen: set[int] = set()
    for row in sorted(ours, key=lambda row: -row["regret"]):
        if row["seed"] not in seen and len(worst) < 6:
            seen.add(row["seed"])
            spec = Spec(**{key: row[key] for key in Spec.__dataclass_fields__})
            task = by_name[spec.dataset]
            worst.append((LoggedRun(spec, task, _log_of(spec, task, folder / "runs")), row))
    write_report(folder / "report.html", rows, summary, groups, worst, constants())
    return summary


def _parts(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The rows by what was trained on what, and the cases that are known to be hard."""
    parts = {
        f"{key} = {value}": [row for row in rows if row[key] == value]
        for key in ("n", "model", "optimizer", "noise")
        for value in sorted({row[key] for row in rows})
    }
    smallest = min(row["n"] for row in rows)
    parts[f"two hidden layers, n = {smallest}"] = [
        row for row in rows if row["model"] == "hidden2" and row["n"] == smallest
    ]
    lowest = {row["seed"]: row["stop_step"] for row in rows if row["rule"] == "oracle"}
    parts["training should not stop (lowest test loss in the last tenth of the steps)"] = [
        row for row in rows if lowest.get(row["seed"], 0) >= 0.9 * row["steps"]
    ]
    return {name: part for name, part in parts.items() if part}


def constants() -> dict[str, Any]:
    """Of every rule, and of the runs."""
    return {
        "folds; share that a shadow does not see": (_run.FOLDS, 1 / _run.FOLDS),
        "ratio of successive checks of folds and shadow, of leave-one-out": (
            Folds().check_spacing,
            LeaveOneOut().check_spacing,
        ),
        "patience of folds and shadow": _rules.FOLD_PATIENCE,
        "patience of leave-one-out": _rules.LOO_PATIENCE,
        "leave-one-out: floor of second moments, most probes": (
            _leaveoneout.FLOOR,
            _leaveoneout.MOST,
        ),
        "draws of bagged weights": _rules.RESAMPLES,
        "epochs of patience on a split": _rules.VALIDATION_PATIENCE,
        "Prechelt's GL alpha": _rules.GL_ALPHA,
        "Prechelt's PQ alpha and strip": (_rules.PQ_ALPHA, _rules.PQ_STRIP),
        "evidence: smoothing, and that of an epoch's mean; arming": (0.9, 0.8, _rules.ARMING),
        "gradient disparity: batches, rises": (DISPARITY_BATCHES, 5),
        "label wave: window, epochs": (3, 10),
        "gradient-weight alignment: added to the excess kurtosis": 1.2,
        "optimiser steps; ratio of the steps at which the test loss is known": (2500, _run.FINE),
        "width of hidden layers": WIDTH,
        "label noise": NOISE,
    }
