"""Elementwise ops: sums over the dimensions along which the parameter is broadcast."""

from __future__ import annotations

import torch

from heldin.capture.contributions import Contributions
from heldin.capture.moments import upcast

from .use import OpUse, register_op_rule


@register_op_rule("AddBackward0")
def _add(use: OpUse) -> Contributions | None:
    alpha = use.option("alpha") if use.argument == 1 else 1
    return use.per_sample_sum(use.grad if alpha == 1 else use.grad * alpha)


@register_op_rule("SubBackward0")
def _sub(use: OpUse) -> Contributions | None:
    return use.per_sample_sum(use.grad if use.argument == 0 else use.grad * -use.option("alpha"))


@register_op_rule("ExpandBackward0")
def _expand(use: OpUse) -> Contributions | None:
    return use.per_sample_sum(use.grad)


@register_op_rule("MulBackward0")
def _mul(use: OpUse) -> Contributions | None:
    other = use.saved("other" if use.argument == 0 else "self")
    return use.per_sample_sum(upcast(use.grad) * other)


@register_op_rule("DivBackward0")
def _div(use: OpUse) -> Contributions | None:
    return use.per_sample_sum(upcast(use.grad) / use.saved("other")) if use.argument == 0 else None


@register_op_rule("PreluKernelBackward0")
def _prelu(use: OpUse) -> Contributions | None:
    if use.argument != 1:
        return None
    x = use.saved("self")
    return use.per_sample_sum(torch.where(x > 0, 0.0, upcast(use.grad) * x))
