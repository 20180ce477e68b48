"""From the nodes of common layers straight to the moments of a sampled block, or of a small tensor.

Between two large matrix products everything small is out of the caches: a call into PyTorch, or a
few lines of Python, take some ten microseconds there, so that the general way (a `Use`, its rule,
a part) costs more than the sums. A `Spot` decides all it can before the pass (`aim`), where the
same lines run one after the other, and then reads the numbers where they lie. It gives what the
general way gives but for rounding; where it does not apply, the general way is taken.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from math import prod
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ._graph import Sink
from ._kernels import KERNELS, readable
from ._layout import Layout
from ._parts import overlap
from ._rules import RULES, Site, Use, along, keep_readable, noise
from ._sampling import Block, Sampler

__all__ = ["Blocks", "Matrix", "Spot", "Vector", "fill", "shortcut"]

# Addresses for the sum and the sum of squares of the contributions; then what `ratios` in
# `_kernels.c` takes, and the address for what it gives.
Places = tuple[int, int, float, int]
LONG = 1 << 14  # rows, above which sums are formed by PyTorch where rounding decides
LARGE = 1 << 23  # products of two numbers, above which matrices are left to larger machinery
_OURS = dict(RULES)  # a user's own rule goes before


class Spot(ABC):
    """The only use of a parameter; serves one pass after the other.

    Attributes:
        shape, weight: of the block that was aimed at, and what each coordinate stands for.
        room: how many coordinates there are places for.
        full: whether the moments have been put there.
    """

    def __init__(self, use: Use, sink: Sink) -> None:
        self.name, self.dtype, self.kind = sink.params[0], use.grad.dtype, use.node.name()
        self.kernels = KERNELS[self.dtype]
        self.shape: tuple[int, ...] = ()
        self.weight = 1.0
        self.size = self.room = 0
        self.start = 0  # in the memory of all of them
        self.places: Places = (0, 0, 0.0, 0)
        self.full = False
        self.kept: list[_Kept] = []  # what the node has saved

    @abstractmethod
    def aim(self, node: Any, sampler: Sampler | None) -> bool:
        """Choose the block and look up what the node has saved; False: does not apply."""

    @abstractmethod
    def read(self, node: Any, at: int, strides: tuple[int, ...]) -> Any:
        """Form the moments, given address and strides of the gradient; False: does not apply.

        What was saved is let go afterwards: it may be large.
        """

    def let_go(self) -> None:
        """Forget what the node has saved."""
        for kept in self.kept:
            kept.found = None

    def ready(self, node: Any, sampler: Sampler | None) -> bool:
        """`aim`, unless the user has a rule."""
        self.full = False
        return RULES.get(self.kind) is _OURS[self.kind] and self.aim(node, sampler)

    def _take(self, shape: tuple[int, ...], weight: float) -> None:
        self.shape, self.weight, self.size = shape, weight, prod(shape)


def fill(spots: Sequence[Spot | None], node: Any, grad: Tensor | None) -> Sequence[int]:
    """Put the moments into their places; gives the numbers of those for which that failed."""
    if grad is None or not readable(grad):
        return range(len(spots))
    at, strides, dtype = grad.data_ptr(), grad.stride(), grad.dtype
    failed = []
    for i, spot in enumerate(spots):
        if spot is not None and spot.dtype is dtype and spot.read(node, at, strides):
            spot.full = True
        else:
            failed.append(i)
    return failed


class Blocks:
    """Places for the moments of some spots, in one piece of memory.

    The same piece serves one pass after the other: memory that is taken and given back in every
    step would move what PyTorch takes next to it, which costs more than all of this.
    """

    def __init__(self, spots: list[Spot], part: float, memory: Tensor | None) -> None:
        self.spots, self.part = spots, part
        end = 0
        for spot in spots:
            spot.start, spot.room = end, max(spot.room, spot.size)
            end += (2 * spot.room * spot.dtype.itemsize + 7) // 8
        if memory is None or len(memory) < end:
            memory = torch.empty(end, dtype=torch.float64, device="cpu")
        self.memory = memory
        self._ratios = array("d", bytes(16 * len(spots)))
        base, (sums, _) = memory.data_ptr(), self._ratios.buffer_info()
        for i, spot in enumerate(spots):
            total = base + 8 * spot.start
            spot.places = (total, total + spot.room * spot.dtype.itemsize, part, sums + 16 * i)

    def fit(self, part: float, memory: Tensor | None) -> bool:
        """Whether they can serve another pass."""
        if part != self.part or memory is not self.memory:
            return False
        return all(spot.size <= spot.room for spot in self.spots)

    def moments(self, spot: Spot) -> tuple[Tensor, Tensor]:
        """Sum and sum of squares of the contributions, copied."""
        numbers = self.memory[spot.start :].view(spot.dtype)
        total, squares = (
            numbers[at : at + spot.size].clone().view(spot.shape) for at in (0, spot.room)
        )
        return total, squares

    def ratios(self) -> list[float]:
        """Two numbers for each spot."""
        return self._ratios.tolist()


def shortcut(use: Use, sink: Sink, sampler: Sampler | None) -> Spot | None:
    """The shortcut for the only use of a parameter; None: there is none."""
    layout, kind = use.layouts[0], use.node.name()
    if use.grad.dtype not in KERNELS or layout is None or layout.dim is None:
        return None
    if kind not in _OURS or layout.rows is not None:
        return None
    given = [child for child, _ in use.node.next_functions]  # None: needs no gradient
    straight = sink.chain == ()
    if kind == "AddmmBackward0" and use.argument == 2 and (straight or sink.transposed):
        return _matrix(use, sink, layout, "mat1", "_saved_alpha", given[1] is None, sampler)
    if kind == "MmBackward0" and use.argument == 1 and (straight or sink.transposed):
        return _matrix(use, sink, layout, "self", None, given[0] is None, sampler)
    if not straight:
        return None
    if kind == "ConvolutionBackward0" and len(layout.shape) == 4 and layout.shape[0] == layout.m:
        if use.argument == 1 and layout.dim == 0 and len(use.shape) == 4:
            return None if sampler is None else _Filters(use, sink, layout)
        if use.argument == 2 and layout.dim == 0:
            return _Channels(use, sink, layout)
    if len(use.shape) == 1 and along(use, use.grad) == -1:
        if kind == "AddmmBackward0" and use.argument == 0:
            return _vector(use, sink, layout, "_saved_beta")
        if kind == "AddBackward0":
            return _vector(use, sink, layout, "_saved_alpha" if use.argument == 1 else None)
        if kind == "NativeLayerNormBackward0":
            return _vector(use, sink, layout, None, use.argument == 1)
    return None


def _reader(layout: Layout) -> tuple[int, int, int, int] | None:
    """Where the next sample and the next row lie in tensors with the samples of the layout.

    The dimension and the number of steps along it for the sample, then for the row.
    """
    m, dim, inner = layout.m, layout.dim, layout.inner
    assert dim is not None
    assert inner is not None
    if len(layout.shape) == 2 and dim == 0:
        outer = layout.shape[0] // (m * inner)
        return None if inner > 1 and outer > 1 else (0, inner, 0, m if outer > 1 else 1)
    if len(layout.shape) == 3 and dim < 2 and layout.shape[dim] == m:
        return dim, 1, 1 - dim, 1
    return None


class _Kept:
    """Reads a tensor that a node has saved; finds it before the pass, if it lies there as it is."""

    __slots__ = ("_at", "_dtype", "_raw", "_saved", "found", "shape", "strides")

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self._raw = attrgetter("_raw_saved_" + name)
        self._saved = attrgetter("_saved_" + name)
        self._dtype = dtype
        self.found: Tensor | None = None
        self._at = 0
        self.shape: tuple[int, ...] = ()
        self.strides: tuple[int, ...] = ()

    def find(self, node: Any) -> bool:
        """Before the pass; False: nothing that can be read."""
        raw = self._raw(node)
        if getattr(raw, "unpack_hook", raw) is not None:  # packed, as by a checkpoint: not now
            self.found = None
            return True
        return self._keep(raw.data)

    def address(self, node: Any) -> int:
        """During the pass, valid until `found` is let go; 0: nothing that can be read."""
        if self.found is None:
            keep_readable(self._raw(node))
            if not self._keep(self._saved(node)):
                return 0
        assert self.found is not None
        at = self.found.data_ptr()
        if at != self._at and not self._keep(self.found):  # the user has put other data there
            return 0
        return at

    def _keep(self, tensor: Tensor) -> bool:
        if tensor.dtype is not self._dtype or not readable(tensor):
            return False
        if self.found is tensor and tensor.shape != self.shape:
            return False
        self.found, self.shape, self.strides = tensor, tensor.shape, tensor.stride()
        self._at = tensor.data_ptr()
        return True


def _drawn(
    sampler: Sampler | None, name: str, shape: tuple[int, ...], reads: int, spread: bool = False
) -> tuple[Block | None, float]:
    return (None, 1.0) if sampler is None else sampler.block(name, shape, reads, spread)


def _unclear(site: Site, rows: int) -> bool:
    """Whether rounding is a question (see `Site.clean`) that the general way answers better."""
    return site.clean is None or (not site.clean and rows > LONG)


def _extent(piece: slice) -> tuple[int, int, int]:
    """First index, step and number of a slice of known ends."""
    step: int = piece.step
    return piece.start, step, -((piece.start - piece.stop) // step)


def _matrix(
    use: Use,
    sink: Sink,
    layout: Layout,
    saved: str,
    scale: str | None,
    apart: bool,
    sampler: Sampler | None,
) -> Spot | None:
    way = _reader(layout)
    if way is None or len(layout.shape) != 2:
        return None
    if sampler is None and layout.shape[0] * prod(use.shape) > LARGE:
        return None
    return Matrix(use, sink, layout, way, saved, scale, apart)


class Matrix(Spot):
    """out = x @ matrix, or its transpose: the block of sum_t x_t^T grad_t."""

    def __init__(
        self,
        use: Use,
        sink: Sink,
        layout: Layout,
        way: tuple[int, int, int, int],
        saved: str,
        scale: str | None,
        apart: bool,
    ) -> None:
        super().__init__(use, sink)
        _, self._far, _, self._near = way
        self.m, self.flip = layout.m, sink.transposed
        self.whole = (use.shape[1], use.shape[0]) if sink.transposed else use.shape
        self.rows = layout.shape[0] // layout.m
        self._costs = (layout.shape[0], False) if self.rows > 1 else (0, apart)
        self.kept = [_Kept(saved, self.dtype)]
        self.saved, self.scale = saved, scale
        self._scale = None if scale is None else attrgetter(scale)
        self._from = self._by = (0, 0)

    def draw(self, sampler: Sampler | None) -> bool:
        """Choose the block."""
        piece, weight = _drawn(sampler, self.name, self.whole, *self._costs)
        (top, down, a), (start, step, b) = (
            [(0, 1, size) for size in self.whole] if piece is None else map(_extent, piece)
        )
        if self.m * self.rows * a * b > LARGE:
            return False
        self._from, self._by = (top, start), (down, step)
        self._take((a, b), weight)
        return True

    @property
    def block(self) -> tuple[int, ...]:
        """First index, step and number, along rows and columns."""
        return (
            self._from[0], self._by[0], self.shape[0], self._from[1], self._by[1], self.shape[1]
        )  # fmt: skip

    def aim(self, node: Any, sampler: Sampler | None) -> bool:
        if self._scale is not None and self._scale(node) != 1:
            return False
        return self.draw(sampler) and self.kept[0].find(node)

    def read(self, node: Any, at: int, strides: tuple[int, ...]) -> Any:
        left, right = at, self.kept[0].address(node)
        if not right:
            return False
        (i, j), (u, v), far, near = strides, self.kept[0].strides, self._far, self._near
        if not self.flip:
            left, right, i, j, u, v = right, left, u, v, i, j
        (top, start), (down, step), size = self._from, self._by, self.kernels.size
        done = self.kernels.outer(
            left + top * j * size, i * far, i * near, j * down,
            right + start * v * size, u * far, u * near, v * step,
            self.m, self.rows, *self.shape, *self.places,
        )  # fmt: skip
        self.kept[0].found = None
        return done


NOTHING = (0,) * 8


def _vector(
    use: Use, sink: Sink, layout: Layout, scale: str | None, norm: bool = False
) -> Spot | None:
    way = _reader(layout)
    return None if way is None else Vector(use, sink, layout, way, scale, norm)


class Vector(Spot):
    """A vector along the last dimension: added, or multiplied with what a norm gives."""

    def __init__(
        self,
        use: Use,
        sink: Sink,
        layout: Layout,
        way: tuple[int, int, int, int],
        scale: str | None,
        norm: bool,
    ) -> None:
        super().__init__(use, sink)
        self.m, self.whole, self._way, self._site = layout.m, use.shape, way, use.site
        self._reads = prod(layout.shape[:-1])
        self.rows = self._reads // layout.m
        self.scale = scale
        self._scale = None if scale is None else attrgetter(scale)
        saved = ("input", "result1", "result2") if norm else ()
        self.kept = [_Kept(name, self.dtype) for name in saved]
        self._from, self._by = 0, 1

    def aim(self, node: Any, sampler: Sampler | None) -> bool:
        if self.rows > 1 and _unclear(self._site, self.rows):
            return False
        if self._scale is not None and self._scale(node) != 1:
            return False
        return self.draw(sampler) and all(kept.find(node) for kept in self.kept)

    def draw(self, sampler: Sampler | None) -> bool:
        """Choose the block."""
        piece, weight = _drawn(sampler, self.name, self.whole, self._reads)
        self._from, self._by, w = (0, 1, *self.whole) if piece is None else _extent(piece[0])
        self._take((w,), weight)
        return True

    @property
    def block(self) -> tuple[int, ...]:
        """First index, step and number."""
        return self._from, self._by, self.shape[0]

    def read(self, node: Any, at: int, strides: tuple[int, ...]) -> Any:
        (one, far, other, near), m, rows = self._way, self.m, self.rows
        start, step, size, others = self._from, self._by, self.kernels.size, NOTHING
        if self.kept:
            x, mean, by = [kept.address(node) for kept in self.kept]
            u, v, w = [kept.strides for kept in self.kept]
            if not (x and mean and by) or v != w:
                return False
            others = (
                x + start * u[-1] * size, u[one] * far, u[other] * near, u[-1] * step,
                mean, by, v[one] * far, v[other] * near,
            )  # fmt: skip
        faint = 0.0 if rows == 1 or self._site.clean else noise(self.dtype, rows)
        done = self.kernels.columns(
            at + start * strides[-1] * size, strides[one] * far, strides[other] * near,
            strides[-1] * step, m, rows, *self.shape, faint, *others, *self.places,
        )  # fmt: skip
        if self.kept:
            self.let_go()
        return done


class _Channels(Spot):
    """The bias of a convolution."""

    def __init__(self, use: Use, sink: Sink, layout: Layout) -> None:
        super().__init__(use, sink)
        self._m, self._line, self._site, self._whole = (
            layout.m,
            layout.shape[3],
            use.site,
            use.shape,
        )
        self._rows = layout.shape[2] * self._line
        self._from, self._by = 0, 1

    def aim(self, node: Any, sampler: Sampler | None) -> bool:
        if _unclear(self._site, self._rows):
            return False
        piece, weight = _drawn(sampler, self.name, self._whole, self._m * self._rows)
        self._from, self._by, w = (0, 1, *self._whole) if piece is None else _extent(piece[0])
        self._take((w,), weight)
        return True

    def read(self, node: Any, at: int, strides: tuple[int, ...]) -> Any:
        i, k, far, j = strides
        if far != self._line * j:
            return False
        faint = 0.0 if self._site.clean else noise(self.dtype, self._rows)
        return self.kernels.columns(
            at + self._from * k * self.kernels.size, i, j, k * self._by, self._m, self._rows,
            *self.shape, faint, *NOTHING, *self.places,
        )  # fmt: skip


_settings = attrgetter("_saved_stride", "_saved_padding", "_saved_dilation")


class _Filters(Spot):
    """The filters of a plain convolution, at one place in the kernel."""

    def __init__(self, use: Use, sink: Sink, layout: Layout) -> None:
        super().__init__(use, sink)
        self._m, self._whole, self._out = layout.m, use.shape, layout.shape[2:]
        self.kept = [_Kept("input", self.dtype)]
        self._piece: Block = ()
        self._settings: Any = ()
        self._meet: list[tuple[slice, slice]] = []

    def aim(self, node: Any, sampler: Sampler | None) -> bool:
        if node._saved_groups != 1 or node._saved_transposed:
            return False
        piece, weight = _drawn(sampler, self.name, self._whole, self._m * prod(self._out))
        if piece is None:
            return False
        self._piece, self._settings = piece, _settings(node)
        self._take((_extent(piece[0])[2], _extent(piece[1])[2], 1, 1), weight)
        known = self.kept[0].find(node)
        self._meet = [] if self.kept[0].found is None else self._overlaps()
        return known

    def _overlaps(self) -> list[tuple[slice, slice]]:
        """Where outputs and inputs meet, along height and width."""
        starts = [place.start for place in self._piece[2:]]
        each = zip(starts, *self._settings, self.kept[0].shape[2:], self._out, strict=True)
        return [overlap(*one) for one in each]

    def read(self, node: Any, at: int, strides: tuple[int, ...]) -> Any:
        x = self.kept[0].address(node)
        if not x:
            return False
        rows, columns, *_ = self._piece
        (out_h, in_h), (out_w, in_w) = self._meet or self._overlaps()
        (g0, g1, g2, g3), (x0, x1, x2, x3) = strides, self.kept[0].strides
        first = rows.start * g1 + out_h.start * g2 + out_w.start * g3
        second = columns.start * x1 + in_h.start * x2 + in_w.start * x3
        done = self.kernels.planes(
            at + first * self.kernels.size, g0, g1 * rows.step, g2, g3,
            x + second * self.kernels.size,
            x0, x1 * columns.step, x2 * (in_h.step or 1), x3 * (in_w.step or 1),
            self._m, *self.shape[:2], out_h.stop - out_h.start, out_w.stop - out_w.start,
            *self.places,
        )  # fmt: skip
        self.kept[0].found = None
        return done
