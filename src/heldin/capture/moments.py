"""Sums and sums of squares of per-sample contributions, and the signal-to-noise ratio they give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

__all__ = ["Moments", "as_real", "ratio_sums", "smallest_square", "snr", "upcast"]

SMALL = 1 << 13  # coordinates up to which tensors are put together, padded to one size
# coordinates of a large tensor that are worked on at a time: so many stay in a processor's cache
PIECE, LARGE_PIECE = 1 << 17, 1 << 22


def upcast(tensor: Tensor) -> Tensor:
    """The tensor in the precision in which statistics are kept: at least float32."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def as_real(tensor: Tensor) -> Tensor:
    """A complex tensor as a real one (..., 2): two coordinates for each entry."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def snr(total: Tensor, squares: Tensor, count: int) -> Tensor:
    r"""The paper's \(f_k = m\,g_k^2 / \hat\Sigma_k\), from sums over m samples.

    With g = total / m and the unbiased variance, f = (m-1) total^2 / (m squares - total^2). It is
    computed through q = total^2 / squares, as f = q (m-1) / (m-q), and where rounding hides the
    variance (q >= m) f is large, not negative. Coordinates to which no sample contributed, and all
    of them if m < 2, are nan.

    >>> snr(torch.tensor([2.0, 0.0]), torch.tensor([4.0, 0.0]), 2)      # contributions 0 and 2
    tensor([1., nan])
    """
    if count < 2:
        return torch.full_like(total, torch.nan)
    q = total.square().div_(squares)
    room = (count - q).clamp_(min=4 * torch.finfo(q.dtype).eps * count)
    return q.mul_(count - 1).div_(room)


def smallest_square(dtype: torch.dtype) -> float:
    """Below it a sum of squares has too few bits for a ratio: its coordinate counts as dead.

    Contributions of 1e-17 and less, in single precision.
    """
    return torch.finfo(dtype).tiny * 2.0**17


def ratio_sums(
    pairs: Sequence[tuple[Tensor, Tensor]], count: int, symmetric: bool = False
) -> Tensor:
    """For each pair of total and squares: sum of f (or q), live coordinates, largest square.

    The result has a row for each pair and stays on the device: nothing here waits for it. The last
    column is inf or nan if a contribution was.

    >>> ratio_sums([(torch.tensor([2.0, 0.0]), torch.tensor([4.0, 0.0]))], 2)
    tensor([[1., 1., 4.]])
    """
    if len(pairs) > 1:
        small: dict[Any, list[int]] = {}
        for i, (total, _) in enumerate(pairs):
            if total.numel() <= SMALL:
                small.setdefault((total.dtype, total.device), []).append(i)
        if any(len(members) > 1 for members in small.values()):
            return _together(pairs, list(small.values()), count, symmetric)
    return torch.stack([_of_one(*pair, count, symmetric) for pair in pairs])


def _together(
    pairs: Sequence[tuple[Tensor, Tensor]], groups: list[list[int]], count: int, symmetric: bool
) -> Tensor:
    """Small tensors as the rows of one matrix: a handful of operations for all of them."""
    rows: list[Tensor | None] = [None] * len(pairs)
    for members in groups:
        if len(members) == len(pairs):
            return _sums_of_rows(*_padded([pairs[i] for i in members]), count, symmetric)
        found = _sums_of_rows(*_padded([pairs[i] for i in members]), count, symmetric).unbind()
        for i, row in zip(members, found, strict=True):
            rows[i] = row
    each = [
        _of_one(*pair, count, symmetric) if row is None else row
        for pair, row in zip(pairs, rows, strict=True)
    ]
    wanted = torch.float64 if any(row.dtype is torch.float64 for row in each) else each[0].dtype
    return torch.stack([row.to(each[0].device, wanted) for row in each])


def _padded(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Totals and squares as rows, filled up with zeros, which count as dead coordinates."""
    totals = pad_sequence([total.reshape(-1) for total, _ in pairs], batch_first=True)
    return totals, pad_sequence([squares.reshape(-1) for _, squares in pairs], batch_first=True)


def _of_one(total: Tensor, squares: Tensor, count: int, symmetric: bool) -> Tensor:
    """The sums of one tensor; a large one in pieces, with nothing of its size in between."""
    total, squares = total.reshape(-1), squares.reshape(-1)
    size = PIECE if total.device.type == "cpu" else LARGE_PIECE
    if total.numel() <= size:
        return _sums_of_rows(total[None], squares[None], count, symmetric)[0]
    info, dead = torch.finfo(squares.dtype), smallest_square(squares.dtype)
    tiny = squares.new_full((), info.tiny)
    room = squares.new_empty(3, size)  # written again for every piece
    found = []
    for first, second in zip(total.split(size), squares.split(size), strict=True):
        below, least, live = room[:, : len(first)]
        torch.ge(second, dead, out=live)
        if symmetric:
            torch.clamp_min(second, info.tiny, out=below)
        else:
            torch.add(tiny, second, alpha=4 * info.eps, out=least)
            torch.addcmul(second, first, first, value=-1 / count, out=below)
            torch.maximum(below, least, out=below)
        torch.div(first, below, out=below).mul_(live)
        found += [torch.dot(below, first), live.sum(), second.amax()]
    table = torch.stack(found).reshape(-1, 3)
    if table.device.type != "mps":  # which has no double precision
        table = table.double()  # a large tensor has more coordinates than floats can count
    factor = 1.0 if symmetric else 1 - 1 / count
    return torch.stack([table[:, 0].sum() * factor, table[:, 1].sum(), table[:, 2].amax()])


def _sums_of_rows(total: Tensor, squares: Tensor, count: int, symmetric: bool) -> Tensor:
    """Per row of two matrices: sum of ratios of live coordinates, their number, largest square.

    f = (1 - 1/m) total^2 / (squares - total^2 / m), where rounding may leave nothing of the
    variance: it is taken to be at least 4 eps of the squares, so that f is large, not negative.
    """
    info = torch.finfo(squares.dtype)
    live = squares >= smallest_square(squares.dtype)
    if symmetric:
        below = squares.clamp_min(info.tiny)
    else:
        least = (squares * (4 * info.eps)).clamp_min_(info.tiny)
        below = torch.addcmul(squares, total, total, value=-1 / count).maximum(least)
    ratio = torch.where(live, total, 0.0).div_(below).mul_(total)
    summed = ratio.sum(1) if symmetric else ratio.sum(1).mul_(1 - 1 / count)
    return torch.stack([summed, live.sum(1, dtype=squares.dtype), squares.amax(1)], 1)


@dataclass(frozen=True, eq=False)
class Moments:
    """What is known about the contributions of `count` samples to one parameter's gradient.

    Attributes:
        total: sum of the contributions, on the loss's own scale; the parameter's shape (that of a
            complex one has real and imaginary parts along a last dimension).
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
