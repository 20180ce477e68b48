"""The situations in which observing must be exact. A bug becomes a new entry here.

Each case is a model, a way to draw a batch, and per-sample losses (m,). The truth is one backward
pass per sample through the same forward pass, so dropout and the like need no special treatment.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, rnn
from torch.utils.checkpoint import checkpoint

M = 4  # samples; most sequences have the same length on purpose


@dataclass
class Case:
    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[], tuple[Any, ...]]
    losses: Callable[..., Tensor]
    options: dict[str, Any]
    autocast: bool = True  # also compared under bf16 autocast
    exact: bool = True  # computed in float64 throughout

    def __repr__(self) -> str:
        return self.name


CASES: list[Case] = []


def rows(out: Any) -> Tensor:
    """A curved loss per sample, for outputs with the batch first."""
    first = out if isinstance(out, Tensor) else out[0]
    return first.flatten(1).sin().mean(1) + first.flatten(1).square().mean(1)


def run(model: nn.Module, *batch: Any) -> Tensor:
    return rows(model(*batch))


def add(
    name: str,
    make: Callable[[], nn.Module],
    batch: Callable[[], tuple[Any, ...]],
    losses: Callable[..., Tensor] = run,
    autocast: bool = True,
    exact: bool = True,
    **options: Any,
) -> None:
    CASES.append(Case(name, make, batch, losses, options, autocast, exact))


def normal(*shape: int) -> Callable[[], tuple[Any, ...]]:
    return lambda: (torch.randn(*shape),)


def tokens(*shape: int, size: int = 11) -> Callable[[], tuple[Any, ...]]:
    return lambda: (torch.randint(0, size, shape),)


class Fn(nn.Module):
    """A model from parameters (or modules) and a function of them."""

    def __init__(self, forward: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            if isinstance(part, tuple):
                part = nn.Parameter(torch.randn(part))
            setattr(self, name, part)
        self.function = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def model(forward: Callable[..., Any], **parts: Callable[[], Any] | tuple[int, ...]) -> Any:
    """A function that builds a fresh `Fn`; modules are given as functions that build them."""
    return lambda: Fn(forward, **{k: v() if callable(v) else v for k, v in parts.items()})


def linear(a: int, b: int, bias: bool = True) -> Callable[[], nn.Module]:
    return lambda: nn.Linear(a, b, bias)


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

# --- several uses ----------------------------------------------------------------------------

add(
    "module called twice",
    model(lambda s, x: s.a(s.a(x).tanh()), a=linear(3, 3)),
    normal(M, 3),
)
add(
    "module called twice, on a sequence",
    model(lambda s, x: s.a(s.a(x).tanh()) + s.a(x), a=linear(3, 3)),
    normal(M, M, 3),
)
add(
    "tied embedding and output",
    model(
        lambda s, i: F.linear(s.a(s.e(i)).tanh(), s.e.weight),
        e=lambda: nn.Embedding(11, 3),
        a=linear(3, 3),
    ),
    tokens(M, M),
)
add(
    "weight and its transpose (autoencoder)",
    model(lambda s, x: F.linear(F.linear(x, s.w).tanh(), s.w.t()), w=(2, 3)),
    normal(M, M, 3),
)
add(
    "scale used twice",
    model(lambda s, x: ((x * s.g).tanh() + x) * s.g, g=(3,)),
    normal(M, M, 3),
)
add(
    "siamese calls",
    lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)),
    lambda: (torch.randn(M, 3), torch.randn(M, 3)),
    lambda s, a, b: (s(a) - s(b)).square().sum(1),
)
add(
    "model fed with its own output",
    lambda: nn.Sequential(nn.Linear(3, 3), nn.Tanh()),
    normal(M, 3),
    lambda s, x: rows(s(s(x))),
)
add(
    "cell in a loop over time",
    model(lambda s, x: _cell_loop(s, x), cell=lambda: nn.GRUCell(3, 4)),
    normal(M, M, 3),
)


def _cell_loop(s: Any, x: Tensor) -> Tensor:
    h = x.new_zeros(len(x), 4)
    for t in range(x.shape[1]):
        h = s.cell(x[:, t], h)
    return h


# --- outputs and losses ----------------------------------------------------------------------

add(
    "several outputs",
    model(lambda s, x: (s.a(x), {"b": [s.b(x)]}), a=linear(3, 2), b=linear(3, 4)),
    normal(M, 3),
    lambda s, x: (lambda o: rows(o[0]) + rows(o[1]["b"][0]))(s(x)),
)
add(
    "output with the batch last",
    model(lambda s, x: s.a(x).permute(1, 2, 0), a=linear(3, 2)),
    normal(M, M, 3),
    lambda s, x: s(x).sin().sum((0, 1)),
)
add(
    "folded output",
    model(lambda s, x: s.a(x).reshape(-1, 2), a=linear(3, 2)),
    normal(M, M, 3),
    lambda s, x: s(x).sin().reshape(M, -1).sum(1),
)
add(
    "only the last position",
    model(lambda s, x: s.b(s.a(x)[:, -1]), a=linear(3, 4), b=linear(4, 2)),
    normal(M, M, 3),
)
add(
    "position chosen by the data",
    model(
        lambda s, i: s.a(s.e(i))[torch.arange(len(i)), i.argmax(1)],
        e=lambda: nn.Embedding(11, 3),
        a=linear(3, 2),
    ),
    tokens(M, M),
)
add(
    "dead units",
    model(lambda s, x: s.b((s.a(x) - 9).relu()), a=linear(3, 4), b=linear(4, 2)),
    normal(M, 3),
)

# --- in place, padding, images ---------------------------------------------------------------

add(
    "in-place chain",
    lambda: nn.Sequential(
        nn.Linear(3, 4),
        nn.ReLU(inplace=True),
        nn.Linear(4, 4),
        nn.SiLU(inplace=True),
        nn.Linear(4, 2),
    ),
    normal(M, 3),
)
add(
    "in-place residual",
    model(lambda s, x: s.b(s.a(x).add_(x).mul_(2).tanh_()), a=linear(3, 3), b=linear(3, 2)),
    normal(M, M, 3),
)
for _mode in ("zeros", "reflect", "replicate", "circular"):
    add(
        f"conv2d, padding mode {_mode}",
        lambda mode=_mode: nn.Conv2d(2, 3, 3, padding=1, padding_mode=mode),
        normal(M, 2, 5, 5),
    )
add("conv2d, padding same", lambda: nn.Conv2d(2, 3, (3, 2), padding="same"), normal(M, 2, 5, 5))
add("conv2d, strided", lambda: nn.Conv2d(2, 3, 3, stride=2, padding=1), normal(M, 2, 6, 7))
add("conv2d, dilated", lambda: nn.Conv2d(2, 3, 2, dilation=2, bias=False), normal(M, 2, 6, 6))
add("conv2d, groups", lambda: nn.Conv2d(4, 6, 3, groups=2), normal(M, 4, 5, 5))
add("conv2d, depthwise", lambda: nn.Conv2d(4, 8, 3, groups=4, padding=1), normal(M, 4, 4, 4))
add("conv2d, 1x1, sides = m", lambda: nn.Conv2d(M, M, 1), normal(M, M, M, M))
add("conv1d", lambda: nn.Conv1d(2, 3, 3, padding=1), normal(M, 2, 6))
add("conv3d", lambda: nn.Conv3d(2, 3, 2), normal(M, 2, 3, 4, 3))
add(
    "transposed conv1d",
    lambda: nn.ConvTranspose1d(2, 3, 3, stride=2, output_padding=1),
    normal(M, 2, 5),
)
add(
    "transposed conv2d, groups",
    lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, groups=2, dilation=2),
    normal(M, 4, 4, 4),
)
add("transposed conv3d", lambda: nn.ConvTranspose3d(2, 2, 2), normal(M, 2, 2, 3, 2))
add(
    "convolution over frames",
    model(lambda s, x: s.c(x.flatten(0, 1)).unflatten(0, (M, -1)), c=lambda: nn.Conv2d(2, 3, 3)),
    normal(M, 3, 2, 4, 4),
)
add(
    "per-sample kernels in groups",
    model(
        lambda s, x, z: F.conv2d(
            x.reshape(1, -1, 4, 4), s.h(z).reshape(-1, 2, 2, 2), groups=M
        ).view(M, -1),
        h=linear(2, 24),
    ),
    lambda: (torch.randn(M, 2, 4, 4), torch.randn(M, 2)),
)
add(
    "conv net",
    lambda: nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU(), nn.AdaptiveAvgPool2d(2),
        nn.Flatten(), nn.Linear(16, 3),
    ),
    normal(M, 2, 8, 8),
)  # fmt: skip
add(
    "u-net step",
    model(
        lambda s, x: s.b(torch.cat([F.interpolate(s.a(F.avg_pool2d(x, 2)), scale_factor=2), x], 1)),
        a=lambda: nn.Conv2d(2, 3, 3, padding=1),
        b=lambda: nn.Conv2d(5, 2, 3, padding=1),
    ),
    normal(M, 2, 4, 4),
)
add(
    "pixel shuffle",
    lambda: nn.Sequential(nn.Conv2d(2, 8, 3), nn.PixelShuffle(2)),
    normal(M, 2, 4, 4),
)
add("unfold", model(lambda s, x: s.a(F.unfold(x, 2).mT), a=linear(8, 3)), normal(M, 2, 4, 4))

# --- embeddings ------------------------------------------------------------------------------

add("embedding", lambda: nn.Embedding(11, 3), tokens(M, M))
add("embedding, one token each", lambda: nn.Embedding(11, 3), tokens(M))
add("embedding, padding", lambda: nn.Embedding(11, 3, padding_idx=2), tokens(M, M, size=4))
add(
    "embedding, scaled by frequency",
    lambda: nn.Embedding(11, 3, scale_grad_by_freq=True),
    tokens(M, M, size=4),
)
add("embedding, sparse", lambda: nn.Embedding(11, 3, sparse=True), tokens(M, M, size=5))
add(
    "embedding of a scaled table",
    model(lambda s, i: F.embedding(i, s.w * 2).tanh(), w=(2 * M, 3)),
    lambda: (torch.randperm(2 * M).reshape(M, 2),),
)
add(
    "embedding of a scaled table, regular tokens first",
    model(lambda s, i: F.embedding(i, s.w * 2).tanh(), w=(2 * M, 3)),
    lambda: _regular_first(),
)
_calls = [0]


def _regular_first() -> tuple[Tensor]:
    _calls[0] += 1
    regular = torch.arange(2 * M).reshape(M, 2)
    return (regular if _calls[0] % 2 else torch.randint(0, 2 * M, (M, 2)),)


add("embedding bag, mean", lambda: nn.EmbeddingBag(11, 3), tokens(M, 5), autocast=False)
add("embedding bag, sum", lambda: nn.EmbeddingBag(11, 3, mode="sum"), tokens(M, 5), autocast=False)
add("embedding bag, max", lambda: nn.EmbeddingBag(11, 3, mode="max"), tokens(M, 5), autocast=False)
add(
    "look-up by hand",
    model(lambda s, i: s.w[i].tanh(), w=(11, 3)),
    tokens(M, M),
)
add(
    "one-hot",
    model(lambda s, i: s.a(F.one_hot(i, 11).to(s.a.weight.dtype)), a=linear(11, 3)),
    tokens(M, M),
)

# --- normalisation and activations with parameters -------------------------------------------

add("layer norm", lambda: nn.LayerNorm(3), normal(M, M, 3))
add("layer norm over two dimensions", lambda: nn.LayerNorm((2, 3)), normal(M, 5, 2, 3))
add("layer norm without bias", lambda: nn.LayerNorm(3, bias=False), normal(M, 3))
add("rms norm", lambda: nn.RMSNorm(3), normal(M, M, 3))
add(
    "rms norm by hand",
    model(lambda s, x: s.w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)), w=(3,)),
    normal(M, M, 3),
)
add("group norm", lambda: nn.GroupNorm(2, 4), normal(M, 4, 3, 3))
add(
    "group norm after a layer",
    lambda: nn.Sequential(nn.Linear(3, 4), nn.GroupNorm(2, 4)),
    normal(M, 3),
)
add("instance norm 1d", lambda: nn.InstanceNorm1d(3, affine=True), normal(M, 3, 5))
add(
    "instance norm 2d after a convolution",
    lambda: nn.Sequential(nn.Conv2d(2, 3, 2), nn.InstanceNorm2d(3, affine=True)),
    normal(M, 2, 4, 4),
    autocast=False,  # the bias of the convolution has no gradient but rounding noise
)
add(
    "batch norm, eval mode",
    lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU()).eval(),
    normal(M, 2, 4, 4),
)
add(
    "batch norm 1d, eval mode",
    lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).eval(),
    normal(M, 3),
)
add("prelu", lambda: nn.PReLU(), normal(M, 3, 4))
add("prelu per channel", lambda: nn.PReLU(3), normal(M, 3, 4, 4))
add(
    "dropout",
    lambda: nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 2)),
    normal(M, 3),
)
add(
    "dropout of channels",
    lambda: nn.Sequential(nn.Conv2d(2, 8, 2), nn.Dropout2d(0.5)),
    normal(M, 2, 4, 4),
)
add(
    "local response norm",
    lambda: nn.Sequential(nn.Conv2d(2, 4, 2), nn.LocalResponseNorm(3)),
    normal(M, 2, 4, 4),
)

# --- attention -------------------------------------------------------------------------------

_attention = {"dropout": 0.2}
add(
    "attention, batch first",
    model(lambda s, x: s.a(x, x, x)[0], a=lambda: nn.MultiheadAttention(4, 2, batch_first=True)),
    normal(M, M, 4),
)
add(
    "attention, time first",
    model(lambda s, x: s.a(x, x, x, need_weights=False)[0], a=lambda: nn.MultiheadAttention(4, 2)),
    normal(5, M, 4),
    lambda s, x: s(x).sin().mean((0, 2)),
    batch_dim=1,
)
add(
    "attention, time first, T = m",
    model(lambda s, x: s.a(x, x, x)[0], a=lambda: nn.MultiheadAttention(4, 2)),
    normal(M, M, 4),
    lambda s, x: s(x).sin().mean((0, 2)),
    batch_dim=1,
)
add(
    "cross attention with other widths",
    model(
        lambda s, q, k, v: s.a(q, k, v)[0],
        a=lambda: nn.MultiheadAttention(4, 2, kdim=3, vdim=5, batch_first=True),
    ),
    lambda: (torch.randn(M, M, 4), torch.randn(M, 6, 3), torch.randn(M, 6, 5)),
)
add(
    "cross attention, same widths",
    model(lambda s, q, k: s.a(q, k, k)[0], a=lambda: nn.MultiheadAttention(4, 2, batch_first=True)),
    lambda: (torch.randn(M, M, 4), torch.randn(M, 6, 4)),
)
add(
    "attention with learnt keys",
    model(
        lambda s, x: s.a(x, x, x)[0],
        a=lambda: nn.MultiheadAttention(
            4, 2, add_bias_kv=True, add_zero_attn=True, batch_first=True
        ),
    ),
    normal(M, M, 4),
)
add(
    "attention with a padding mask",
    model(
        lambda s, x, mask: s.a(x, x, x, key_padding_mask=mask, need_weights=False)[0],
        a=lambda: nn.MultiheadAttention(4, 2, batch_first=True),
    ),
    lambda: (torch.randn(M, M, 4), torch.arange(M)[None] > torch.randint(0, M, (M, 1))),
)
add(
    "encoder layer",
    lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, **_attention),
    normal(M, M, 4),
)
add(
    "encoder layer, time first, norm first",
    lambda: nn.TransformerEncoderLayer(4, 2, 8, norm_first=True, **_attention),
    normal(M, M, 4),
    lambda s, x: s(x).sin().mean((0, 2)),
    batch_dim=1,
)
add(
    "encoder with a causal mask",
    model(
        lambda s, x: s.e(x, mask=nn.Transformer.generate_square_subsequent_mask(M).to(x.dtype)),
        e=lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2, enable_nested_tensor=False
        ),
    ),
    normal(M, M, 4),
)
add(
    "encoder, mask given as an argument, T = m",
    lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2, enable_nested_tensor=False
    ),
    normal(M, M, 4),
    lambda s, x: rows(s(x, mask=torch.triu(torch.full((M, M), -torch.inf, dtype=x.dtype), 1))),
)
add(
    "decoder layer",
    lambda: nn.TransformerDecoderLayer(4, 2, 8, batch_first=True, **_attention),
    lambda: (torch.randn(M, M, 4), torch.randn(M, 6, 4)),
)
add(
    "transformer",
    lambda: nn.Transformer(4, 2, 1, 1, 8, batch_first=True),
    lambda: (torch.randn(M, M, 4), torch.randn(M, 3, 4)),
)

# --- recurrences -----------------------------------------------------------------------------

for _kind in (nn.RNN, nn.GRU, nn.LSTM):
    add(
        f"{_kind.__name__}, two layers, both directions",
        lambda kind=_kind: kind(3, 4, num_layers=2, bidirectional=True, batch_first=True),
        normal(M, M, 3),
    )
    add(
        f"{_kind.__name__}, time first",
        lambda kind=_kind: kind(3, 4),
        normal(M, M, 3),
        lambda s, x: s(x)[0].sin().mean((0, 2)),
        batch_dim=1,
    )
add(
    "LSTM with projection",
    lambda: nn.LSTM(3, 5, proj_size=2, batch_first=True),
    normal(M, M, 3),
)
add(
    "LSTM, last state only",
    model(
        lambda s, x: s.a(s.r(x)[1][0][-1]),
        r=lambda: nn.LSTM(3, 4, batch_first=True),
        a=linear(4, 2),
    ),
    normal(M, M, 3),
)
add(
    "GRU with a learnt initial state",
    model(
        lambda s, x: s.r(x, s.h.expand(1, len(x), 4).contiguous())[0],
        r=lambda: nn.GRU(3, 4, batch_first=True),
        h=(1, 1, 4),
    ),
    normal(M, M, 3),
)
add(
    "GRU on packed sequences",
    model(
        lambda s, x, n: rnn.pad_packed_sequence(
            s.r(rnn.pack_padded_sequence(x, n, batch_first=True, enforce_sorted=False))[0],
            batch_first=True,
            total_length=x.shape[1],
        )[0],
        r=lambda: nn.GRU(3, 4, batch_first=True),
    ),
    lambda: (torch.randn(M, 5, 3), torch.randint(1, 6, (M,))),
)

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


add(
    "branch on the data",
    model(
        lambda s, x: s.a(x) if bool(x.sum() > 0) else s.b(x).tanh(),
        a=linear(3, 2),
        b=linear(3, 2),
    ),
    lambda: (torch.randn(M, 3).abs() * next(_signs),),
)
_signs = iter([1.0, -1.0] * 1000)
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

# --- found by looking for trouble ------------------------------------------------------------

add(
    "distance to prototypes (whose batched backward is wrong in PyTorch)",
    model(lambda s, x: torch.cdist(s.a(x), s.e), a=linear(3, 4), e=(6, 4)),
    normal(M, 3),
    autocast=False,
)
add(
    "distance between parameters",
    model(lambda s, x: x @ torch.cdist(s.e, s.g), e=(3, 4), g=(2, 4)),
    normal(M, 3),
    autocast=False,
)
for _op, _combine in (
    ("times", lambda x, w: x * w),
    ("over", lambda x, w: x / w),
    ("plus", lambda x, w: x + w),
):
    add(
        f"spectrum {_op} complex weights (Fourier layer)",
        model(
            lambda s, x, combine=_combine: torch.fft.irfft(
                combine(torch.fft.rfft(x), torch.view_as_complex(s.w)), n=6
            ),
            w=(4, 2),
        ),
        normal(M, 6),
        autocast=False,
    )
add(
    "Fourier transform seen as pairs",
    model(
        lambda s, x: torch.view_as_real(torch.fft.fft(s.a(x), dim=1)) * s.b, a=linear(3, 4), b=(2,)
    ),
    normal(M, M, 3),
    autocast=False,
)
add(
    "windows that overlap in memory",
    model(
        lambda s, x: s.b(s.a(x).as_strided((M, 3, 2, 2), (8, 2, 2, 1))),
        a=linear(3, 2),
        b=linear(2, 2),
    ),
    normal(M, 4, 3),
)
add(
    "complex matrix",
    model(lambda s, x: (torch.fft.rfft(x) @ torch.view_as_complex(s.w)).abs(), w=(4, 3, 2)),
    normal(M, 6),
    autocast=False,
)
for _layout in (torch.sparse_coo, torch.sparse_csr):
    add(
        f"{_layout} inputs",
        model(lambda s, x: s.a((x @ s.w + s.b).tanh()), w=(3, 5), b=(5,), a=linear(5, 2)),
        lambda layout=_layout: (torch.randn(M, 3).relu().to_sparse(layout=layout),),
        autocast=False,
    )
add(
    "sparse product inside",
    model(lambda s, x: torch.sparse.mm(x.to_sparse(), s.w), w=(3, 2)),
    normal(M, 3),
    autocast=False,
)
add(
    "random leaky relu",
    lambda: nn.Sequential(nn.Linear(3, 5), nn.RReLU(), nn.Linear(5, 2)),
    normal(M, 3),
)
add(
    "spectral norm",
    lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(3, 4)), nn.Tanh()),
    normal(M, 3),
    autocast=False,  # the singular vectors move with every forward pass
)
add(
    "force of an energy (double backward)",
    model(lambda s, x: _force(s, x), a=linear(3, 4), b=linear(4, 1)),
    normal(M, 3),
    autocast=False,
)


def _force(s: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        (force,) = torch.autograd.grad(s.b(s.a(x).tanh()).sum(), x, create_graph=True)
    return force


add(
    "linear on packed rows",
    model(lambda s, x, n: _on_packed(s, x, n), a=linear(3, 2)),
    lambda: (torch.randn(M, 5, 3), torch.randint(1, 6, (M,))),
)


def _on_packed(s: Any, x: Tensor, n: Tensor) -> Tensor:
    packed = rnn.pack_padded_sequence(x, n.cpu(), batch_first=True, enforce_sorted=False)
    rows = packed._replace(data=s.a(packed.data))
    return rnn.pad_packed_sequence(rows, batch_first=True, total_length=x.shape[1])[0]


add(
    "carried state",
    model(lambda s, x: _carried(s, x), a=linear(3, 3)),
    normal(M, 3),
)


def _carried(s: Any, x: Tensor) -> Tensor:
    old = getattr(s, "state", None)
    h = s.a(x) if old is None else s.a(x) + s.a(old)
    s.state = h.detach().to(x.dtype)
    return h


class Context(nn.Module):
    """An argument with as many rows as there are samples, which are none."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        return self.a(x) + self.b(context).mean(0)


