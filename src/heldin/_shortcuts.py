"""From the nodes of common layers straight to the moments of a sampled block, or of a small tensor.

Between two large matrix products everything small is out of the caches: a call into PyTorch, or a
few lines of Python, take some ten microseconds there, so that the general way (a `Use`, its rule,
a part) costs more than the sums. A shortcut decides all it can before the pass (`aim`), and then
reads the numbers where they lie. It gives what the general way gives but for rounding; where it
does not apply, the general way is taken.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
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

__all__ = ["Blocks", "Cell", "cell_for", "fill", "shortcut"]

# Addresses for the sum and the sum of squares of the contributions; then what `ratios` in
# `_kernels.c` takes, and the address for what it gives.
Places = tuple[int, int, float, int]
# Takes a node, address and strides of its incoming gradient, and places; False: does not apply.
Read = Callable[[Any, int, tuple[int, ...], Places], Any]
# The block that is drawn: its shape, what each coordinate stands for, and how it is read.
Aimed = tuple[tuple[int, ...], float, Read]
Aim = Callable[[Sampler | None], Aimed | None]
LONG = 1 << 14  # rows, above which sums are formed by PyTorch where rounding decides
LARGE = 1 << 23  # products of two numbers, above which matrices are left to larger machinery
_OURS = dict(RULES)  # a user's own rule goes before


class Cell:
    """A block, and the places for its moments."""

    __slots__ = ("dtype", "full", "name", "places", "read", "shape", "size", "start", "weight")

    def __init__(self, name: str, dtype: torch.dtype, aimed: Aimed) -> None:
        self.name, self.dtype = name, dtype
        self.shape, self.weight, self.read = aimed
        self.size = prod(self.shape)
        self.start = 0  # in the memory of all of them
        self.places: Places = (0, 0, 0.0, 0)
        self.full = False


def fill(cells: Sequence[Cell | None], node: Any, grad: Tensor | None) -> Iterator[int]:
    """Put the moments into their places; gives the numbers of those for which that failed."""
    if grad is None or not readable(grad):
        yield from range(len(cells))
        return
    at, strides, dtype = grad.data_ptr(), grad.stride(), grad.dtype
    for i, cell in enumerate(cells):
        if cell is None or cell.dtype is not dtype:
            yield i
        elif cell.read(node, at, strides, cell.places):
            cell.full = True
        else:
            yield i


def cell_for(site: Site | None, sink: Sink, sampler: Sampler | None) -> Cell | None:
    """The block of a use (without a sampler all of it), if there is a shortcut for it."""
    if site is None or not site.shortcut:
        return None
    aim, dtype, kind = site.shortcut
    aimed = aim(sampler) if RULES.get(kind) is _OURS[kind] else None
    return None if aimed is None else Cell(sink.params[0], dtype, aimed)


class Blocks:
    """Blocks that are read by shortcuts, in one piece of memory.

    The same piece, `room`, serves one pass after the other: memory that is taken and given back in
    every step would move what PyTorch takes next to it, which costs more than all of this.
    """

    def __init__(self, cells: list[Cell], part: float, room: Tensor | None) -> None:
        self.cells = cells
        end = 0
        for cell in cells:
            cell.start = end
            end += (2 * cell.size * cell.dtype.itemsize + 7) // 8
        if room is None or len(room) < end:
            room = torch.empty(end, dtype=torch.float64, device="cpu")
        self.room = room
        self._ratios = array("d", bytes(16 * len(cells)))
        base, (sums, _) = room.data_ptr(), self._ratios.buffer_info()
        for i, cell in enumerate(cells):
            total = base + 8 * cell.start
            cell.places = (total, total + cell.size * cell.dtype.itemsize, part, sums + 16 * i)

    def moments(self, cell: Cell) -> tuple[Tensor, Tensor]:
        """Sum and sum of squares of the contributions, copied."""
        numbers = self.room[cell.start :].view(cell.dtype)[: 2 * cell.size]
        total, squares = numbers.clone().view(2, *cell.shape).unbind()
        return total, squares

    def ratios(self) -> list[float]:
        """Two numbers for each cell."""
        return self._ratios.tolist()


def shortcut(use: Use, sink: Sink) -> tuple[Aim, torch.dtype, str] | None:
    """The shortcut for the only use of a parameter; None: there is none."""
    layout, name, kind = use.layouts[0], sink.params[0], use.node.name()
    if use.grad.dtype not in KERNELS or layout is None or layout.dim is None:
        return None
    aim = None if layout.rows is not None else _aim(use, sink, layout, name, kind)
    return None if aim is None else (aim, use.grad.dtype, kind)


def _aim(use: Use, sink: Sink, layout: Layout, name: str, kind: str) -> Aim | None:
    given = [child for child, _ in use.node.next_functions]  # None: needs no gradient
    straight = sink.chain == ()
    if kind == "AddmmBackward0" and use.argument == 2 and (straight or sink.transposed):
        apart = given[1] is None
        return _matrix(use, layout, sink.transposed, name, "mat1", "_saved_alpha", apart)
    if kind == "MmBackward0" and use.argument == 1 and (straight or sink.transposed):
        return _matrix(use, layout, sink.transposed, name, "self", None, given[0] is None)
    if not straight:
        return None
    if kind == "ConvolutionBackward0" and len(layout.shape) == 4 and layout.shape[0] == layout.m:
        if use.argument == 1 and layout.dim == 0 and len(use.shape) == 4:
            return _filters(use, layout, name)
        if use.argument == 2 and layout.dim == 0:
            return _channels(use, layout, name)
    if len(use.shape) == 1 and along(use, use.grad) == -1:
        if kind == "AddmmBackward0" and use.argument == 0:
            return _vector(use, layout, name, "_saved_beta")
        if kind == "AddBackward0":
            scale = "_saved_alpha" if use.argument == 1 else None
            return _vector(use, layout, name, scale)
        if kind == "NativeLayerNormBackward0":
            return _vector(use, layout, name, None, use.argument == 1)
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
    """Reads a tensor that a node has saved."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self._raw = attrgetter("_raw_saved_" + name)
        self._saved = attrgetter("_saved_" + name)
        self._dtype = dtype

    def __call__(self, node: Any) -> Tensor | None:
        keep_readable(self._raw(node))
        tensor: Tensor = self._saved(node)
        return tensor if tensor.dtype is self._dtype and readable(tensor) else None


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
    use: Use, layout: Layout, flip: bool, name: str, saved: str, scale: str | None, apart: bool
) -> Aim | None:
    """out = x @ matrix, or its transpose: the block of sum_t x_t^T grad_t."""
    way, m = _reader(layout), layout.m
    if way is None or len(layout.shape) != 2:
        return None
    _, far, _, near = way
    shape = (use.shape[1], use.shape[0]) if flip else use.shape
    rows = layout.shape[0] // m
    reads, spread = (m * rows, False) if rows > 1 else (0, apart)
    kept, scaled = _Kept(saved, use.grad.dtype), None if scale is None else attrgetter(scale)
    kernels = KERNELS[use.grad.dtype]
    size = kernels.size

    def aim(sampler: Sampler | None) -> Aimed | None:
        piece, weight = _drawn(sampler, name, shape, reads, spread)
        top, down, a = (0, 1, shape[0]) if piece is None else _extent(piece[0])
        start, step, b = (0, 1, shape[1]) if piece is None else _extent(piece[1])

        def block(node: Any, at: int, strides: tuple[int, ...], places: Places) -> Any:
            x = kept(node)
            if x is None or (scaled is not None and scaled(node) != 1):
                return False
            left, right, (i, j), (u, v) = at, x.data_ptr(), strides, x.stride()
            if not flip:
                left, right, i, j, u, v = right, left, u, v, i, j
            return kernels.outer(
                left + top * j * size, i * far, i * near, j * down,
                right + start * v * size, u * far, u * near, v * step,
                m, rows, a, b, *places,
            )  # fmt: skip

        return ((a, b), weight, block) if m * rows * a * b <= LARGE else None

    return aim


