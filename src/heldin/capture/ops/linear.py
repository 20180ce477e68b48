"""Matrix products."""

from __future__ import annotations

import torch
from torch import Tensor

from heldin.capture.contributions import Contributions, Lazy, Outer, Owned
from heldin.capture.moments import upcast

from .use import OpUse, register_op_rule


def _matrix(
    use: OpUse, left: str, right: str, argument: int, scale: float = 1.0
) -> Contributions | None:
    """Return contributions to one factor of left @ right, if the other has rows of samples."""
    if (use.layout.dim, argument) not in ((0, 1), (1, 0)):
        return None
    factor = use.saved(left if argument == 1 else right)
    strided = factor if factor.layout is torch.strided else factor.to_dense()
    x, delta = use.layout.split(strided), use.layout.split(use.grad)
    # Input features are sampled with a stride: adjacent raw inputs (pixels) are correlated, hidden
    # units are not. With one row per sample, a stride costs little.
    spread = x.shape[1] == 1 and not factor.requires_grad
    x = x if scale == 1 else x * scale
    return Outer(x, delta, spread) if argument == 1 else Outer(delta, x, spread)


@register_op_rule("MmBackward0")
def _mm(use: OpUse) -> Contributions | None:
    return _matrix(use, "self", "mat2", use.argument)


@register_op_rule("AddmmBackward0", "SparseAddmmBackward0")
def _addmm(use: OpUse) -> Contributions | None:
    if use.argument == 0:
        beta = use.option("beta")
        return use.per_sample_sum(use.grad if beta == 1 else use.grad * beta)
    return _matrix(use, "mat1", "mat2", use.argument - 1, use.option("alpha"))


@register_op_rule("BmmBackward0")
def _bmm(use: OpUse) -> Contributions | None:
    """Handle (b, n, k) @ (b, k, p), where samples are rows of every product or whole products."""
    if use.argument == 1 and use.layout.dim == 1:
        x = use.layout.split(use.saved("self"), 1)  # (m, r, b, k)
        delta = use.layout.split(use.grad)  # (m, r, b, p)
    elif use.argument == 0 and use.layout.dim == 2:
        x = use.layout.split(use.grad)  # (m, r, b, n)
        delta = use.layout.split(use.saved("mat2"), 2)  # (m, r, b, k)
    elif use.layout.dim == 0:
        grad = upcast(use.grad)
        other = upcast(use.saved("mat2" if use.argument == 0 else "self")).mT
        values = grad @ other if use.argument == 0 else other @ grad
        return Owned(values, use.layout.owner_on(values.device), use.m)
    else:
        return None
    x, delta = upcast(x), upcast(delta)

    def compute(lo: int, hi: int) -> Tensor:
        return torch.einsum("irbk,irbp->ibkp", x[lo:hi], delta[lo:hi])

    return Lazy(compute, use.m, use.shape)
