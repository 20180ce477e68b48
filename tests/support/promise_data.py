"""What the tests of promises share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.support.truth import error, truth


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))


def agree(seen: Any, model: nn.Module, losses: Tensor) -> None:
    expected = truth(model, losses)
    assert set(seen) == set(expected)
    worst = error(seen, expected, 1e-12)
    assert max(worst.values()) < 1e-9, worst


X, Y, CLASS = torch.randn(6, 3).double(), torch.randn(6, 2).double(), torch.arange(6) % 2
