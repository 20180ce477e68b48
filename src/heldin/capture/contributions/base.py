"""What every form of contributions can do."""

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

    They can be written out for a range of samples (`samples`), and know the cheapest way to their
    sum and sum of squares (`moments`). Some can be restricted to a block of coordinates before
    anything is computed (`restrict`).
    """

    m: int
    shape: tuple[int, ...]
    spread = False  # whether coordinates that are looked at should lie apart (and cheaply can)
    reads = 0  # how many elements are read for each row, column or channel

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @abstractmethod
    def samples(self, lo: int, hi: int) -> Tensor:
        """Contributions of samples lo..hi-1, (hi - lo, *shape)."""

    def moments(self, total: Tensor | None, room: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Sum and sum of squares over all samples.

        Args:
            total: the sum, if it is known already.
            room: a tensor of the shape, into which the sum of squares may be written.
        """
        return chunked(self.samples, self.m, self.numel)

    def restrict(self, block: Block) -> Contributions:
        """The same for a block of coordinates only."""
        raise NotImplementedError

    @property
    def whole_only(self) -> bool:
        """Whether there is no way to look at a block only."""
        return type(self).restrict is Contributions.restrict


def chunked(samples: Callable[[int, int], Tensor], m: int, size: int) -> tuple[Tensor, Tensor]:
    """Sum and sum of squares of contributions that are written out for some samples at a time."""
    step = max(1, min(m, CHUNK // max(size, 1)))
    each = samples(0, step)
    total, squares = each.sum(0), each.square().sum(0)
    for lo in range(step, m, step):
        each = samples(lo, min(m, lo + step))
        total += each.sum(0)
        squares += each.square().sum(0)
    return total, squares
