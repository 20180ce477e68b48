"""Decisions on curves of held-out losses: when to look, when to give up, what to keep.

A curve is a matrix (rows, checks): the loss of every held-out row at every check. Everything here
is a pure function, so that a rule can be replayed on a logged run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Patience", "best_check", "mean_and_error", "most_crowded", "next_check", "votes"]


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


def mean_and_error(
    losses: Tensor,
    held_per_trained: float = 0.0,
    missing: float = 0.0,
    training_loss: float = math.nan,
) -> tuple[float, float]:
    """Mean of held-out rows' losses and its standard error (nan for a single row).

    The plain standard error of a mean is too small here, for four reasons:

    - On other training rows, all losses would be others together. Nadeau and Bengio (2003) add
      s^2 / t to the variance s^2 / m, with t the rows that each model was trained on, for models
      trained on random parts of the rows. Folds overlap less evenly: half of that.
    - s is an estimate: m - 3 in place of m - 1 is the variance of Student's distribution.
    - Losses have a long tail. A sample without a large loss has a mean and a spread that are both
      too small, so the largest loss counts twice in s^2.
    - The models behind the losses miss a share of the rows. If the gap between their loss and the
      training loss shrinks as 1 / rows, the model that sees all rows is better by that share of
      the gap. By how much it is better is not known, so the share counts as an error.

    The half and the twice were chosen on development tables (docs/which-rule.md).

    Args:
        losses: (m,) of the rows, or means over blocks of as many rows each.
        held_per_trained: m / t in rows: all rows held out, over those that each model was trained
            on; n / (0.8 n) for five folds, 0.2 n / (0.8 n) for one shadow without a fifth.
        missing: share of the rows that each model was not trained on.
        training_loss: of the model on rows that it was trained on; nan: not known.

    >>> losses = torch.tensor([1.0, 2.0, 3.0, 2.0, 2.0, 2.0])  # s^2 = (1 + 1 + 1) / 3
    >>> mean_and_error(losses)
    (2.0, 0.408...)
    >>> mean_and_error(losses, held_per_trained=1.25)  # sqrt((1 + 1.25 / 2) / 6)
    (2.0, 0.520...)
    >>> mean_and_error(losses, missing=0.2, training_loss=0.5)  # sqrt(0.408^2 + (0.2 x 1.5)^2)
    (2.0, 0.506...)
    """
    losses = losses.double()
    middle = losses.mean()
    if len(losses) < 2:
        return float(middle), math.nan
    squares = (losses - middle).square()
    spread = (squares.sum() + squares[losses.argmax()]) / max(1, len(losses) - 3)
    error = float((spread * (1 + held_per_trained / 2) / len(losses)).sqrt())
    gap = float(middle) - training_loss
    return float(middle), math.hypot(error, missing * gap) if gap > 0 else error


def best_check(means: Tensor) -> int:
    """Number of the first check with the lowest mean; those with inf or nan do not count.

    >>> best_check(torch.tensor([3.0, torch.nan, 1.0, 1.0]))
    2
    """
    return int(torch.where(means.isfinite(), means, torch.inf).argmin())


def most_crowded(steps: Mapping[int, int], best: int) -> int:
    """The check whose neighbours are nearest to each other in log steps, and not the best one.

    Args:
        steps: of checks by their numbers, in order.
        best: number of the check that is not to be given up.

    >>> most_crowded({0: 0, 1: 10, 2: 11, 3: 12, 4: 13, 5: 100}, best=2)
    3
    """
    numbers, logs = list(steps), [math.log1p(step) for step in steps.values()]
    gaps = {
        number: logs[min(i + 1, len(logs) - 1)] - logs[max(i - 1, 0)]
        for i, number in enumerate(numbers)
        if number != best
    }
    return min(gaps, key=lambda number: gaps[number])


def votes(
    curves: Tensor, resamples: int = 100, seed: int = 0, held_per_trained: float = 0.0
) -> Tensor:
    """How often each check is the best one when the rows are drawn again with replacement.

    m rows drawn m times would make the minimum look more certain than it is: on other training rows
    all curves would be others together. A mean of m / (1 + m / t) rows is as uncertain as Nadeau
    and Bengio (2003) say (see `mean_and_error`), so that many are drawn.

    Args:
        curves: (rows, checks).
        resamples: number of draws.
        seed: of the draws.
        held_per_trained: m / t, see `mean_and_error`; 0 draws all m.

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
    size = max(1, round(rows / (1 + held_per_trained)))
    drawn = torch.randint(rows, (resamples, size), generator=generator)
    counts = torch.zeros(resamples, rows, dtype=torch.float64)
    counts.scatter_add_(1, drawn, torch.ones_like(drawn, dtype=torch.float64))
    values = counts @ torch.where(usable, curves.detach().cpu().double(), 0.0)
    winners = torch.where(usable.cpu(), values, torch.inf).argmin(1)
    return torch.bincount(winners, minlength=checks).double() / resamples
