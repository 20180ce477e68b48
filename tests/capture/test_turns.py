"""The sampled estimator observes the parameters of a deep model in turns."""

from __future__ import annotations

import copy
import statistics
from typing import Any

import pytest
import torch
from torch import nn

from heldin.capture.sampling import TENSORS, Sampler
from tests.support import runs

DEPTH = 20  # layers: twice as many parameters


def deep() -> nn.Module:
    layers = [layer for _ in range(DEPTH) for layer in (nn.Linear(6, 6), nn.LeakyReLU(0.5))]
    for layer in layers[::2]:
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
            turn = sampled._collector.turn() or set(exact.evidence.groups)
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
            turn = rule._collector.turn() or {name for name, _ in model.named_parameters()}
            rule.step()
            values = [rule.evidence.groups[name] for name in turn]
            expected = getattr(statistics, across)(values)
            assert rule.evidence.criterion == pytest.approx(expected)
            assert len(rule.evidence.groups) == 2 * DEPTH


def test_groups_of_several_parameters_are_whole() -> None:
    torch.manual_seed(0)
    model = deep()
    with runs.EvidenceStopping(model, groups=lambda name: name.split(".")[1]) as rule:
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
