"""What a case is, and the tools that write one in a few lines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

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