add(
    "no batch, declared by the name of a positional argument",
    Context,
    lambda: (torch.randn(M, 3), torch.randn(M, 3)),
    batch_dim={"context": None},
)
_lengths = iter([2, 4, 2, 6, 3, 1, 6] * 1000)
for _name, _cut in {
    "linear": model(lambda s, x: s.a(x[:, : next(_lengths)]).tanh().mean(1), a=linear(3, 4)),
    "positions": model(lambda s, x: _at_positions(s, x, next(_lengths)), p=(6, 3)),
    "repeats": model(lambda s, x: _repeated(s, x[:, 0], next(_lengths)), a=linear(3, 2)),
    "part of the batch": model(
        lambda s, x: _in_two(s, x, next(_lengths) % 3 + 1), a=linear(3, 2), b=linear(3, 2)
    ),
    "rolled rows": model(lambda s, x: _rolled(s, x[:, 0], next(_lengths)), a=linear(3, 2)),
}.items():
    add(f"a size that no argument tells: {_name}", _cut, normal(M, 6, 3))


def _at_positions(s: Any, x: Tensor, length: int) -> Tensor:
    return (x[:, :length] + s.p[:length]).sin().mean(1)


def _repeated(s: Any, x: Tensor, times: int) -> Tensor:
    return s.a(x.repeat_interleave(times, 0)).view(M, times, 2).sin().mean(1)


