"""`heldin-lab bench`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from heldin.errors import HeldinError

from .progress import tell

__all__ = ["add_problems", "bench", "problems_of"]


def bench(parser: argparse.ArgumentParser) -> None:
    """Time training steps; or "tables": compare small-table models; or "shadows": whole runs."""
    parser.add_argument(
        "workloads",
        nargs="*",
        help='default: all; see --list; "tables": networks on small tables; "shadows": whole runs '
        "until they stop",
    )
    parser.add_argument("--list", action="store_true", help="list workloads and methods")
    parser.add_argument("--methods", default="all", help="methods, separated by commas")
    parser.add_argument("--no-memory", action="store_true", help="do not measure peak memory")
    parser.add_argument(
        "--steady-heap",
        action="store_true",
        help="tell glibc to keep freed memory, as jemalloc does (default: as it is)",
    )
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="count processor time, on one thread, in place of elapsed time: for a busy machine",
    )
    parser.add_argument("--processes", type=int, default=7, help="in how many to time (7)")
    parser.add_argument("--no-counts", action="store_true", help="do not count operations")
    parser.add_argument("--no-growth", action="store_true", help="do not measure growth with size")
    parser.add_argument("--out", default="out/bench", help="folder for JSON, table and charts")
    shadows = parser.add_argument_group('for "shadows"')
    shadows.add_argument("--rounds", type=int, default=3, help="number of seeds (3)")
    shadows.add_argument("--only", default="", help="settings whose name contains this")
    tables = parser.add_argument_group('for "tables"')
    add_problems(tables, "confirmation")
    parser.set_defaults(run=_bench)


def add_problems(parser: argparse._ActionsContainer, role: str) -> None:
    """Options that say which small problems are cut from which tables."""
    parser.add_argument(
        "--data",
        default=os.environ.get("HELDIN_DATA"),
        help="folder of .npz files with X, y and task; scikit-learn's bundled datasets if neither "
        "this nor HELDIN_DATA is given",
    )
    parser.add_argument("--n", default="50,100,200,500", help="numbers of training rows")
    parser.add_argument("--seeds", type=int, default=1, help="draws of each problem (1)")
    parser.add_argument("--seed", type=int, default=1000, help="of the first draw (1000)")
    parser.add_argument(
        "--role",
        default=role,
        choices=["confirmation", "development", "all"],
        help=f"which tables; defaults were chosen on those for development ({role})",
    )
    parser.add_argument(
        "--table", action="store_true", help="fit nothing: the table of the results in --out"
    )


def problems_of(options: argparse.Namespace) -> Any:
    """The problems that the options ask for, if any."""
    if options.table:
        return []
    from heldin_lab.study.data import tables
    from heldin_lab.tables import problems

    try:
        sizes = [int(part) for part in options.n.split(",")]
    except ValueError:
        raise HeldinError(f"--n: expected numbers separated by commas, got {options.n!r}") from None
    seeds = range(options.seed, options.seed + options.seeds)
    found = list(problems(tables(options.data), options.role, sizes, seeds))
    if not found:
        raise HeldinError(
            f"--n {options.n} --role {options.role} --seeds {options.seeds}: no problem is left; a "
            "table needs 100 rows more than are trained on"
        )
    return found


def _tables(options: argparse.Namespace) -> int:
    from heldin_lab.tables import METHODS, compare, installed, write_comparison

    names = installed() if options.methods == "all" else options.methods.split(",")
    for name in names:
        if name not in METHODS:
            raise HeldinError(f"bench: {name!r} is unknown; there are {'; '.join(METHODS)}")
        if name not in installed() and not options.table:
            raise HeldinError(f"bench: {name} needs {METHODS[name].needs}, which is not installed")
    rows = compare(problems_of(options), {name: METHODS[name] for name in names}, options.out, tell)
    rivals = [n for n in names if METHODS[n].needs == "sklearn" and METHODS[n].kind != "constant"]
    rivals = [name for name in rivals if not name.startswith("heldin")]
    print(write_comparison(rows, names, options.out, rivals=rivals))
    print(f"Results and table are in {options.out}")
    return 0


def _shadows(options: argparse.Namespace) -> int:
    from heldin_lab.bench import shadows

    ways = shadows.DEFAULT if options.methods == "all" else tuple(options.methods.split("; "))
    for way in ways:
        if way not in shadows.WAYS:
            raise HeldinError(f"bench: {way!r} is unknown; there are {'; '.join(shadows.WAYS)}")
    print(shadows.bench_shadows(Path(options.out), ways, options.rounds, options.only, tell))
    return 0


def _bench(options: argparse.Namespace) -> int:
    from heldin_lab.bench import (
        WORKLOADS,
        count_steps,
        growth,
        measure_apart,
        peak_memory,
        steady_heap,
        write_report,
    )
    from heldin_lab.bench.methods import METHODS
    from heldin_lab.bench.run import GROWTH

    if options.workloads == ["tables"]:
        return _tables(options)
    if options.workloads == ["shadows"]:
        return _shadows(options)
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

    if options.steady_heap:
        steady_heap()
    ours = [m for m in ("heldin sampled", "heldin exact") if m in methods]
    results = []
    for name in names:
        args = (methods, tell, options.steady_heap, options.processes, options.processor_time)
        results.append(measure_apart(name, *args))
        if WORKLOADS[name].memory and not options.no_memory:
            tell(f"{name}: peak memory")
            results[-1].memory = peak_memory(name, [m for m in methods if m != "plain"])
    growing = {} if options.no_growth else {what: growth(what, ours, tell) for what in GROWTH}
    counts = {} if options.no_counts else count_steps()
    print(write_report(results, growing, Path(options.out), counts))
    print(f"JSON and charts are in {options.out}")
    return 0
