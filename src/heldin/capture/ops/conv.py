"""Convolutions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from heldin.capture.contributions import Contributions, Lazy
from heldin.capture.moments import upcast
from heldin.capture.sampling import Block

from .use import OpUse, register_op_rule

__all__ = ["Filters"]

PATCHES = 1 << 20  # elements of patches per chunk


@register_op_rule("ConvolutionBackward0")
def _convolution(use: OpUse) -> Contributions | None:
    if use.layout.dim != 0:
        return None
    if use.argument == 2:
        return use.per_sample_sum(use.grad, axis=1)
    if use.argument != 1:
        return None
    x, grad = use.layout.split(use.saved("input")), use.layout.split(use.grad)
    weight = use.saved("weight")
    axes = weight.dim() - 2
    settings = {name: _per_axis(use, name, axes) for name in ("stride", "padding", "dilation")}
    if axes == 2 and use.option("groups") == 1 and not use.option("transposed"):
        return Filters(grad, x, weight.shape[2:], settings)
    tail = [use.option("transposed"), _per_axis(use, "output_padding", axes), use.option("groups")]

    def compute(lo: int, hi: int) -> Tensor:
        gradients = [
            torch.ops.aten.convolution_backward(
                grad[i], x[i], weight, None, *settings.values(), *tail, [False, True, False]
            )[1]
            for i in range(lo, hi)
        ]
        return upcast(torch.stack(gradients))

    return Lazy(compute, use.m, use.shape)


def _per_axis(use: OpUse, name: str, axes: int) -> list[int]:
    """Read a setting that has one number per axis, or one for all (`padding="valid"`)."""
    numbers = list(use.option(name))
    return numbers * axes if len(numbers) == 1 else numbers


class Filters(Contributions):
    """Contributions to the filters (O, C, k, k) of a plain convolution, from image patches."""

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
        self.place = place  # the sampled kernel position; None: all of them
        self.m = grad.shape[0]
        self.shape = (grad.shape[2], x.shape[2], *((1, 1) if place else self.kernel))
        self.reads = self.m * grad.shape[1] * grad.shape[3] * grad.shape[4]

    def restrict(self, block: Block) -> Contributions:
        rows, columns, down, right = block
        grad, x = self.grad[:, :, rows], self.x[:, :, columns]
        whole = (down.stop - down.start, right.stop - right.start) == self.kernel
        place = None if whole else (down.start, right.start)
        return Filters(grad, x, self.kernel, self.settings, place)

    def samples(self, lo: int, hi: int) -> Tensor:
        x, grad = upcast(self.x[lo:hi]), upcast(self.grad[lo:hi])
        if self.place is None:
            patches = F.unfold(x.flatten(0, 1), self.kernel, **self.settings)  # type: ignore[arg-type]
        else:
            (up, down), (left, right) = (self._overlap(axis, self.place[axis]) for axis in (0, 1))
            grad, patches = grad[..., up, left], x[..., down, right]
        delta = grad.flatten(3)  # (n, r, O, L)
        patches = patches.reshape(*delta.shape[:2], prod(self.shape[1:]), delta.shape[3])
        if delta.shape[1] == 1:
            contributions = delta[:, 0] @ patches[:, 0].mT
        else:
            contributions = torch.einsum("irol,irkl->iok", delta, patches)
        return contributions.reshape(hi - lo, *self.shape)

    def _overlap(self, axis: int, place: int) -> tuple[slice, slice]:
        """Return the outputs and the inputs that meet at one kernel position along an axis.

        The other outputs meet padding there.
        """
        names = ("stride", "padding", "dilation")
        stride, padding, dilation = (self.settings[name][axis] for name in names)
        size, outputs = self.x.shape[3 + axis], self.grad.shape[3 + axis]
        shift = place * dilation - padding
        first = max(0, -(shift // stride))
        last = min(outputs, (size - 1 - shift) // stride + 1)
        if last <= first:
            return slice(0, 0), slice(0, 0)
        start = first * stride + shift
        return slice(first, last), slice(start, start + (last - first - 1) * stride + 1, stride)

    def moments(self, total: Tensor | None, room: Tensor | None = None) -> tuple[Tensor, Tensor]:
        work = self.reads * prod(self.shape[1:]) // self.m + self.numel
        step = max(1, min(self.m, PATCHES // max(1, work)))
        first, second = total, None
        for lo in range(0, self.m, step):
            contributions = self.samples(lo, min(self.m, lo + step))
            if total is None:
                sums = contributions.sum(0)
                first = sums if first is None else first.add_(sums)
            squares = contributions.square_().sum(0)
            second = squares if second is None else second.add_(squares)
        assert first is not None
        assert second is not None
        return first, second