def _in_two(s: Any, x: Tensor, first: int) -> Tensor:
    return torch.cat([s.a(x[:first]), s.b(x[first:])])


def _rolled(s: Any, x: Tensor, by: int) -> Tensor:
    return s.a(x) + 2 * s.a(x.roll(by, 0)).roll(-by, 0)


# --- found by attacks: functions of the user's -------------------------------------------------


class Scaled(torch.autograd.Function):
    """Arguments that are no tensors before, between and after the tensors; two outputs."""

    @staticmethod
    def forward(ctx: Any, by: float, x: Tensor, how: str, w: Tensor, b: Tensor, flag: bool) -> Any:
        ctx.save_for_backward(x, w)
        ctx.by = by
        return by * x * w + b, x - w

    @staticmethod
    def backward(ctx: Any, one: Tensor, two: Tensor) -> Any:
        x, w = ctx.saved_tensors
        dx, dw = ctx.by * one * w + two, ctx.by * one * x - two  # both must be tensors
        return None, dx, None, dw.sum(0), one.sum(0), None


for _count in (1, 2):
    add(
        f"function with numbers among its arguments, {_count} outputs used",
        model(
            lambda s, x, n=_count: sum(Scaled.apply(2.0, s.a(x), "a", s.w, s.b, True)[:n]),
            a=linear(3, 3),
            w=(3,),
            b=(3,),
        ),
        normal(M, 3),
        autocast=False,
    )


