"""`heldin-lab loops`."""

from __future__ import annotations

import argparse
from pathlib import Path

from heldin.errors import HeldinError

from .progress import tell

__all__ = ["loops"]


def loops(parser: argparse.ArgumentParser) -> None:
    """Run training loops with and without heldin, and beside twins trained by hand."""
    parser.add_argument("names", nargs="*", help="loops or kinds (default: all; see --list)")
    parser.add_argument("--list", action="store_true", help="list the loops")
    parser.add_argument("--out", default="out/loops", help="folder for JSON and the tables")
    parser.set_defaults(run=_loops)


def _loops(options: argparse.Namespace) -> int:
    from heldin_lab.loops import LOOPS, by_kind, run_loops, table
    from heldin_lab.loops.report import FAULTS

    if options.list:
        for loop in LOOPS.values():
            print(f"{loop.name}: {loop.what}")
        return 0
    chosen = []
    for name in options.names:
        matches = [loop for loop in LOOPS.values() if name in (loop.name, loop.kind)]
        if not matches:
            raise HeldinError(f"loops: {name!r} is unknown; --list shows all loops")
        chosen += matches
    out = Path(options.out)
    outcomes = run_loops(chosen or list(LOOPS.values()), out, tell)
    (out / "loops-all.md").write_text(table(outcomes) + "\n", encoding="utf-8")
    (out / "loops.md").write_text(by_kind(outcomes) + "\n", encoding="utf-8")
    print(table(outcomes), by_kind(outcomes), sep="\n\n")
    return 1 if any(outcome.verdict in FAULTS for outcome in outcomes) else 0
