"""Per-sample contributions to one tensor, in the form in which an op leaves them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from math import prod

import torch
from torch import Tensor

from .moments import upcast
from .sampling import Block

__all__ = [
    "CHUNK", "Contributions", "Lazy", "Moved", "Outer", "Owned", "Rows", "moments",
    "samples_of",
]  # fmt: skip

CHUNK = 1 << 22  # elements of per-sample gradients held at a time
STRIP = 1 << 18  # elements of a matrix per strip, to fit the processor's cache


class Contributions(ABC):
    """The contributions of m samples to one tensor of the given shape.

    `samples` materialises them for a range of samples, `moments` computes their sum and sum of
    squares in the cheapest way. Some can be restricted to a block of coordinates before anything
    is computed (`restrict`).
    """

    m: int
    shape: tuple[int, ...]
    spread = False  # whether to sample coordinates with a stride
    reads = 0  # elements to read for each row, column or channel

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @abstractmethod
    def samples(self, lo: int, hi: int) -> Tensor:
        """Return the contributions of samples lo..hi-1, (hi - lo, *shape)."""

    def moments(self, total: Tensor | None, room: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return sum and sum of squares over all samples.

        Args:
            total: the sum, if it is known already.
            room: a tensor of the shape, into which the sum of squares may be written.
        """
        step = max(1, min(self.m, CHUNK // max(self.numel, 1)))
        contributions = self.samples(0, step)
        first, second = contributions.sum(0), contributions.square().sum(0)
        for lo in range(step, self.m, step):
            contributions = self.samples(lo, min(self.m, lo + step))
            first += contributions.sum(0)
            second += contributions.square().sum(0)
        return first, second

    def restrict(self, block: Block) -> Contributions:
        raise NotImplementedError

    @property
    def whole_only(self) -> bool:
        """Whether the contributions cannot be restricted to a block."""
        return type(self).restrict is Contributions.restrict


class Rows(Contributions):
    """Materialised contributions, (m, *shape)."""

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self.m, self.shape = values.shape[0], tuple(values.shape[1:])

    def samples(self, lo: int, hi: int) -> Tensor:
        return self.values[lo:hi]

    def moments(self, total: Tensor | None, room: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.values.sum(0), self.values.square().sum(0)

    def restrict(self, block: Block) -> Contributions:
        return Rows(self.values[(slice(None), *block)])


class Owned(Contributions):
    """Contributions to a tensor in which every element belongs to exactly one sample."""

    def __init__(self, values: Tensor, owner: Tensor, m: int) -> None:
        self.values, self.owner, self.m = values, owner, m  # owner: broadcastable to values
        self.shape = tuple(values.shape)

    def samples(self, lo: int, hi: int) -> Tensor:
        samples = torch.arange(lo, hi, device=self.values.device)
        chosen = self.owner == samples.reshape(-1, *[1] * self.values.dim())
        return self.values * chosen

    def moments(self, total: Tensor | None, room: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.values.clone(), self.values.square()


class Lazy(Contributions):
    """Contributions that are computed on demand, while the node's saved tensors exist."""

    def __init__(self, compute: Callable[[int, int], Tensor], m: int, shape: Sequence[int]) -> None:
        self.compute, self.m, self.shape = compute, m, tuple(shape)

    def samples(self, lo: int, hi: int) -> Tensor:
        return self.compute(lo, hi)


class Moved(Contributions):
    """Contributions behind views; `move` maps them to the shape of the parameter."""

    def __init__(
        self, inner: Contributions, move: Callable[[Tensor], Tensor], shape: tuple[int, ...]
    ) -> None:
        self.inner, self.move, self.shape, self.m = inner, move, shape, inner.m

    def samples(self, lo: int, hi: int) -> Tensor:
        return torch.stack([self.move(contribution) for contribution in self.inner.samples(lo, hi)])

    def moments(self, total: Tensor | None, room: Tensor | None = None) -> tuple[Tensor, Tensor]:
        first, second = self.inner.moments(None)
        return self.move(first), self.move(second)


class Outer(Contributions):
    """Contributions left_i^T right_i (over r rows) to a matrix that multiplies data."""

    def __init__(self, left: Tensor, right: Tensor, spread: bool = False) -> None:
        self.left, self.right, self.spread = left, right, spread  # (m, r, a), (m, r, b)
        self.m, self.rows = left.shape[0], left.shape[1]
        self.reads = self.m * self.rows if self.rows > 1 else 0  # one row per sample is cheap
        self.shape = (left.shape[2], right.shape[2])

    def transposed(self) -> Outer:
        return Outer(self.right, self.left, self.spread)

    def samples(self, lo: int, hi: int) -> Tensor:
        return upcast(self.left[lo:hi]).mT @ upcast(self.right[lo:hi])

    def restrict(self, block: Block) -> Contributions:
        return Outer(self.left[:, :, block[0]], self.right[:, :, block[1]])

    def moments(self, total: Tensor | None, room: Tensor | None = None) -> tuple[Tensor, Tensor]:
        left, right = upcast(self.left), upcast(self.right)
        if self.rows == 1:
            left, right = left.squeeze(1), right.squeeze(1)
            if total is None:
                total = left.mT @ right
            return total, torch.mm(left.square().mT, right.square(), out=room)
        if self.m * self.numel <= CHUNK // 8:
            products = left.mT @ right
            return products.sum(0) if total is None else total, products.square_().sum(0)
        if left.device.type != "cpu":
            first, squares = super().moments(None)
            return first if total is None else total, squares
        if total is None:
            total = left.flatten(0, 1).mT @ right.flatten(0, 1)
        squares = left.new_empty(self.shape) if room is None else room
        self._squares_in_strips(left, right, squares)
        return total, squares

    def _squares_in_strips(self, left: Tensor, right: Tensor, squares: Tensor) -> None:
        """Sum (left_i^T right_i)^2 over samples, in strips of rows that fit the cache."""
        a, b = self.shape
        height = max(1, STRIP // b)
        work = left.new_empty(min(a, height), b)
        for top in range(0, a, height):
            out = squares[top : top + height]
            product = work[: len(out)]
            strip = left[:, :, top : top + height].mT
            torch.mm(strip[0], right[0], out=product)
            torch.mul(product, product, out=out)
            for i in range(1, self.m):
                torch.mm(strip[i], right[i], out=product)
                out.addcmul_(product, product)


def samples_of(parts: Sequence[Contributions], lo: int, hi: int) -> Tensor:
    """Return the contributions of samples lo..hi-1, summed over several uses of one tensor."""
    return sum((part.samples(lo, hi) for part in parts[1:]), start=parts[0].samples(lo, hi))


def moments(
    parts: Sequence[Contributions], total: Tensor | None = None, room: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return sum and sum of squares of the contributions of several uses of one tensor.

    For a module that is called twice, or tied weights, the contributions of a sample are summed
    over the uses before they are squared.
    """
    outers = [part for part in parts if isinstance(part, Outer)]
    if len(outers) > 1:  # as one use with more rows
        others = [part for part in parts if not isinstance(part, Outer)]
        left = torch.cat([part.left for part in outers], 1)
        parts = [Outer(left, torch.cat([part.right for part in outers], 1)), *others]
    if len(parts) == 1:
        return parts[0].moments(total, room)
    return Lazy(partial(samples_of, parts), parts[0].m, parts[0].shape).moments(None)
