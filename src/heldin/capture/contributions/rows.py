"""Contributions that are materialised, computed on demand, owned by element, or moved."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from heldin.capture.moments import as_real
from heldin.capture.sampling import Block

from .base import Contributions

__all__ = ["Lazy", "Moved", "Owned", "Real", "Rows"]


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

    def written_out(self) -> Rows:
        return Rows(self.compute(0, self.m))


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


class Real(Contributions):
    """Contributions to a complex parameter, as real numbers (..., 2)."""

    def __init__(self, inner: Contributions) -> None:
        self.inner, self.shape, self.m = inner, (*inner.shape, 2), inner.m

    def samples(self, lo: int, hi: int) -> Tensor:
        return as_real(self.inner.samples(lo, hi))
