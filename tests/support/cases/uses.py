"""Cases: several uses of a parameter, outputs and losses, in place, padding, images."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .common import M, add, linear, model, normal, rows, tokens

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
for _kind, _sides in {nn.Conv1d: (6,), nn.Conv2d: (5, 6), nn.Conv3d: (4, 3, 4)}.items():
    add(
        f"{_kind.__name__}, padding valid",  # whose node saves one number for all axes
        lambda kind=_kind: kind(2, 3, 2, stride=2, padding="valid"),
        normal(M, 2, *_sides),
    )
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
