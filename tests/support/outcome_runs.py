"""Classifiers that are trained with shadows, whose outputs are followed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import heldin
from heldin import rules
from heldin.crossval import Calibrator, numbered

N, D, CLASSES = 40, 5, 3


def rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, D, generator=generator, dtype=torch.float64)
    scores = x[:, :CLASSES] + torch.randn(N, CLASSES, generator=generator, dtype=torch.float64)
    return x, scores.argmax(1)


def network(kind: str = "plain") -> nn.Module:
    torch.manual_seed(1)
    norm = nn.LayerNorm(8) if kind == "norm" else nn.Identity()
    return nn.Sequential(nn.Linear(D, 8), norm, nn.Tanh(), nn.Linear(8, CLASSES)).double()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.3)


def batches(steps: int = 12) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randperm(N, generator=generator)[:10] for _ in range(steps)]


def usual_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


CASES: dict[str, dict[str, Any]] = {
    "dense": {"engine": "dense"},
    "vmap": {"engine": "vmap", "kind": "norm"},
    "replay": {"engine": "replay"},
    "two of four": {"engine": "dense", "shadows": 2},
    "batch_loss": {"engine": "auto", "batch_loss": usual_loss},
    "predict, stacked": {"engine": "dense", "predict": lambda model, batch: model(batch[0])},
    "predict, replay": {"engine": "replay", "predict": lambda model, batch: model(batch[0])},
}


def trained(
    case: dict[str, Any], steps: int = 12, *, after: int = 0, saved: Any = None, **options: Any
) -> tuple[heldin.EarlyStopping, nn.Module]:
    """Train a network with shadows for some steps, or go on after some with what was saved."""
    case = {"kind": "plain", "shadows": None} | case
    model, (x, y) = network(case["kind"]), rows()
    optimizer = sgd(model)
    loss = case.get("batch_loss")
    stopping = heldin.EarlyStopping(
        model,
        optimizer,
        None if loss else F.cross_entropy,
        (x, y),
        rules.Folds(folds=4, shadows=case["shadows"], engine=case["engine"]),
        batch_loss=loss,
        predict=case.get("predict"),
        patience=None,
        **options,
    )
    if saved is not None:
        weights, state = saved
        model.load_state_dict(weights)
        stopping.load_state_dict(state)
    for index in batches()[after:steps]:
        batch = (x[index], y[index])
        stopping.note_batch(batch, index)
        optimizer.zero_grad()
        usual_loss(model, batch).backward()
        optimizer.step()
    return stopping, model


def cross_fitted(
    logits: Tensor,
    targets: Tensor,
    folds: Tensor,
    weights: Tensor | None = None,
    binary: bool | None = None,
) -> tuple[float, Tensor]:
    """The temperature of all rows, and losses of the rows of each fold at that of the others."""
    fit = Calibrator(logits, targets, binary, weights, numbered(folds))(logits, exact=True)
    return fit.temperature, fit.losses
