"""Decisions on curves of held-out losses: when to look, when to give up, what to keep.

A curve is a matrix (rows, checks): the loss of every held-out row at every check. Everything here
is a pure function, so that a rule can be replayed on a logged run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "PATIENCE",
    "Patience",
    "best_check",
    "bootstrap_shares",
    "densest_check",
    "lag",
    "matched_checks",
    "mean_and_error",
    "next_check",
    "worse_beyond_doubt",
]


FEWEST_EPOCHS = 4  # before a rise counts as beyond doubt
CHECKS = 3  # fewest checks after the best one before patience in epochs may end the run


def next_check(step: int, grid: float) -> int:
    """Return the step of the check after the one at `step`, on a grid of ratio `grid`.

    >>> steps = [0]
    >>> while steps[-1] < 30:
    ...     steps.append(next_check(steps[-1], 1.2))
    >>> steps
    [0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 18, 22, 27, 33]
    """
    return max(step + 1, math.ceil(step * grid - 1e-9))


@dataclass(frozen=True)
class Patience:
    """How long to continue after the best check.

    Stop at step t once t >= factor x (best step) + slack and at least `checks` checks have passed
    since the best one, which is not the last. The slack keeps a transient at the start from looking
    like the minimum.

    All checks have the same rows, so the difference of two of them has a small error, paired over
    rows. With `improvement`, patience counts from the first check that is as good as the best one
    but for so many standard errors: a curve that falls within its noise does not keep a run alive.
    With `errors`, the slack is not waited for where the rise is beyond doubt: the last two checks
    are each worse than the best one by more than so many standard errors (`worse_beyond_doubt`), at
    least 4 epochs have passed, and the best check came after the first epoch and after step 3 (or
    it may be a transient).

    >>> Patience(2.0, 200, 3).is_exhausted(step=440, best=120, since=5)
    True
    >>> Patience(2.0, 200, 3).is_exhausted(step=439, best=120, since=5)
    False
    >>> curves = torch.tensor([[1.0, 2.0, 2.1, 2.2], [1.5, 1.9, 2.4, 2.6]])
    >>> Patience(2.0, 200, 3, errors=2.0).beyond_doubt(300, 120, curves, epochs=9.0)
    True
    """

    factor: float
    slack: int
    checks: int
    errors: float | None = None
    improvement: float = 0.0

    @classmethod
    def of_epochs(cls, epochs: int, epoch_steps: float) -> Patience:
        """Return a patience of so many epochs after the best check."""
        slack = math.ceil(epochs * epoch_steps)
        return cls(1.0, slack, min(CHECKS, slack))

    def stops(self, steps: Sequence[int], best: int, curves: Tensor | None, epochs: float) -> bool:
        """Whether to stop at the last check.

        Args:
            steps: of all checks.
            best: number of the best check.
            curves: (rows, checks); None where a metric decides, which has no value for each row.
            epochs: that have passed.
        """
        last = len(steps) - 1
        if last == best:
            return False
        first = self.reference(best, curves)
        if self.is_exhausted(steps[last], steps[first], last - first):
            return True
        late = None if curves is None else curves[:, best:]
        return late is not None and self.beyond_doubt(steps[last], steps[best], late, epochs)

    def reference(self, best: int, curves: Tensor | None) -> int:
        """Return the check that patience counts from: the first that is as good as the best."""
        if curves is None or not self.improvement or len(curves) < 2:
            return best
        gains = curves[:, : best + 1].double() - curves[:, best : best + 1].double()
        error = gains.std(0) / math.sqrt(len(gains))
        as_good = gains.mean(0) <= self.improvement * error
        as_good[best] = True
        return int(as_good.int().argmax())

    def is_exhausted(self, step: int, best: int, since: int) -> bool:
        """Whether to stop at `step`, `since` checks after the one at step `best`."""
        return self.step_limit(best) <= step and since >= self.checks

    def step_limit(self, best: int) -> int:
        """Return the step from which training may stop if `best` remains the best step."""
        return math.ceil(self.factor * best + self.slack)

    def beyond_doubt(self, step: int, best: int, curves: Tensor, epochs: float) -> bool:
        """Whether to stop at `step` because the last checks are worse beyond doubt.

        Args:
            step: of the last check.
            best: step of the best check.
            curves: (rows, checks) from the best check on.
            epochs: that have passed.
        """
        if self.errors is None or curves.shape[1] - 1 < self.checks:
            return False
        first = best > 3 and epochs * best / step >= 1
        return (
            first
            and epochs >= FEWEST_EPOCHS
            and step >= self.factor * best
            and worse_beyond_doubt(curves, self.errors)
        )


# The default, chosen on 385 development runs (docs/results/patience.md).
PATIENCE = Patience(factor=1.5, slack=150, checks=3, errors=3.0, improvement=1.0)


def worse_beyond_doubt(curves: Tensor, errors: float, checks: int = 2) -> bool:
    """Return whether the last checks are each worse than the first, beyond doubt.

    All checks have the same rows, so the error of a difference of two means is that of the rows'
    differences, which is much smaller than the error of either mean.

    Args:
        curves: (rows, checks).
        errors: number of standard errors by which a check must be worse.
        checks: how many of the last checks must be.
    """
    if len(curves) < 2:
        return False
    differences = curves[:, -checks:].double() - curves[:, :1].double()
    error = differences.std(0) / math.sqrt(len(differences))
    return bool((differences.mean(0) > errors * error).all())


def mean_and_error(
    losses: Tensor,
    held_per_trained: float = 0.0,
    missing: float = 0.0,
    training_loss: float = math.nan,
) -> tuple[float, float]:
    """Mean of held-out rows' losses and its standard error (nan for a single row).

    The plain standard error of a mean is too small here, for four reasons:

    - On other training rows, all losses would differ in common. Nadeau and Bengio (2003) add
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
    """Return the number of the first check with the lowest finite mean."""
    return int(torch.where(means.isfinite(), means, torch.inf).argmin())


