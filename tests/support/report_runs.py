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


def stopping_by(rule: Any, rate: float = 0.05, **options: Any) -> Any:
    x, y = data()
    model = nn.Linear(4, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.5)
    if rule == "evidence":
        return heldin.EarlyStopping(model, optimizer, rule=rule)
    if rule == "validation":
        rule = heldin.rules.Validation(data=(x, y))
    return heldin.EarlyStopping(model, optimizer, nn.MSELoss(), (x, y), rule, **options)


def trained(rule: Any, epochs: int = 20, **options: Any) -> Any:
    stopping = stopping_by(rule, **options)
    (x, y), model, optimizer = data(), stopping._model, stopping._optimizer
    for _ in stopping.epochs(epochs):
        for index in torch.arange(40).split(20):
            if rule not in ("evidence", "validation"):
                stopping.note_batch((x[index], y[index]), index)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x[index]), y[index]).backward()
            optimizer.step()
    return stopping
