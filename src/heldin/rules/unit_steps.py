"""What an optimiser does with a gradient: how far it carries weights, what it divides by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["KNOWN", "UnitGradientPath", "second_moment", "unit_gradient_step"]

KNOWN = (torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adam, torch.optim.AdamW)


@dataclass
class UnitGradientPath:
    """How far a constant unit gradient has carried the weights of a group since the last check."""

    velocity: float = 0.0  # of a momentum buffer that is fed with ones
    time: float = 0.0
    decay: float = 0.0  # the same for decoupled weight decay


def unit_gradient_step(
    kind: type[Optimizer], setting: Mapping[str, Any], velocity: float
) -> tuple[float, float]:
    """Velocity after a step and how far the step went, for a gradient of one."""
    rate = float(setting["lr"])
    momentum = float(setting.get("momentum", 0.0))
    if momentum == 0.0 or issubclass(kind, (torch.optim.Adam, torch.optim.AdamW)):
        return 1.0, rate
    first = velocity == 0.0 and kind is torch.optim.SGD
    damped = 1.0 if first else 1.0 - float(setting.get("dampening", 0.0))
    velocity = momentum * velocity + damped
    if setting.get("nesterov"):
        return velocity, rate * (1.0 + momentum * velocity)
    return velocity, rate * velocity


def second_moment(optimizer: Optimizer, p: Tensor, setting: Mapping[str, Any]) -> Tensor:
    """Return the bias-corrected second moment by whose root the optimiser divides."""
    state: Mapping[str, Tensor] = optimizer.state.get(p, {})
    if not state:
        return torch.zeros_like(p)
    v: Tensor
    if isinstance(optimizer, torch.optim.RMSprop):
        v = state["square_avg"].detach()
        if setting["centered"]:
            v = v - state["grad_avg"].square()
        return v
    v = state.get("max_exp_avg_sq", state["exp_avg_sq"]).detach()
    v = v / (1 - float(setting["betas"][1]) ** float(state["step"]))
    return v
