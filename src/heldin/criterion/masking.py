"""The arithmetic of stopping single weights: when they are off, and how they are held."""

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
    """The next smoothed f_k, elementwise: b a + (1-b) f. Weights with a value below 1 are stopped.

    In terms of Eq. 15, c = 1 - a. Greedy: a stopped weight's average stays, and so does the stop.

    >>> m = Moments(torch.tensor([3.0, 1.0]), torch.tensor([5.0, 1.0]), 2)          # f = 9, 1
    >>> smoothed(torch.tensor([0.9, 2.0]), m, 0.5, True, "out", None)
    tensor([0.9000, 1.5000])
    """
    tiny = torch.finfo(moments.squares.dtype).tiny  # makes 0/0 a zero, without a branch
    known = Moments(moments.total, moments.squares.clamp(min=tiny), moments.count)
    f = known.q if correction == "symmetric" else known.snr
    if correction == "gaussian":
        f = f * ((moments.count - 3) / (moments.count - 1))
    moves = moments.squares.sign() if dead == "out" else torch.ones_like(f)
    if greedy:
        moves.mul_(torch.ge(average, 1.0, out=torch.empty_like(average)))
    f = f.clamp(max=1e30)  # no inf, whose average would be nan in the end
    return average.addcmul(f - average, moves, value=1.0 - smoothing)


def keep(now: Tensor, before: Tensor, average: Tensor) -> None:
    """Put stopped weights back, in place: `torch.where(average < 1, before, now)`, bit by bit.

    On a CPU `where` is slow if the mask is irregular. The sign of average - 1, spread over all bits
    of an integer, selects as well.

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
    """Flat pieces of tensors of one shape: on a CPU small enough to stay in the cache."""
    size = 1 << 16 if tensors[0].device.type == "cpu" else max(1, tensors[0].numel())
    yield from zip(*(t.reshape(-1).split(size) for t in tensors), strict=True)