NOTHING = (0,) * 8


def _vector(
    use: Use, layout: Layout, name: str, scale: str | None, norm: bool = False
) -> Aim | None:
    """A vector along the last dimension: added, or multiplied with what a norm gives."""
    way, m = _reader(layout), layout.m
    if way is None:
        return None
    one, far, other, near = way
    reads = prod(layout.shape[:-1])
    rows = reads // m
    scaled, dtype, site, shape = None, use.grad.dtype, use.site, use.shape
    if scale is not None:
        scaled = attrgetter(scale)
    kept = [_Kept(saved, dtype) for saved in ("input", "result1", "result2")] if norm else []
    kernels = KERNELS[dtype]
    size = kernels.size

    def aim(sampler: Sampler | None) -> Aimed | None:
        if rows > 1 and _unclear(site, rows):
            return None
        piece, weight = _drawn(sampler, name, shape, reads)
        start, step, w = (0, 1, shape[0]) if piece is None else _extent(piece[0])
        faint = 0.0 if rows == 1 or site.clean else noise(dtype, rows)

        def block(node: Any, at: int, strides: tuple[int, ...], places: Places) -> Any:
            if scaled is not None and scaled(node) != 1:
                return False
            others = NOTHING
            if kept:
                x, mean, by = [read(node) for read in kept]
                if x is None or mean is None or by is None or mean.stride() != by.stride():
                    return False
                u, v = x.stride(), mean.stride()
                others = (
                    x.data_ptr() + start * u[-1] * size, u[one] * far, u[other] * near,
                    u[-1] * step, mean.data_ptr(), by.data_ptr(), v[one] * far, v[other] * near,
                )  # fmt: skip
            return kernels.columns(
                at + start * strides[-1] * size, strides[one] * far,
                strides[other] * near, strides[-1] * step, m, rows, w, faint, *others, *places,
            )  # fmt: skip

        return (w,), weight, block

    return aim


