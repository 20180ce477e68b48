"""Sums and sums of squares of per-sample contributions, and the signal-to-noise ratio they give."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

__all__ = ["Moments", "Sums", "piece_sums", "ratio_sums", "snr"]

CACHE = 1 << 17  # coordinates worked on at a time


def snr(total: Tensor, squares: Tensor, count: int) -> Tensor:
    r"""The paper's \(f_k = m\,g_k^2 / \hat\Sigma_k\), from sums over m samples.

    With g = total / m and the unbiased variance, f = (m-1) total^2 / (m squares - total^2). It is
    computed through q = total^2 / squares, as f = q (m-1) / (m-q): no sum of squares is subtracted,
    and where rounding hides the variance (q >= m) f is large, not negative. Coordinates to which no
    sample contributed, and all of them if m < 2, are nan.

    >>> snr(torch.tensor([2.0, 0.0]), torch.tensor([4.0, 0.0]), 2)      # contributions 0 and 2
    tensor([1., nan])
    """
    if count < 2:
        return torch.full_like(total, torch.nan)
    q = total.square().div_(squares)
    room = (count - q).clamp_(min=4 * torch.finfo(q.dtype).eps * count)
    return q.mul_(count - 1).div_(room)


Sums = tuple[float, float, bool]  # of the ratios of live coordinates, their number, all finite


def ratio_sums(
    pairs: Sequence[tuple[Tensor, Tensor]], count: int, symmetric: bool = False
) -> list[Sums]:
    """For each pair of total and squares: sum of f (or q), number of live coordinates, finiteness.

    >>> ratio_sums([(torch.tensor([2.0, 0.0]), torch.tensor([4.0, 0.0]))], 2)
    [(1.0, 1.0, True)]
    """
    groups: dict[Any, list[int]] = {}  # small tensors are worked on together
    found: list[Sums] = [(0.0, 0.0, True)] * len(pairs)
    for i, (total, squares) in enumerate(pairs):
        if total.numel() <= CACHE or total.device.type != "cpu":
            groups.setdefault((total.device, total.dtype), []).append(i)
        else:
            found[i] = _in_pieces(total, squares, count, symmetric)
    for members in groups.values():
        together = _together([pairs[i] for i in members], count, symmetric)
        for i, sums in zip(members, together, strict=True):
            found[i] = sums
    return found


def _together(pairs: Sequence[tuple[Tensor, Tensor]], count: int, symmetric: bool) -> list[Sums]:
    if len(pairs) <= 4 and pairs[0][0].device.type == "cpu":
        return [piece_sums(total, squares, count, symmetric) for total, squares in pairs]
    return _sums_of(pairs, count, symmetric)


def _sums_of(pairs: Sequence[tuple[Tensor, Tensor]], count: int, symmetric: bool) -> list[Sums]:
    sizes = [total.numel() for total, _ in pairs]
    total = torch.cat([t.reshape(-1) for t, _ in pairs])
    squares = torch.cat([s.reshape(-1) for _, s in pairs])
    rows = [_ratios(total, squares, count, symmetric), (squares != 0).to(total.dtype), squares]
    running = torch.stack(rows).cumsum(1, dtype=torch.float64)
    ends = torch.tensor(sizes).cumsum(0) - 1
    upto = running[:, ends.to(running.device)].T.tolist()  # the only wait for a device
    summed, number, size = upto[-1]
    extreme = not (math.isfinite(size) and summed <= 1e4 * max(1.0, number))
    if extreme and len(pairs) > 1:  # one would spoil those behind it
        return [_sums_of([pair], count, symmetric)[0] for pair in pairs]
    before = [[0.0, 0.0, 0.0], *upto]
    return [
        (a - x, b - y, math.isfinite(c)) for (a, b, c), (x, y, _) in zip(upto, before, strict=False)
    ]


def _ratios(total: Tensor, squares: Tensor, count: int, symmetric: bool) -> Tensor:
    """f, or q, with 0 for dead coordinates."""
    ratio = total.square().div_(squares) if symmetric else snr(total, squares, count)
    return ratio.nan_to_num_(0.0, torch.inf)


def _in_pieces(total: Tensor, squares: Tensor, count: int, symmetric: bool) -> Sums:
    """In pieces that stay in the cache."""
    flat, across = total.reshape(-1).split(CACHE), squares.reshape(-1).split(CACHE)
    each = [piece_sums(a, b, count, symmetric) for a, b in zip(flat, across, strict=True)]
    return sum(e[0] for e in each), sum(e[1] for e in each), all(e[2] for e in each)


def piece_sums(total: Tensor, squares: Tensor, count: int, symmetric: bool) -> Sums:
    """`ratio_sums` of one piece. Where nothing is dead or extreme, it takes fewer passes."""
    below = squares
    if not symmetric:  # the variance, but for a factor: f = (1 - 1/m) total^2 / (squares - ...)
        below = torch.addcmul(squares, total, total, value=-1 / count)
    if below.numel() and below.amin().item() > 0:  # false for nan
        ratio = torch.div(total, below, out=None if symmetric else below)
        summed = torch.dot(ratio.reshape(-1), total.reshape(-1)).item()
        if summed < 1e5 * count:  # so none is extreme; false for nan
            factor = 1.0 if symmetric else 1 - 1 / count
            return summed * factor, float(total.numel()), True
    return _sums_of([(total, squares)], count, symmetric)[0]


@dataclass(frozen=True, eq=False)
class Moments:
    """What is known about the contributions of `count` samples to one parameter's gradient.

    Attributes:
        total: sum of the contributions, on the loss's own scale; the parameter's shape.
        squares: sum of their squares.
        count: number of samples.
        weight: how many coordinates of the parameter each one here stands for (1: all are here).

    >>> m = Moments(torch.tensor([2.0]), torch.tensor([4.0]), 2)     # contributions 0 and 2
    >>> m.snr
    tensor([1.])
    """

    total: Tensor
    squares: Tensor
    count: int
    weight: float = 1.0

    @cached_property
    def snr(self) -> Tensor:
        """f_k, elementwise; nan where no sample contributed."""
        return snr(self.total, self.squares, self.count)

    @cached_property
    def q(self) -> Tensor:
        r"""\(q_k = (\sum c)^2 / \sum c^2\), elementwise; nan where no sample contributed.

        q = f m / (m - 1 + f): equal to f where that is 1, never above m, and of mean exactly 1 for
        contributions that are symmetric about zero, however few they are.

        >>> Moments(torch.tensor([3.0]), torch.tensor([5.0]), 2).q
        tensor([1.8000])
        """
        if self.count < 2:
            return torch.full_like(self.total, torch.nan)
        return self.total.square().div_(self.squares)

    @cached_property
    def finite(self) -> bool:
        """Whether no contribution was inf or nan."""
        return bool(torch.isfinite(self.squares.sum()) & torch.isfinite(self.total.sum()))
