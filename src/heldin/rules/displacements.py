"""The mathematics of leave-one-out displacements: pure functions of tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["directions", "solve"]


def solve(
    gram: Tensor, shift: Tensor, residual: Tensor, curvature: Tensor, source: float, share: float
) -> tuple[Tensor, Tensor]:
    """One implicit step of all leave-one-out displacements, seen through b outputs of q samples.

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
    known = torch.cat([gram.reshape(size, size), shift.reshape(size, q)], dim=1)
    both = torch.linalg.solve(system, known)
    response = both[:, :size].reshape(q, b, q, b)
    shifts = both[:, size:].reshape(q, b, q)
    shifts = shifts + source * torch.einsum("jaib,ib->jai", response, residual)
    # The sample itself does not pull back: Sherman-Morrison-Woodbury on its own columns.
    each = torch.arange(q, device=gram.device)
    own = response[each, :, each]  # (q, b, b)
    room = torch.eye(b, dtype=gram.dtype, device=gram.device) - own @ c
    freed = torch.linalg.solve(room, shifts[each, :, each])
    freed = torch.einsum("iab,ib->ia", c, freed)
    shifts = shifts + torch.einsum("jaib,ib->jai", response, freed)
    moves = -torch.einsum("jab,jbi->jai", c, shifts)
    moves[each, :, each] = source * residual
    return shifts, moves


def directions(slope: Tensor, bend: Callable[[Tensor], Tensor], count: int) -> Tensor:
    """Orthonormal directions in each sample's outputs in which its loss changes and bends most.

    All of them if there are no more than `count`; else the slope and the leading eigenvectors of
    the second derivative.

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
