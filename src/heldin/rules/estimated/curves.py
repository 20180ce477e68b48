"""Decisions on curves of held-out losses: when to look, when to give up, what to keep.

A curve is a matrix (rows, checks): the loss of every held-out row at every check. Everything here
is a pure function, so that a rule can be replayed on a logged run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Patience", "best_check", "mean_and_error", "next_check", "votes"]


def next_check(step: int, grid: float) -> int:
    """The step of the check that follows the one at `step`, on a grid of ratio `grid`.

    >>> steps = [0]
    >>> while steps[-1] < 30:
    ...     steps.append(next_check(steps[-1], 1.2))
    >>> steps
    [0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 18, 22, 27, 33]
    """
    return max(step + 1, math.ceil(step * grid - 1e-9))


@dataclass(frozen=True)
class Patience:
    """How long to go on after the best check.

    Stop at step t once t >= factor x (best step) + slack and at least `checks` checks have passed
    since the best one. The slack keeps a transient at the start from looking like the minimum.

    >>> Patience(2.0, 200, 3).over(step=440, best=120, since=5)
    True
    >>> Patience(2.0, 200, 3).over(step=439, best=120, since=5)
    False
    """

    factor: float
    slack: int
    checks: int

    def over(self, step: int, best: int, since: int) -> bool:
        """Whether to stop at `step`, `since` checks after the best one at step `best`."""
        return step >= self.factor * best + self.slack and since >= self.checks


def mean_and_error(losses: Tensor) -> tuple[float, float]:
    """Mean of the rows' losses and its standard error (nan for a single row).

    >>> mean_and_error(torch.tensor([1.0, 2.0, 3.0, 2.0]))
    (2.0, 0.408...)
    """
    losses = losses.double()
    error = float(losses.std() / len(losses) ** 0.5) if len(losses) > 1 else math.nan
    return float(losses.mean()), error


def best_check(means: Tensor) -> int:
    """Number of the first check with the lowest mean; those with inf or nan do not count.

    >>> best_check(torch.tensor([3.0, torch.nan, 1.0, 1.0]))
    2
    """
    return int(torch.where(means.isfinite(), means, torch.inf).argmin())


def votes(curves: Tensor, resamples: int = 100, seed: int = 0) -> Tensor:
    """How often each check is the best one when the rows are drawn again with replacement.

    Args:
        curves: (rows, checks).
        resamples: number of draws.
        seed: of the draws.

    Returns:
        (checks,) shares that sum to 1.

    >>> votes(torch.tensor([[3.0, 1.0, 2.0]] * 4))
    tensor([0., 1., 0.], dtype=torch.float64)
    """
    rows, checks = curves.shape
    usable = curves.isfinite().all(0)
    share = torch.zeros(checks, dtype=torch.float64)
    if not bool(usable.any()):
        share[0] = 1.0
        return share
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(rows, (resamples, rows), generator=generator)
    counts = torch.zeros(resamples, rows, dtype=torch.float64)
    counts.scatter_add_(1, drawn, torch.ones_like(drawn, dtype=torch.float64))
    values = counts @ torch.where(usable, curves.detach().cpu().double(), 0.0)
    winners = torch.where(usable.cpu(), values, torch.inf).argmin(1)
    return torch.bincount(winners, minlength=checks).double() / resamples
