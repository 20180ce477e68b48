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
    settings = [list(use.option(name)) for name in ("stride", "padding", "dilation")]
    if weight.dim() == 4 and use.option("groups") == 1 and not use.option("transposed"):
        named = dict(zip(("stride", "padding", "dilation"), settings, strict=True))
        return Filters(grad, x, weight.shape[2:], named)
    tail = [use.option("transposed"), list(use.option("output_padding")), use.option("groups")]

    def compute(lo: int, hi: int) -> Tensor:
        each = [
            torch.ops.aten.convolution_backward(
                grad[i], x[i], weight, None, *settings, *tail, [False, True, False]
            )[1]
            for i in range(lo, hi)
        ]
        return upcast(torch.stack(each))

    return Lazy(compute, use.m, use.shape)
