"""Per-sample contributions to one tensor, in the form in which an op leaves them.

A part can hand out the contributions of a range of samples (`take`) and knows the cheapest way to
their sum and sum of squares (`moments`). Several parts of one tensor (a module called twice, tied
weights) are summed per sample before they are squared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["Lazy", "Moved", "Outer", "Owned", "Part", "Rows", "Scattered", "moments", "wide"]

CHUNK = 1 << 22  # elements of per-sample gradients held at a time
CACHE = 1 << 16  # elements of one sample's gradient worked on at a time


def wide(tensor: Tensor) -> Tensor:
    """The tensor in the precision in which statistics are kept: at least float32."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


class Part(Protocol):
    """The contributions of m samples to one tensor of the given shape."""

    m: int
    shape: tuple[int, ...]

    def take(self, lo: int, hi: int) -> Tensor:
        """Contributions of samples lo..hi-1, (hi - lo, *shape)."""
        ...

    def moments(self, total: Tensor | None) -> tuple[Tensor, Tensor]:
        """Sum and sum of squares over all samples; the sum may be known already."""
        ...


def _chunked(
    take: Callable[[int, int], Tensor], m: int, shape: Sequence[int]
) -> tuple[Tensor, Tensor]:
    size = 1
    for extent in shape:
        size *= extent
    step = max(1, min(m, CHUNK // max(size, 1)))
    total = squares = None
    for lo in range(0, m, step):
        part = take(lo, min(m, lo + step))
        if total is None or squares is None:
            total, squares = part.sum(0), part.square().sum(0)
        else:
            total += part.sum(0)
            squares += part.square().sum(0)
    assert total is not None
    assert squares is not None
    return total, squares


def moments(parts: Sequence[Part], total: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Sum and sum of squares of the summed parts."""
    if len(parts) == 1:
        return parts[0].moments(total)
    outers = [p for p in parts if isinstance(p, Outer)]
    if len(outers) > 1:
        joined = Outer(
            torch.cat([p.left for p in outers], 1), torch.cat([p.right for p in outers], 1)
        )
        return moments([joined, *[p for p in parts if not isinstance(p, Outer)]], total)

    def take(lo: int, hi: int) -> Tensor:
        result = parts[0].take(lo, hi)
        for part in parts[1:]:
            result = result + part.take(lo, hi)
        return result

    return _chunked(take, parts[0].m, parts[0].shape)


@dataclass
class Rows:
    """Contributions written out: (m, *shape)."""

    values: Tensor

    def __post_init__(self) -> None:
        self.m, self.shape = self.values.shape[0], tuple(self.values.shape[1:])

    def take(self, lo: int, hi: int) -> Tensor:
        return self.values[lo:hi]

    def moments(self, total: Tensor | None) -> tuple[Tensor, Tensor]:
        return self.values.sum(0), self.values.square().sum(0)


@dataclass
class Outer:
    """A matrix in a product with the data: contribution i is left_i^T right_i, over r rows."""

    left: Tensor  # (m, r, a)
    right: Tensor  # (m, r, b)

    def __post_init__(self) -> None:
        self.m = self.left.shape[0]
        self.shape: tuple[int, ...] = (self.left.shape[2], self.right.shape[2])

    def t(self) -> Outer:
        return Outer(self.right, self.left)

    def take(self, lo: int, hi: int) -> Tensor:
        return wide(self.left[lo:hi]).mT @ wide(self.right[lo:hi])

    def moments(self, total: Tensor | None) -> tuple[Tensor, Tensor]:
        left, right = wide(self.left), wide(self.right)
        if total is None:
            total = left.flatten(0, 1).mT @ right.flatten(0, 1)
        if left.shape[1] == 1:
            return total, left[:, 0].square().mT @ right[:, 0].square()
        if self.m * total.numel() <= CHUNK // 8:
            return total, (left.mT @ right).square_().sum(0)
        squares = torch.zeros_like(total)
        height = max(1, CACHE // right.shape[2])  # rows of the matrix at a time, to stay in cache
        for top in range(0, left.shape[2], height):
            piece, rows = squares[top : top + height], left[:, :, top : top + height].mT
            each = torch.empty_like(piece)
            for i in range(self.m):
                torch.mm(rows[i], right[i], out=each)
                piece.addcmul_(each, each)
        return total, squares


@dataclass
class Scattered:
    """Rows of a table: row index[i, r] receives values[i, r]; the index `size` receives nothing."""

    index: Tensor  # (m, r)
    values: Tensor  # (m, r, d)
    size: int

    def __post_init__(self) -> None:
        self.m = self.index.shape[0]
        self.shape: tuple[int, ...] = (self.size, self.values.shape[2])

    def take(self, lo: int, hi: int) -> Tensor:
        values = wide(self.values[lo:hi])
        table = values.new_zeros(hi - lo, self.size + 1, values.shape[2])
        where = self.index[lo:hi, :, None].expand_as(values)
        return table.scatter_add_(1, where, values)[:, : self.size]

    def moments(self, total: Tensor | None) -> tuple[Tensor, Tensor]:
        values = wide(self.values).flatten(0, 1)
        samples = torch.arange(self.m, device=self.index.device)[:, None]
        pairs, place = torch.unique(samples * (self.size + 1) + self.index, return_inverse=True)
        sums = values.new_zeros(len(pairs), values.shape[1])
        sums.index_add_(0, place.flatten(), values)  # one row per (sample, index)
        rows = pairs % (self.size + 1)
        first = values.new_zeros(self.size + 1, values.shape[1]).index_add_(0, rows, sums)
        second = values.new_zeros(self.size + 1, values.shape[1])
        second.index_add_(0, rows, sums.square())
        return first[: self.size], second[: self.size]


@dataclass
class Owned:
    """A tensor each element of which belongs to one sample: the contribution is its own slice."""

    values: Tensor  # (*shape)
    owner: Tensor  # broadcastable to shape
    m: int

    def __post_init__(self) -> None:
        self.shape = tuple(self.values.shape)

    def take(self, lo: int, hi: int) -> Tensor:
        samples = torch.arange(lo, hi, device=self.values.device)
        chosen = self.owner == samples.reshape(-1, *[1] * self.values.dim())
        return self.values * chosen

    def moments(self, total: Tensor | None) -> tuple[Tensor, Tensor]:
        return self.values.clone(), self.values.square()


@dataclass
class Lazy:
    """Contributions that are computed when asked for."""

    compute: Callable[[int, int], Tensor]
    m: int
    shape: tuple[int, ...]

    def take(self, lo: int, hi: int) -> Tensor:
        return self.compute(lo, hi)

    def moments(self, total: Tensor | None) -> tuple[Tensor, Tensor]:
        return _chunked(self.compute, self.m, self.shape)

    def written_out(self) -> Rows:
        return Rows(self.compute(0, self.m))


@dataclass
class Moved:
    """A part behind views: `move` puts each element in its place in a tensor of the given shape."""

    inner: Part
    move: Callable[[Tensor], Tensor]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        self.m = self.inner.m

    def take(self, lo: int, hi: int) -> Tensor:
        return torch.stack([self.move(each) for each in self.inner.take(lo, hi)])

    def moments(self, total: Tensor | None) -> tuple[Tensor, Tensor]:
        first, second = self.inner.moments(None)
        return self.move(first), self.move(second)
