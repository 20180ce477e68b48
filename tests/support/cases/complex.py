"""Cases: complex parameters, which are two real coordinates for each entry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .common import M, add, linear, model, normal


def weights(*shape: int) -> Callable[[], nn.Parameter]:
    return lambda: nn.Parameter(torch.view_as_complex(torch.randn(*shape, 2)))


def spectrum(x: Tensor) -> Tensor:
    return torch.fft.rfft(x)


for _name, _combine in {
    "times": lambda x, w: x * w,
    "over": lambda x, w: x / w,
    "plus": lambda x, w: x + w,
    "minus the conjugate of": lambda x, w: x - w.conj(),
    "times a part of": lambda x, w: x * torch.cat([w[1:], w[:1]]),
    "times the size of": lambda x, w: x * w.abs(),
    "times pairs of": lambda x, w: torch.view_as_real(x) * torch.view_as_real(w),
    "turned by": lambda x, w: x * torch.polar(torch.ones_like(w.real), w.imag) + w * w,
}.items():
    add(
        f"spectrum {_name} a complex parameter",
        model(
            lambda s, x, combine=_combine: _real(combine(spectrum(s.a(x)), s.w)),
            a=linear(6, 6), w=weights(4),
        ),
        normal(M, 6),
        autocast=False,
    )  # fmt: skip


def _real(x: Tensor) -> Tensor:
    return torch.cat([x.real, x.imag], -1) if x.is_complex() else x.flatten(1)


add(
    "complex matrix parameter (Fourier layer)",
    model(
        lambda s, x: torch.fft.irfft(torch.einsum("bik,iok->bok", spectrum(x), s.w), n=6),
        w=weights(3, 2, 4),
    ),
    normal(M, 3, 6),
    autocast=False,
)
add(
    "complex linear layers",
    model(
        lambda s, x: _real(s.b(s.a(spectrum(x)).tanh())),
        a=lambda: _linear(4, 3),
        b=lambda: _linear(3, 2),
    ),
    normal(M, M, 6),
    autocast=False,
)


def _linear(a: int, b: int) -> nn.Module:
    layer: Any = nn.Linear(a, b)
    return nn.Linear(a, b, dtype=layer.weight.dtype.to_complex())
