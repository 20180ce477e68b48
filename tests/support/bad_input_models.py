"""What the tests of bad input share."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from tests.support.truth import error, truth


def net() -> Any:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def agree(seen: Any, model: nn.Module, losses: Tensor) -> None:
    expected = truth(model, losses)
    assert set(seen) == set(expected)
    worst = error(seen, expected, 1e-12)
    assert max(worst.values()) < 1e-9, worst
