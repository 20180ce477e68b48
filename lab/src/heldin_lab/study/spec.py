"""What is trained on what, and how: the runs of the study by their specification."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from heldin_lab.rules import PerRowLoss, jacobians_by_vmap

__all__ = [
    "MODELS",
    "NOISE",
    "OPTIMIZERS",
    "TABLES",
    "Spec",
    "Ways",
    "factor",
    "minibatches",
    "network",
    "optimizer_of",
    "rate",
    "sharpness",
]

MODELS = ("linear", "degree2", "hidden1", "hidden2")
OPTIMIZERS = ("gd", "sgd", "adam")
NOISE = (0.0, 0.1, 0.2, 0.4)
WIDTH = 32  # of a hidden layer


@dataclass(frozen=True)
class Ways:
    """What runs of a kind are drawn from."""

    models: tuple[str, ...]
    optimizers: tuple[str, ...]
    noise: tuple[float, ...]
    sizes: tuple[int, ...]  # numbers of training rows
    steps: int


TABLES = Ways(MODELS, OPTIMIZERS, NOISE, (50, 100, 200), 2500)


@dataclass(frozen=True)
class Spec:
    """What is trained on what."""

    dataset: str
    n: int
    noise: float
    model: str
    optimizer: str
    seed: int
    steps: int = 2500

    @property
    def key(self) -> str:
        """A name for files."""
        noise = round(100 * self.noise)
        return (
            f"{self.dataset}-n{self.n}-noise{noise}-{self.model}-{self.optimizer}-"
            f"seed{self.seed}-steps{self.steps}"
        )

    @property
    def batch(self) -> int:
        """Rows in a minibatch: all of them for gradient descent."""
        return self.n if self.optimizer == "gd" else min(32, self.n // 4)


def network(spec: Spec, features: int, outputs: int) -> nn.Sequential:
    """The model of a run, with weights drawn from its seed."""
    hidden = {"hidden1": 1, "hidden2": 2}.get(spec.model, 0)
    sizes = [features, *[WIDTH] * hidden]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        layers: list[nn.Module] = []
        for before in sizes[:-1]:
            layers += [nn.Linear(before, WIDTH), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(sizes[-1], outputs))


def rate(spec: Spec, curvature: float) -> float:
    """The learning rate: within what is stable, and different in every run.

    Args:
        spec: of the run; its seed draws a factor between 0.2 and 1.
        curvature: largest eigenvalue of the Gauss-Newton matrix at the start.
    """
    if spec.optimizer == "adam":
        return 0.003 * factor(spec)
    share, most = (1.0, 0.3) if spec.optimizer == "gd" else (0.3, 0.1)
    return float(factor(spec) * min(share / curvature, most))


def factor(spec: Spec) -> float:
    """Between 0.2 and 1, drawn by the run's seed."""
    return float(10 ** np.random.default_rng([spec.seed, 1]).uniform(math.log10(0.2), 0.0))


def sharpness(model: nn.Module, loss: PerRowLoss, x: Tensor, y: Tensor) -> float:
    """Largest eigenvalue of the Gauss-Newton matrix, by power iteration on some rows."""
    x, y = x[:200], y[:200]
    with torch.no_grad():
        outputs = model(x)
    with torch.enable_grad():
        free = outputs.requires_grad_()
        (slope,) = torch.autograd.grad(loss.per_row(free, y).sum(), free, create_graph=True)
        bends = [
            torch.autograd.grad(slope[:, c].sum(), free, retain_graph=True)[0]
            for c in range(outputs.shape[1])
        ]
    basis = torch.eye(outputs.shape[1]).expand(len(x), -1, -1)
    found = jacobians_by_vmap(model, [name for name, _ in model.named_parameters()], [x], basis)
    jacobian = torch.cat([part.flatten(2) for part in found.values()], dim=2)
    bend = torch.stack(bends, dim=1)  # (rows, outputs, outputs)
    vector = torch.ones(jacobian.shape[2])
    for _ in range(30):
        vector = vector / vector.norm()
        along = torch.einsum("qcw,w->qc", jacobian, vector)
        along = torch.einsum("qcd,qd->qc", bend, along)
        vector = torch.einsum("qcw,qc->w", jacobian, along) / len(x)
    return float(vector.norm())


def optimizer_of(spec: Spec, model: nn.Module, lr: float) -> Optimizer:
    """GD and SGD are plain; Adam has its defaults."""
    if spec.optimizer == "adam":
        return torch.optim.Adam(model.parameters(), lr=lr)
    return torch.optim.SGD(model.parameters(), lr=lr)


def minibatches(rows: Tensor, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Row numbers for ever, in whole minibatches of a new order each epoch."""
    while True:
        order = torch.randperm(len(rows), generator=generator)
        if size >= len(rows):
            order = torch.arange(len(rows))
        for start in range(0, len(rows) - size + 1, size):
            yield rows[order[start : start + size]]
