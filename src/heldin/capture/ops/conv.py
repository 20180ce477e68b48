"""Convolutions."""

from __future__ import annotations

import torch
from torch import Tensor

from heldin.capture.contributions import Contributions, Filters, Lazy
from heldin.capture.moments import upcast

from .registry import register_op_rule
from .use import OpUse


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
