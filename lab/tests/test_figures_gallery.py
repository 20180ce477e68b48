"""Programs of the gallery are short, run, and print what the page shows; so do notebooks."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

from heldin_lab.figures import IMAGES, gallery

NEEDS = {"texts_lora": "peft", "keras_digits": "keras", "csv_file": "pandas"}
NUMBER = re.compile(r"(?<![\w.])-?\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?")
LOOSE = {"epochs", "steps", "step", "stopped"}  # counts that another machine may not repeat


def numbers_in(text: str) -> list[float]:
    return [float(number.replace(",", "")) for number in NUMBER.findall(text)]


def assert_alike(printed: str, shown: str) -> None:
    """Words are the same, numbers about the same; steps may differ by more."""
    assert NUMBER.sub("#", printed) == NUMBER.sub("#", shown)
    for ours, theirs in zip(printed.splitlines(), shown.splitlines(), strict=True):
        counts = LOOSE & set(re.findall(r"\w+", theirs))
        rel, distance = (0.5, 0.1) if counts else (0.15, 0.05)
        wanted = pytest.approx(numbers_in(theirs), rel=rel, abs=distance)
        assert numbers_in(ours) == wanted, (ours, theirs)


def test_outputs_that_differ_are_found() -> None:
    assert_alike("accuracy 0.91 [0.85, 0.96]\n", "accuracy 0.92 [0.86, 0.95]\n")
    with pytest.raises(AssertionError):
        assert_alike("accuracy 0.71 [0.85, 0.96]\n", "accuracy 0.92 [0.86, 0.95]\n")
    with pytest.raises(AssertionError):
        assert_alike("accuracy 0.92\n", "loss 0.92\n")


@pytest.mark.parametrize("name", gallery.PROGRAMS)
def test_program(name: str, tmp_path: Path) -> None:
    needed = ("matplotlib", "sklearn", NEEDS.get(name, "torch"))
    for package in needed:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    assert len(gallery.PROGRAMS[name].read_text().splitlines()) <= 40
    printed = gallery.run(name, tmp_path)
    shown = (gallery.PRINTED / f"{name}.txt").read_text()
    assert_alike(printed, shown)
    kind = "svg" if name == "csv_file" else "png"
    assert (IMAGES / "gallery" / f"{name}.{kind}").stat().st_size > 1000
    assert kind == "svg" or (tmp_path / f"{name}.png").exists()


@pytest.mark.parametrize("name", gallery.NOTEBOOKS)
def test_notebook(name: str, tmp_path: Path) -> None:
    made = gallery.notebook(name)
    stored = json.loads(gallery.PROGRAMS[name].with_suffix(".ipynb").read_text())
    assert [cell["source"] for cell in stored["cells"]] == [c["source"] for c in made["cells"]]
    assert "colab-badge" in "".join(made["cells"][0]["source"])
    printed = "".join(
        "".join(output.get("text", ""))
        for cell in stored["cells"]
        for output in cell.get("outputs", [])
    )
    assert_alike(printed, (gallery.PRINTED / f"{name}.txt").read_text())
    assert "image/png" in str(stored)
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
    assert "heldin\u00a0fit\u00a0&lt;file&gt;" in drawn
    assert drawn.count("<text") == 2
    assert "rows:\u00a03" in drawn


def test_long_lines_of_a_terminal_are_wrapped() -> None:
    drawn = gallery.terminal(f"rule:    {'word ' * 40}\n")
    lines = re.findall(r"<text[^>]*>(.*)</text>", drawn)
    assert len(lines) > 2
    assert max(map(len, lines)) <= gallery.COLUMNS
    assert all(line.startswith("\u00a0" * 9 + "word") for line in lines[1:])
