"""Normalisation layers: scale and shift."""

from __future__ import annotations

from heldin.capture.contributions import Contributions
from heldin.capture.moments import upcast

from .use import OpUse, register_op_rule


@register_op_rule("NativeLayerNormBackward0")
def _layer_norm(use: OpUse) -> Contributions | None:
    if use.argument == 2:
        return use.per_sample_sum(use.grad)
    x = upcast(use.saved("input"))
    return use.per_sample_sum(
        upcast(use.grad) * ((x - use.saved("result1")) * use.saved("result2"))
    )


@register_op_rule("NativeGroupNormBackward0")
def _group_norm(use: OpUse) -> Contributions | None:
    if use.argument == 2:
        return use.per_sample_sum(use.grad, axis=1)
    x = upcast(use.saved("input"))
    n, groups = x.shape[0], use.option("group")
    mean, rstd = (upcast(use.saved(name)).reshape(n, groups, 1) for name in ("result1", "result2"))
    centred = ((x.reshape(n, groups, -1) - mean) * rstd).reshape(x.shape)
    return use.per_sample_sum(upcast(use.grad) * centred, axis=1)


@register_op_rule("NativeBatchNormBackward0")
def _batch_norm(use: OpUse) -> Contributions | None:
    if use.argument == 2:
        return use.per_sample_sum(use.grad, axis=1)
    x = upcast(use.saved("input"))
    if use.option("training"):
        mean, rstd = use.saved("result1"), use.saved("result2")
    else:
        mean = use.saved("running_mean")
        rstd = (use.saved("running_var") + use.option("eps")).rsqrt()
    column = (1, -1, *[1] * (x.dim() - 2))
    centred = (x - mean.reshape(column)) * rstd.reshape(column)
    return use.per_sample_sum(upcast(use.grad) * centred, axis=1)
