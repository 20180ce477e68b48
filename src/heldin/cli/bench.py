"""`heldin bench`."""

from __future__ import annotations

import argparse
from pathlib import Path

from heldin.errors import HeldinError

from .progress import tell

__all__ = ["bench"]


def bench(parser: argparse.ArgumentParser) -> None:
    """Time training steps with and without observation, beside other libraries."""
    parser.add_argument("workloads", nargs="*", help="default: all; see --list")
    parser.add_argument("--list", action="store_true", help="list workloads and methods")
    parser.add_argument("--methods", default="all", help="methods, separated by commas")
    parser.add_argument("--no-memory", action="store_true", help="do not measure peak memory")
    parser.add_argument(
        "--steady-heap",
        action="store_true",
        help="tell glibc to keep freed memory, as jemalloc does (default: as it is)",
    )
    parser.add_argument("--processes", type=int, default=7, help="in how many to time (7)")
    parser.add_argument("--no-counts", action="store_true", help="do not count operations")
    parser.add_argument("--no-growth", action="store_true", help="do not measure growth with size")
    parser.add_argument("--out", default="out/bench", help="folder for JSON, table and charts")
    parser.set_defaults(run=_bench)


def _bench(options: argparse.Namespace) -> int:
    from heldin.lab.bench import (
        WORKLOADS,
        count_steps,
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

    if options.steady_heap:
        steady_heap()
    ours = [m for m in ("heldin sampled", "heldin exact") if m in methods]
    results = []
    for name in names:
        args = (methods, tell, options.steady_heap, options.processes)
        results.append(measure_apart(name, *args))
        if WORKLOADS[name].memory and not options.no_memory:
            tell(f"{name}: peak memory")
            results[-1].memory = peak_memory(name, [m for m in methods if m != "plain"])
    growing = {} if options.no_growth else {what: growth(what, ours, tell) for what in GROWTH}
    counts = {} if options.no_counts else count_steps()
    print(write_report(results, growing, Path(options.out), counts))
    print(f"JSON and charts are in {options.out}")
    return 0
