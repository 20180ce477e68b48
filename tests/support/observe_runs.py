"""What the tests of observe share."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from tests.support.truth import error, truth


def net(*sizes: int) -> Any:
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def agree(seen: Any, model: nn.Module, losses: Tensor, tolerance: float = 1e-9) -> None:
    worst = error(seen, truth(model, losses), 1e-12)
    assert max(worst.values()) < tolerance, worst
