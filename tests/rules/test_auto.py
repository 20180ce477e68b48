"""Which rule is chosen, and that it says why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import heldin
from heldin.rules.estimated.choose import _Case, _chosen


def case(**options: Any) -> _Case:
    usual: dict[str, Any] = {"rows": 200, "parameters": 5000, "plain": True, "known": True}
    usual |= options
    return _Case(bytes=4 * usual["parameters"], **usual)


@pytest.mark.parametrize(
    ("options", "budget", "expected"),
    [
        ({}, 6.0, "folds"),
        ({"plain": False}, 6.0, "folds"),
        ({"parameters": 1_000_000}, 6.0, "folds"),
        ({"plain": False}, 3.0, "leave-one-out"),
        ({"plain": False, "known": False}, 3.0, "shadow"),
        ({"rows": 5000}, 6.0, "shadow"),
        ({"rows": 5000, "parameters": 1000}, 2.0, "leave-one-out"),
        ({"parameters": 40_000_000}, 6.0, "shadow"),  # five copies do not fit the memory
        ({"parameters": 40_000}, 2.0, "leave-one-out"),
    ],
)
def test_the_choice(options: dict[str, Any], budget: float, expected: str) -> None:
    rule, reason = _chosen(case(**options), budget, 2**30)
    assert rule == expected
    assert f"{case(**options).rows} rows" in reason


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


def test_refusals() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.ones(4, 2), torch.ones(4, 1)
    with pytest.raises(heldin.HeldinError, match="expected 'auto', 'folds'"):
        heldin.stopping("best", model, optimizer, F.mse_loss, data)  # type: ignore[arg-type]
    with pytest.raises(heldin.HeldinError, match="no parameter that requires"):
        heldin.stopping("auto", nn.ReLU(), optimizer, F.mse_loss, data)
