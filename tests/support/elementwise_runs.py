"""What the tests of elementwise share."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import heldin
from tests.support.loops import data

# Every optimiser of torch.optim, with all that can move a weight without a gradient.
OPTIMISERS: dict[str, dict[str, Any]] = {
    "ASGD": {"lambd": 0.1, "weight_decay": 0.1},
    "Adadelta": {"lr": 0.5, "weight_decay": 0.1},
    "Adafactor": {"lr": 0.1, "weight_decay": 0.1},
    "Adagrad": {"lr": 0.1, "weight_decay": 0.1},
    "Adam": {"lr": 0.1, "weight_decay": 0.1, "amsgrad": True},
    "AdamW": {"lr": 0.1, "weight_decay": 0.1},
    "Adamax": {"lr": 0.1, "weight_decay": 0.1},
    "LBFGS": {"lr": 0.1},
    "Muon": {"lr": 0.1, "weight_decay": 0.1},
    "NAdam": {"lr": 0.1, "weight_decay": 0.1, "decoupled_weight_decay": True},
    "RAdam": {"lr": 0.1, "weight_decay": 0.1},
    "RMSprop": {"lr": 0.01, "weight_decay": 0.1, "momentum": 0.9, "centered": True},
    "Rprop": {"lr": 0.1},
    "SGD": {"lr": 0.1, "weight_decay": 0.1, "momentum": 0.9, "nesterov": True},
    "SparseAdam": {"lr": 0.1},
}


CLASSES = {
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
} - {"Optimizer"}


def wrapped(model: nn.Module, kind: str = "SGD", **options: Any) -> heldin.ElementwiseStopping:
    optimizer = getattr(torch.optim, kind)(model.parameters(), **OPTIMISERS[kind])
    return heldin.ElementwiseStopping(optimizer, model, **options)


def backward(model: nn.Module, rows: slice = slice(0, 32)) -> None:
    x, y = data(64)
    F.cross_entropy(model(x[rows]), y[rows]).backward()


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def stop_some(optimizer: heldin.ElementwiseStopping, share: float = 0.5) -> dict[str, Tensor]:
    """Let a random share of the weights be stopped, and say which."""
    generator = torch.Generator().manual_seed(7)
    state = optimizer.state_dict()
    own = state["heldin"]
    for name, average in own["averages"].items():
        low = torch.rand(average.shape, generator=generator) < share
        own["averages"][name] = torch.where(low, 0.5, average).contiguous()
    own["updates"] = 10**6
    optimizer.load_state_dict(state)
    return optimizer.masks()


SCHEDULERS: dict[str, Any] = {
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5),
    "CosineAnnealingLR": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 5),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.5, total_steps=8),
    "CyclicLR": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.01, 0.5, step_size_up=2),
    "ReduceLROnPlateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [
            torch.optim.lr_scheduler.ConstantLR(o),
            torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
        ],
        [2],
    ),
}


class Table(nn.Module):
    """A model for every kind of optimiser: sparse gradients, or matrices only."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 4, sparse=kind == "SparseAdam")
        self.out = None if kind == "SparseAdam" else nn.Linear(4, 3, bias=kind != "Muon")

    def forward(self, index: Tensor) -> Tensor:
        h: Tensor = self.embed(index).sum(1)
        return h if self.out is None else self.out(h)
