"""`heldin-lab study`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from heldin.errors import HeldinError

from .bench import add_problems, problems_of
from .progress import tell

__all__ = ["study"]


def study(parser: argparse.ArgumentParser) -> None:
    """Train many small models and say which stopping rule keeps the better ones."""
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    quality = kinds.add_parser(
        "quality",
        help="test loss at the stop of every rule, on real data",
        description="Train small models on real tables, images or texts, replay every stopping "
        "rule on each run, and compare the test losses. Interrupted studies go on where they were.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    quality.add_argument(
        "--task",
        default="tables",
        choices=["tables", "images", "texts", "tuning"],
        help="tables; small images; pieces of text; fine-tuning of a network trained on MNIST",
    )
    quality.add_argument(
        "--data",
        default=os.environ.get("HELDIN_DATA"),
        help="folder of .npz files with X, y and task, and of MNIST in its sub-folder mnist; "
        "scikit-learn's bundled datasets if neither this nor HELDIN_DATA is given",
    )
    quality.add_argument("--n", help="numbers of training rows (by default those of the task)")
    quality.add_argument("--runs", type=int, default=150, help="number of runs")
    quality.add_argument("--seed", type=int, default=0, help="of the plan")
    quality.add_argument("--rules", default="all", help="rules to replay, separated by commas")
    quality.add_argument("--out", default="study", help="folder for the results")
    quality.add_argument(
        "--role",
        default="confirmation",
        choices=["confirmation", "development", "all"],
        help="which datasets; constants were chosen on those for development",
    )
    quality.add_argument("--jobs", type=int, default=1, help="processes")
    quality.add_argument("--steps", type=int, help="optimiser steps of a run (as for --n)")
    quality.set_defaults(run=_quality)
    rivals = kinds.add_parser(
        "rivals",
        help="rules that people use beside heldin's, by loss, accuracy, calibration and cost",
        description="Train small networks by every rule: splits, five folds and a refit, averages "
        "of weights, heldin. One line of JSON for each run; interrupted studies go on.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    every = ["tables", "images", "texts", "tuning", "faces", "topics", "halves"]
    rivals.add_argument("--task", default="tables", choices=every)
    rivals.add_argument(
        "--data",
        default=os.environ.get("HELDIN_DATA"),
        help="as for quality",
    )
    rivals.add_argument("--runs", type=int, default=300, help="number of runs")
    rivals.add_argument("--seed", type=int, default=340, help="of the plan")
    rivals.add_argument(
        "--role", default="confirmation", choices=["confirmation", "development", "all"]
    )
    rivals.add_argument("--n", help="numbers of training rows, separated by commas (as --steps)")
    rivals.add_argument("--steps", type=int, help="optimiser steps of a run (default: the task's)")
    rivals.add_argument("--out", default="out/rivals", help="folder for the results")
    rivals.add_argument(
        "--renew", action="store_true", help="compute heldin's rules of the stored runs again"
    )
    rivals.add_argument(
        "--more", action="store_true", help="add bagging, GradStop and task vectors to stored runs"
    )
    rivals.add_argument(
        "--only",
        default="",
        help="heldin's rules beside the default, separated by ';': these and the splits alone",
    )
    rivals.set_defaults(run=_rivals)
    choice = kinds.add_parser(
        "tables",
        help="settings of heldin's networks for tables, on tables for development",
        description="Fit heldin's networks with other settings than the defaults, and compare the "
        "test losses with those of the defaults. Interrupted studies go on where they were; sizes "
        "and seeds that are in the folder already join the table.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_problems(choice, "development")
    choice.add_argument("--settings", default="all", help="which ones, separated by commas")
    choice.add_argument("--list", action="store_true", help="list the settings")
    choice.add_argument("--out", default="out/study-tables", help="folder for the results")
    choice.set_defaults(run=_tables)
    agree = kinds.add_parser(
        "agreement",
        help="the sampled criterion beside the exact one, over whole runs",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    agree.add_argument("--seeds", type=int, default=5, help="runs of each model")
    agree.add_argument("--steps", type=int, default=1000, help="optimiser steps of a run")
    agree.add_argument("--out", default="out/agreement", help="folder for table and figure")
    agree.set_defaults(run=_agreement)


def _sizes(options: argparse.Namespace) -> list[int] | None:
    try:
        return None if options.n is None else [int(part) for part in options.n.split(",")]
    except ValueError:
        raise HeldinError(f"--n: expected numbers separated by commas, got {options.n!r}") from None


def _quality(options: argparse.Namespace) -> int:
    from heldin_lab.study.quality import quality

    summary = quality(
        options.data,
        kind=options.task,
        sizes=_sizes(options),
        runs=options.runs,
        seed=options.seed,
        rules=options.rules,
        out=options.out,
        datasets=options.role,
        jobs=options.jobs,
        steps=options.steps,
        progress=_progress,
    )
    print(f"{'rule':32} {'gm':>7} {'median':>7} {'p90':>7} {'worst':>7} {'wins':>5} {'runs':>5}")
    for line in sorted(summary, key=lambda line: line["gm"]):
        print(
            f"{line['rule']:32} {line['gm']:7.3f} {line['median']:7.3f} {line['p90']:7.3f} "
            f"{line['worst']:7.2f} {line['win_rate']:5.2f} {line['runs']:5}"
        )
    print(f"Tables and report.html are in {options.out}")
    return 0


def _rivals(options: argparse.Namespace) -> int:
    from heldin_lab.study.contest import contest

    out = contest(
        options.task,
        options.data,
        Path(options.out),
        runs=options.runs,
        seed=options.seed,
        datasets=options.role,
        sizes=_sizes(options),
        steps=options.steps,
        renew=options.renew,
        more=options.more,
        only=[name.strip() for name in options.only.split(";") if name.strip()],
        progress=tell,
    )
    print(f"Results are in {out}")
    return 0


def _tables(options: argparse.Namespace) -> int:
    from heldin_lab.tables import SETTINGS, compare, write_settings

    if options.list:
        print("\n".join(SETTINGS))
        return 0
    names = list(SETTINGS) if options.settings == "all" else options.settings.split(",")
    for name in names:
        if name not in SETTINGS:
            raise HeldinError(f"study: {name!r} is unknown; there are {', '.join(SETTINGS)}")
    names = list(dict.fromkeys(["default", *names]))  # which the others are compared with
    chosen = {name: SETTINGS[name] for name in names}
    rows = compare(problems_of(options), chosen, options.out, tell)
    print(write_settings(rows, names, options.out))
    print(f"Results and table are in {options.out}")
    return 0


def _agreement(options: argparse.Namespace) -> int:
    from heldin_lab.study.agreement import agreement, table

    lines = agreement(options.out, seeds=options.seeds, steps=options.steps, progress=tell)
    print(table(lines), end="")
    print(f"Table and figure are in {options.out}")
    return 0


def _progress(finished: Iterable[Any], total: int) -> Iterable[Any]:
    """A bar on stderr."""
    from rich.console import Console
    from rich.progress import track

    return track(finished, "runs", total=total, console=Console(stderr=True))
