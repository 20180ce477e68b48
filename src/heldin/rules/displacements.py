"""The mathematics of leave-one-out: what an optimiser does with a gradient, and displacements."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = [
    "KNOWN", "UnitGradientPath", "directions", "second_moment", "solve", "unit_gradient_step",
]  # fmt: skip

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
    """Return the velocity after a step and how far the step went, for a gradient of one."""
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


def solve(
    gram: Tensor, shift: Tensor, residual: Tensor, curvature: Tensor, source: float, share: float
) -> tuple[Tensor, Tensor]:
    """Take one implicit step of all leave-one-out displacements, through b outputs of q samples.

    Args:
        gram: (q, b, q, b), J P J^T over the time of the step.
        shift: (q, b, q), J_j D_i at [j, :, i], before the step.
        residual: (q, b), derivative of each sample's loss by its outputs.
        curvature: (q, b, b), second derivative, positive semidefinite.
        source: weight of a sample in the training loss, 1 / M.
        share: weight of a sample in the curvature, 1 / q.

    Returns:
        The shifts after the step, and the coefficients B such that D_i moves by P J^T B[..., i].
    """
    q, b = residual.shape
    size = q * b
    c = share * curvature
    pull = torch.einsum("jaib,ibc->jaic", gram, c).reshape(size, size)
    system = pull + torch.eye(size, dtype=gram.dtype, device=gram.device)
    right_sides = torch.cat([gram.reshape(size, size), shift.reshape(size, q)], dim=1)
    solution = torch.linalg.solve(system, right_sides)
    response = solution[:, :size].reshape(q, b, q, b)
    shifts = solution[:, size:].reshape(q, b, q)
    shifts = shifts + source * torch.einsum("jaib,ib->jai", response, residual)
    # The sample itself does not pull back: Sherman-Morrison-Woodbury on its own columns.
    index = torch.arange(q, device=gram.device)
    own_response = response[index, :, index]  # (q, b, b)
    room = torch.eye(b, dtype=gram.dtype, device=gram.device) - own_response @ c
    freed = torch.linalg.solve(room, shifts[index, :, index])
    freed = torch.einsum("iab,ib->ia", c, freed)
    shifts = shifts + torch.einsum("jaib,ib->jai", response, freed)
    moves = -torch.einsum("jab,jbi->jai", c, shifts)
    moves[index, :, index] = source * residual
    return shifts, moves


def directions(slope: Tensor, bend: Callable[[Tensor], Tensor], count: int) -> Tensor:
    """Return orthonormal directions in the outputs in which a sample's loss changes most.

    All of them if there are no more than `count`; else the slope and the leading eigenvectors of
    the second derivative, for each sample.

    Args:
        slope: (q, outputs), of the losses.
        bend: second derivative of the losses, times vectors (q, outputs).
        count: number of directions.

    Returns:
        (q, count, outputs).
    """
    q, outputs = slope.shape
    every = torch.eye(outputs, dtype=slope.dtype, device=slope.device).expand(q, -1, -1)
    if count >= outputs:
        return every
    first = torch.nn.functional.normalize(slope, dim=1, eps=1e-30).unsqueeze(2)
    if count == 1:
        return first.transpose(1, 2)
    second = torch.stack([bend(every[:, c]) for c in range(outputs)], dim=2)
    vectors = torch.linalg.eigh(second + second.transpose(1, 2)).eigenvectors
    lead = vectors[:, :, 1 - count :].flip(2)
    frame: Tensor = torch.linalg.qr(torch.cat([first, lead], dim=2)).Q
    return frame.transpose(1, 2)
