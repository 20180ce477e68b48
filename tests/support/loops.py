"""Small training problems whose evidence is known, and the slow twin of the criterion."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Dial(nn.Module):
    """One weight whose criterion can be dialled: two samples that contribute a + 1 and a - 1.

    With total 2a and squares 2a^2 + 2, f = a^2.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x

    def show(self, criterion: float, times: int = 1) -> None:
        """Run a backward pass with this criterion (at most 1), on 2 * times samples.

        More samples: each of the two contributions is there `times` times, and a is chosen anew.
        """
        m = 2 * times
        a = math.sqrt((1.0 - criterion) / (m - 1))
        if math.isnan(criterion):
            a = math.nan
        x = torch.tensor([a + 1.0, a - 1.0], dtype=torch.float64).repeat(times)
        self(x).sum().backward()


def watch(stopping: Any, dial: Dial, values: Iterable[float]) -> int | None:
    """Feed dialled values until the rule stops; the stopping step."""
    for value in values:
        dial.zero_grad()
        dial.show(value)
        if stopping.step():
            break
    stopping.close()
    return stopping.stopped_step


def net(dropout: float = 0.0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    layers = [nn.Linear(5, 8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 3)]
    return nn.Sequential(*layers).to(dtype)


def data(n: int = 64, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 5, dtype=dtype)
    return x, (x[:, 0] + 0.5 * torch.randn(n, dtype=dtype) > 0).long()


def slow_groups(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """1 - mean_k f_k per parameter as Eq. 5 writes it, from one gradient per sample."""
    rows: dict[str, list[Tensor]] = {name: [] for name, _ in model.named_parameters()}
    for x, y in batches:
        for i in range(len(x)):
            model.zero_grad()
            F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]).backward()
            for name, p in model.named_parameters():
                assert p.grad is not None
                rows[name].append(p.grad.clone())
    model.zero_grad()
    values = {}
    for name, each in rows.items():
        g = torch.stack(each)
        f = len(g) * g.mean(0) ** 2 / g.var(0)
        values[name] = float(1 - f.nanmean())
    return values


def close(rule: object) -> None:
    """Let any rule go of its model; an optimiser that is none is left alone."""
    getattr(rule, "close", int)()
