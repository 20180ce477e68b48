"""Per-sample contributions to one tensor, in the form in which an op leaves them.

A part can hand out the contributions of a range of samples (`take`), knows the cheapest way to
their sum and sum of squares (`moments`), and some parts can be cut down to a block of coordinates
before anything is computed (`cut`). Several parts of one tensor (a module called twice, tied
weights) are summed per sample before they are squared.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from ._kernels import KERNELS, readable
from ._moments import Sums, piece_sums, ratio_sums, usual
from ._sampling import Block

__all__ = [
    "CHUNK",
    "Filters",
    "Lazy",
    "Moved",
    "Outer",
    "Owned",
    "Part",
    "Rows",
    "Scattered",
    "moments",
    "overlap",
    "wide",
]

CHUNK = 1 << 22  # elements of per-sample gradients held at a time
CACHE = 1 << 18  # elements of a matrix worked on at a time
AT_ONCE = 1 << 10  # rows up to which products and ratios are formed together
PATCHES = 1 << 20  # elements of images that are cut into patches at a time


def wide(tensor: Tensor) -> Tensor:
    """The tensor in the precision in which statistics are kept: at least float32."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


class Part(ABC):
    """The contributions of m samples to one tensor of the given shape."""

    m: int
    shape: tuple[int, ...]
    spread = False  # whether coordinates that are looked at should lie apart (and cheaply can)
    reads = 0  # how many elements are read for each row, column or channel
    holds = 0  # how many elements `held` would copy; 0 if it cannot

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @abstractmethod
    def take(self, lo: int, hi: int) -> Tensor:
        """Contributions of samples lo..hi-1, (hi - lo, *shape)."""

    def moments(self, total: Tensor | None) -> tuple[Tensor, Tensor]:
        """Sum and sum of squares over all samples; the sum may be known already."""
        return _chunked(self.take, self.m, self.numel)

    def ratios(self, total: Tensor | None, symmetric: bool) -> Sums:
        """Sum of f over all coordinates, without keeping anything of the tensor's size."""
        return ratio_sums([self.moments(total)], self.m, symmetric)[0]

    def cut(self, block: Block) -> Part:
        """The same for a block of coordinates only."""
        raise NotImplementedError

    def held(self) -> Part:
        """A copy that outlives the pass."""
        raise NotImplementedError

    @property
    def whole_only(self) -> bool:
        """Whether there is no way to look at a block only."""
        return type(self).cut is Part.cut


