"""Cases: matrices, where the batch is, parameters that meet the data in other ways."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from .common import M, add, linear, model, normal, rows, tokens

# --- matrices and where the batch is ---------------------------------------------------------

add("linear", linear(3, 2), normal(M, 3))
add("linear, no bias", linear(3, 2, False), normal(M, 3))
add(
    "mlp",
    lambda: nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)),
    normal(M, 3),
)
add("linear on a sequence, T = m", linear(3, 2), normal(M, M, 3))
add("linear on a grid", linear(3, 2), normal(M, 2, M, 3))
add(
    "batch folded into rows",
    model(lambda s, x: s.a(x.reshape(-1, 3)).reshape(M, -1), a=linear(3, 2)),
    normal(M, M, 3),
)
add(
    "batch folded into rows, time first",
    model(
        lambda s, x: s.a(x.transpose(0, 1).reshape(-1, 3)).reshape(M, M, 2).transpose(0, 1),
        a=linear(3, 2),
    ),
    normal(M, M, 3),
)
add(
    "batch in the last dimension",
    model(lambda s, x: (s.w @ x.t()).tanh().t(), w=(2, 3)),
    normal(M, 3),
)
add(
    "batch in dimension 1 of the input",
    lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)),
    normal(5, M, 3),
    lambda s, x: s(x).sin().mean((0, 2)),
    batch_dim=1,
)
add(
    "batch in dimension 1, T = m",
    lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)),
    normal(M, M, 3),
    lambda s, x: s(x).sin().mean((0, 2)),
    batch_dim=1,
)
add(
    "batch dimension counted from the end",
    model(lambda s, x: s.a(x.mT), a=linear(3, 2)),
    normal(5, 3, M),
    lambda s, x: s(x).sin().mean((0, 2)),
    batch_dim=-1,
)
add("bilinear", lambda: nn.Bilinear(3, 2, 4), lambda: (torch.randn(M, 3), torch.randn(M, 2)))
add(
    "einsum",
    model(lambda s, x: torch.einsum("ntd,de->nte", x, s.w).tanh(), w=(3, 2)),
    normal(M, M, 3),
)
add(
    "einsum, heads",
    model(lambda s, x: torch.einsum("ntd,hde->nhte", x, s.w).tanh(), w=(2, 3, 5)),
    normal(M, M, 3),
)
add(
    "matmul with an expanded matrix",
    model(lambda s, x: x @ s.w.expand(len(x), 3, 2), w=(3, 2)),
    normal(M, 5, 3),
)
add(
    "batched matrices (mixture of experts, dense)",
    model(lambda s, x: torch.bmm(x.expand(2, -1, -1), s.w).tanh().transpose(0, 1), w=(2, 3, 4)),
    normal(M, 3),
)
add("matrix-vector", model(lambda s, x: (x @ s.w).tanh()[:, None], w=(3,)), normal(M, 3))
add(
    "addmm with factors",
    model(lambda s, x: torch.addmm(s.b, x, s.w, beta=0.5, alpha=3.0), w=(3, 2), b=(2,)),
    normal(M, 3),
)
add(
    "linear subclass",
    lambda: type("Odd", (nn.Linear,), {"forward": lambda s, x: F.linear(x, s.weight * 2, s.bias)})(
        3, 2
    ),
    normal(M, 3),
)

# --- parameters that meet the data in other ways ---------------------------------------------

add("scale and shift", model(lambda s, x: x * s.g + s.b, g=(3,), b=(3,)), normal(M, M, 3))
add("scalar parameter", model(lambda s, x: (x * s.g).tanh(), g=()), normal(M, 3))
add("division", model(lambda s, x: s.a / (1 + x**2) - s.b, a=(3,), b=(1,)), normal(M, 3))
add("denominator", model(lambda s, x: x / (2 + s.a**2), a=(3,)), normal(M, M, 3))
add("subtracted", model(lambda s, x: torch.sub(x, s.a, alpha=2).tanh(), a=(M, 3)), normal(M, M, 3))
add("exponent", model(lambda s, x: x.exp() ** s.a.sigmoid(), a=(3,)), normal(M, 3))
add("where", model(lambda s, x: torch.where(x > 0, x * 2, s.a), a=(3,)), normal(M, M, 3))
add("lerp", model(lambda s, x: torch.lerp(x, x.tanh(), s.a), a=(3,)), normal(M, 3))
add("position parameter", model(lambda s, x: (x + s.p).tanh(), p=(M, 3)), normal(M, M, 3))
add(
    "position parameter (1, T, d)",
    model(lambda s, x: (x + s.p).sin(), p=(1, M, 3)),
    normal(M, M, 3),
)
add(
    "position parameter, cut to length",
    model(lambda s, x: s.a(x + s.p[: x.shape[1]]), p=(9, 3), a=linear(3, 2)),
    normal(M, M, 3),
)
add(
    "position embedding broadcast over the batch",
    model(
        lambda s, i: s.a(s.tok(i) + s.pos(torch.arange(i.shape[1])[None])),
        tok=lambda: nn.Embedding(11, 3),
        pos=lambda: nn.Embedding(8, 3),
        a=linear(3, 2),
    ),
    tokens(M, M),
)
add(
    "relative position table",
    model(
        lambda s, x: (
            torch.softmax(x @ x.mT + s.t[(torch.arange(M)[:, None] - torch.arange(M)) + M - 1], -1)
            @ x
        ),
        t=(2 * M - 1,),
    ),
    normal(M, M, 3),
)
add(
    "class token",
    model(
        lambda s, x: s.a(torch.cat([s.c.expand(len(x), 1, 3), x], 1) + s.p).tanh().softmax(1),
        c=(1, 1, 3),
        p=(1, M + 1, 3),
        a=linear(3, 3),
    ),
    normal(M, M, 3),
)
add(
    "class token, stacked by repeat",
    model(
        lambda s, x: s.a(torch.cat([s.c.repeat(len(x), 1, 1), x], 1)), c=(1, 1, 3), a=linear(3, 2)
    ),
    normal(M, M, 3),
)
add(
    "learnt queries",
    model(
        lambda s, x: s.att(s.q.expand(len(x), -1, -1), x, x)[0],
        q=(1, 2, 4),
        att=lambda: nn.MultiheadAttention(4, 2, batch_first=True),
    ),
    normal(M, M, 4),
)
add(
    "a row of parameters per sample",
    model(lambda s, x: (x + s.w).tanh(), w=(M, 3)),
    normal(M, 3),
)
add(
    "zeros filled in place",
    model(
        lambda s, x: s.a(_filled(x)),
        a=linear(3, 2),
    ),
    normal(M, M, 3),
)


def _filled(x: Tensor) -> Tensor:
    out = x.new_zeros(x.shape[0], x.shape[1] + 2, x.shape[2])
    out[:, 1:-1] = x
    return out


add("transposed weight", model(lambda s, x: x @ s.w.t(), w=(2, 3)), normal(M, 3))
add(
    "weight from a view",
    model(lambda s, x: F.linear(x, s.w.view(2, 3), s.w[:2]), w=(6,)),
    normal(M, 3),
)
add(
    "weight in slices",
    model(lambda s, x: F.linear(x, s.w[:2]) * F.linear(x, s.w[2:]), w=(4, 3)),
    normal(M, M, 3),
)
add(
    "weight cast to another precision",
    model(lambda s, x: F.linear(x.float(), s.w.float()).to(x.dtype), w=(2, 3)),
    normal(M, 3),
    exact=False,
)
add("weight times a number", model(lambda s, x: F.linear(x, s.w * 3), w=(2, 3)), normal(M, M, 3))
add(
    "merged low rank",
    model(lambda s, x: F.linear(x, s.w + s.b @ s.a), w=(2, 3), b=(2, 1), a=(1, 3)),
    normal(M, M, 3),
)
add(
    "low-rank adapter",
    model(lambda s, x: s.base(x) + x @ s.a @ s.b, base=linear(3, 2), a=(3, 1), b=(1, 2)),
    normal(M, M, 3),
)
add(
    "weight norm",
    lambda: nn.Sequential(
        parametrizations.weight_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 2)
    ),
    normal(M, M, 3),
)
add(
    "weight norm of a convolution",
    lambda: parametrizations.weight_norm(nn.Conv1d(3, 2, 2)),
    normal(M, 3, 6),
)
add(
    "orthogonal weight",
    lambda: parametrizations.orthogonal(nn.Linear(3, 3), orthogonal_map="cayley"),
    normal(M, 3),
    autocast=False,
)
add(
    "masked weight",
    lambda: _masked(),
    normal(M, 3),
)


def _masked() -> nn.Module:
    class Mask(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return w * torch.ones_like(w).tril()

    layer = nn.Linear(3, 3)
    parametrize.register_parametrization(layer, "weight", Mask())
    return layer


add(
    "generated weight (hypernetwork)",
    model(
        lambda s, x, z: torch.bmm(x, s.h(z).view(len(z), 3, 2)),
        h=linear(2, 6),
    ),
    lambda: (torch.randn(M, 5, 3), torch.randn(M, 2)),
)
add(
    "raw parameter with a keyword argument",
    model(lambda s, x, scale=None: (x * s.w + s.b) * scale, w=(3,), b=(3,)),
    normal(M, 3),
    lambda s, x: rows(s(x, scale=torch.full((1,), 2.0))),
)
add(
    "extra arguments that are no batch",
    model(lambda s, x, table, flag: F.linear(x, s.w) + table.sum(0), w=(2, 3)),
    lambda: (torch.randn(M, 3), torch.randn(7, 2), True),
)
add(
    "an argument that looks like a batch",
    model(lambda s, x, mask: s.a((x @ x.mT + mask).softmax(-1) @ x), a=linear(3, 2)),
    lambda: (torch.randn(M, M, 3), torch.zeros(M, M).fill_diagonal_(-1.0)),
)
