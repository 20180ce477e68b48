"""Optimisers whose `step` calls that of their base class have hooks around both."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import heldin


class Halving(torch.optim.SGD):
    """SGD whose rate falls, by a number that it keeps as an attribute."""

    taken = 0

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.taken += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / self.taken
        return super().step(closure)


def test_a_step_that_calls_another_one_is_one_step() -> None:
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)  # its class has hooks from now on
    torch.manual_seed(0)
    model, x = nn.Linear(3, 1), torch.randn(20, 3)
    optimizer = Halving(model.parameters(), 0.1)
    loader = DataLoader(TensorDataset(x, 3 + x[:, :1]), batch_size=10)
    stopping = heldin.EarlyStopping(
        model,
        optimizer,
        data=loader,
        batch_loss=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
        patience=None,
    )
    for _ in stopping.epochs(2):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    assert stopping._step == 4
    assert optimizer.taken == 4


def test_closing_after_an_error_leaves_the_loop_quietly() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    stopping = heldin.EarlyStopping(
        model, optimizer, nn.MSELoss(), (torch.randn(20, 3), torch.randn(20, 1))
    )
    epochs = stopping.epochs(3)
    next(epochs)
    nn.functional.mse_loss(model(torch.randn(4, 3)), torch.zeros(4, 1))
    stopping._step = 1
    stopping.close()
    epochs.close()  # type: ignore[attr-defined]
