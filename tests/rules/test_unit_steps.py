"""How far a unit gradient moves a weight."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from heldin.rules.displacements import unit_gradient_step
from tests.support.leave_one_out_runs import ADAM, SGD


@pytest.mark.parametrize(
    ("kind", "setting", "travelled"),
    [
        (SGD, {"lr": 0.1}, 0.3),
        (SGD, {"lr": 0.1, "momentum": 0.5}, 0.1 * (1 + 1.5 + 1.75)),
        (SGD, {"lr": 0.1, "momentum": 0.5, "dampening": 0.5}, 0.1 * 3),
        (SGD, {"lr": 1.0, "momentum": 0.5, "nesterov": True}, 1.5 + 1.75 + 1.875),
        (torch.optim.RMSprop, {"lr": 0.1, "momentum": 0.5}, 0.1 * (1 + 1.5 + 1.75)),
        (ADAM, {"lr": 0.1, "betas": (0.9, 0.99)}, 0.3),
    ],
)
def test_pulses_are_those_of_the_optimisers(
    kind: Any, setting: dict[str, Any], travelled: float
) -> None:
    velocity = total = 0.0
    for _ in range(3):
        velocity, far = unit_gradient_step(kind, setting, velocity)
        total += far
    assert math.isclose(total, travelled)
    p = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = kind([p], **setting)
    for _ in range(3):
        p.grad = torch.ones_like(p)
        optimizer.step()
    if kind is SGD:
        assert math.isclose(float(-p.detach()), travelled)
    if kind is ADAM:
        assert math.isclose(float(-p.detach()), travelled, rel_tol=1e-6)