# --- found by attacks: numbers that leave tensors ----------------------------------------------

_PARTS = ([1, 3, 2, 4], [4, 2, 3, 1], [2, 2, 3, 3], [4, 1, 4, 1], [3, 3, 3, 1])  # of ten rows
_parts = iter([_PARTS[i % 5] for i in range(5000)])


def _unpadded(s: Any, x: Tensor, lengths: Any) -> Tensor:
    rows = torch.cat([x[i, :n] for i, n in enumerate(lengths)])
    return torch.stack([part.mean(0) for part in s.a(rows).tanh().split([int(n) for n in lengths])])


for _name, _read in {
    "tolist": lambda n: n.tolist(),
    "numpy": lambda n: n.numpy().copy(),
    "item": lambda n: [each.item() for each in n],
    "slices": lambda n: n,
    "single yes and no": lambda n: [sum(1 for j in range(5) if j < each) for each in n],
}.items():
    add(
        f"lengths that become numbers of Python: {_name}",
        model(lambda s, x, n, read=_read: _unpadded(s, x, read(n)), a=linear(3, 2)),
        lambda: (torch.randn(M, 5, 3), torch.tensor(next(_parts))),
    )
for _name, _given in {
    "a list": lambda n: n,
    "a list in a dictionary": lambda n: {"lengths": {"of": n}},
    "an array": lambda n: torch.tensor(n).numpy(),
}.items():
    add(
        f"lengths among the arguments: {_name}",
        model(
            lambda s, x, n: _unpadded(s, x, n["lengths"]["of"] if isinstance(n, dict) else n),
            a=linear(3, 2),
        ),
        lambda given=_given: (torch.randn(M, 5, 3), given(next(_parts))),
    )


