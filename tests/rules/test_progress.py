"""A run is shown as a line while it trains."""

from __future__ import annotations

import functools
import io
import re

import pytest
import torch
from torch import nn

from heldin import early_stopping
from heldin.pages.live import Live
from heldin.rules.progress import RunProgress
from heldin.rules.reporting import RunFacts
from tests.support.report_runs import RULES, data, started, trained


def test_nothing_is_printed_unless_asked(capsys: pytest.CaptureFixture[str]) -> None:
    trained("folds")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("own_loop", [True, False])
def test_progress_is_shown(rule: str, own_loop: bool, capsys: pytest.CaptureFixture[str]) -> None:
    stopping, model, optimizer = started(rule)
    if own_loop:
        x, y = data()
        for _ in stopping.epochs(4, progress=True):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            if rule not in ("evidence", "validation"):
                stopping.note_batch((x, y), range(40))
            optimizer.step()
    elif rule == "evidence":
        return  # it has no data to train on
    else:
        stopping.fit(max_epochs=4, progress=True)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines()[-1].startswith("epoch 4 | step 4 | ")


def test_progress_and_reports_leave_the_training_alone() -> None:
    def weights(progress: bool) -> torch.Tensor:
        stopping, model, optimizer = started("folds", metrics=["r2"])
        x, y = data()
        for _ in stopping.epochs(6, progress=progress):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            stopping.note_batch((x, y), range(40))
            optimizer.step()
            if progress:
                stopping.report()
        return torch.cat([*(p.detach().flatten() for p in model.parameters()), torch.rand(3)])

    assert torch.equal(weights(True), weights(False))


def test_the_line_says_what_the_run_has(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    shown = functools.partial(RunProgress, live=Live(file=file, between=0))
    monkeypatch.setattr(early_stopping, "RunProgress", shown)
    stopping, _, _ = started("folds", metrics=["r2"])
    stopping.fit(20, 60, progress=True)
    first, *_, last = file.getvalue().splitlines()
    form = (
        r"epoch (\d+) \| step (\d+) \| loss (\S+) \| test loss (\S+) \[\S+, \S+\] \| r2 \S+ \| "
        r"best (\S+) at epoch (\d+) \| (stops by epoch \d+|stopped) \| [▁-█]+"
    )
    assert re.fullmatch(form, first)
    match = re.fullmatch(form, last)
    assert match is not None
    assert int(match[2]) == (stopping.stopped_step or 120) == 2 * int(match[1])
    assert float(match[5]) == pytest.approx(stopping.estimates["loss"].value, rel=0.01)
    assert int(match[6]) == stopping.best_epoch + 1


def test_a_bar_on_a_terminal() -> None:
    pytest.importorskip("tqdm")

    class Terminal(io.StringIO):
        encoding = "utf-8"

        def isatty(self) -> bool:
            return True

    file = Terminal()
    with Live(10, file=file) as live:
        live.show(4, lambda: ("epoch 4 | loss 1", 10))
        live.show(9, "too soon after it")
        live.show(10, "epoch 10 | loss 0")
    states = re.split(r"[\r\n]+", file.getvalue())
    assert any("epoch 4 | loss 1" in state and "████" in state for state in states)
    assert "too soon" not in file.getvalue()
    assert any("epoch 10 | loss 0" in state and "█" * 10 in state for state in states)


def test_a_short_run_may_stay_silent() -> None:
    file = io.StringIO()
    with Live(10, file=file, patient=True) as live:
        live.show(1, "said")
    assert file.getvalue() == ""


def test_only_the_first_process_shows_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    (stopping, _, _), file = started("folds"), io.StringIO()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for rank, shown in ((1, False), (0, True)):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        progress = RunProgress(stopping.following, RunFacts(), 5, Live(file=file, between=0))
        progress.show(1)
        progress.close()
        assert bool(file.getvalue()) == shown
    stopping.close()
