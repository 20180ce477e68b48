"""A short run by every rule, for its page and the line that shows its progress."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import heldin

RULES = ["evidence", "folds", "shadow", "leave-one-out", "validation"]


def data() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(40, 4, dtype=torch.float64)
    return x, 2 * x[:, :1] + torch.randn(40, 1, dtype=torch.float64)


def started(rule: Any, rate: float = 0.05, **options: Any) -> tuple[Any, nn.Module, Any]:
    """Return the stopping object, the model and the optimiser of a run by a rule."""
    x, y = data()
    model = nn.Linear(4, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.5)
    if rule == "evidence":
        return heldin.EarlyStopping(model, optimizer, rule=rule), model, optimizer
    if rule == "validation":
        rule = heldin.rules.Validation(data=(x, y))
    stopping = heldin.EarlyStopping(model, optimizer, nn.MSELoss(), (x, y), rule, **options)
    return stopping, model, optimizer


def trained(rule: Any, epochs: int = 20, **options: Any) -> Any:
    stopping, model, optimizer = started(rule, **options)
    x, y = data()
    for _ in stopping.epochs(epochs):
        for index in torch.arange(40).split(20):
            if rule not in ("evidence", "validation"):
                stopping.note_batch((x[index], y[index]), index)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x[index]), y[index]).backward()
            optimizer.step()
    return stopping