def _even_or_not(s: Any, x: Tensor, n: Tensor) -> Tensor:
    if (n == n[0]).all():  # a question about the whole batch
        rows = x[:, :2].reshape(-1, 3)
    else:
        rows = torch.cat([x[i, :k] for i, k in enumerate(n.tolist())])
    where = torch.repeat_interleave(torch.arange(M), n)
    return torch.zeros(M, 2, dtype=x.dtype).index_add(0, where, s.a(rows).tanh().to(x.dtype))


_evens = iter([([2, 2, 2, 2], [1, 3, 3, 1], [3, 1, 1, 3])[i % 3] for i in range(3000)])
add(
    "a branch for batches without padding",
    model(_even_or_not, a=linear(3, 2)),
    lambda: (torch.randn(M, 5, 3), torch.tensor(next(_evens))),
)

# --- found by attacks: what counts samples ------------------------------------------------------

_sizes = iter([(3, 1, 5, 2)[i % 4] for i in range(4000)])


def _with_mask(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 5, 4), torch.triu(torch.full((5, 5), -torch.inf), 1)


add(
    "batches of any size, also one, beside a mask",
    lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.0),
    lambda: _with_mask(next(_sizes)),
)
add(
    "a batch of one beside a mask",
    lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.0),
    lambda: _with_mask(1),
)
add(
    "prompts before the batch",
    model(
        lambda s, p, x: s.b(torch.cat([s.a(p).expand(len(x), -1, -1), x], 1)).tanh().mean(1),
        a=linear(3, 3),
        b=linear(3, 2),
    ),
    lambda: (torch.randn(7, 3), torch.randn(next(_sizes), 2, 3)),
    autocast=False,  # cat of two precisions
)
add(
    "positions before the batch",
    model(lambda s, p, x: s.a(x) + s.e(p), a=linear(3, 2), e=lambda: nn.Embedding(9, 2)),
    lambda: (torch.arange(6), torch.randn(next(_sizes), 6, 3)),
)
add(
    "points before functions, told which",
    model(lambda s, p, f: s.a(f) @ s.b(p).T, a=linear(3, 2), b=linear(2, 2)),
    lambda: (torch.randn(5, 2), torch.randn(next(_sizes), 3)),
    batch_dim={0: None},
)
_images = model(
    lambda s, xs: s.c(torch.stack(xs)).tanh().mean((2, 3)), c=lambda: nn.Conv2d(3, 2, 3)
)
add(
    "a list of images, sometimes as many as they have channels",
    _images,
    lambda: ([torch.randn(3, 6, 6) for _ in range(next(_sizes) + 1)],),
)
_graph = model(
    lambda s, xs: torch.stack([s.b(s.a(x).tanh().mean(0)) for x in xs]),
    a=linear(3, 4),
    b=linear(4, 2),
)
add(
    "a list of graphs of equal size",
    _graph,
    lambda: ([torch.randn(3, 3) for _ in range(next(_sizes))],),
)
add(
    "a list of graphs of different sizes, targets beside them",
    model(
        lambda s, xs, ys: torch.stack(
            [s.a(x).tanh().mean(0) - y["target"] for x, y in zip(xs, ys, strict=True)]
        ),
        a=linear(3, 2),
    ),
    lambda: (
        [torch.randn(2 + i, 3) for i in range(M)],
        [{"target": torch.randn(2)} for _ in range(M)],
    ),
)
add(
    "two inputs in a list",
    model(lambda s, xs: s.a(xs[0]) + s.b(xs[1]), a=linear(3, 4), b=linear(2, 4)),
    lambda: ([torch.randn(M, 3), torch.randn(M, 2)],),
)


