"""The command line: `heldin COMMAND ...`.

A command is a function that takes a sub-parser and gives it arguments and `run=`, a function of
the parsed arguments. It joins by one line in `COMMANDS`. Only the command that was asked for is
imported, so that `heldin --help` answers at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any

from heldin import __version__
from heldin.errors import HeldinError

__all__ = ["main"]

Parser = argparse.ArgumentParser


def study(parser: Parser) -> None:
    """Train many small models and say which stopping rule keeps the better ones."""
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    quality = kinds.add_parser(
        "quality",
        help="test loss at the stop of every rule, on real tables",
        description="Train small models on real tables, replay every stopping rule on each run, "
        "and compare the test losses. Interrupted studies go on where they were.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    quality.add_argument(
        "--data",
        default=os.environ.get("HELDIN_DATA"),
        help="folder of .npz files with X, y and task; scikit-learn's bundled datasets if neither "
        "this nor HELDIN_DATA is given",
    )
    quality.add_argument("--n", default="50,100,200", help="numbers of training rows")
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
    quality.add_argument("--steps", type=int, default=2500, help="optimiser steps of a run")
    quality.set_defaults(run=_quality)
    agree = kinds.add_parser(
        "agreement",
        help="the sampled criterion beside the exact one, over whole runs",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    agree.add_argument("--seeds", type=int, default=5, help="runs of each model")
    agree.add_argument("--steps", type=int, default=1000, help="optimiser steps of a run")
    agree.add_argument("--out", default="out/agreement", help="folder for table and figure")
    agree.set_defaults(run=_agreement)


def _quality(options: argparse.Namespace) -> int:
    try:
        from heldin.lab.study.quality import quality
    except ImportError as error:
        raise HeldinError(
            f"study: {error.name} is not installed; pip install 'heldin[study]'"
        ) from error
    try:
        sizes = [int(part) for part in options.n.split(",")]
    except ValueError:
        raise HeldinError(f"--n: expected numbers separated by commas, got {options.n!r}") from None
    summary = quality(
        options.data,
        sizes=sizes,
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


def _agreement(options: argparse.Namespace) -> int:
    try:
        import matplotlib  # noqa: F401  (said before the training, not after)

        from heldin.lab.study.agreement import agreement, table
    except ImportError as error:
        raise HeldinError(
            f"study: {error.name} is not installed; pip install 'heldin[study]'"
        ) from error
    lines = agreement(options.out, seeds=options.seeds, steps=options.steps, progress=_tell)
    _tell("")
    print(table(lines), end="")
    print(f"Table and figure are in {options.out}")
    return 0


def _tell(line: str) -> None:
    """A line on stderr that the next one replaces; a line of its own where that is no terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
    elif line:
        print(line, file=sys.stderr, flush=True)


def _progress(finished: Iterable[Any], total: int) -> Iterable[Any]:
    """A bar on stderr."""
    from rich.console import Console
    from rich.progress import track

    return track(finished, "runs", total=total, console=Console(stderr=True))


def bench(parser: Parser) -> None:
    """Time training steps with and without observation, beside other libraries."""
    parser.add_argument("workloads", nargs="*", help="default: all; see --list")
    parser.add_argument("--list", action="store_true", help="list workloads and methods")
    parser.add_argument("--methods", default="all", help="methods, separated by commas")
    parser.add_argument("--no-memory", action="store_true", help="do not measure peak memory")
    parser.add_argument(
        "--system-heap",
        action="store_true",
        help="let glibc give freed memory back to the system (default: keep it, as jemalloc does)",
    )
    parser.add_argument("--no-growth", action="store_true", help="do not measure growth with size")
    parser.add_argument("--out", default="out/bench", help="folder for JSON, table and charts")
    parser.set_defaults(run=_bench)


def _bench(options: argparse.Namespace) -> int:
    from pathlib import Path

    from heldin.lab.bench import (
        WORKLOADS,
        growth,
        measure_apart,
        peak_memory,
        steady_heap,
        write_report,
    )
    from heldin.lab.bench.methods import METHODS
    from heldin.lab.bench.run import GROWTH

    if options.list:
        for name, workload in WORKLOADS.items():
            print(f"{name:10} {workload.title}")
        print("methods: " + "; ".join(METHODS))
        return 0
    names = options.workloads or list(WORKLOADS)
    methods = list(METHODS) if options.methods == "all" else options.methods.split(",")
    for given, known in ((names, WORKLOADS), (methods, METHODS)):
        for name in given:
            if name not in known:
                raise HeldinError(f"bench: {name!r} is unknown; there are {', '.join(known)}")

    if not options.system_heap:
        steady_heap()
    ours = [m for m in ("heldin sampled", "heldin exact") if m in methods]
    results = []
    for name in names:
        results.append(measure_apart(name, methods, _tell, not options.system_heap))
        if WORKLOADS[name].memory and not options.no_memory:
            _tell(f"{name}: peak memory")
            results[-1].memory = peak_memory(name, [m for m in methods if m != "plain"])
    growing = {} if options.no_growth else {what: growth(what, ours, _tell) for what in GROWTH}
    _tell("")
    print(write_report(results, growing, Path(options.out)))
    print(f"JSON and charts are in {options.out}")
    return 0


COMMANDS = {  # where the function is, and what it does
    "bench": (".main:bench", "Time training steps with and without observation."),
    "fit": (".fit:fit", "Train a model on all rows of a table, without a held-out part."),
    "predict": (".fit:predict", "Predict rows with a model of `heldin fit`; CSV to stdout."),
    "study": (".main:study", "Train many small models; which stopping rule keeps better ones?"),
    "reproduce": (".reproduce:reproduce", "Run the paper's experiments; a report."),
    "data": (".reproduce:data", "Fetch the paper's datasets from their official places."),
}


def parser(only: str | None = None) -> Parser:
    """The parser of all commands, of which one or all know their arguments."""
    top = Parser(prog="heldin", description="Early stopping without a validation set.")
    top.add_argument("--version", action="version", version=f"heldin {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (place, what) in COMMANDS.items():
        command = commands.add_parser(name, help=what, description=what)
        if only in (name, None):
            module, function = place.split(":")
            getattr(import_module(module, __package__), function)(command)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; errors that heldin raises on purpose are one line on stderr."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        options = parser(next((word for word in given if word[:1] != "-"), "")).parse_args(given)
        code: int = options.run(options)
        return code
    except HeldinError as error:
        print(f"heldin: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        print(f"heldin: interrupted {interrupt}".rstrip(), file=sys.stderr)
        return 130
