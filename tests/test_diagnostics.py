"""`heldin.verify` compares what is observed with one backward pass per sample."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import heldin
from tests.support.observe_runs import net


@pytest.fixture(autouse=True)
def double_precision() -> Any:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_verify_agrees_both_ways() -> None:
    model, x, y = net(3, 4, 2), torch.randn(6, 3), torch.randn(6, 2)
    model[0].weight.grad = torch.ones(4, 3)
    alone = heldin.verify(model, lambda x, y: F.mse_loss(model(x), y), x, y)
    assert alone.ok, str(alone)
    assert alone.count == 6
    same_graph = heldin.verify(model, lambda: F.mse_loss(model(x), y))
    assert same_graph
    assert "all parameters agree" in str(same_graph)
    itself = heldin.verify(model, lambda: F.mse_loss(model(x), y).backward())
    assert itself.ok
    assert torch.equal(model[0].weight.grad, torch.ones(4, 3))


def test_verify_finds_a_wrong_rule() -> None:
    from heldin.capture.ops import OP_RULES

    model, x = nn.Sequential(nn.Linear(3, 2), nn.Tanh()), torch.randn(6, 3)
    right = OP_RULES["AddmmBackward0"]
    try:

        @heldin.ops.register_op_rule("AddmmBackward0")
        def wrong(use: heldin.ops.OpUse) -> Any:
            return right(use) if use.argument == 0 else torch.zeros(use.m, *use.shape)

        found = heldin.verify(model, lambda: model(x).square().sum())
    finally:
        OP_RULES["AddmmBackward0"] = right
    assert not found.ok
    assert "WRONG" in str(found)
    assert found.errors["0.bias"] < 1e-8 < found.errors["0.weight"]


def test_verify_says_when_it_needs_the_batch() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x).square().sum()

    model, x = Model(), torch.randn(4, 3)
    with pytest.raises(heldin.HeldinError, match="pass the batch"):
        heldin.verify(model, lambda: model(x))
    assert heldin.verify(model, lambda x: model(x), x).ok