# --- found by attacks: refused, though people expect it to work ---------------------------------

add(
    "channels last, pooled to one pixel",
    lambda: nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)
    ).to(memory_format=torch.channels_last),
    lambda: (torch.randn(M, 3, 6, 6).to(memory_format=torch.channels_last),),
)


def _some(count: int) -> Tensor:
    """A mask (M, 5) with so many true entries in each row."""
    return torch.rand(M, 5).argsort(1) < count


add(
    "masked scatter of another input",
    model(
        lambda s, x, v, mask: s.b(
            s.a(x).masked_scatter(mask[..., None].expand(-1, -1, 3), s.v(v))
        ).tanh(),
        a=linear(3, 3),
        b=linear(3, 2),
        v=linear(2, 3),
    ),
    lambda: (torch.randn(M, 5, 3), torch.randn(M, 2, 2), _some(2)),
)


def _masked_by_parameter(s: Any, x: Tensor, mask: Tensor) -> Tensor:
    h = s.a(x)
    h[mask] = s.p.to(h.dtype)
    return s.b(h)


add(
    "a parameter put where a mask is true",
    model(_masked_by_parameter, a=linear(3, 3), b=linear(3, 2), p=(3,)),
    lambda: (torch.randn(M, 5, 3), torch.rand(M, 5) > 0.5),
)


