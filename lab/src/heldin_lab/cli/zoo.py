"""`heldin-lab zoo`."""

from __future__ import annotations

import argparse
from pathlib import Path

from heldin.errors import HeldinError

from .progress import tell

__all__ = ["zoo"]


def zoo(parser: argparse.ArgumentParser) -> None:
    """Observe models of other libraries, and compare with one backward pass per sample."""
    parser.add_argument("names", nargs="*", help="libraries or models (default: all; see --list)")
    parser.add_argument("--list", action="store_true", help="list libraries and models")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for a model (300)")
    parser.add_argument("--again", action="store_true", help="run also what was run before")
    parser.add_argument("--out", default="out/zoo", help="folder for JSON and the table")
    parser.set_defaults(run=_zoo)


def _zoo(options: argparse.Namespace) -> int:
    from heldin_lab.zoo import ENTRIES, run_zoo, version_of, write_report

    libraries = sorted({entry.library for entry in ENTRIES}, key=str.lower)
    versions = {library: version_of(library) for library in libraries}
    if options.list:
        for library in libraries:
            names = [entry.name for entry in ENTRIES if entry.library == library]
            print(f"{library} ({versions[library] or 'not installed'}): {', '.join(names)}")
        return 0
    chosen = []
    for name in options.names or libraries:
        found = [entry for entry in ENTRIES if name in (entry.library, entry.name)]
        if not found:
            raise HeldinError(f"zoo: {name!r} is unknown; --list shows libraries and models")
        chosen += found
    missing = sorted({e.library for e in chosen if versions[e.library] is None}, key=str.lower)
    if missing:
        tell(f"not installed: {', '.join(missing)} (pip install './lab[zoo]')")
    chosen = [entry for entry in chosen if versions[entry.library] is not None]
    if not chosen:
        raise HeldinError("zoo: none of these libraries is installed: pip install './lab[zoo]'")
    out = Path(options.out)
    outcomes = run_zoo(chosen, out / "models", options.timeout, tell, options.again)
    print(write_report(outcomes, out))
    print(f"JSON and the table are in {out}")
    return 0 if all(o.status not in ("wrong", "crashed", "changed") for o in outcomes) else 1
