"""The moments of several uses of one parameter."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .base import Contributions, chunked
from .outer import Outer

__all__ = ["moments"]


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
        parts = [Outer.join(outers), *others]
    if len(parts) == 1:
        return parts[0].moments(total, room)

    def samples(lo: int, hi: int) -> Tensor:
        result = parts[0].samples(lo, hi)
        for part in parts[1:]:
            result = result + part.samples(lo, hi)
        return result

    return chunked(samples, parts[0].m, parts[0].numel)