def _chunked(take: Callable[[int, int], Tensor], m: int, size: int) -> tuple[Tensor, Tensor]:
    step = max(1, min(m, CHUNK // max(size, 1)))
    part = take(0, step)
    total, squares = part.sum(0), part.square().sum(0)
    for lo in range(step, m, step):
        part = take(lo, min(m, lo + step))
        total += part.sum(0)
        squares += part.square().sum(0)
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

    return _chunked(take, parts[0].m, parts[0].numel)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


class Rows(Part):
    """Contributions written out: (m, *shape); `own` if no other tensor has their memory."""

    def __init__(self, values: Tensor, own: bool = False) -> None:
        self.values, self.own, self.holds = values, own, values.numel()
        self.m, self.shape = values.shape[0], tuple(values.shape[1:])

    def take(self, lo: int, hi: int) -> Tensor:
        return self.values[lo:hi]

    def held(self) -> Part:
        return self if self.own else Rows(_copy(self.values))

    def moments(self, total: Tensor | None) -> tuple[Tensor, Tensor]:
        return self.values.sum(0), self.values.square().sum(0)

    def cut(self, block: Block) -> Part:
        return Rows(self.values[(slice(None), *block)])


class Outer(Part):
    """A matrix in a product with the data: contribution i is left_i^T right_i, over r rows."""

    def __init__(self, left: Tensor, right: Tensor, spread: bool = False) -> None:
        self.left, self.right, self.spread = left, right, spread  # (m, r, a), (m, r, b)
        self.m, self.rows = left.shape[0], left.shape[1]
        self.reads = self.m * self.rows if self.rows > 1 else 0  # one row is cheap
        self.holds = left.numel() + right.numel()
        self.shape = (left.shape[2], right.shape[2])

    def t(self) -> Outer:
        """The same for the transposed matrix."""
        return Outer(self.right, self.left, self.spread)

    def take(self, lo: int, hi: int) -> Tensor:
        return wide(self.left[lo:hi]).mT @ wide(self.right[lo:hi])

    def cut(self, block: Block) -> Part:
        return Outer(self.left[:, :, block[0]], self.right[:, :, block[1]])

    def held(self) -> Part:
        return Outer(_copy(self.left), _copy(self.right))

    def moments(self, total: Tensor | None) -> tuple[Tensor, Tensor]:
        left, right = wide(self.left), wide(self.right)
        if self.rows == 1:
            left, right = left.squeeze(1), right.squeeze(1)
            if total is None:
                total = left.mT @ right
            return total, left.square().mT @ right.square()
        size = self.shape[0] * self.shape[1]
        if self.m * size <= CHUNK // 8:
            each = left.mT @ right
            return each.sum(0) if total is None else total, each.square_().sum(0)
        if total is None:
            total = left.flatten(0, 1).mT @ right.flatten(0, 1)
        squares = torch.empty_like(total)
        for top, bottom in self._strips(CACHE):
            strip = squares[top:bottom]
            _strip_squares(left[:, :, top:bottom], right, strip, torch.empty_like(strip))
        return total, squares

    def _strips(self, most: int) -> list[tuple[int, int]]:
        """Rows of the matrix that are worked on at a time, to stay in the cache."""
        a, b = self.shape
        height = max(1, most // b)
        return [(top, min(a, top + height)) for top in range(0, a, height)]

    def ratios(self, total: Tensor | None, symmetric: bool) -> Sums:
        if total is not None and self.m * self.rows <= AT_ONCE:
            sums = self._at_once(total, symmetric)
            if sums is not None:
                return sums
        if total is None or self.numel <= CACHE or total.device.type != "cpu":
            return super().ratios(total, symmetric)
        left, right = wide(self.left), wide(self.right)
        if self.rows == 1:
            left, right = left.square(), right.square()
        once = self.rows == 1 and total.dtype in KERNELS  # squares are read but once
        strips = self._strips(4 * CACHE if once else CACHE)
        room = total.new_empty(1 if once else 2, strips[0][1], self.shape[1])
        each = []
        for top, bottom in strips:
            squares, other = room[0, : bottom - top], room[-1, : bottom - top]
            if self.rows == 1:
                torch.mm(left[:, 0, top:bottom].mT, right[:, 0], out=squares)
            else:
                _strip_squares(left[:, :, top:bottom], right, squares, other)
            spare = None if once else other
            each.append(piece_sums(total[top:bottom], squares, self.m, symmetric, spare))
        return sum(e[0] for e in each), sum(e[1] for e in each), all(e[2] for e in each)

    def _at_once(self, total: Tensor, symmetric: bool) -> Sums | None:
        """In registers; None where there are none, or something is extreme."""
        left, right, kernels = wide(self.left), wide(self.right), KERNELS.get(total.dtype)
        if kernels is None or not all(map(readable, (left, right, total))):
            return None
        if left.dtype is not total.dtype or right.dtype is not total.dtype or total.stride(1) != 1:
            return None
        (a, b), m = self.shape, self.m
        found = kernels.outer_ratios(
            left.data_ptr(), *left.stride(), right.data_ptr(), *right.stride(), m, self.rows, a, b,
            total.data_ptr(), total.stride(0), 0.0 if symmetric else 1 / m,
        )  # fmt: skip
        return None if found is None else usual(found[0], found[1], m, symmetric, found[2])


def _strip_squares(left: Tensor, right: Tensor, out: Tensor, each: Tensor) -> None:
    """Sum over samples of (left_i^T right_i)^2, for a strip small enough for the cache."""
    strip = left.mT
    torch.mm(strip[0], right[0], out=each)
    torch.mul(each, each, out=out)
    for i in range(1, len(left)):
        torch.mm(strip[i], right[i], out=each)
        out.addcmul_(each, each)


class Filters(Part):
    """Filters (O, C, k, k) of a plain convolution: patches of each sample's images are taken."""

    def __init__(
        self,
        grad: Tensor,
        x: Tensor,
        kernel: Sequence[int],
        settings: Mapping[str, Sequence[int]],
        place: tuple[int, int] | None = None,
    ) -> None:
        self.grad, self.x = grad, x  # (m, r, O, H, W), (m, r, C, H, W)
        self.kernel, self.settings = tuple(kernel), settings
        self.place = place  # the one place in the kernel that is looked at
        self.m = grad.shape[0]
        self.shape = (grad.shape[2], x.shape[2], *((1, 1) if place else self.kernel))
        self.reads = self.m * grad.shape[1] * grad.shape[3] * grad.shape[4]

    def cut(self, block: Block) -> Part:
        rows, columns, *place = block
        grad, x = self.grad[:, :, rows], self.x[:, :, columns]
        at = (place[0].start, place[1].start) if place else None
        return Filters(grad, x, self.kernel, self.settings, at)

    def take(self, lo: int, hi: int) -> Tensor:
        x, grad = wide(self.x[lo:hi]), wide(self.grad[lo:hi])
        if self.place is None:
            patches = F.unfold(x.flatten(0, 1), self.kernel, **self.settings)  # type: ignore[arg-type]
        else:
            (up, down), (left, right) = (self._overlap(axis) for axis in (0, 1))
            grad, patches = grad[..., up, left], x[..., down, right]
        delta = grad.flatten(3)  # (n, r, O, L)
        patches = patches.reshape(*delta.shape[:2], prod(self.shape[1:]), delta.shape[3])
        if delta.shape[1] == 1:
            each = delta[:, 0] @ patches[:, 0].mT
        else:
            each = torch.einsum("irol,irkl->iok", delta, patches)
        return each.reshape(hi - lo, *self.shape)

    def _overlap(self, axis: int) -> tuple[slice, slice]:
        assert self.place is not None
        stride, padding, dilation = (
            self.settings[name][axis] for name in ("stride", "padding", "dilation")
        )
        size, outputs = self.x.shape[3 + axis], self.grad.shape[3 + axis]
        return overlap(self.place[axis], stride, padding, dilation, size, outputs)

    def moments(self, total: Tensor | None) -> tuple[Tensor, Tensor]:
        work = self.reads * prod(self.shape[1:]) // self.m + self.numel
        step = max(1, min(self.m, PATCHES // max(1, work)))
        first, second = total, None
        for lo in range(0, self.m, step):
            each = self.take(lo, min(self.m, lo + step))
            if total is None:
                sums = each.sum(0)
                first = sums if first is None else first.add_(sums)
            squares = each.square_().sum(0)
            second = squares if second is None else second.add_(squares)
        assert first is not None
        assert second is not None
        return first, second


def overlap(
    place: int, stride: int, padding: int, dilation: int, size: int, outputs: int
) -> tuple[slice, slice]:
    """Where outputs and inputs meet at one place in the kernel, along an axis; the rest is padding.

    >>> overlap(0, 1, 1, 1, 4, 4)                  # the left column of a kernel of 3
    (slice(1, 4, None), slice(0, 3, 1))
    """
    shift = place * dilation - padding
    first = max(0, -(shift // stride))
    last = min(outputs, (size - 1 - shift) // stride + 1)
    if last <= first:
        return slice(0, 0), slice(0, 0)
    start = first * stride + shift
    return slice(first, last), slice(start, start + (last - first - 1) * stride + 1, stride)


class Scattered(Part):
    """Rows of a table: row index[i, r] receives values[i, r]; the index `size` receives nothing."""

    def __init__(self, index: Tensor, values: Tensor, size: int) -> None:
        self.index, self.values, self.size = index, values, size  # (m, r), (m, r, d)
        self.m = index.shape[0]
        self.shape = (size, values.shape[2])

    def take(self, lo: int, hi: int) -> Tensor:
        values = wide(self.values[lo:hi])
        table = values.new_zeros(hi - lo, self.size + 1, values.shape[2])
        where = self.index[lo:hi, :, None].expand_as(values)
        return table.scatter_add_(1, where, values)[:, : self.size]

    def cut(self, block: Block) -> Part:
        rows, columns = block
        lo, hi, step = rows.indices(self.size)
        size = len(range(lo, hi, step))
        place = (self.index - lo) // step
        inside = (self.index >= lo) & (self.index < hi) & ((self.index - lo) % step == 0)
        return Scattered(torch.where(inside, place, size), self.values[:, :, columns], size)

    def moments(self, total: Tensor | None) -> tuple[Tensor, Tensor]:
        values = wide(self.values).flatten(0, 1)
        samples = torch.arange(self.m, device=self.index.device)[:, None]
        pairs, place = torch.unique(samples * (self.size + 1) + self.index, return_inverse=True)
        sums = values.new_zeros(len(pairs), values.shape[1])
        sums.index_add_(0, place.flatten(), values)  # one row per (sample, index)
        rows = pairs % (self.size + 1)
        first = values.new_zeros(self.size + 1, values.shape[1]).index_add_(0, rows, sums)
        second = torch.zeros_like(first).index_add_(0, rows, sums.square_())
        return first[: self.size], second[: self.size]


class Owned(Part):
    """A tensor each element of which belongs to one sample: the contribution is its own slice."""

    def __init__(self, values: Tensor, owner: Tensor, m: int) -> None:
        self.values, self.owner, self.m = values, owner, m  # owner: broadcastable to values
        self.shape = tuple(values.shape)

    def take(self, lo: int, hi: int) -> Tensor:
        samples = torch.arange(lo, hi, device=self.values.device)
        chosen = self.owner == samples.reshape(-1, *[1] * self.values.dim())
        return self.values * chosen

    def moments(self, total: Tensor | None) -> tuple[Tensor, Tensor]:
        return self.values.clone(), self.values.square()


class Lazy(Part):
    """Contributions that are computed when asked for."""

    def __init__(self, compute: Callable[[int, int], Tensor], m: int, shape: Sequence[int]) -> None:
        self.compute, self.m, self.shape = compute, m, tuple(shape)

    def take(self, lo: int, hi: int) -> Tensor:
        return self.compute(lo, hi)

    def written_out(self) -> Rows:
        return Rows(self.compute(0, self.m))


class Moved(Part):
    """A part behind views: `move` puts each element in its place in a tensor of the given shape."""

    def __init__(
        self, inner: Part, move: Callable[[Tensor], Tensor], shape: tuple[int, ...]
    ) -> None:
        self.inner, self.move, self.shape, self.m = inner, move, shape, inner.m

    def take(self, lo: int, hi: int) -> Tensor:
        return torch.stack([self.move(each) for each in self.inner.take(lo, hi)])

    def moments(self, total: Tensor | None) -> tuple[Tensor, Tensor]:
        first, second = self.inner.moments(None)
        return self.move(first), self.move(second)
