"""Sampled and micro-batch estimates beside the exact values; deep models in turns."""

from __future__ import annotations

import copy
import math
import statistics
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import heldin
from heldin.capture.sampling import TENSORS, Sampler
from tests.support import inside, runs
from tests.support.cases import CASES, Case
from tests.support.machine import supported

pytestmark = [
    pytest.mark.filterwarnings("ignore:Using padding='same'"),
    pytest.mark.filterwarnings("ignore:LSTM with projections"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support"),
]


@pytest.mark.parametrize("coordinates", [1, 5])
@pytest.mark.parametrize("case", [c for c in CASES if c.exact], ids=repr)
def test_blocks_of_the_exact_moments(case: Case, coordinates: int) -> None:
    """Whatever is looked at is exact, for every way in which a parameter can be used."""
    torch.manual_seed(1)
    torch.set_default_dtype(torch.float64)
    try:
        model = case.make()
        sampled = heldin.observe(
            model, estimator="sampled", coordinates=coordinates, **case.options
        )
        with (
            supported(lambda: case.losses(model, *case.batch()).sum().backward()),
            heldin.observe(model, **case.options) as exact,
            sampled,
        ):
            for _ in range(3):
                case.losses(model, *case.batch()).sum().backward()
                turn = inside.turn(sampled, exact)
                assert set(sampled) == set(exact) & turn
                for name, part in sampled.items():
                    whole = exact[name]
                    block, weight = inside.block(sampled, name)
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
    shape: list[int], coordinates: int, spread: bool, seed: int
) -> None:
    """The weighted sum over blocks has the mean of the whole sum, exactly, over all draws."""
    from heldin.capture.sampling import _piece

    size, width = shape[0], max(1, coordinates)
    chances = torch.zeros(size)
    for number in range(size * max(1, -(-size // width))):
        piece, weight = _piece(number, size, width, spread)
        chances[piece] += weight
    assert torch.allclose(chances, chances[0].expand(size))
    sampler = Sampler(coordinates, seed)
    block, weight = sampler.block("w", shape, spread=spread)
    values = torch.arange(math.prod(shape)).reshape(shape)
    most = max(coordinates, math.prod(shape[2:]))  # the last dimensions are never cut
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
    sampled = heldin.observe(model, estimator="sampled", coordinates=200)
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
    with heldin.observe(model, estimator="sampled", coordinates=64) as seen:
        model(x).sin().sum().backward()
        sampler = inside.collector(seen).sampler
        assert sampler is not None
        first = sampler.block("weight", (200, 300))
        model(x).sin().sum().backward()
        assert sampler.block("weight", (200, 300)) == first
        assert seen.count == 16
        seen.clear(redraw=False)
        assert sampler.block("weight", (200, 300)) == first
        seen.clear()
        assert sampler.block("weight", (200, 300), spread=True) != first


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
    with heldin.observe(model, estimator="sampled", coordinates=64) as seen:
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
        heldin.observe(model, estimator="sampled", coordinates=0)


def test_small_matrices_are_exact_however_many_samples() -> None:
    """A whole data set as one batch: hidden layers of fewer coordinates are taken whole."""
    model = nn.Sequential(
        nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)
    )
    x = torch.randn(5000, 20)
    with runs.EvidenceStopping(model) as stopping:
        for _ in range(3):
            model(x).square().sum().backward()
            stopping.step()
        assert stopping.evidence.live["2.weight"] == 64 * 64


DEPTH = 20  # layers: twice as many parameters


def deep() -> Any:
    layers = [layer for _ in range(DEPTH) for layer in (nn.Linear(6, 6), nn.LeakyReLU(0.5))]
    for layer in layers[::2]:
        assert isinstance(layer, nn.Linear)
        nn.init.orthogonal_(layer.weight)  # so that samples stay apart
    return nn.Sequential(*layers)


def test_turns_go_through_all_parameters_alike() -> None:
    names = [f"layer{i}" for i in range(100)]
    sampler = Sampler(64, seed=3)
    assert sampler.turn(lambda: names) is None  # the first draw looks at all
    counts = dict.fromkeys(names, 0)
    for _ in range(len(names)):
        sampler.close_step(redraw=True)
        turn = sampler.turn(lambda: names)
        assert turn is not None
        assert len(turn) == TENSORS
        assert sampler.turn(list) == turn  # until the next draw
        for name in turn:
            counts[name] += 1
    assert set(counts.values()) == {TENSORS}


def test_few_parameters_have_no_turns() -> None:
    sampler = Sampler(64)
    for _ in range(3):
        assert sampler.turn(lambda: ["a"] * TENSORS) is None
        sampler.close_step(redraw=True)


def run(steps: int, stop: int | None = None, **options: Any) -> list[runs.EvidenceStopping]:
    torch.manual_seed(0)
    model = deep()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rules = [runs.EvidenceStopping(model, **options)]
    for step in range(steps):
        if step == stop:
            rules.append(runs.EvidenceStopping(model, **options))
            rules[1].load_state_dict(copy.deepcopy(rules[0].state_dict()))
        model(torch.randn(12, 6)).square().sum().backward()
        for rule in rules:
            rule.step()
        optimizer.step()
        optimizer.zero_grad()
    for rule in rules:
        rule.close()
    return rules


def test_every_check_has_a_value_of_every_parameter() -> None:
    (rule,) = run(7)
    for record in rule.history:
        assert len(record.groups) == 2 * DEPTH
    changed = [
        sum(a.groups[name] != b.groups[name] for name in a.groups)
        for a, b in zip(rule.history, list(rule.history)[1:], strict=False)
    ]
    assert changed == [TENSORS] * 6


def test_what_is_looked_at_is_what_all_would_give() -> None:
    """Small parameters are taken whole: a value of the turn is that of the exact estimator."""
    torch.manual_seed(0)
    model = deep()
    exact = runs.EvidenceStopping(model, estimator="exact")
    with exact, runs.EvidenceStopping(model) as sampled:
        for _ in range(5):
            model(torch.randn(12, 6)).square().sum().backward()
            turn = inside.turn(sampled, exact.evidence.groups)
            exact.step()
            sampled.step()
            for name in turn:
                value = sampled.evidence.groups[name]
                assert value == pytest.approx(exact.evidence.groups[name], rel=1e-4), name


@pytest.mark.parametrize("across", ["mean", "median"])
def test_the_criterion_is_that_of_the_turn(across: Any) -> None:
    """Values of other batches are shown, and do not count beside those of this one."""
    torch.manual_seed(0)
    model = deep()
    with runs.EvidenceStopping(model, across=across) as rule:
        for _ in range(4):
            model(torch.randn(12, 6)).square().sum().backward()
            turn = inside.turn(rule, dict(model.named_parameters()))
            rule.step()
            values = [rule.evidence.groups[name] for name in turn]
            expected = getattr(statistics, across)(values)
            assert rule.evidence.criterion == pytest.approx(expected)
            assert len(rule.evidence.groups) == 2 * DEPTH


def test_groups_of_several_parameters_are_whole() -> None:
    torch.manual_seed(0)
    model = deep()
    with runs.EvidenceStopping(model, parameter_groups=lambda name: name.split(".")[1]) as rule:
        for _ in range(4):
            model(torch.randn(12, 6)).square().sum().backward()
            rule.step()
            values = rule.evidence.groups
            assert set(values) == {"weight", "bias"}
            assert rule.evidence.criterion == pytest.approx(sum(values.values()) / 2)


def test_resumed_in_the_middle_of_a_turn() -> None:
    whole, resumed = run(12, stop=5)
    assert whole.history.columns() == resumed.history.columns()


def test_a_parameter_that_is_frozen_leaves_and_comes_back() -> None:
    torch.manual_seed(0)
    model = deep()
    first = next(model.parameters())
    with runs.EvidenceStopping(model) as rule:
        for step in range(12):
            first.requires_grad_(step not in range(3, 6))
            model(torch.randn(12, 6)).square().sum().backward()
            rule.step()
            if step in range(3, 6):
                assert "0.weight" not in rule.evidence.groups
    assert "0.weight" in rule.evidence.groups


def test_groups_stand_in_the_models_order() -> None:
    (rule,) = run(3)
    assert list(rule.evidence.groups) == [name for name, _ in deep().named_parameters()]
