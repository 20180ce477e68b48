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
    "calibrate",
    "checked_temperature",
    "fit_temperature",
    "numbered",
    "temperature_losses",
]

HOTTEST = 100.0  # largest temperature that is fitted
IGNORED = -100  # target of positions that do not count, as in torch.nn.CrossEntropyLoss
STEPS = 60  # most steps of Newton's method
LAST_STEP = 1e-5  # relative size of the last step; the error after it is about its square
FOLD_STEP = 0.1  # the same without a fold, which the losses depend on little
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
    lines = _Lines(logits, targets, binary)
    return 1 / lines.sharpness(_checked_weights(weights, lines.rows), 0.5)


def temperature_losses(
    logits: Tensor, targets: Tensor, temperature: float, *, binary: bool | None = None
) -> Tensor:
    """Return the (n,) log losses of the rows at `logits / temperature`.

    The loss of a row with several positions or labels is their mean. See `fit_temperature` for the
    arguments.
    """
    return _Lines(logits, targets, binary).losses(1 / checked_temperature(temperature))


class Calibrated(NamedTuple):
    """Logits with a temperature."""

    temperature: float  # fitted on all rows
    curve: Tensor  # (n,) losses of the rows at it
    row_temperatures: Tensor  # (n,) fitted on the other folds
    losses: Tensor  # (n,) losses of the rows at these


def calibrate(
    logits: Tensor,
    targets: Tensor,
    folds: Tensor,
    weights: Tensor | None = None,
    *,
    binary: bool | None = None,
    start: float = 2.0,
    last_step: float = FOLD_STEP,
) -> Calibrated:
    """Fit a temperature, and one for the rows of each fold that does not profit from them.

    The rows of each fold are scored with the temperature of the other folds.

    Args:
        logits, targets, weights, binary: see `fit_temperature`.
        folds: (n,) numbers of the rows' folds, from 0; see `numbered`.
        start: a temperature to start from.
        last_step: relative size up to which one step of Newton's method is enough without a fold.
    """
    lines = _Lines(logits, targets, binary)
    row_weights = _checked_weights(weights, lines.rows)
    sharpness = lines.sharpness(row_weights, 1 / start)
    of_rows = lines.without_folds(row_weights, folds, sharpness, last_step)
    return Calibrated(1 / sharpness, lines.losses(sharpness), 1 / of_rows, lines.losses(of_rows))


def numbered(folds: Tensor) -> Tensor:
    """Return numbers of folds from 0; a single fold is cut into two halves."""
    numbers = torch.unique(folds.detach().cpu(), return_inverse=True)[1]
    return numbers if bool(numbers.any()) else torch.arange(len(folds)) % 2


