"""Random states of torch, Python and NumPy."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from heldin.loop.copying import copy_sharing_data
from heldin.loop.generators import generators_in, is_of_user, left_alone
from heldin.loop.randomness import Autocast, RandomState, mixed_seed, separate_random_stream

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


def test_a_stream_depends_on_its_numbers_and_leaves_the_loop_alone() -> None:
    device = torch.device("cpu")
    expected: Any = [
        torch.rand(2, generator=torch.Generator().manual_seed(0)),
        random.Random(0).random(),
    ]
    drawn = []
    for numbers in ((1, 2), (1, 2), (2, 1), ()):
        torch.manual_seed(0)
        random.seed(0)
        with separate_random_stream(device, *numbers):
            drawn.append([torch.rand(2).tolist(), random.random(), np.random.rand()])
        assert torch.equal(torch.rand(2), expected[0])
        assert random.random() == expected[1]
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[3][:2] == [expected[0].tolist(), expected[1]]
    assert mixed_seed(0, 1) != mixed_seed(1, 0)


def test_autocast_is_repeated() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        setting = Autocast.current("cpu")
    with setting.context():
        assert (torch.ones(1, 1) @ torch.ones(1, 1)).dtype == torch.bfloat16


class Noisy:
    def __init__(self) -> None:
        self.x, self.generator = torch.ones(3), random.Random(0)


def test_copies_share_data_and_generators_are_put_back() -> None:
    original = Noisy()
    duplicate = copy_sharing_data(original)
    assert duplicate.x is original.x
    assert duplicate.generator is not original.generator
    with left_alone(generators_in({"noise": [original]})):
        original.generator.random()
    assert original.generator.random() == duplicate.generator.random()
    names = ("__main__", "torch.nn", "collections")
    assert [is_of_user(name) for name in names] == [True, False, False]
