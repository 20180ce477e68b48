"""`heldin demo`."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest

for needed in ("sklearn", "matplotlib", "rich"):
    pytest.importorskip(needed)

from heldin.cli import demo_runs as demo
from heldin.cli.main import main


def test_demo_ends_with_a_table_and_a_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figure = tmp_path / "out" / "demo.png"
    assert main(["demo", "--splits", "2", "--epochs", "4", "--out", str(figure)]) == 0
    printed = capsys.readouterr()
    assert figure.stat().st_size > 5000
    lines = printed.out.splitlines()
    for rule in ("auto", "validation", "evidence"):
        assert demo.RULES[rule] in printed.out
    assert "of 2" in next(line for line in lines if 'stopping("auto")' in line)
    assert " 80 " in next(line for line in lines if "held out, patience" in line)
    assert "run 7 of 7: evidence: test loss" in printed.err  # plain lines, as there is no terminal


def test_progress_fits_a_narrow_terminal() -> None:
    """The words give way, not the number, the bar or the time."""
    from rich.console import Console

    from heldin.pages.live import Live

    file = io.StringIO()
    with Live(1000, "epoch", Console(file=file, force_terminal=True, width=60)) as live:
        live.show(123, "loss 0.1234; step 370: estimated loss 0.5899, lowest 0.5539 at step 177")
    text = re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", file.getvalue())
    line = next(line for line in reversed(re.split(r"[\r\n]+", text)) if "epoch 123" in line)
    assert re.match(r"epoch 123 +\S{10} 0:00:00 loss 0\.1234; step 370: .*…$", line.strip())
    assert len(line) <= 60


@pytest.mark.parametrize("wrong", [["--splits", "0"], ["--epochs", "0"], ["--out", "demo.txt"]])
def test_demo_refuses(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", *wrong]) == 2
    assert wrong[0] in capsys.readouterr().err


def test_rows_that_are_tested_with_are_not_trained_on() -> None:
    problem = demo.load(3)
    assert (len(problem.x), len(problem.test_x)) == (100, 469)
    rows = {tuple(row) for row in problem.x.tolist()}
    assert not rows & {tuple(row) for row in problem.test_x.tolist()}
    assert demo.train("validation", 3, epochs=1).rows == 80
    assert demo.train("auto", 3, epochs=1).rows == 100