def _packed_both_ways(s: Any, x: Tensor, n: Tensor) -> Tensor:
    packed = rnn.pack_padded_sequence(x, n, batch_first=True, enforce_sorted=False)
    return rnn.pad_packed_sequence(s.l(packed)[0], batch_first=True, total_length=5)[0]


add(
    "packed, in both directions",
    model(_packed_both_ways, l=lambda: nn.LSTM(3, 4, 2, batch_first=True, bidirectional=True)),
    lambda: (torch.randn(M, 5, 3), torch.randint(1, 6, (M,))),
    autocast=False,
)
add(
    "packed, in both directions, GRU",
    model(_packed_both_ways, l=lambda: nn.GRU(3, 4, 2, batch_first=True, bidirectional=True)),
    lambda: (torch.randn(M, 5, 3), torch.randint(1, 6, (M,))),
    autocast=False,
)
add(
    "activations in place that are not marked as such",
    model(
        lambda s, x: s.c(F.mish(F.hardswish(s.b(s.a(x).abs_()), inplace=True), inplace=True)),
        a=linear(3, 4), b=linear(4, 4), c=linear(4, 2),
    ),
    normal(M, M, 3),
)  # fmt: skip
add(
    "products of vectors, bins, solved matrices",
    model(
        lambda s, x: s.b(torch.linalg.cross(s.a(x), x)) * (_bins(s.a(x)) + 1)
        + torch.cholesky_solve(s.a(x), torch.eye(3) + x.tril() ** 2),
        a=linear(3, 3), b=linear(3, 3),
    ),
    normal(M, 3, 3),
    autocast=False,
)  # fmt: skip


