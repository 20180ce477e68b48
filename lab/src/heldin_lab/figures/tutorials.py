"""Run the tutorials in full, draw their figures and compare what they print with what they say.

    python -m heldin_lab.figures.tutorials [--out FOLDER] [--write] [NAME ...]

A tutorial is a page of docs/tutorials: its blocks of code, one after the other, are a program. A
block of text after one of them is what the program prints there.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from heldin_lab.figures import DOCS, IMAGES

PAGES = DOCS / "tutorials"
NAMES = ("small-data", "text", "label-noise", "single-weights")
BLOCK = re.compile(r"^```(?P<kind>py|text)\n(?P<code>.*?)^```", re.M | re.S)


def play(name: str, out: Path, changes: Mapping[str, str] | None = None) -> list[str]:
    """Run a tutorial with its figures in a folder; what each block printed.

    Args:
        name: of the page.
        out: folder for the figures.
        changes: settings to replace in the code, such as {"STEPS = 400": "STEPS = 4"}.
    """
    import matplotlib
    from matplotlib import pyplot

    matplotlib.use("Agg")
    page = PAGES / f"{name}.md"
    text = page.read_text()
    for old, new in (changes or {}).items():
        if old not in text:
            raise ValueError(f"{page.name}: there is no {old!r} to change")
        text = text.replace(old, new)
    space: dict[str, Any] = {"__name__": f"tutorial {name}"}
    printed = []
    with _in(out):
        for block in BLOCK.finditer(text):
            if block["kind"] == "py":
                with contextlib.redirect_stdout(io.StringIO()) as stream:
                    exec(compile(block["code"], page.name, "exec"), space)
                if stream.getvalue():
                    printed.append(stream.getvalue())
    pyplot.close("all")
    return printed


@contextlib.contextmanager
def _in(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def said(name: str) -> list[str]:
    """What the page says that its blocks print."""
    text = (PAGES / f"{name}.md").read_text()
    return [block["code"] for block in BLOCK.finditer(text) if block["kind"] == "text"]


def write(name: str, printed: list[str]) -> None:
    """Put what was printed into the page."""
    page, lines = PAGES / f"{name}.md", iter(printed)

    def renewed(block: re.Match[str]) -> str:
        return block[0] if block["kind"] == "py" else f"```text\n{next(lines)}```"

    page.write_text(BLOCK.sub(renewed, page.read_text()))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--out", type=Path, default=IMAGES)
    parser.add_argument("--write", action="store_true", help="let the pages say what is printed")
    options = parser.parse_args(arguments)
    differences = 0
    for name in options.names or NAMES:
        start = time.process_time()
        printed = play(name, options.out)
        if options.write:
            write(name, printed)
        same = printed == said(name)
        differences += not same
        seconds = time.process_time() - start
        print(f"--- {name} ({seconds:.0f} s): {'as' if same else 'NOT as'} the page says")
        print("\n".join(printed))
    return differences


if __name__ == "__main__":
    raise SystemExit(main())
