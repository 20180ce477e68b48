"""Sums and sums of squares of per-sample contributions, and the signal-to-noise ratio they give."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from heldin._private_torch import norms

__all__ = [
    "Moments", "as_real", "as_statistic", "ratio_sums", "smallest_square", "snr", "upcast",
    "which_finite",
]  # fmt: skip

SMALL = 1 << 13  # maximum number of coordinates of tensors that are concatenated
# Coordinates of a large tensor per chunk, small enough for the processor's cache.
PIECE, LARGE_PIECE = 1 << 17, 1 << 22


def upcast(tensor: Tensor) -> Tensor:
    """Return the tensor in the precision of statistics: at least float32."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def as_real(tensor: Tensor) -> Tensor:
    """Return a complex tensor as a real one (..., 2), with two coordinates per entry."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def as_statistic(grad: Tensor) -> Tensor:
    """Return a gradient as a dense and real tensor in the precision of statistics."""
    return as_real(upcast(grad.to_dense() if grad.is_sparse else grad))


def snr(total: Tensor, squares: Tensor, count: int) -> Tensor:
    r"""Return the paper's \(f_k = m\,g_k^2 / \hat\Sigma_k\), from sums over m samples.

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
    """Return the smallest sum of squares of a live coordinate; below it, too few bits remain.

    In single precision this excludes contributions of 1e-17 and less.
    """
    return torch.finfo(dtype).tiny * 2.0**17


def ratio_sums(
    pairs: Sequence[tuple[Tensor, Tensor]], count: int, symmetric: bool = False
) -> Tensor:
    """Return, per pair of total and squares: sum of f (or q), live coordinates, largest square.

    The result has a row per pair and stays on the device, without synchronisation. The last column
    is inf or nan if a contribution was.

    >>> ratio_sums([(torch.tensor([2.0, 0.0]), torch.tensor([4.0, 0.0]))], 2)
    tensor([[1., 1., 4.]])
    """
    groups: dict[Any, list[int]] = {}  # small tensors by dtype and device, large ones singly
    for i, (total, _) in enumerate(pairs):
        small = total.numel() <= SMALL
        groups.setdefault((total.dtype, total.device) if small else i, []).append(i)
    tables = [
        _large_sums(*pairs[members[0]], count, symmetric)
        if isinstance(key, int)
        else _small_sums([pairs[i] for i in members], count, symmetric)
        for key, members in groups.items()
    ]
    if len(tables) == 1:
        return tables[0]
    wanted = torch.float64 if any(t.dtype is torch.float64 for t in tables) else tables[0].dtype
    joined = torch.cat([table.to(tables[0].device, wanted) for table in tables])
    order = [i for members in groups.values() for i in members]
    rows = joined.unbind()
    return torch.stack([rows[at] for at in sorted(range(len(order)), key=order.__getitem__)])


def _small_sums(pairs: Sequence[tuple[Tensor, Tensor]], count: int, symmetric: bool) -> Tensor:
    """Return the sums of small tensors, concatenated to save operations."""
    sizes = [total.numel() for total, _ in pairs]
    total = torch.cat([total.reshape(-1) for total, _ in pairs])
    squares = torch.cat([squares.reshape(-1) for _, squares in pairs])
    ratio, live = _ratios(total, squares, count, symmetric)
    columns = [  # no ratio is negative
        *norms(ratio.split(sizes), 1),
        *norms(live.to(ratio.dtype).split(sizes), 1),
        *norms(squares.split(sizes), math.inf),
    ]
    return torch.stack(columns).reshape(3, -1).mT


def _large_sums(total: Tensor, squares: Tensor, count: int, symmetric: bool) -> Tensor:
    """Return the sums of one large tensor in chunks, without temporaries of its size."""
    total, squares = total.reshape(-1), squares.reshape(-1)
    size = PIECE if total.device.type == "cpu" else LARGE_PIECE
    info, dead = torch.finfo(squares.dtype), smallest_square(squares.dtype)
    tiny = squares.new_full((), info.tiny)
    room = squares.new_empty(3, min(size, total.numel()))  # reused for every chunk
    sums = []
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
        sums += [torch.dot(below, first), live.sum(), second.amax()]
    table = torch.stack(sums).reshape(-1, 3)
    if table.device.type != "mps":  # MPS has no double precision
        table = table.double()  # float32 cannot count the coordinates of a large tensor
    factor = 1.0 if symmetric else 1 - 1 / count
    return torch.stack([table[:, 0].sum() * factor, table[:, 1].sum(), table[:, 2].amax()])[None]


def _ratios(total: Tensor, squares: Tensor, count: int, symmetric: bool) -> tuple[Tensor, Tensor]:
    """Return the ratio of each coordinate (0 if it is dead), and whether it is live.

    f = (1 - 1/m) total^2 / (squares - total^2 / m). Rounding may cancel the variance, so it is
    clamped to at least 4 eps of the squares: f is then large, not negative.
    """
    info = torch.finfo(squares.dtype)
    live = squares >= smallest_square(squares.dtype)
    if symmetric:
        below, factor = squares.clamp_min(info.tiny), 1.0
    else:
        least = (squares * (4 * info.eps)).clamp_min_(info.tiny)
        below = torch.addcmul(squares, total, total, value=-1 / count).maximum(least)
        factor = 1 - 1 / count
    return torch.where(live, total, 0.0).div_(below).mul_(total * factor), live


@dataclass(frozen=True, eq=False)
class Moments:
    """Sum and sum of squares of the contributions of `count` samples to a parameter's gradient.

    Attributes:
        total: sum of the contributions, on the scale of the loss; it has the parameter's shape
            (real and imaginary parts of a complex one along an extra last dimension).
        squares: sum of their squares.
        count: number of samples.
        weight: number of the parameter's coordinates that each one here represents (1: all are
            here).

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
        """The paper's f_k, elementwise; nan where no sample contributed."""
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


def which_finite(moments: Sequence[Moments]) -> list[bool]:
    """Return for each whether no contribution was inf or nan; synchronises with the device once.

    >>> which_finite([Moments(torch.ones(2), torch.tensor([1.0, torch.inf]), 3)])
    [False]
    """
    sums = [each.squares.sum() + each.total.sum() for each in moments]
    table = torch.stack([each.to(sums[0].device) for each in sums]) if sums else torch.zeros(0)
    finite: list[bool] = table.isfinite().tolist()
    return finite
