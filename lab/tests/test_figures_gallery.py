"""Programs of the gallery are short, run, and print what the page shows; so do notebooks."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

from heldin_lab.figures import IMAGES, gallery

NEEDS = {"texts_lora": "peft", "keras_digits": "keras", "csv_file": "pandas"}
NUMBER = re.compile(r"-?\d[\d.]*(e[+-]\d+)?")


@pytest.mark.parametrize("name", gallery.PROGRAMS)
def test_program(name: str, tmp_path: Path) -> None:
    needed = ("matplotlib", "sklearn", NEEDS.get(name, "torch"))
    for package in needed:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    assert len(gallery.PROGRAMS[name].read_text().splitlines()) <= 40
    printed = gallery.run(name, tmp_path)
    shown = (gallery.PRINTED / f"{name}.txt").read_text()
    assert NUMBER.sub("#", printed) == NUMBER.sub("#", shown)
    kind = "svg" if name == "csv_file" else "png"
    assert (IMAGES / "gallery" / f"{name}.{kind}").stat().st_size > 1000
    assert kind == "svg" or (tmp_path / f"{name}.png").exists()


@pytest.mark.parametrize("name", gallery.NOTEBOOKS)
def test_notebook(name: str, tmp_path: Path) -> None:
    made = gallery.notebook(name)
    assert json.loads(gallery.PROGRAMS[name].with_suffix(".ipynb").read_text()) == made
    nbformat, nbclient = (pytest.importorskip(p) for p in ("nbformat", "nbclient"))
    pytest.importorskip("ipykernel")
    made["cells"] = [cell for cell in made["cells"] if "%pip" not in "".join(cell["source"])]
    book = nbformat.reads(json.dumps(made), as_version=4)
    nbclient.NotebookClient(book, timeout=300, resources={"metadata": {"path": tmp_path}}).execute()
    outputs = [output for cell in book.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert any(output.get("name") == "stdout" for output in outputs)


def test_a_terminal_is_drawn() -> None:
    drawn = gallery.terminal("$ heldin fit <file>\nrows: 3\n")
    assert "heldin fit &lt;file&gt;" in drawn
    assert drawn.count("<text") == 2
