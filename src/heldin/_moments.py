"""Sums and sums of squares of per-sample contributions, and the signal-to-noise ratio they give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

__all__ = ["Moments", "ratio_sums", "snr"]

CACHE = 1 << 16  # coordinates worked on at a time


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


def ratio_sums(
    totals: Sequence[Tensor], squares: Sequence[Tensor], count: int, symmetric: bool = False
) -> list[list[float]]:
    """For each of several tensors: sum of f (or of q), number of live coordinates, sum of squares.

    Small tensors are worked on together, large ones in pieces that stay in the cache. The last sum
    is not finite if any contribution was not.

    >>> ratio_sums([torch.tensor([2.0, 0.0])], [torch.tensor([4.0, 0.0])], 2)
    [[1.0, 1.0, 4.0]]
    """
    found: list[Tensor] = []
    together: list[int] = []
    for i, (first, second) in enumerate(zip(totals, squares, strict=True)):
        if first.numel() <= CACHE:
            together.append(i)
            found.append(first)  # its place
        else:
            flat, across = first.reshape(-1), second.reshape(-1)
            pieces = zip(flat.split(CACHE), across.split(CACHE), strict=True)
            sums = [_ratios(a, b, count, symmetric).sum(1, dtype=torch.float64) for a, b in pieces]
            found.append(torch.stack(sums).sum(0))
    if together:
        a = torch.cat([totals[i].reshape(-1) for i in together])
        b = torch.cat([squares[i].reshape(-1) for i in together])
        rows = _ratios(a, b, count, symmetric)
        sizes = [totals[i].numel() for i in together]
        for i, piece in zip(together, rows.split(sizes, 1), strict=True):
            found[i] = piece.sum(1, dtype=torch.float64)
    result: list[list[float]] = torch.stack(found).tolist() if found else []
    return result


def _ratios(total: Tensor, squares: Tensor, count: int, symmetric: bool) -> Tensor:
    """(3, n): the ratios, with 0 for dead coordinates; whether they are live; the squares."""
    rows = total.new_empty(3, len(total))
    ratio, live = rows[0], rows[1]
    torch.mul(total, total, out=ratio)
    torch.sign(squares, out=live)
    rows[2] = squares
    ratio.div_(squares.clamp(min=torch.finfo(squares.dtype).tiny))
    if not symmetric:
        room = (count - ratio).clamp_(min=4 * torch.finfo(ratio.dtype).eps * count)
        ratio.mul_(count - 1).div_(room)
    return rows


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
