"""A temperature for logits: fitted, and cross-fitted.

"Refine, then calibrate" (Berta, Holzmueller, Jordan, Bach 2025): a network is best at a step where
it is over-confident already, if its logits are divided by one temperature afterwards.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from heldin.errors import HeldinError
from heldin.state.schema import shown

__all__ = [
    "Calibrated",
    "Calibrator",
    "checked_temperature",
    "fit_temperature",
    "numbered",
    "temperature_losses",
]

HOTTEST = 100.0  # largest temperature that is fitted
IGNORED = -100  # target of positions that do not count, as in torch.nn.CrossEntropyLoss
STEPS = 60  # most steps of Newton's method
LAST_STEP = 1e-5  # relative size of the last step; the error after it is about its square
EXACT = LAST_STEP, 0.0  # of all rows, and at most without a fold, which losses depend on little
COARSE = 1e-3, 0.1  # the same at the checks of a run
MOST_LINES = 20_000  # lines that a temperature is fitted on


def fit_temperature(
    logits: Tensor, targets: Tensor, weights: Tensor | None = None, *, binary: bool | None = None
) -> float:
    """Return the temperature T >= 1 with the lowest mean log loss of `logits / T`.

    The log loss is convex in 1 / T. A network that is not confident enough keeps T = 1, because
    smaller temperatures hurt on fresh rows. T is at most 100.

    Args:
        logits: (n, classes) or (n, classes, ...); (n,) or (n, 1) for two classes; (n, labels) with
            targets of the same shape for labels that do not exclude each other. Rows whose loss is
            not finite do not count.
        targets: (n,) or (n, ...) numbers of classes (-100: does not count), probabilities (n,
            classes), or 0 and 1.
        weights: (n,) weights of the rows, not negative.
        binary: whether every logit stands for a class of its own (a sigmoid, not a softmax). None:
            so if targets are as many as logits and their rows do not all sum to 1.
    """
    lines = Calibrator(logits, targets, binary, weights)
    return 1 / _Scores(lines, logits).best(0.5)


def temperature_losses(
    logits: Tensor, targets: Tensor, temperature: float, *, binary: bool | None = None
) -> Tensor:
    """Return the (n,) log losses of the rows at `logits / temperature`.

    The loss of a row with several positions or labels is their mean. See `fit_temperature` for the
    arguments.
    """
    sharpness = 1 / checked_temperature(temperature)
    return _Scores(Calibrator(logits, targets, binary), logits).losses(sharpness)


class Calibrated(NamedTuple):
    """Logits with a temperature."""

    temperature: float  # fitted on all rows
    curve: Tensor  # (n,) losses of the rows at it
    row_temperatures: Tensor  # (n,) fitted on the other folds
    losses: Tensor  # (n,) losses of the rows at these


def numbered(folds: Tensor) -> Tensor:
    """Return numbers of folds from 0; a single fold is cut into two halves."""
    numbers = torch.unique(folds.detach().cpu(), return_inverse=True)[1]
    return numbers if bool(numbers.any()) else torch.arange(len(folds)) % 2


class Calibrator:
    """Rows whose logits get a temperature, at one check of a run after the other.

    Targets and weights are kept by lines: one for each softmax or sigmoid, as many for each row.
    Tensors are (classes, lines), because sums over the first dimension are fast.

    Args:
        logits: the first ones, whose shape all others have.
        targets, binary, weights: see `fit_temperature`.
        folds: (n,) numbers of the rows' folds, from 0; see `numbered`.
    """

    def __init__(
        self,
        logits: Tensor,
        targets: Tensor,
        binary: bool | None,
        weights: Tensor | None = None,
        folds: Tensor | None = None,
    ) -> None:
        for name, value in (("logits", logits), ("targets", targets)):
            if not isinstance(value, Tensor) or value.dim() == 0 or len(value) == 0:
                raise HeldinError(f"{name} must be a tensor with one entry for each row")
        self.rows = len(logits)
        z, t = logits if logits.dim() > 1 else logits[:, None], targets.detach().cpu()
        if t.dim() == z.dim() - 1 and z.shape[1] == 1:
            t = t.unsqueeze(1)
        counts: Tensor | None = None  # (lines,) whether they do; None: all
        if binary is None:
            binary = _is_binary(z, t)
        self.is_binary = binary and t.shape == z.shape  # a softmax of two classes
        if self.is_binary:
            t = t.double().reshape(-1)
            counts = t != IGNORED
            if not bool(((t >= 0) & (t <= 1) | ~counts).all()):
                raise HeldinError("targets of sigmoid logits must lie between 0 and 1")
            t = torch.stack([1 - t, t])
        elif not binary and t.shape == z.shape:
            t = _class_lines(t.double())
        elif not binary and not t.is_floating_point() and t.shape == z[:, 0].shape:
            t = t.reshape(-1).long()
            counts = t != IGNORED
            used, classes = t[counts], z.shape[1]
            if len(used) and not 0 <= int(used.min()) <= int(used.max()) < classes:
                raise HeldinError(
                    f"targets must be numbers from 0 to {classes - 1}, the classes of the logits; "
                    f"they lie between {int(used.min())} and {int(used.max())}"
                )
            t = t.clamp_min(0)
        else:
            raise HeldinError(
                f"logits of shape {tuple(logits.shape)} do not match targets of shape "
                f"{tuple(targets.shape)} and type {targets.dtype}; give logits (n, classes) with "
                "whole numbers (n,), or logits (n,) with targets 0 and 1"
            )
        lines = t.shape[-1]
        self.targets = t
        self.target_sums: Tensor | float = t.sum(0) if t.dim() == 2 else 1.0
        self._per_row = lines // self.rows
        shares = torch.ones(lines, dtype=torch.float64) if counts is None else counts.double()
        shares = shares.reshape(self.rows, -1)
        number = shares.sum(1, keepdim=True)
        self.shares = (shares / number.clamp_min(1)).reshape(-1)  # of the row's mean
        self.counted = number[:, 0] > 0
        self._single = self._per_row == 1 and bool(self.counted.all())
        sample = torch.arange(lines)  # evenly spaced lines that a temperature is fitted on
        if lines > MOST_LINES:
            sample = torch.linspace(0, lines - 1, MOST_LINES).round().long()
        self.sample: Any = sample if lines > MOST_LINES else slice(None)
        self._sampled_rows = sample // self._per_row
        row_weights = _checked_weights(weights, self.rows).unsqueeze(1)
        if folds is not None:
            row_weights = row_weights * (folds.unsqueeze(1) == torch.arange(int(folds.max()) + 1))
        self._row_weights = row_weights  # (n, folds): of the rows of each fold
        self.weights = self.weights_of(self.counted)
        self._folds = folds

    def __call__(self, logits: Tensor, start: float = 2.0, exact: bool = False) -> Calibrated:
        """Return temperatures of all rows and without each fold, with the losses of rows at them.

        Args:
            logits: see `fit_temperature`.
            start: a temperature to start from.
            exact: whether temperatures without a fold must not be wrong by some per cent, and that
                of all rows not by 1e-6.
        """
        assert self._folds is not None
        scores, (last, enough) = _Scores(self, logits), EXACT if exact else COARSE
        sharpness = scores.best(1 / start, last)
        without = scores.without_folds(sharpness, enough)
        temperatures = torch.tensor([1 / each for each in without], dtype=torch.float64)
        temperatures = temperatures[self._folds]
        curve = losses = scores.losses(sharpness)
        if any(each != sharpness for each in without):
            losses = scores.losses(1 / temperatures)
        return Calibrated(1 / sharpness, curve, temperatures, losses)

    def of_lines(self, values: Tensor) -> Tensor:
        """Repeat values of rows for their lines."""
        return values if self._per_row == 1 else values.repeat_interleave(self._per_row)

    def of_rows(self, values: Tensor) -> Tensor:
        """Return the sums over the lines of each row."""
        if self._single:
            return values
        return torch.where(self.shares > 0, values, 0.0).reshape(self.rows, -1).sum(1)

    def weights_of(self, usable: Tensor) -> Tensor:
        """Return (lines, folds) weights of the sampled lines; 0 for rows that are not usable."""
        weights = (self._row_weights * usable.unsqueeze(1))[self._sampled_rows]
        return weights * self.shares[self.sample].unsqueeze(1)


class _Scores:
    """Logits of lines, less the largest of each line."""

    def __init__(self, lines: Calibrator, logits: Tensor) -> None:
        z = logits.detach().to("cpu", torch.float64)
        if lines.is_binary:
            z = z.reshape(-1)
            z = torch.stack([torch.zeros_like(z), z])
        else:
            z = _class_lines(z if z.dim() > 1 else z[:, None])
        z = z - z.amax(0)
        t = lines.targets
        if t.dim() == 2:
            target_scores = torch.where(t > 0, t * z, 0.0).sum(0)
        else:
            target_scores = z.gather(0, t[None])[0]
        scores = z.clamp_min(-1e100)  # a masked class (-inf) has no part in the derivatives
        self._lines, self._all = lines, (scores, target_scores)
        self._weights, finite = lines.weights, target_scores.isfinite()
        if not bool(finite.all()):
            finite |= lines.shares == 0
            usable = finite.reshape(lines.rows, -1).all(1) & lines.counted
            self._weights, used = lines.weights_of(usable), lines.of_lines(usable)
            scores = torch.where(used, scores, 0.0)
            target_scores = torch.where(used, target_scores, 0.0)
        sums = lines.target_sums
        if isinstance(lines.sample, Tensor):
            scores, target_scores = scores[:, lines.sample], target_scores[lines.sample]
            sums = sums[lines.sample] if isinstance(sums, Tensor) else sums
        self._sampled = scores, target_scores, sums
        self._latest = 0.0, z  # sharpness and slopes at the latest step of `best`

    def losses(self, sharpness: float | Tensor) -> Tensor:
        """Return the rows' losses at logits x sharpness: one for all, or one for each row."""
        scores, target_scores = self._all
        if isinstance(sharpness, Tensor):
            sharpness = self._lines.of_lines(sharpness)
        total = (scores * sharpness).exp_().sum(0).log_()
        losses = total * self._lines.target_sums - target_scores * sharpness
        return self._lines.of_rows(losses * self._lines.shares)

    def slopes(self, sharpness: float) -> Tensor:
        """Return (2, lines): two derivatives of every sampled line's loss by the sharpness."""
        scores, target_scores, sums = self._sampled
        p = (scores * sharpness).exp_()
        total = p.sum(0)
        mean = p.mul_(scores).sum(0).div_(total)
        square = p.mul_(scores).sum(0).div_(total)
        return torch.stack([sums * mean - target_scores, sums * (square - mean * mean)])

    def best(self, start: float, last_step: float = LAST_STEP, without: int | None = None) -> float:
        """Return the best 1 / temperature, by Newton's method with bisection.

        Args:
            start: a sharpness.
            last_step: relative size of the last step.
            without: number of a fold that does not count.
        """
        weights = self._weights.sum(1)
        if without is not None:
            weights = weights - self._weights[:, without]
        low, high, at = 0.99 / HOTTEST, 1.01, start  # around the ends, which may be the best
        for _ in range(STEPS):
            self._latest = at, self.slopes(at)
            first, second = (self._latest[1] @ weights).tolist()
            if first == second == 0:  # nothing counts, or all logits of a row are equal
                return 1.0
            if (at == 1 and first <= 0) or (at == 1 / HOTTEST and first >= 0):
                break
            low, high = (at, high) if first < 0 else (low, at)
            after = _after_step(at, first, second)
            if not low < after < high:
                after = (max(low, 1 / HOTTEST) + min(high, 1.0)) / 2
            is_last = abs(after - at) <= last_step * at and 1 / HOTTEST < after < 1
            at = after
            if is_last:
                break
        return at

    def without_folds(self, sharpness: float, enough: float) -> list[float]:
        """Return the best 1 / temperature without each fold, after `best` has found that of all.

        The last step of `best` is taken without each fold, too. It is kept where it ends within a
        share of the best for all rows.

        Args:
            sharpness: the best for all rows.
            enough: the share.
        """
        at, slopes = self._latest
        by_fold = (slopes @ self._weights).T
        without = []
        for fold, (first, second) in enumerate((by_fold.sum(0) - by_fold).tolist()):
            each = _after_step(at, first, second)
            if abs(each - sharpness) > enough * sharpness:
                each = self.best(each, max(enough, LAST_STEP), fold)
            without.append(each)
        return without


