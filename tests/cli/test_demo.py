"""`heldin demo`."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

for needed in ("sklearn", "matplotlib"):
    pytest.importorskip(needed)

from heldin.cli import demo
from heldin.cli.main import main


def test_demo_ends_with_a_table_and_a_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figure = tmp_path / "out" / "demo.png"
    assert main(["demo", "--splits", "2", "--epochs", "4", "--out", str(figure)]) == 0
    printed = capsys.readouterr()
    assert figure.stat().st_size > 5000
    lines = printed.out.splitlines()
    for name in demo.RULES.values():
        assert any(line.startswith(f"{name} ") and line.endswith(" s") for line in lines)
    assert " 80 " in next(line for line in lines if line.startswith("20 % held out"))
    assert "of 2 splits." in printed.out
    assert "times the split's time" in printed.out
    assert "run 8 of 8 | no stopping | test loss" in printed.err  # lines: this is no terminal


@pytest.mark.parametrize("wrong", [["--splits", "0"], ["--epochs", "0"], ["--out", "demo.txt"]])
def test_demo_refuses(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", *wrong]) == 2
    assert wrong[0] in capsys.readouterr().err


def test_interval_of_a_mean() -> None:
    middle, half = demo.interval([1.0, 2.0, 3.0])
    assert (middle, half) == (2, pytest.approx(2.484, abs=1e-3))  # Student's t with two degrees


def test_rows_that_are_tested_with_are_not_trained_on() -> None:
    x, y, test_x, test_y = demo.load(3)
    assert (len(x), len(y), len(test_x), len(test_y)) == (100, 100, 469, 469)
    rows = {tuple(row) for row in x.tolist()}
    assert not rows & {tuple(row) for row in test_x.tolist()}
    trained_on = {"heldin": 100, "split": 80, "folds": 100, "none": 100}
    for rule, count in trained_on.items():
        run = demo.train(rule, 3, epochs=2)
        assert run.rows == count
        assert math.isnan(run.said) == (rule == "none")
        assert run.seconds > 0
