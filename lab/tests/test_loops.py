"""`heldin-lab loops`: some of its loops, and that its judge notices faults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from heldin.shadows.replayed import ReplayedShadows
from heldin_lab.cli.main import main
from heldin_lab.loops import LOOPS, judge

FAST = [
    "collate-sorts-by-length",
    "mixup-in-collate",
    "mixing-in-getitem",
    "clipping-not-announced",
    "clipping-not-announced+train_step",
    "accumulation",
    "dropout",
    "lambda-with-submodule",
    "dice",
    "generator-of-numpy",
    "repeated-rows-in-a-dataset",
    "rule-made-late",
    "trainer-with-memory+train_step",
    "schedule-free",
]


@pytest.mark.parametrize("name", FAST)
def test_loops(name: str) -> None:
    outcome = judge(LOOPS[name])
    assert outcome.expected, f"{outcome.verdict}: {outcome.message}"


def test_there_are_loops_of_all_kinds() -> None:
    assert len(LOOPS) >= 150
    assert len({loop.kind for loop in LOOPS.values()}) == 10
    assert all(loop.what.endswith(".") for loop in LOOPS.values())


def test_the_judge_notices_a_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        ReplayedShadows,
        "_parts",
        lambda self, batches, number: [
            (self._source.whole(batch), len(batch.rows)) for batch in batches
        ],
    )
    outcome = judge(LOOPS["dictionary"])
    assert outcome.verdict == "wrong"
    assert outcome.difference is not None
    assert outcome.difference > 1e-3


def test_the_judge_notices_changed_training(monkeypatch: pytest.MonkeyPatch) -> None:
    follow = ReplayedShadows.follow

    def drawing(self: Any, *args: Any) -> Any:
        torch.rand(1)
        return follow(self, *args)

    monkeypatch.setattr(ReplayedShadows, "follow", drawing)
    outcome = judge(LOOPS["dropout"])
    assert outcome.verdict == "changed"
    assert "weights from batch 1 on" in outcome.message


def test_the_judge_notices_foreign_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any, *args: Any) -> Any:
        raise KeyError("x")

    monkeypatch.setattr(ReplayedShadows, "follow", fail)
    assert judge(LOOPS["dropout"]).verdict == "crashed"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["loops", "plain-with-loss-fn", "l1-penalty", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "2 loops: 1 exact, 1 refused." in shown
    assert "| **all** | 2 | 1 | 1 | 0 | 0 | 0 | 0 |" in shown
    outcomes = json.loads((tmp_path / "loops.json").read_text())
    assert [outcome["verdict"] for outcome in outcomes] == ["exact", "refused"]
    assert main(["loops", "none-such"]) == 2
    assert main(["loops", "--list"]) == 0
    assert "l1-penalty: The loop adds" in capsys.readouterr().out


def test_a_fault_is_an_exit_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(self: Any, *args: Any) -> Any:
        raise KeyError("x")

    monkeypatch.setattr(ReplayedShadows, "follow", fail)
    assert main(["loops", "dropout", "--out", str(tmp_path)]) == 1
