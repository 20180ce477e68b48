"""What members say of rows that they have not seen: how much to believe, how good to expect.

Pure functions of the members' outputs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .mlp import predictions

__all__ = ["Assessment", "assess", "prediction_losses", "wider"]

SHARES = tuple(step / 20 for step in range(21))  # of the members, among which one is looked for
# Errors are wider than that of a mean of rows that know nothing of each other, and more so where
# there are few: rare large losses are not among them, and they chose the best step and share.
WIDER, FEW = 1.2, 20


@dataclass(frozen=True, eq=False)
class Assessment:
    """Of a committee, from its own training rows.

    Attributes:
        share: of the members' outputs; the rest is the constant. 0: the constant alone.
        predictions: (n, outputs) probabilities or numbers, each from the members that have not seen
            the row; nan where there is none.
        losses: (n,) what the committee is expected to lose there; nan where nobody was asked.
        estimate, standard_error: of the mean loss on new rows.
        constant: the same for the best constant.
    """

    share: float
    predictions: Tensor
    losses: Tensor
    estimate: float
    standard_error: float
    constant: float


def wider(rows: int) -> float:
    """By how much a plain standard error of so many rows is too small.

    >>> round(wider(50), 2), round(wider(500), 2)
    (1.42, 1.22)
    """
    return WIDER * math.sqrt(1 + FEW / max(rows, 1))


def prediction_losses(loss_fn: Any, predicted: Tensor, y: Tensor) -> Tensor:
    """(..., n) losses of predictions (..., n, outputs), with targets as the loss takes them.

    >>> prediction_losses(nn.CrossEntropyLoss(), torch.tensor([[0.5, 0.5]]), torch.tensor([1]))
    tensor([0.6931], dtype=torch.float64)
    """
    predicted = predicted.double()
    tiny = torch.finfo(torch.float64).tiny
    if isinstance(loss_fn, nn.CrossEntropyLoss):
        index = y.expand(predicted.shape[:-1]).unsqueeze(-1)
        return -predicted.gather(-1, index).squeeze(-1).clamp(min=tiny).log()
    y = y.double()
    if isinstance(loss_fn, nn.BCEWithLogitsLoss):
        right = torch.where(y > 0.5, predicted, 1 - predicted)
        return -right.clamp(min=tiny).log().mean(-1)
    return (predicted - y).square().mean(-1)


def assess(
    loss_fn: Any,
    outputs: Tensor,
    constants: Tensor,
    judges: Tensor,
    y: Tensor,
    weights: Tensor | None,
    together: bool,
) -> Assessment:
    """From the members' outputs on all training rows.

    Args:
        loss_fn: cross-entropy, its binary kind, or the squared error.
        outputs: (members, n, outputs).
        constants: (members, outputs), of the rows that each has seen.
        judges: (members, n), true where a member is asked about a row.
        y: (n,) class numbers or (n, outputs).
        weights: (n,) with mean 1, or None.
        together: whether all members predict, or the last one alone.
    """
    outputs, constants = outputs.double(), constants.double()
    member, row = judges.nonzero().unbind(1)  # who is asked about what
    asked = judges.sum(0)
    some = asked > 0
    counts = 1 / asked.clamp(min=1).double()  # a row counts once, however many judge it
    if weights is not None:
        counts = counts * weights.double()
    said, without, truth = outputs[member, row], constants[member], y[row]

    def mixed(share: float) -> Tensor:
        return predictions(loss_fn, share * said + (1 - share) * without)

    def of_rows(predicted: Tensor) -> Tensor:
        losses = prediction_losses(loss_fn, predicted, truth) * counts[row]
        return torch.zeros_like(counts).index_add_(0, row, losses)[some]

    means = torch.stack([of_rows(mixed(share)).mean() for share in SHARES])
    share = SHARES[int(torch.where(means.isfinite(), means, math.inf).argmin())]

    chosen = mixed(share)
    honest = torch.full(outputs.shape[1:], math.nan, dtype=torch.float64)
    honest[some] = torch.zeros_like(honest).index_add_(0, row, chosen)[some] / asked[
        some
    ].unsqueeze(-1)
    losses = of_rows(chosen)
    if together and share > 0:
        everything = share * outputs + (1 - share) * constants.unsqueeze(1)
        predicted = predictions(loss_fn, everything)
        losses = losses - _gain(loss_fn, predicted, ~judges, y, weights)[some]
    found = torch.full((outputs.shape[1],), math.nan, dtype=torch.float64)
    found[some] = losses
    count, constant = int(some.sum()), float(of_rows(mixed(0.0)).mean())
    error = float(losses.std()) / math.sqrt(count) * wider(count) if count > 1 else math.nan
    return Assessment(share, honest, found, float(losses.mean()), error, constant)


def _gain(
    loss_fn: Any, predicted: Tensor, seen: Tensor, y: Tensor, weights: Tensor | None
) -> Tensor:
    """(n,) by how much all members together lose less than one of them.

    From those that have seen a row. They agree on it more than on a new one, so that this is rather
    too little, and the estimate rather too high.
    """
    count = seen.sum(0)
    losses = prediction_losses(loss_fn, predicted, y)
    single = torch.where(seen, losses, 0.0).sum(0) / count
    mean = torch.where(seen.unsqueeze(-1), predicted, 0.0).sum(0) / count.unsqueeze(-1)
    gain = single - prediction_losses(loss_fn, mean, y)
    members = len(predicted)
    gain = gain * (1 - 1 / members) / (1 - 1 / count.clamp(min=2).double())
    return gain if weights is None else gain * weights.double()
