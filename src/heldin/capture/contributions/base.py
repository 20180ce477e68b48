"""The interface of per-sample contributions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from math import prod

from torch import Tensor

from heldin.capture.sampling import Block

__all__ = ["CHUNK", "Contributions", "chunked"]

CHUNK = 1 << 22  # elements of per-sample gradients held at a time


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
        return chunked(self.samples, self.m, self.numel)

    def restrict(self, block: Block) -> Contributions:
        """Return the contributions to a block of coordinates."""
        raise NotImplementedError

    @property
    def whole_only(self) -> bool:
        """Whether the contributions cannot be restricted to a block."""
        return type(self).restrict is Contributions.restrict


def chunked(samples: Callable[[int, int], Tensor], m: int, size: int) -> tuple[Tensor, Tensor]:
    """Return sum and sum of squares of contributions that are materialised in chunks."""
    step = max(1, min(m, CHUNK // max(size, 1)))
    contributions = samples(0, step)
    total, squares = contributions.sum(0), contributions.square().sum(0)
    for lo in range(step, m, step):
        contributions = samples(lo, min(m, lo + step))
        total += contributions.sum(0)
        squares += contributions.square().sum(0)
    return total, squares
