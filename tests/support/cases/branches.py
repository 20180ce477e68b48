"""Cases: what the data decides, and other ways to write a forward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .common import M, add, linear, model, normal, rows

# --- what the data decides -------------------------------------------------------------------


def _routed(s: Any, x: Tensor) -> Tensor:
    flat = x.reshape(-1, 3)
    chosen = s.gate(flat).argmax(1)
    out = torch.zeros(len(flat), 2, dtype=s.a.weight.dtype)
    for number, expert in enumerate((s.a, s.b)):
        where = (chosen == number).nonzero().flatten()
        out = out.index_add(0, where, expert(flat[where]).to(out.dtype))
    return out.reshape(M, -1, 2)


add(
    "routing to experts",
    model(_routed, gate=linear(3, 2), a=linear(3, 2), b=linear(3, 2)),
    normal(M, M, 3),
)
add(
    "rows shuffled and put back",
    model(lambda s, x: _shuffled(s, x), a=linear(3, 2)),
    normal(M, 3),
)


def _shuffled(s: Any, x: Tensor) -> Tensor:
    order = torch.randperm(len(x))
    return s.a(x[order]).tanh()[order.argsort()]


_signs = iter([1.0, -1.0] * 1000)
add(
    "branch on the data",
    model(
        lambda s, x: s.a(x) if bool(x.sum() > 0) else s.b(x).tanh(),
        a=linear(3, 2),
        b=linear(3, 2),
    ),
    lambda: (torch.randn(M, 3).abs() * next(_signs),),
)
add(
    "masked mean",
    model(
        lambda s, x, mask: s.a((s.b(x) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)),
        a=linear(4, 2),
        b=linear(3, 4),
    ),
    lambda: (torch.randn(M, 5, 3), (torch.rand(M, 5) > 0.3).to(torch.get_default_dtype()) + 1e-3),
)
add(
    "boolean mask",
    model(lambda s, x, mask: _by_mask(s, x, mask), a=linear(3, 3)),
    lambda: (torch.randn(M, 5, 3), torch.rand(M, 5) > 0.4),
)


def _by_mask(s: Any, x: Tensor, mask: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[mask] = s.a(x[mask]).to(out.dtype)
    return out


add(
    "best of several (top k)",
    model(lambda s, x: s.a(x).topk(2, 1).values, a=linear(3, 2)),
    normal(M, M, 3),
)

# --- other ways to write a forward pass ------------------------------------------------------


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x.square() @ w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return 2 * x * (grad @ w.t()), x.square().t() @ grad


add(
    "custom function",
    model(lambda s, x: Square.apply(s.a(x), s.w), a=linear(3, 3), w=(3, 2)),
    normal(M, 3),
    autocast=False,
)
add(
    "activation checkpointing",
    model(
        lambda s, x: s.b(checkpoint(lambda v: s.a(v).tanh(), x, use_reentrant=False)),
        a=linear(3, 4),
        b=linear(4, 2),
    ),
    normal(M, M, 3),
)
add(
    "activation checkpointing of a block",
    model(
        lambda s, x: checkpoint(s.e, x, use_reentrant=False),
        e=lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.3, batch_first=True),
    ),
    normal(M, M, 4),
)
add(
    "loss with sample weights",
    linear(3, 2),
    lambda: (torch.randn(M, 3), torch.rand(M)),
    lambda s, x, w: rows(s(x)) * w / w.sum(),
)
add(
    "frozen layer below",
    lambda: _frozen_below(),
    normal(M, 3),
)


def _frozen_below() -> nn.Module:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    net[0].requires_grad_(False)
    return net


add("input that needs a gradient", linear(3, 2), lambda: (torch.randn(M, 3, requires_grad=True),))
add(
    "complex numbers inside",
    model(lambda s, x: torch.fft.rfft(s.a(x)).abs(), a=linear(3, 6)),
    normal(M, M, 3),
    autocast=False,
)
add(
    "channels last",
    model(lambda s, x: s.c(x.to(memory_format=torch.channels_last)), c=lambda: nn.Conv2d(2, 3, 3)),
    normal(M, 2, 5, 5),
)
