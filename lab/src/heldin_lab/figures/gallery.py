"""Run the programs of `examples/gallery`, for the pictures, texts and notebooks of the gallery.

python -m heldin_lab.figures.gallery [name ...]
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import html
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

from . import DOCS, IMAGES, ROOT

PROGRAMS = {path.stem: path for path in sorted((ROOT / "examples" / "gallery").glob("*.py"))}
NOTEBOOKS = ("compare_models", "images_augmented", "medical_table", "patients")
PRINTED = DOCS / "results" / "gallery"
PAGE = "https://github.com/heldin/heldin"
COLAB = "https://colab.research.google.com/github/heldin/heldin/blob/main/examples/gallery"
BADGE = "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]"
INSTALL = f"""# until 0.2 is released; then: %pip install -q "heldin[demo]"
%pip install -q "heldin[demo] @ git+{PAGE}"
"""
COLUMNS = 84  # of the terminal that is drawn
STYLE = "figure.figsize: 5, 3.4\nfigure.autolayout: True\nsavefig.dpi: 120\nfont.size: 11\n"


def run(name: str, folder: Path) -> str:
    """Run a program in a folder and return what it prints."""
    (folder / "matplotlibrc").write_text(STYLE)
    command = folder / "heldin"  # of this environment, for the program that calls the command line
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m heldin "$@"\n')
    command.chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ.get('PATH', '')}"
    environment = {**os.environ, "PATH": path, "MPLBACKEND": "agg", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(PROGRAMS[name])],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr[-2000:]}")
    return done.stdout


def notebook(name: str) -> dict[str, Any]:
    """Return a program as a notebook: a cell of text and one of code for each `# %%`.

    Its cells have no outputs yet; see `executed`.
    """
    heading, *parts = re.split(r"^# %% (.*)\n", PROGRAMS[name].read_text(), flags=re.M)
    title = heading.strip().strip('"')
    badge = f"{BADGE}({COLAB}/{name}.ipynb)"
    cells = [_cell("markdown", badge), _cell("markdown", f"# {title}"), _cell("code", INSTALL)]
    for text, code in zip(parts[::2], parts[1::2], strict=True):
        code = re.sub(r"(?m)^plt\.savefig.*$", "plt.show()", code)
        code = re.sub(r"(?m)\.figure\.savefig.*$", ".figure", code)
        cells += [_cell("markdown", text), _cell("code", code)]
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def executed(book: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return a notebook with what its cells print and draw, but for the line that installs."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    space: dict[str, Any] = {"__name__": "__main__"}
    counted = 0
    style = folder / "style"
    style.write_text(STYLE)
    with mpl.rc_context(fname=str(style)):
        for cell in book["cells"]:
            code = "".join(cell["source"])
            if cell["cell_type"] != "code" or "%pip" in code:
                continue
            counted += 1
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(code, "cell", "exec"), space)
            cell["execution_count"] = counted
            text = printed.getvalue().splitlines(keepends=True)
            if text:
                cell["outputs"].append({"name": "stdout", "output_type": "stream", "text": text})
            for number in plt.get_fignums():
                picture = io.BytesIO()
                plt.figure(number).savefig(picture, format="png", dpi=80)
                data = {"image/png": base64.b64encode(picture.getvalue()).decode()}
                shown = {"data": data, "metadata": {}, "output_type": "display_data"}
                cell["outputs"].append(shown)
            plt.close("all")
    return book


def _cell(kind: str, source: str) -> dict[str, Any]:
    cell = {"cell_type": kind, "metadata": {}, "source": source.strip().splitlines(keepends=True)}
    return cell | ({"execution_count": None, "outputs": []} if kind == "code" else {})


def terminal(text: str) -> str:
    """Return a picture of a terminal with a text, as SVG."""
    lines = [part for line in text.splitlines() for part in _wrapped(line)]
    width, height = 28 + 7.9 * max(map(len, lines)), 44 + 19 * len(lines)
    shown = []
    for i, line in enumerate(lines):
        colour = "#7ee787" if line.startswith("$") else "#e6edf3"
        text = html.escape(line).replace(" ", "\u00a0")  # browsers would join several spaces
        shown.append(f'<text x="14" y="{46 + 19 * i}" fill="{colour}">{text}</text>')
    dots = "".join(f'<circle cx="{18 + 18 * i}" cy="16" r="5" fill="#57606a"/>' for i in range(3))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}">'
        f'<rect width="100%" height="100%" rx="8" fill="#0d1117"/>{dots}\n'
        '<g font-family="ui-monospace, Menlo, Consolas, monospace" font-size="13">\n'
        + "\n".join(shown)
        + "\n</g></svg>\n"
    )


def _wrapped(line: str) -> list[str]:
    """Return the parts of a line that fit; later ones stand below the first's second column."""
    column = re.match(r"\w+:\s+", line)
    indent = " " * (column.end() if column else 2)
    return textwrap.wrap(line, COLUMNS, subsequent_indent=indent, drop_whitespace=True) or [""]


def main(arguments: list[str] | None = None) -> None:
    """Write the results of programs, and all notebooks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(PROGRAMS), help="programs (default: all)")
    options = parser.parse_args(arguments)
    PRINTED.mkdir(exist_ok=True)
    (IMAGES / "gallery").mkdir(exist_ok=True)
    for name in set(NOTEBOOKS) & set(options.names):
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            text = json.dumps(executed(notebook(name), Path(folder)), indent=1) + "\n"
        PROGRAMS[name].with_suffix(".ipynb").write_text(text)
    for name in options.names:
        with tempfile.TemporaryDirectory() as folder:
            text = run(name, Path(folder))
            picture = Path(folder) / f"{name}.png"
            if picture.exists():
                shutil.copy(picture, IMAGES / "gallery")
            else:
                (IMAGES / "gallery" / f"{name}.svg").write_text(terminal(text))
        (PRINTED / f"{name}.txt").write_text(text)
        print(f"{name}:\n{text}")


if __name__ == "__main__":
    main()
