"""Which rule is chosen, and that it says why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import heldin
from heldin.rules.estimated.choose import COSTS, LEAVE_ONE_OUT, SIZES, _Case, _chosen, _size


def case(**options: Any) -> _Case:
    usual: dict[str, Any] = {"rows": 200, "parameters": 5000, "engine": "dense", "known": True}
    usual |= options
    usual.setdefault("size", sum(usual["parameters"] > size for size in SIZES))
    return _Case(bytes=4 * usual["parameters"], **usual)


@pytest.mark.parametrize(
    ("options", "budget", "expected"),
    [
        ({}, 6.0, "folds"),
        ({"engine": "vmap"}, 6.0, ("folds", 5)),
        ({"engine": "loop", "known": False}, 6.0, ("folds", 3)),
        ({"parameters": 1_000_000}, 6.0, "folds"),
        ({"engine": "vmap", "parameters": 1000}, 3.0, "leave-one-out"),
        ({"engine": "vmap", "known": False}, 4.5, ("folds", 2)),
        ({"rows": 5000}, 6.0, ("folds", 2)),
        ({"rows": 10_000}, 6.0, "shadow"),
        ({"rows": 50_000, "parameters": 1000}, 2.6, "shadow"),  # too many to leave out
        ({"parameters": 40_000_000}, 6.0, "shadow"),  # five copies do not fit the memory
        ({"parameters": 40_000, "known": False}, 4.2, ("folds", 3)),
        ({"parameters": 40_000, "known": False}, 3.4, ("folds", 2)),
        ({"parameters": 10**6, "engine": "copies", "known": False}, 2.5, ("shadow", 1)),
        ({"parameters": 10**6, "engine": "copies", "known": False}, 6.0, ("folds", 4)),
        ({"parameters": 10**6, "engine": "copies", "known": False, "rows": 99}, 7.0, ("folds", 5)),
        ({"parameters": 10**6, "engine": "copies", "known": False, "rows": 5000}, 6.0, "folds"),
        ({"parameters": 10**4, "engine": "copies", "known": False, "size": 2}, 2.5, "shadow"),
        ({"parameters": 1000}, 2.0, "leave-one-out"),
    ],
)
def test_the_choice(options: dict[str, Any], budget: float, expected: Any) -> None:
    one = case(**options)
    rule, shadows, reason = _chosen(one, budget, 2**30)
    assert {0: "leave-one-out", 1: "shadow"}.get(shadows, "folds") == rule
    assert (rule, shadows) == expected if isinstance(expected, tuple) else rule == expected
    assert f"{one.rows} rows" in reason
    cost = one.cost(shadows) if shadows else LEAVE_ONE_OUT
    assert cost <= budget
    assert f"about {cost:g} times" in reason
    assert 4 * shadows * one.bytes <= 2**30


def test_costs_grow_with_shadows_and_shrink_with_size() -> None:
    """A model whose steps are dearer pays less for what Python adds to them, beside one shadow."""
    for engine, columns in COSTS.items():
        ones = [sum(column) for column in columns]
        assert ones == sorted(ones, reverse=True), engine
        assert all(each > 0 for _, each in columns)


@pytest.mark.parametrize(
    ("model", "size"),
    [
        (nn.Linear(10, 10), 0),
        (nn.Sequential(nn.Linear(200, 200), nn.LayerNorm(200), nn.ReLU()), 1),
        (nn.Sequential(nn.Linear(400, 400), nn.BatchNorm1d(400)), 2),
        (nn.Conv2d(1, 2, 3), 2),
        (nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 2)), 2),
    ],
)
def test_the_size_is_how_much_of_a_step_is_arithmetic(model: nn.Module, size: int) -> None:
    assert _size(model) == size


def test_nothing_affordable_says_what_is() -> None:
    with pytest.raises(heldin.HeldinError, match="EvidenceStopping"):
        _chosen(case(rows=100_000, parameters=10**9), 1.2, 2**30)


def test_the_made_object_is_the_rule_and_trains() -> None:
    torch.manual_seed(0)
    x = torch.randn(60, 5)
    y = x[:, :1] + torch.randn(60, 1)
    kinds = {
        "folds": heldin.FoldStopping,
        "shadow": heldin.ShadowStopping,
        "leave-one-out": heldin.LeaveOneOutStopping,
        "auto": heldin.FoldStopping,
    }
    for rule, kind in kinds.items():
        model = nn.Linear(5, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        made = heldin.stopping(rule, model, optimizer, F.mse_loss, (x, y), grid=1.5)  # type: ignore[arg-type]
        assert type(made) is kind
        assert made.grid == 1.5
        assert made.reason_chosen
        with made:
            for _ in range(20):
                F.mse_loss(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                made.step()
        assert made.estimate > 0


def test_folds_of_ones_own_keep_to_the_budget() -> None:
    x = torch.randn(40, 3)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for rows, folds, shadows in ((40, 8, 5), (40, 2, 2), (1200, 4, 2), (12_000, 4, 1)):
        data = x.repeat(rows // 40, 1), x.repeat(rows // 40, 1)[:, :1]
        made = heldin.stopping("auto", model, optimizer, F.mse_loss, data, folds=folds)
        assert isinstance(made, heldin.FoldStopping)
        assert (made.folds, made.shadows) == (folds, shadows)


def test_the_engine_that_was_asked_for_is_what_it_costs() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(50, 3), torch.randn(50, 1)
    parts = ("auto", model, optimizer, nn.MSELoss(), data)
    for engine, shadows in (("dense", 5), ("copies", 1), ("swap", 1)):
        made = heldin.stopping(*parts, budget=3.5, engine=engine)
        assert made._team.copies == shadows
        assert made.engine == engine
        made.close()
    with pytest.raises(heldin.HeldinError, match=r"engine: expected 'auto'.*got 'fast'"):
        heldin.stopping(*parts, engine="fast")


def test_refusals() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.ones(4, 2), torch.ones(4, 1)
    with pytest.raises(heldin.HeldinError, match="name of a rule, 'auto', 'folds'"):
        heldin.stopping("best", model, optimizer, F.mse_loss, data)  # type: ignore[arg-type]
    with pytest.raises(heldin.HeldinError, match="no parameter that requires"):
        heldin.stopping("auto", nn.ReLU(), optimizer, F.mse_loss, data)
    lazy = nn.LazyLinear(1)
    optimizer = torch.optim.SGD(lazy.parameters(), lr=0.1)
    with pytest.raises(heldin.HeldinError, match="lazy layers"):
        heldin.stopping("auto", lazy, optimizer, F.mse_loss, data)


def test_any_batch_within_a_budget() -> None:
    torch.manual_seed(0)
    rows = [{"x": torch.randn(64), "y": torch.randn(1)} for _ in range(60)]
    loader = torch.utils.data.DataLoader(rows, batch_size=20, shuffle=True)  # type: ignore[arg-type]
    model = nn.Sequential(nn.Linear(64, 400), nn.ReLU(), nn.Linear(400, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def batch_loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.mse_loss(model(batch["x"]), batch["y"])

    options: dict[str, Any] = {"data": loader, "batch_loss": batch_loss, "groups": range(60)}
    made = heldin.stopping("auto", model, optimizer, budget=3, **options)
    assert type(made) is heldin.ShadowStopping
    assert (
        "one shadow, for about 3 times the time of a run of 1,000 steps or more (budget 3)"
        in made.reason_chosen
    )
    for batch in loader:
        batch_loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        made.step()
    made.close()
    made = heldin.stopping("auto", model, optimizer, budget=4.5, **options)
    assert isinstance(made, heldin.FoldStopping)
    assert made.shadows == 2
    made.close()
    with pytest.raises(heldin.HeldinError, match="needs tensors and loss_fn"):
        heldin.stopping("leave-one-out", model, optimizer, **options)
    with pytest.raises(heldin.HeldinError, match=r"fits a budget of 1\.5"):
        heldin.stopping("auto", model, optimizer, budget=1.5, **options)


def test_moving_averages_are_refused_by_name() -> None:
    x = torch.randn(40, 3)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    average = torch.optim.swa_utils.AveragedModel(model)
    for rule in ("folds", "shadow", "leave-one-out"):
        with pytest.raises(heldin.HeldinError, match=r"AveragedModel is a moving average.*trains"):
            heldin.stopping(rule, average, optimizer, F.mse_loss, (x, x[:, :1]))  # type: ignore[arg-type]
    heldin.stopping("folds", model, optimizer, F.mse_loss, (x, x[:, :1])).close()
