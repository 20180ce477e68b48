"""From the nodes of common layers straight to the moments of a sampled block, or of a small tensor.

Between two large matrix products everything small is out of the caches: a call into PyTorch, or a
few lines of Python, take some ten microseconds there, so that the general way (a `Use`, its rule,
a part) costs more than the sums. A shortcut decides all it can before the pass (`aim`), and then
reads the numbers where they lie. It gives what the general way gives but for rounding; where it
does not apply, the general way is taken.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

from ._graph import Sink
from ._kernels import KERNELS, Kernels, readable
from ._layout import Layout
from ._parts import overlap
from ._rules import RULES, Site, Use, along, keep_readable, noise
from ._sampling import Block, Sampler

__all__ = ["Blocks", "Cell", "cell_for", "shortcut"]

# Addresses for the sum and the sum of squares of the contributions; then what `ratios` in
# `_kernels.c` takes, and the address for what it gives.
Places = tuple[int, int, float, int]
# Takes a node, its incoming gradient, compiled functions and places; False: it does not apply.
Read = Callable[[Any, Tensor, Kernels, Places], Any]
# The block that is drawn: its shape, what each coordinate stands for, and how it is read.
Aimed = tuple[tuple[int, ...], float, Read]
Aim = Callable[[Sampler | None], Aimed | None]
Strides = tuple[int, int, int]  # of a tensor: to the next sample, row and column
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

    def fill(self, node: Any, grad: Tensor) -> bool:
        """Put the moments into their places; False if that cannot be done."""
        fits = grad.dtype is self.dtype and readable(grad)
        self.full = fits and bool(self.read(node, grad, KERNELS[self.dtype], self.places))
        return self.full


def cell_for(site: Site | None, sink: Sink, sampler: Sampler | None) -> Cell | None:
    """The block of a use (without a sampler all of it), if there is a shortcut for it."""
    if site is None or not site.shortcut:
        return None
    aim, dtype, kind = site.shortcut
    aimed = aim(sampler) if RULES.get(kind) is _OURS[kind] else None
    return None if aimed is None else Cell(sink.params[0], dtype, aimed)


class Blocks:
    """Blocks that are read by shortcuts, in one piece of memory."""

    def __init__(self, cells: list[Cell], part: float) -> None:
        self.cells = cells
        end = 2 * len(cells)  # ratios first
        for cell in cells:
            cell.start = end
            end += (2 * cell.size * cell.dtype.itemsize + 7) // 8
        self._room = torch.empty(end, dtype=torch.float64, device="cpu")
        base = self._room.data_ptr()
        for i, cell in enumerate(cells):
            total = base + 8 * cell.start
            cell.places = (total, total + cell.size * cell.dtype.itemsize, part, base + 16 * i)

    def moments(self, cell: Cell) -> tuple[Tensor, Tensor]:
        """Sum and sum of squares of the contributions."""
        numbers = self._room[cell.start :].view(cell.dtype)[: 2 * cell.size]
        total, squares = numbers.view(2, *cell.shape).unbind()
        return total, squares

    def ratios(self) -> list[float]:
        """Two numbers for each cell."""
        numbers: list[float] = self._room[: 2 * len(self.cells)].tolist()
        return numbers


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
        return _matrix(layout, use.shape, sink.transposed, name, "mat1", "_saved_alpha", apart)
    if kind == "MmBackward0" and use.argument == 1 and (straight or sink.transposed):
        return _matrix(layout, use.shape, sink.transposed, name, "self", None, given[0] is None)
    if not straight:
        return None
    if kind == "ConvolutionBackward0" and len(layout.shape) == 4 and layout.shape[0] == layout.m:
        if use.argument == 1 and layout.dim == 0 and len(use.shape) == 4:
            return _filters(layout, use.shape, name)
        if use.argument == 2 and layout.dim == 0:
            return _channels(layout, use.shape, name, use.site)
    if len(use.shape) == 1 and along(use, use.grad) == -1:
        if kind == "AddmmBackward0" and use.argument == 0:
            return _vector(layout, use.shape, name, use.site, "_saved_beta")
        if kind == "AddBackward0":
            scale = "_saved_alpha" if use.argument == 1 else None
            return _vector(layout, use.shape, name, use.site, scale)
        if kind == "NativeLayerNormBackward0":
            return _vector(layout, use.shape, name, use.site, None, use.argument == 1)
    return None


def _reader(layout: Layout) -> Callable[[Tensor], Strides] | None:
    """How a tensor is read that has the samples where the layout has them."""
    m, dim, inner = layout.m, layout.dim, layout.inner
    assert dim is not None
    assert inner is not None
    if len(layout.shape) == 2 and dim == 0:
        outer = layout.shape[0] // (m * inner)
        if inner > 1 and outer > 1:
            return None
        between = m if outer > 1 else 1

        def flat(tensor: Tensor) -> Strides:
            row, column = tensor.stride()
            return row * inner, row * between, column

        return flat
    if len(layout.shape) == 3 and dim < 2 and layout.shape[dim] == m:

        def deep(tensor: Tensor) -> Strides:
            strides = tensor.stride()
            return strides[dim], strides[1 - dim], strides[2]

        return deep
    return None


def _kept(node: Any, name: str) -> Tensor:
    keep_readable(getattr(node, "_raw_saved_" + name))
    tensor: Tensor = getattr(node, "_saved_" + name)
    return tensor


def _alike(grad: Tensor, other: Tensor) -> bool:
    return other.dtype is grad.dtype and readable(other)


def _drawn(
    sampler: Sampler | None, name: str, shape: tuple[int, ...], reads: int, spread: bool = False
) -> tuple[Block | None, float]:
    return (None, 1.0) if sampler is None else sampler.block(name, shape, reads, spread)


def _extent(piece: slice) -> tuple[int, int, int]:
    """First index, step and number of a slice of known ends."""
    step = piece.step or 1
    return piece.start, step, -((piece.start - piece.stop) // step)


def _matrix(
    layout: Layout, of: tuple[int, ...], flip: bool, name: str, saved: str, scale: str | None,
    apart: bool,
) -> Aim | None:  # fmt: skip
    """out = x @ matrix, or its transpose: the block of sum_t x_t^T grad_t."""
    read, m = _reader(layout), layout.m
    if read is None or len(layout.shape) != 2:
        return None
    shape = (of[1], of[0]) if flip else of
    rows = layout.shape[0] // m
    reads, spread = (m * rows, False) if rows > 1 else (0, apart)

    def aim(sampler: Sampler | None) -> Aimed | None:
        piece, weight = _drawn(sampler, name, shape, reads, spread)
        top, down, a = (0, 1, shape[0]) if piece is None else _extent(piece[0])
        start, step, b = (0, 1, shape[1]) if piece is None else _extent(piece[1])

        def block(node: Any, grad: Tensor, kernels: Kernels, places: Places) -> Any:
            x = _kept(node, saved)
            if not _alike(grad, x) or (scale is not None and getattr(node, scale) != 1):
                return False
            left, right = (grad, x) if flip else (x, grad)
            (i, j, k), (u, v, w), size = read(left), read(right), kernels.size
            return kernels.outer(
                left.data_ptr() + top * k * size, i, j, k * down,
                right.data_ptr() + start * w * size, u, v, w * step,
                m, rows, a, b, *places,
            )  # fmt: skip

        return ((a, b), weight, block) if m * rows * a * b <= LARGE else None

    return aim


NOTHING = (0,) * 8


def _vector(
    layout: Layout, shape: tuple[int, ...], name: str, site: Site, scale: str | None,
    norm: bool = False,
) -> Aim | None:  # fmt: skip
    """A vector along the last dimension: added, or multiplied with what a norm gives."""
    read, m = _reader(layout), layout.m
    if read is None:
        return None
    reads = prod(layout.shape[:-1])
    rows = reads // m

    def aim(sampler: Sampler | None) -> Aimed | None:
        if rows > 1 and site.clean is None:
            return None  # the general way finds out
        piece, weight = _drawn(sampler, name, shape, reads)
        start, step, w = (0, 1, shape[0]) if piece is None else _extent(piece[0])
        quiet = rows == 1 or bool(site.clean)

        def block(node: Any, grad: Tensor, kernels: Kernels, places: Places) -> Any:
            if scale is not None and getattr(node, scale) != 1:
                return False
            (i, j, k), others = read(grad), NOTHING
            if norm:
                x, mean, by = (_kept(node, n) for n in ("input", "result1", "result2"))
                if not (_alike(grad, x) and _alike(grad, mean) and mean.stride() == by.stride()):
                    return False
                (u, v, c), (q, r, _) = read(x), read(mean)
                at = x.data_ptr() + start * c * kernels.size
                others = (at, u, v, c * step, mean.data_ptr(), by.data_ptr(), q, r)
            faint = 0.0 if quiet else noise(grad.dtype, rows)
            at = grad.data_ptr() + start * k * kernels.size
            return kernels.columns(at, i, j, k * step, m, rows, w, faint, *others, *places)

        return (w,), weight, block

    return aim


def _channels(layout: Layout, shape: tuple[int, ...], name: str, site: Site) -> Aim:
    """The bias of a convolution."""
    m, line = layout.m, layout.shape[3]
    rows = layout.shape[2] * line

    def aim(sampler: Sampler | None) -> Aimed | None:
        if site.clean is None:
            return None  # the general way finds out
        piece, weight = _drawn(sampler, name, shape, m * rows)
        start, step, w = (0, 1, shape[0]) if piece is None else _extent(piece[0])

        def block(node: Any, grad: Tensor, kernels: Kernels, places: Places) -> Any:
            i, k, far, j = grad.stride()
            if far != line * j:
                return False
            faint = 0.0 if site.clean else noise(grad.dtype, rows)
            at = grad.data_ptr() + start * k * kernels.size
            return kernels.columns(at, i, j, k * step, m, rows, w, faint, *NOTHING, *places)

        return (w,), weight, block

    return aim


_FOUR = ctypes.c_int64 * 4


def _filters(layout: Layout, shape: tuple[int, ...], name: str) -> Aim:
    """The filters of a plain convolution, at one place in the kernel."""
    m, reads = layout.m, layout.m * layout.shape[2] * layout.shape[3]

    def aim(sampler: Sampler | None) -> Aimed | None:
        piece, weight = _drawn(sampler, name, shape, reads)
        if piece is None:
            return None
        rows, columns, down, right = piece
        (top, up, a), (start, step, b) = _extent(rows), _extent(columns)

        def block(node: Any, grad: Tensor, kernels: Kernels, places: Places) -> Any:
            if node._saved_groups != 1 or node._saved_transposed:
                return False
            x = _kept(node, "input")
            if not _alike(grad, x):
                return False
            settings = zip(
                (down.start, right.start), node._saved_stride, node._saved_padding,
                node._saved_dilation, x.shape[2:], grad.shape[2:], strict=True,
            )  # fmt: skip
            (out_h, in_h), (out_w, in_w) = (overlap(*each) for each in settings)
            (g0, g1, g2, g3), (x0, x1, x2, x3) = grad.stride(), x.stride()
            first = top * g1 + out_h.start * g2 + out_w.start * g3
            second = start * x1 + in_h.start * x2 + in_w.start * x3
            return kernels.planes(
                grad.data_ptr() + first * kernels.size, _FOUR(g0, g1 * up, g2, g3),
                x.data_ptr() + second * kernels.size,
                _FOUR(x0, x1 * step, x2 * (in_h.step or 1), x3 * (in_w.step or 1)),
                m, a, b, out_h.stop - out_h.start, out_w.stop - out_w.start, *places,
            )  # fmt: skip

        return (a, b, 1, 1), weight, block

    return aim