class _Lines:
    """Logits and targets, one line for each softmax or sigmoid; each row has as many lines.

    Tensors are (classes, lines), because sums over the first dimension are fast.
    """

    def __init__(self, logits: Tensor, targets: Tensor, binary: bool | None) -> None:
        for name, value in (("logits", logits), ("targets", targets)):
            if not isinstance(value, Tensor) or value.dim() == 0 or len(value) == 0:
                raise HeldinError(f"{name} must be a tensor with one entry for each row")
        self.rows = len(logits)
        z, t = logits.detach().to("cpu", torch.float64), targets.detach().cpu()
        if z.dim() == 1:
            z = z[:, None]
        if t.dim() == z.dim() - 1 and z.shape[1] == 1:
            t = t.unsqueeze(1)
        counts: Tensor | None = None  # (lines,) whether they do; None: all
        if binary is None:
            binary = _is_binary(z, t)
        if binary and t.shape == z.shape:  # a softmax of two classes
            t, z = t.double().reshape(-1), z.reshape(-1)
            counts = t != IGNORED
            if not bool(((t >= 0) & (t <= 1) | ~counts).all()):
                raise HeldinError("targets of sigmoid logits must lie between 0 and 1")
            z, t = torch.stack([torch.zeros_like(z), z]), torch.stack([1 - t, t])
        elif not binary and t.shape == z.shape:
            z, t = _class_lines(z), _class_lines(t.double())
        elif not binary and not t.is_floating_point() and t.shape == z[:, 0].shape:
            z, t = _class_lines(z), t.reshape(-1).long()
        else:
            raise HeldinError(
                f"logits of shape {tuple(logits.shape)} do not match targets of shape "
                f"{tuple(targets.shape)} and type {targets.dtype}; give logits (n, classes) with "
                "whole numbers (n,), or logits (n,) with targets 0 and 1"
            )
        z = z - z.amax(0)
        self.target_sums: Tensor | float = 1.0
        if t.dim() == 2:
            self.target_sums = t.sum(0)
            self.target_scores = torch.where(t > 0, t * z, 0.0).sum(0)
        else:
            counts = t != IGNORED
            used, classes = t[counts], len(z)
            if len(used) and not 0 <= int(used.min()) <= int(used.max()) < classes:
                raise HeldinError(
                    f"targets must be numbers from 0 to {classes - 1}, the classes of the logits; "
                    f"they lie between {int(used.min())} and {int(used.max())}"
                )
            self.target_scores = z.gather(0, t.clamp_min(0)[None])[0]
        self.scores = z.clamp_min(-1e100)  # a masked class (-inf) has no part in the derivatives
        lines = z.shape[1]
        self._per_row = lines // self.rows
        shares = torch.ones(lines, dtype=torch.float64) if counts is None else counts.double()
        shares = shares.reshape(self.rows, -1)
        number = shares.sum(1, keepdim=True)
        self.shares = (shares / number.clamp_min(1)).reshape(-1)  # of the row's mean
        usable = self.target_scores.isfinite() | (self.shares == 0)
        self.usable = usable.reshape(self.rows, -1).all(1) & (number[:, 0] > 0)
        # what a temperature is fitted on: evenly spaced lines, 0 in place of what is not finite
        scores, target_scores, sums = self.scores, self.target_scores, self.target_sums
        if not bool(self.usable.all()):
            used = self._of_lines(self.usable)
            scores = torch.where(used, scores, 0.0)
            target_scores = torch.where(used, target_scores, 0.0)
        self._sample: Any = slice(None)
        if lines > MOST_LINES:
            self._sample = torch.linspace(0, lines - 1, MOST_LINES).round().long()
            scores, target_scores = scores[:, self._sample], target_scores[self._sample]
            sums = sums[self._sample] if isinstance(sums, Tensor) else sums
        self._sampled = scores, target_scores, sums
        self._latest: tuple[float, Tensor, Tensor] | None = None  # see `slopes`

    def _of_lines(self, values: Tensor) -> Tensor:
        """Repeat values of rows for their lines."""
        return values if self._per_row == 1 else values.repeat_interleave(self._per_row)

    def _line_weights(self, weights: Tensor) -> Tensor:
        return (self._of_lines(weights * self.usable) * self.shares)[self._sample]

    def losses(self, sharpness: float | Tensor) -> Tensor:
        """Return the rows' losses at logits x sharpness: one for all, or one for each row."""
        total: Tensor | None = None
        if isinstance(sharpness, Tensor):
            sharpness = self._of_lines(sharpness)
        elif self._latest is not None and self._latest[0] == sharpness:
            total = self._latest[2]
        if total is None or len(total) != len(self.shares):
            total = (self.scores * sharpness).exp_().sum(0)
        losses = (total.log() * self.target_sums - self.target_scores * sharpness) * self.shares
        return torch.where(self.shares > 0, losses, 0.0).reshape(self.rows, -1).sum(1)

    def slopes(self, sharpness: float) -> Tensor:
        """Return (2, lines): two derivatives of every sampled line's loss by the sharpness."""
        if self._latest is None or self._latest[0] != sharpness:
            scores, target_scores, sums = self._sampled
            p = (scores * sharpness).exp_()
            total = p.sum(0)
            mean = p.mul_(scores).sum(0).div_(total)
            square = p.mul_(scores).sum(0).div_(total)
            first, second = sums * mean - target_scores, sums * (square - mean * mean)
            self._latest = sharpness, torch.stack([first, second]), total
        return self._latest[1]

    def without_folds(
        self, weights: Tensor, folds: Tensor, sharpness: float, last_step: float
    ) -> Tensor:
        """Return the (n,) sharpness that fits the other folds of each row.

        sharpness: that fits all rows; last_step: relative size up to which one step is enough.
        """
        slopes = self.slopes(sharpness) * self._line_weights(weights)
        sums = torch.zeros(2, int(folds.max()) + 1, dtype=torch.float64)
        sums.index_add_(1, self._of_lines(folds)[self._sample], slopes)
        first, second = sums.sum(1, keepdim=True) - sums
        each: Tensor = (sharpness - first / second).clamp(1 / HOTTEST, 1.0)
        enough = ((each - sharpness).abs() <= last_step * sharpness) & (second > 0)
        for fold in (~enough).nonzero()[:, 0].tolist():
            start = float(each[fold].nan_to_num(sharpness))
            others = weights * (folds != fold)
            each[fold] = self.sharpness(others, start, max(last_step, LAST_STEP))
        return each[folds]

    def sharpness(self, weights: Tensor, start: float, last_step: float = LAST_STEP) -> float:
        """Return the best 1 / temperature for weighted rows, by Newton's method with bisection.

        start: a sharpness; last_step: relative size of the last step.
        """
        line_weights = self._line_weights(weights)
        if not bool(line_weights.any()):
            return 1.0
        low, high, at = 0.99 / HOTTEST, 1.01, start  # around the ends, which may be the best
        for _ in range(STEPS):
            first, second = (self.slopes(at) @ line_weights).tolist()
            if (at == 1 and first <= 0) or (at == 1 / HOTTEST and first >= 0):
                break
            low, high = (at, high) if first < 0 else (low, at)
            after = min(max(at - first / second, 1 / HOTTEST), 1.0) if second > 0 else math.nan
            if not low < after < high:
                after = (max(low, 1 / HOTTEST) + min(high, 1.0)) / 2
            is_last = abs(after - at) <= last_step * at and 1 / HOTTEST < after < 1
            at = after
            if is_last:
                break
        return at


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
