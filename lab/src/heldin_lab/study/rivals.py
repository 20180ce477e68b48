"""Other rules that decide when to stop, from their definitions, as functions of logged values.

Each returns the number of the check (or epoch, or step) that it would keep, and the one at which it
would have ended training; None where it never fires.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "Stop",
    "alignment",
    "best_alignment",
    "credibility",
    "disparity",
    "disparity_consecutive",
    "disparity_total",
    "generalisation_loss",
    "label_wave",
    "patience",
    "pooled_evidence",
    "progress_quotient",
    "successive_rises",
    "task_vector_growth",
]


class Stop(NamedTuple):
    """What a rule keeps and when it ends training, as positions in the logged values."""

    keep: int
    end: int


def patience(losses: Sequence[float], checks: int) -> Stop | None:
    """Stop after so many checks without a new minimum; keep the minimum.

    >>> patience([3.0, 2.0, 2.5, 2.2, 1.0], checks=2)
    Stop(keep=1, end=3)
    """
    best = 0
    for i, loss in enumerate(losses):
        if loss < losses[best]:
            best = i
        elif i - best >= checks:
            return Stop(best, i)
    return None


def generalisation_loss(losses: Sequence[float], alpha: float) -> Stop | None:
    """Prechelt (1998), GL: stop when 100 (E_va / min E_va - 1) > alpha; keep the minimum.

    >>> generalisation_loss([1.0, 0.8, 0.82, 0.85], alpha=5)         # 0.85 / 0.8 = 1.0625
    Stop(keep=1, end=3)
    """
    best = 0
    for i, loss in enumerate(losses):
        if loss < losses[best]:
            best = i
        if 100 * (loss / losses[best] - 1) > alpha:
            return Stop(best, i)
    return None


def progress_quotient(
    losses: Sequence[float], training: Sequence[float], alpha: float, strip: int = 5
) -> Stop | None:
    """Prechelt (1998), PQ: GL divided by the training progress P_k over the last strip.

    P_k = 1000 (sum of E_tr over the strip / (k min E_tr over the strip) - 1), looked at after
    every k epochs; stop when GL / P_k > alpha.

    >>> progress_quotient([1.0, 0.5, 0.6, 0.7], [1.0, 0.5, 0.5, 0.4], alpha=0.1, strip=2)
    Stop(keep=1, end=3)
    """
    best = 0
    for i, loss in enumerate(losses):
        if loss < losses[best]:
            best = i
        if (i + 1) % strip == 0:
            part = training[i + 1 - strip : i + 1]
            progress = 1000 * (sum(part) / (strip * max(min(part), 1e-300)) - 1)
            rise = 100 * (loss / losses[best] - 1)
            if rise > alpha * progress and rise > 0:
                return Stop(best, i)
    return None


def successive_rises(losses: Sequence[float], strips: int, length: int = 5) -> Stop | None:
    """Prechelt (1998), UP: stop when the error has risen over so many strips in a row.

    Looked at after every strip of `length` epochs; keep the minimum.

    >>> successive_rises([1.0, 0.5, 0.6, 0.7, 0.8], strips=2, length=1)
    Stop(keep=1, end=3)
    """
    rises = 0
    for i in range(length, len(losses), length):
        rises = rises + 1 if losses[i] > losses[i - length] else 0
        if rises >= strips:
            return Stop(int(np.argmin(losses[: i + 1])), i)
    return None


def disparity(gradients: Tensor) -> float:
    """Gradient Disparity (Forouzesh and Thiran, 2021): mean distance of pairs of batch gradients.

    Args:
        gradients: (batches, parameters), of losses that were divided by their standard deviation
            over the batch.

    >>> disparity(torch.tensor([[0.0, 0.0], [3.0, 4.0], [0.0, 0.0]]))      # 5, 0 and 5
    3.333...
    """
    return float(torch.pdist(gradients).mean())


def disparity_total(values: Sequence[float], rises: int = 5) -> Stop | None:
    """t1: stop when the disparity has risen from one epoch to the next so many times in all.

    >>> disparity_total([1.0, 2.0, 1.5, 1.6], rises=2)
    Stop(keep=3, end=3)
    """
    seen = 0
    for i in range(1, len(values)):
        seen += values[i] > values[i - 1]
        if seen >= rises:
            return Stop(i, i)
    return None


def disparity_consecutive(values: Sequence[float], rises: int = 5) -> Stop | None:
    """t2: the same, in a row.

    >>> disparity_consecutive([1.0, 2.0, 1.5, 1.6, 1.7], rises=2)
    Stop(keep=4, end=4)
    """
    seen = 0
    for i in range(1, len(values)):
        seen = seen + 1 if values[i] > values[i - 1] else 0
        if seen >= rises:
            return Stop(i, i)
    return None


def pooled_evidence(total: Tensor, squares: Tensor, count: int) -> float:
    """m |g|^2 / tr S over all parameters at once; stop below 1.

    The one-step generalisation ratio of Liu et al. (2020); below 1 the gradient noise scale of
    McCandlish et al. (2018) exceeds the batch.

    Args:
        total: sum over the m samples of their gradients.
        squares: sum of the squares.
        count: m.

    >>> pooled_evidence(torch.tensor([3.0]), torch.tensor([5.0]), 2)       # 2 * 1.5^2 / 0.5
    9.0
    """
    mean = total / count
    spread = (squares - count * mean.square()).sum() / (count - 1)
    return float(count * mean.square().sum() / spread) if float(spread) > 0 else float("inf")


def label_wave(changes: Sequence[float], window: int = 3, epochs: int = 10) -> Stop | None:
    """Label Wave (Yuan, Feng and Liu, 2024): the first local minimum of the prediction changes.

    The number of training predictions that changed since the last epoch, as a moving average; its
    minimum counts as found when so many epochs have not gone below it.

    >>> label_wave([9.0, 6.0, 3.0, 3.0, 6.0, 9.0], window=1, epochs=3)
    Stop(keep=2, end=5)
    """
    smooth = [float(np.mean(changes[max(0, i + 1 - window) : i + 1])) for i in range(len(changes))]
    return patience(smooth, epochs)


def alignment(slopes: Tensor, features: Tensor, weight: Tensor) -> float:
    """Gradient-weight alignment (Hoelzl, Rueckert and Kaissis, 2025) of the last layer.

    a_i = cos(-gradient of loss i by W, W); mean(a) / (excess kurtosis of a + 1.2). Not defined, and
    nan, where the kurtosis makes the denominator 0 or negative.

    Args:
        slopes: (n, outputs), of each loss by its outputs.
        features: (n, width), inputs of the last layer.
        weight: (outputs, width).

    >>> one = torch.ones(4, 1)
    >>> flat = torch.tensor([[1.0], [1.0], [1.0], [-1.0]])       # a = -1, -1, -1, 1: kurtosis -2/3
    >>> round(alignment(flat, one, torch.ones(1, 1)), 4)
    -0.9375
    """
    # the gradient is slopes_i features_i^T, so <gradient, W> = slopes_i^T W features_i
    inner = (slopes * (features @ weight.T)).sum(1)
    sizes = slopes.norm(dim=1) * features.norm(dim=1) * weight.norm()
    a = -(inner / sizes.clamp(min=1e-30)).double()
    centred = a - a.mean()
    variance = float(centred.square().mean())
    if variance <= 1e-20:
        return float("nan")
    excess = float(centred.pow(4).mean()) / variance**2 - 3
    return float(a.mean()) / (excess + 1.2) if excess + 1.2 > 0 else float("nan")


def best_alignment(values: Sequence[float]) -> Stop:
    """Keep the epoch with the largest alignment.

    >>> best_alignment([0.1, float("nan"), 0.3, 0.2])
    Stop(keep=2, end=3)
    """
    known = np.where(np.isfinite(values), values, -np.inf)
    return Stop(int(np.argmax(known)), len(values) - 1)


def task_vector_growth(
    distances: Sequence[float], threshold: float = 0.005, epochs: int = 10
) -> Stop | None:
    """Task-vector growth (Lee and others, 2026): stop when the way from the start hardly grows.

    The distance d of the weights from the first ones grows by (d_t - d_(t-1)) / d_(t-1) from one
    epoch to the next; stop when that was below the threshold for so many epochs in a row. The
    threshold and the number are those of the authors' program, whose rounds are epochs here.

    >>> task_vector_growth([0.0, 1.0, 2.0, 2.01, 2.02], threshold=0.1, epochs=2)
    Stop(keep=4, end=4)
    """
    seen = 0
    for i in range(2, len(distances)):
        before = max(distances[i - 1], 1e-300)
        seen = seen + 1 if (distances[i] - before) / before < threshold else 0
        if seen >= epochs:
            return Stop(i, i)
    return None


def credibility(total: Tensor, squares: Tensor, count: int) -> float:
    """GradStop (Jamshidi and others, 2025): posterior mass that is less likely than the weights.

    The posterior is normal around the minimum of the summed losses, its precision the covariance of
    the rows' gradients times their number, here its diagonal: 1 - F(sum of G^2 / (m var)), G the
    summed gradient and F the chi-squared distribution with as many degrees of freedom as there are
    coordinates with a variance. GradStop ends training when it exceeds a number that was drawn
    uniformly from [0, 1] before. How the authors estimate the covariance could not be had.

    Args:
        total: sum over the m rows of their gradients.
        squares: sum of the squares.
        count: m.

    >>> credibility(torch.tensor([2.0]), torch.tensor([2.0]), 2)               # no variance
    0.0
    >>> round(credibility(torch.tensor([1.0]), torch.tensor([5.0]), 2), 3)     # 1 / (2 x 4.5)
    0.739
    """
    from scipy.stats import chi2

    mean = total.double() / count
    variance = (squares.double() - count * mean.square()) / (count - 1)
    known = variance > 1e-12 * squares.double() / count
    if not bool(known.any()):
        return float(not bool(mean.any()))
    statistic = count * (mean.square()[known] / variance[known]).sum()
    return float(chi2.sf(float(statistic), int(known.sum())))