def _after_step(at: float, first: float, second: float) -> float:
    """Return the sharpness after a step of Newton's method, an end where there is no curvature."""
    step = first / second if second > 0 else math.copysign(math.inf, first)
    return min(max(at - step, 1 / HOTTEST), 1.0)


def _class_lines(values: Tensor) -> Tensor:
    """Reshape (n, classes, ...) to (classes, lines), one line for each position of each row."""
    return values.movedim(1, 0).reshape(values.shape[1], -1).contiguous()


def _is_binary(logits: Tensor, targets: Tensor) -> bool:
    if logits.shape != targets.shape:
        return False
    if logits.shape[1] == 1 or not targets.is_floating_point():
        return True
    return not bool(((targets.double().sum(1) - 1).abs() < 1e-4).all())


def _checked_weights(weights: Tensor | None, rows: int) -> Tensor:
    if weights is None:
        return torch.ones(rows, dtype=torch.float64)
    row_weights = torch.as_tensor(weights).detach().to("cpu", torch.float64)
    if row_weights.shape != (rows,) or not bool((row_weights >= 0).all()):
        raise HeldinError(f"weights must be {rows} numbers >= 0, one for each row")
    return row_weights


def checked_temperature(temperature: float) -> float:
    """Return a temperature; refuse what is no positive number."""
    if not isinstance(temperature, (int, float)) or not 0 < temperature < math.inf:
        raise HeldinError(f"temperature must be a positive number, got {shown(temperature)}")
    return float(temperature)
