"""Models of other libraries: the judge, and a few entries that need transformers alone."""

from __future__ import annotations

import json
import os
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from heldin.capture.ops import OP_RULES, OpUse
from heldin_lab import zoo
from heldin_lab.cli import main as cli
from heldin_lab.zoo import run as zoo_run
from heldin_lab.zoo.entry import Entry, normal


def entry(make: Any, **more: Any) -> Entry:
    return Entry("torch", "a model", make, normal(3), **more)


class Mixing(nn.Module):
    """Rows without the batch's mean, or products of rows that meet a parameter."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(3, 2), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layer(x)
        return (
            out - out.mean(0) if self.how == "mean" else self.layer.weight[0, 0] * (out @ out.t())
        )


class Drawing(nn.Module):
    """Draws a number where nobody observes, and two where somebody does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._forward_pre_hooks:
            torch.rand(())
        return self.layer(x)


class Failing(nn.Module):
    """Fails where somebody observes it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._forward_pre_hooks:
            raise RuntimeError("not with me")
        return self.layer(x)


def test_names_are_unlike() -> None:
    names = [(e.library, e.name) for e in zoo.ENTRIES]
    assert len(set(names)) == len(names)
    assert len(names) >= 120
    assert len({library for library, _ in names}) >= 15


def test_what_is_right_is_exact() -> None:
    found = zoo.judge(entry(lambda: nn.Sequential(nn.Linear(3, 4), nn.Dropout(), nn.Linear(4, 1))))
    assert (found.status, found.parameters) == ("exact", 4)
    assert found.error is not None
    assert found.error < 1e-9


def test_what_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(use: OpUse) -> Any:
        return use.per_sample_sum(2 * use.grad) if len(use.shape) == 1 else None

    monkeypatch.setitem(OP_RULES, "AddmmBackward0", twice)
    found = zoo.judge(entry(lambda: nn.Linear(3, 2)))
    assert (found.status, "bias" in found.reason) == ("wrong", True)


def test_samples_that_influence_each_other() -> None:
    told = zoo.judge(entry(lambda: Mixing("mean")))
    assert (told.status, told.mixes) == ("warned", True)
    refused = zoo.judge(entry(lambda: Mixing("product")))
    assert (refused.status, refused.mixes) == ("refused", True)
    unsaid = zoo.judge(entry(lambda: nn.Linear(3, 2), mixes=True))
    assert unsaid.status == "wrong"


def test_training_that_is_not_the_same_is_found() -> None:
    found = zoo.judge(entry(Drawing))
    assert (found.status, "random numbers" in found.reason) == ("changed", True)


def test_errors_are_told_apart() -> None:
    assert zoo.judge(entry(Failing)).status == "crashed"
    assert zoo.judge(entry(lambda: nn.Linear(4, 2))).status == "broken"


def dies(pipe: Connection) -> None:
    pipe.recv()
    pipe.send("started")
    os._exit(1)


def hangs(pipe: Connection) -> None:
    pipe.recv()
    pipe.recv()


def test_a_process_that_dies_or_hangs() -> None:
    died = zoo_run.Keeper(60.0, dies).run(zoo.ENTRIES[0])
    assert (died.status, died.reason) == ("crashed", "the process died")
    hung = zoo_run.Keeper(0.01, hangs).run(zoo.ENTRIES[0])
    assert (hung.status, hung.reason) == ("broken", "no answer in 0.01 seconds")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    names = ["BertForMaskedLM", "CLIPModel"]
    options = [*names, "--out", str(tmp_path)]
    assert cli.main(["zoo", *options]) == 0
    data = json.loads((tmp_path / "zoo.json").read_text(encoding="utf-8"))
    assert [o["status"] for o in data["outcomes"]] == ["exact", "refused"]
    table = (tmp_path / "zoo.md").read_text(encoding="utf-8")
    assert "| **1 libraries** | 2 | 1 | 1 | 0 | 0 | 0 | 0 |" in table
    capsys.readouterr()
    assert cli.main(["zoo", *options]) == 0
    assert "[1/2]" not in capsys.readouterr().err  # both were there


def test_unknown_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["zoo", "none-such"]) == 2
    assert cli.main(["zoo", "--list"]) == 0
    assert "BertForMaskedLM" in capsys.readouterr().out