def matched_checks(
    steps: Sequence[int], levels: Sequence[tuple[float, float]], kept: Sequence[int]
) -> list[int]:
    """Return the check of the model that belongs to each check of light shadows.

    A light shadow is slower than the model: at the same step it has memorised less, at the same
    training loss more of its steps were noise. The model's check is the mean of the two in log
    steps: of the shadows' step, and of the step at which the model first had their training loss.

    Args:
        steps: of all checks.
        levels: training loss of the shadows and of the model on the same rows, of all checks.
        kept: numbers of the checks whose weights are there; one of them is returned.

    >>> steps = [0, 10, 20, 40, 80]
    >>> shadows, model = [4.0, 3.0, 2.5, 2.0, 1.5], [4.0, 2.6, 1.9, 1.0, 0.5]
    >>> matched_checks(steps, list(zip(shadows, model)), range(5))
    [0, 1, 1, 2, 3]
    """
    logs = [math.log1p(step) for step in steps]
    lowest, least = [], math.inf  # of the model up to each check
    for _, model in levels:
        least = min(least, model) if math.isfinite(model) else least
        lowest.append(least)
    checks = []
    for log, (level, _) in zip(logs, levels, strict=True):
        reached = [number for number, loss in enumerate(lowest) if loss <= level]
        number = reached[0] if reached else len(steps) - 1
        if reached and number and lowest[number] > 0 and lowest[number - 1] < math.inf:
            before, after = (math.log(lowest[i] / level) for i in (number - 1, number))
            number -= int(before < -after)  # the nearer of the two
        middle = (log + logs[number]) / 2
        checks.append(min(kept, key=lambda i: round(abs(logs[i] - middle), 9)))
    return checks


def lag(steps: Sequence[int], levels: Sequence[tuple[float, float]]) -> float:
    """Return by what factor light shadows are later than the model, at the last check.

    The step of the check over the one at which the model first had the training loss that the
    shadows have now; inf if that is no number.
    """
    level = levels[-1][0]
    if not math.isfinite(level):
        return math.inf
    reached = (step for step, (_, model) in zip(steps, levels, strict=True) if model <= level)
    return (steps[-1] + 1) / (next(reached, steps[-1]) + 1)


def densest_check(steps: Mapping[int, int], best: int) -> int:
    """Return the check, other than the best, whose neighbours are nearest in log steps.

    Args:
        steps: of checks by their numbers, in order.
        best: number of the check that is not to be given up.
    """
    numbers, logs = list(steps), [math.log1p(step) for step in steps.values()]
    gaps = {
        number: logs[min(i + 1, len(logs) - 1)] - logs[max(i - 1, 0)]
        for i, number in enumerate(numbers)
        if number != best
    }
    return min(gaps, key=lambda number: gaps[number])


def bootstrap_shares(
    curves: Tensor, resamples: int = 100, seed: int = 0, held_per_trained: float = 0.0
) -> Tensor:
    """How often each check is the best one when the rows are drawn again with replacement.

    m rows drawn m times would make the minimum look more certain than it is: on other training rows
    all curves would differ in common. A mean of m / (1 + m / t) rows is as uncertain as Nadeau
    and Bengio (2003) say (see `mean_and_error`), so that many are drawn.

    Args:
        curves: (rows, checks).
        resamples: number of draws.
        seed: of the draws.
        held_per_trained: m / t, see `mean_and_error`; 0 draws all m.

    Returns:
        (checks,) shares that sum to 1.
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
