"""Sampled and micro-batch estimates beside the exact values."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import heldin
from heldin.capture.sampling import Sampler
from tests.support import runs
from tests.support.cases import CASES, Case
from tests.support.machine import supported

pytestmark = [
    pytest.mark.filterwarnings("ignore:Using padding='same'"),
    pytest.mark.filterwarnings("ignore:LSTM with projections"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support"),
]


@pytest.mark.parametrize("budget", [1, 5])
@pytest.mark.parametrize("case", [c for c in CASES if c.exact], ids=repr)
def test_blocks_of_the_exact_moments(case: Case, budget: int) -> None:
    """Whatever is looked at is exact, for every way in which a parameter can be used."""
    torch.manual_seed(1)
    torch.set_default_dtype(torch.float64)
    try:
        model = case.make()
        sampled = heldin.observe(model, estimator="sampled", budget=budget, **case.options)
        with (
            supported(lambda: case.losses(model, *case.batch()).sum().backward()),
            heldin.observe(model, **case.options) as exact,
            sampled,
        ):
            for _ in range(3):
                case.losses(model, *case.batch()).sum().backward()
                turn = sampled._collector.turn() or set(exact)
                assert set(sampled) == set(exact) & turn
                for name, part in sampled.items():
                    whole = exact[name]
                    block, weight = sampled._collector.sampler._blocks.get(name, (None, 1.0))
                    cut = whole.total.shape != part.total.shape
                    where = block if cut else ()
                    assert torch.allclose(part.total, whole.total[where], atol=1e-10)
                    assert torch.allclose(part.squares, whole.squares[where], atol=1e-10)
                    assert part.weight == (weight if cut else 1.0)
                exact.clear()
                sampled.clear()
    finally:
        torch.set_default_dtype(torch.float32)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=3),
    st.integers(1, 60),
    st.booleans(),
    st.integers(0, 5),
)
def test_every_coordinate_is_as_likely(
    shape: list[int], budget: int, spread: bool, seed: int
) -> None:
    """The weighted sum over blocks has the mean of the whole sum, exactly, over all draws."""
    from heldin.capture.sampling import _piece

    size, width = shape[0], max(1, budget)
    chances = torch.zeros(size)
    for number in range(size * max(1, -(-size // width))):
        piece, weight = _piece(number, size, width, spread)
        chances[piece] += weight
    assert torch.allclose(chances, chances[0].expand(size))
    sampler = Sampler(budget, seed)
    block, weight = sampler.block("w", shape, spread=spread)
    values = torch.arange(math.prod(shape)).reshape(shape)
    most = max(budget, math.prod(shape[2:]))  # the last dimensions are never cut
    if block is None:
        assert values.numel() <= most
        assert weight == 1.0
    else:
        assert 1 <= values[block].numel() <= most
    assert sampler.block("w", shape, spread=spread) == (block, weight)


def test_the_estimate_is_unbiased() -> None:
    """Over many draws the estimated criterion has the exact one as its mean."""
    torch.manual_seed(0)
    model, x = nn.Linear(60, 50), torch.randn(32, 60)
    x[:, ::3] = 0  # dead columns
    y = torch.randint(0, 50, (32,))
    sampled = heldin.observe(model, estimator="sampled", budget=200)
    values = []
    with heldin.observe(model) as seen, sampled:
        for _ in range(400):
            sampled.clear()
            seen.clear()
            F.cross_entropy(model(x), y).backward()
            values.append(heldin.evidence(sampled).groups["weight"])
        exact = heldin.evidence(seen).groups["weight"]
    mean, spread = float(torch.tensor(values).mean()), float(torch.tensor(values).std())
    assert abs(mean - exact) < 4 * spread / 400**0.5
    assert spread > 0


def test_small_parameters_are_exact() -> None:
    model, x = nn.Linear(6, 3), torch.randn(8, 6)
    sampled = heldin.observe(model, estimator="sampled")
    with heldin.observe(model) as exact, sampled:
        model(x).sin().sum().backward()
    assert heldin.evidence(sampled).criterion == heldin.evidence(exact).criterion
    assert sampled["weight"].total.shape == (3, 6)


def test_blocks_change_with_clear_and_not_before() -> None:
    model, x = nn.Linear(300, 200), torch.randn(8, 300)
    with heldin.observe(model, estimator="sampled", budget=64) as seen:
        model(x).sin().sum().backward()
        first = seen._collector.sampler.block("weight", (200, 300))
        model(x).sin().sum().backward()
        assert seen._collector.sampler.block("weight", (200, 300)) == first
        assert seen.count == 16
        seen.clear(redraw=False)
        assert seen._collector.sampler.block("weight", (200, 300)) == first
        seen.clear()
        assert seen._collector.sampler.block("weight", (200, 300), spread=True) != first


def test_the_weight_and_the_bias_of_a_layer_share_their_rows() -> None:
    """These are read but once: the rows of the block of weights are among the bias's entries."""
    sampler = Sampler(64)
    for _ in range(20):
        rows = sampler.block("layer.weight", (250, 256))[0][0]
        entries = sampler.block("layer.bias", (250,), 1024)[0][0]
        assert entries.start <= rows.start
        assert rows.stop <= entries.stop
        sampler.close_step(redraw=True)


def test_the_global_random_stream_is_untouched() -> None:
    model, x = nn.Linear(300, 200), torch.randn(8, 300)
    before = torch.get_rng_state()
    with heldin.observe(model, estimator="sampled", budget=64) as seen:
        for _ in range(3):
            model(x).sin().sum().backward()
            seen.clear()
    assert torch.equal(before, torch.get_rng_state())


def test_micro_batches_as_samples() -> None:
    torch.manual_seed(0)
    model, x, y = nn.Linear(6, 3).double(), torch.randn(64, 6).double(), torch.randint(0, 3, (64,))
    grads = []
    with heldin.observe(model, estimator="microbatch") as seen:
        for xs, ys in zip(x.split(4), y.split(4), strict=True):
            loss = F.cross_entropy(model(xs), ys)
            grads.append(torch.autograd.grad(loss, model.weight, retain_graph=True)[0])
            loss.backward()
    each = torch.stack(grads)
    assert seen.count == 16
    assert torch.allclose(seen["weight"].total, each.sum(0))
    assert torch.allclose(seen["weight"].squares, each.square().sum(0))


def test_arguments() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(heldin.HeldinError, match="'exact', 'sampled' or 'microbatch'"):
        heldin.observe(model, estimator="guessed")  # type: ignore[arg-type]
    with pytest.raises(heldin.HeldinError, match="at least 1"):
        heldin.observe(model, estimator="sampled", budget=0)


def test_small_matrices_are_exact_however_many_samples() -> None:
    """A whole data set as one batch: hidden layers below the budget are taken whole."""
    model = nn.Sequential(
        nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)
    )
    x = torch.randn(5000, 20)
    with runs.EvidenceStopping(model) as stopping:
        for _ in range(3):
            model(x).square().sum().backward()
            stopping.step()
        assert stopping.evidence.live["2.weight"] == 64 * 64
