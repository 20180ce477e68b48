"""The arithmetic of stopping single weights: their smoothed ratio, and how they are held."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from heldin.capture.moments import Moments
from heldin.criterion.evidence import Correction, Dead

__all__ = ["keep", "pieces", "smoothed"]

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def smoothed(
    average: Tensor,
    moments: Moments,
    smoothing: float,
    greedy: bool,
    dead: Dead,
    correction: Correction,
) -> Tensor:
    """Return the next smoothed f_k, b a + (1-b) f; weights with a value below 1 are stopped.

    In terms of Eq. 15, c = 1 - a. With `greedy`, the average of a stopped weight is not updated,
    so that it stays stopped.

    >>> m = Moments(torch.tensor([3.0, 1.0]), torch.tensor([5.0, 1.0]), 2)          # f = 9, 1
    >>> smoothed(torch.tensor([0.9, 2.0]), m, 0.5, True, "out", None)
    tensor([0.9000, 1.5000])
    """
    tiny = torch.finfo(moments.squares.dtype).tiny  # makes 0/0 a zero, without a branch
    clamped = Moments(moments.total, moments.squares.clamp(min=tiny), moments.count)
    f = clamped.q if correction == "symmetric" else clamped.snr
    if correction == "gaussian":
        f = f * ((moments.count - 3) / (moments.count - 1))
    moves = moments.squares.sign() if dead == "out" else torch.ones_like(f)
    if greedy:
        moves.mul_(torch.ge(average, 1.0, out=torch.empty_like(average)))
    f = f.clamp(max=1e30)  # an inf would make the average nan
    return average.addcmul(f - average, moves, value=1.0 - smoothing)


def keep(now: Tensor, before: Tensor, average: Tensor) -> None:
    """Restore stopped weights in place: `torch.where(average < 1, before, now)`, by bits.

    On a CPU `where` is slow for irregular masks, so the sign bit of average - 1, copied to all bits
    of an integer, selects between the two.

    >>> now = torch.tensor([1.0, 2.0])
    >>> keep(now, torch.tensor([-0.0, 5.0]), torch.tensor([0.5, 1.0]))
    >>> now
    tensor([-0.,  2.])
    """
    integer = INTEGERS[now.element_size()]
    sign = (average - 1.0).view(INTEGERS[average.element_size()])
    off = sign.bitwise_right_shift_(8 * average.element_size() - 1).to(integer)
    bits = now.detach().view(integer)
    bits.bitwise_xor_(torch.bitwise_xor(bits, before.view(integer)).bitwise_and_(off))


def pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield flat chunks of tensors of one shape; on a CPU, they fit the cache."""
    size = 1 << 16 if tensors[0].device.type == "cpu" else max(1, tensors[0].numel())
    yield from zip(*(t.reshape(-1).split(size) for t in tensors), strict=True)