def _bins(x: Tensor) -> Tensor:
    return torch.searchsorted(x.detach().sort(-1)[0], x.detach()).to(x.dtype)


_bags = iter([([0, 2, 3, 6], [0, 1, 5, 6], [0, 3, 4, 5])[i % 3] for i in range(3000)])
for _mode in ("mean", "sum"):
    add(
        f"bags with offsets: {_mode}",
        model(
            lambda s, i, o: s.b(s.e(i, o)),
            e=lambda mode=_mode: nn.EmbeddingBag(7, 3, mode=mode),
            b=linear(3, 2),
        ),
        lambda: (torch.randint(0, 7, (9,)), torch.tensor(next(_bags))),
    )


class Labelled(Tensor):
    """A subclass that ops keep."""


add(
    "a subclass of Tensor",
    lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)),
    lambda: (torch.randn(M, 3).as_subclass(Labelled),),
    lambda s, x: rows(s(x).as_subclass(Tensor)),
)
add(
    "rows ordered by a number that the data give",
    model(lambda s, x: _in_order(s, x), a=linear(3, 3), b=linear(3, 2)),
    normal(M, 5, 3),
)


def _in_order(s: Any, x: Tensor) -> Tensor:
    rows = s.a(x.reshape(-1, 3))
    order = x.reshape(-1, 3).sum(1).argsort()  # as routing to experts does
    out = torch.zeros(len(order), 2, dtype=rows.dtype).to(s.b(rows[:1]).dtype)
    return out.index_copy(0, order, s.b(rows[order]).tanh()).reshape(*x.shape[:2], 2)
