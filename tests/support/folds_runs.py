"""What the tests of folds share."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

N, D = 31, 6


class Tied(nn.Module):
    """A weight used twice, a scalar parameter, an unused one, and a buffer."""

    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(D, D)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.unused = nn.Parameter(torch.ones(2))
        self.register_buffer("shift", torch.linspace(-1, 1, D))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.first(F.gelu(self.first(x + self.shift)))[:, :1]


MODELS: dict[str, Any] = {
    "linear": lambda: nn.Linear(D, 1),
    "relu": lambda: nn.Sequential(nn.Linear(D, 8), nn.ReLU(), nn.Linear(8, 1)),
    "deep": lambda: nn.Sequential(
        nn.Flatten(),
        nn.Sequential(nn.Linear(D, 8), nn.Tanh()),
        nn.Linear(8, 7, bias=False),
        nn.SiLU(),
        nn.Linear(7, 5),
        nn.GELU(approximate="tanh"),
        nn.Linear(5, 4),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Identity(),
        nn.Linear(4, 3),
        nn.Sigmoid(),
        nn.Linear(3, 1),
    ),
    "tied": Tied,
    "batchnorm": lambda: nn.Sequential(
        nn.Linear(D, 8, bias=False),  # its gradient would be nothing but rounding
        nn.BatchNorm1d(8),
        nn.Linear(8, 1),
    ),
    "batchnorms": lambda: nn.Sequential(
        nn.BatchNorm1d(D, affine=False),
        nn.Linear(D, 8, bias=False),
        nn.BatchNorm1d(8, momentum=None),
        nn.ReLU(),
        nn.Linear(8, 5, bias=False),
        nn.BatchNorm1d(5, momentum=0.3),
        nn.Linear(5, 1),
    ),
    "layernorm": lambda: nn.Sequential(nn.Linear(D, 8), nn.LayerNorm(8), nn.Linear(8, 1)),
}


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "nesterov": lambda p: torch.optim.SGD(
        p, lr=0.02, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    "adam": lambda p: torch.optim.Adam(p, lr=0.02, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, lr_decay=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.02, t0=3),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.02),
}


def data(seed: int = 0, outputs: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(N, D, generator=generator, dtype=torch.float64)
    y = torch.randn(N, outputs, generator=generator, dtype=torch.float64)
    return x, y + x[:, :1]


def minibatches(size: int, steps: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    found: list[Tensor] = []
    while len(found) < steps:
        found += list(torch.randperm(N, generator=generator).split(size))
    return found[:steps]


def separately(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: Any,
    rows: tuple[Tensor, ...],
    batches: list[Tensor],
    seen: Tensor,
    schedule: Any = None,
) -> nn.Module:
    """The slow twin: train one model on the rows of each minibatch that it may see."""
    *inputs, y = rows
    least = 2 if any(isinstance(m, nn.BatchNorm1d) and m.training for m in model.modules()) else 1
    scheduler = schedule(optimizer) if schedule else None
    for index in batches:
        kept = index[seen[index]]
        if len(kept) >= least:  # a shadow without a row takes no step, nor BatchNorm on one
            optimizer.zero_grad(set_to_none=False)
            loss_fn(model(*(x[kept] for x in inputs)), y[kept]).backward()
            for p in model.parameters():
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            optimizer.step()
        if scheduler:
            scheduler.step()
    return model


def check_shadows(
    stopping: Any, start: nn.Module, make: Any, loss_fn: Any, rows: Any, batches: Any, **more: Any
) -> None:
    *inputs, y = rows
    expected = torch.full((N,), math.nan, dtype=torch.float64)
    for k in range(int(stopping.fold_of_row.max()) + 1):
        twin = copy.deepcopy(start)
        separately(
            twin, make(twin.parameters()), loss_fn, rows, batches, stopping.fold_of_row != k, **more
        )
        for name, p in twin.named_parameters():
            if name == "unused":  # has no gradient: engines may pass over it
                continue
            torch.testing.assert_close(
                stopping.backend.weights_of(k)[name].detach(), p.detach(), rtol=1e-9, atol=1e-11
            )
        held = stopping.fold_of_row == k
        twin.eval()
        with torch.no_grad():
            for i in held.nonzero().flatten().tolist():
                expected[i] = loss_fn(twin(*(x[i : i + 1] for x in inputs)), y[i : i + 1])
    losses = stopping.backend.held_out()
    torch.testing.assert_close(losses, expected[stopping.fold_of_row >= 0], rtol=1e-8, atol=1e-10)


def train_once(stopping: Any, model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> bool:
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    return bool(stopping.step())
