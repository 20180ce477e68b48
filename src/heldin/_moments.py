"""Sums and sums of squares of per-sample contributions, and the signal-to-noise ratio they give."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ._kernels import KERNELS, Kernels, readable

__all__ = ["Moments", "Sums", "piece_sums", "ratio_sums", "snr", "usual"]

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
    if all(total.device.type == "cpu" for total, _ in pairs):
        return [_in_pieces(total, squares, count, symmetric) for total, squares in pairs]
    found: list[Sums] = [(0.0, 0.0, True)] * len(pairs)
    groups: dict[Any, list[int]] = {}  # one wait for a device, not one for each tensor
    for i, (total, _) in enumerate(pairs):
        groups.setdefault((total.device, total.dtype), []).append(i)
    for members in groups.values():
        together = _sums_of([pairs[i] for i in members], count, symmetric)
        for i, sums in zip(members, together, strict=True):
            found[i] = sums
    return found


def _sums_of(pairs: Sequence[tuple[Tensor, Tensor]], count: int, symmetric: bool) -> list[Sums]:
    sizes = [total.numel() for total, _ in pairs]
    total = torch.cat([t.reshape(-1) for t, _ in pairs])
    squares = torch.cat([s.reshape(-1) for _, s in pairs])
    live = squares >= floor(squares)
    ratios = torch.where(live, _ratios(total, squares, count, symmetric), 0.0)
    rows = [ratios, live.to(total.dtype), squares]
    parts = torch.stack(rows).split(sizes, 1)
    sums = torch.stack([part.sum(1, dtype=torch.float64) for part in parts])
    return [(a, b, math.isfinite(c)) for a, b, c in sums.tolist()]  # the only wait for a device


def floor(squares: Tensor) -> float:
    """Below it a sum of squares has too few bits for a ratio: its coordinate counts as dead.

    Contributions of 1e-17 and less, in single precision.
    """
    return torch.finfo(squares.dtype).tiny * 2.0**17


def _ratios(total: Tensor, squares: Tensor, count: int, symmetric: bool) -> Tensor:
    """f, or q, with 0 for dead coordinates."""
    ratio = total.square().div_(squares) if symmetric else snr(total, squares, count)
    return ratio.nan_to_num_(0.0, torch.inf)


def _in_pieces(total: Tensor, squares: Tensor, count: int, symmetric: bool) -> Sums:
    """In pieces that stay in the cache."""
    if total.numel() <= CACHE:
        return piece_sums(total, squares, count, symmetric)
    flat, across = total.reshape(-1).split(CACHE), squares.reshape(-1).split(CACHE)
    each = [piece_sums(a, b, count, symmetric) for a, b in zip(flat, across, strict=True)]
    return sum(e[0] for e in each), sum(e[1] for e in each), all(e[2] for e in each)


def piece_sums(
    total: Tensor, squares: Tensor, count: int, symmetric: bool, room: Tensor | None = None
) -> Sums:
    """`ratio_sums` of one piece, in few passes where nothing is extreme.

    Args:
        room: a tensor like `squares` to work in.
    """
    kernels = KERNELS.get(squares.dtype)
    if kernels is not None:
        found = _at_once(kernels, total, squares, 0.0 if symmetric else 1 / count)
        sums = None if found is None else usual(found[0], found[1], count, symmetric, found[2])
        if sums is not None:
            return sums
    # Dead coordinates add nothing. One whose variance is lost in rounding adds so much that the
    # sum shows it.
    tiny = torch.finfo(squares.dtype).tiny
    if symmetric:
        below = torch.clamp_min(squares, tiny, out=room)
    else:  # the variance, but for a factor: f = (1 - 1/m) total^2 / (squares - total^2 / m)
        below = torch.addcmul(squares, total, total, value=-1 / count, out=room).clamp_min_(tiny)
    alive = torch.ge(squares, floor(squares), out=torch.empty_like(squares))  # sooner than bools
    ratio = torch.div(total, below, out=below).mul_(alive)
    summed = torch.dot(ratio.reshape(-1), total.reshape(-1)).item()
    finite = squares.amax().item() < math.inf if squares.numel() else True
    sums = usual(summed, float(alive.sum()), count, symmetric) if finite else None
    return sums or _sums_of([(total, squares)], count, symmetric)[0]


def usual(
    summed: float,
    live: float,
    count: int,
    symmetric: bool | None,
    largest: float | None = None,
) -> Sums | None:
    """From the sum of total^2 / (squares - total^2 / m), or of q; None if something is extreme.

    Where the variance of a coordinate is nearly lost in rounding its summand is too large to be
    right, and so is the sum, if nothing is known of the `largest`.
    """
    extreme, factor = usually(count, symmetric)
    if (summed if largest is None else largest) < extreme and summed < math.inf:  # false for nan
        return summed * factor, live, True
    return None


def usually(count: int, symmetric: bool | None) -> tuple[float, float]:
    """What is extreme for `usual`, and what it multiplies with."""
    return 1e5 * count, 1.0 if symmetric else 1 - 1 / count


def _at_once(kernels: Kernels, total: Tensor, squares: Tensor, part: float) -> Any:
    """The sum of total^2 / (squares - part total^2), the live coordinates, the largest summand."""
    if total.dtype is not squares.dtype or not (readable(total) and readable(squares)):
        return None
    if total.is_contiguous() and squares.is_contiguous():
        rows, columns, above, below = 1, total.numel(), 0, 0
    elif total.dim() == 2 and total.stride(1) == squares.stride(1) == 1:
        (rows, columns), above, below = total.shape, total.stride(0), squares.stride(0)
    else:
        return None
    at = total.data_ptr()
    return kernels.ratios(at, above, squares.data_ptr(), below, rows, columns, part)


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
