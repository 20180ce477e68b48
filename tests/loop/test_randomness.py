"""Random states of torch, Python and NumPy."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from heldin.loop.randomness import RandomState

np = pytest.importorskip("numpy")


@pytest.mark.parametrize(
    "draw",
    [lambda: torch.rand(1), random.random, lambda: np.random.rand(), lambda: np.random.randn()],
    ids=["torch", "python", "numpy", "numpy normal"],
)
def test_a_draw_from_any_generator_is_seen(draw: Callable[[], Any]) -> None:
    state = RandomState.current()
    assert not state.has_moved()
    draw()
    assert state.has_moved()
    state.restore()
    assert not state.has_moved()