def _channels(use: Use, layout: Layout, name: str) -> Aim:
    """The bias of a convolution."""
    m, line, site, shape = layout.m, layout.shape[3], use.site, use.shape
    rows, kernels, dtype = layout.shape[2] * line, KERNELS[use.grad.dtype], use.grad.dtype

    def aim(sampler: Sampler | None) -> Aimed | None:
        if _unclear(site, rows):
            return None
        piece, weight = _drawn(sampler, name, shape, m * rows)
        start, step, w = (0, 1, shape[0]) if piece is None else _extent(piece[0])

        def block(node: Any, at: int, strides: tuple[int, ...], places: Places) -> Any:
            i, k, far, j = strides
            if far != line * j:
                return False
            faint = 0.0 if site.clean else noise(dtype, rows)
            first = at + start * k * kernels.size
            return kernels.columns(first, i, j, k * step, m, rows, w, faint, *NOTHING, *places)

        return (w,), weight, block

    return aim


def _filters(use: Use, layout: Layout, name: str) -> Aim:
    """The filters of a plain convolution, at one place in the kernel."""
    m, reads = layout.m, layout.m * layout.shape[2] * layout.shape[3]
    kept, kernels, shape = _Kept("input", use.grad.dtype), KERNELS[use.grad.dtype], use.shape

    def aim(sampler: Sampler | None) -> Aimed | None:
        piece, weight = _drawn(sampler, name, shape, reads)
        if piece is None:
            return None
        rows, columns, down, right = piece
        (top, up, a), (start, step, b) = _extent(rows), _extent(columns)

        def block(node: Any, at: int, strides: tuple[int, ...], places: Places) -> Any:
            if node._saved_groups != 1 or node._saved_transposed:
                return False
            x = kept(node)
            if x is None:
                return False
            settings = zip(
                (down.start, right.start), node._saved_stride, node._saved_padding,
                node._saved_dilation, x.shape[2:], layout.shape[2:], strict=True,
            )  # fmt: skip
            (out_h, in_h), (out_w, in_w) = (overlap(*each) for each in settings)
            (g0, g1, g2, g3), (x0, x1, x2, x3) = strides, x.stride()
            first = top * g1 + out_h.start * g2 + out_w.start * g3
            second = start * x1 + in_h.start * x2 + in_w.start * x3
            return kernels.planes(
                at + first * kernels.size, g0, g1 * up, g2, g3,
                x.data_ptr() + second * kernels.size,
                x0, x1 * step, x2 * (in_h.step or 1), x3 * (in_w.step or 1),
                m, a, b, out_h.stop - out_h.start, out_w.stop - out_w.start, *places,
            )  # fmt: skip

        return (a, b, 1, 1), weight, block

    return aim
