"""`close()` releases whatever the user gave: model, optimiser, functions, loader, tensors."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

import heldin
from heldin import rules

N, D = 60, 12


class Parts:
    """Everything that a run refers to, and what only the stopping object may keep alive."""

    def __init__(self, norm: bool = False) -> None:
        torch.manual_seed(1)
        layers = [nn.Linear(D, 8), nn.BatchNorm1d(8) if norm else nn.Tanh(), nn.Linear(8, 1)]
        self.model = nn.Sequential(*layers).double()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.x = torch.randn(N, D, dtype=torch.float64)
        self.y = self.x[:, :1] + torch.randn(N, 1, dtype=torch.float64)
        self.dataset = TensorDataset(self.x, self.y)
        self.loader = DataLoader(self.dataset, batch_size=15, shuffle=True)
        self.loss_fn = nn.MSELoss()
        model = self.model

        def batch_loss(_: nn.Module, batch: Any) -> Tensor:
            return F.mse_loss(model(batch[0]), batch[1])

        def clip(parameters: Any) -> None:
            nn.utils.clip_grad_norm_(model.parameters(), 1e6)

        self.batch_loss, self.clip = batch_loss, clip
        self.average = AveragedModel(model)
        optimizer, average = self.optimizer, self.average
        steps = [0]

        def train_step(batch: Any) -> Tensor:
            optimizer.zero_grad()
            loss = batch_loss(model, batch)
            loss.backward()
            optimizer.step()
            average.update_parameters(model)
            steps[0] += 1
            return loss.detach()

        self.train_step = train_step

    def references(self) -> dict[str, weakref.ref[Any]]:
        """Weak references to all parts, and to the parameters."""
        parts = dict(vars(self)) | {"weight": self.model[0].weight}
        return {name: weakref.ref(part) for name, part in parts.items()}


def plainly(options: Callable[[Parts], dict[str, Any]], norm: bool = False) -> Any:
    def run(parts: Parts) -> Any:
        given: dict[str, Any] = {"loss_fn": parts.loss_fn, "data": parts.loader} | options(parts)
        stopping = heldin.EarlyStopping(parts.model, parts.optimizer, **given)
        for _ in range(2):
            for x, y in parts.loader:
                parts.optimizer.zero_grad()
                F.mse_loss(parts.model(x), y).backward()
                parts.optimizer.step()
        return stopping

    return lambda: Parts(norm), run


def by_function(parts: Parts) -> Any:
    stopping = heldin.EarlyStopping(
        parts.model,
        parts.optimizer,
        data=parts.loader,
        rule="folds",
        batch_loss=parts.batch_loss,
        train_step=parts.train_step,
        averaged_model=parts.average,
    )
    for _ in range(2):
        for batch in parts.loader:
            stopping.train(batch)
    return stopping


def by_fit(parts: Parts) -> Any:
    stopping = heldin.EarlyStopping(parts.model, parts.optimizer, parts.loss_fn, (parts.x, parts.y))
    return stopping.fit(batch_size=20, max_epochs=3)


RUNS: dict[str, Any] = {
    "dense": plainly(lambda p: {"rule": "folds"}),
    "dense, tensors": plainly(lambda p: {"rule": "folds", "data": (p.x, p.y)}),
    "vmap": plainly(lambda p: {"rule": rules.Folds(engine="vmap")}),
    "BatchNorm": plainly(lambda p: {"rule": "folds"}, norm=True),
    "batch_loss": plainly(lambda p: {"loss_fn": None, "batch_loss": p.batch_loss}),
    "light": plainly(
        lambda p: {
            "loss_fn": None,
            "batch_loss": p.batch_loss,
            "rule": rules.Folds(rows=0.25, shadows=3),
        }
    ),
    "clip": plainly(
        lambda p: {"loss_fn": None, "batch_loss": p.batch_loss, "clip": p.clip, "rule": "folds"}
    ),
    "eval_loss": plainly(
        lambda p: {
            "loss_fn": None,
            "rule": "folds",
            "batch_loss": p.batch_loss,
            "eval_loss": p.batch_loss,
            "metrics": {"error": lambda outputs, targets: F.l1_loss(outputs, targets)},
        }
    ),
    "leave-one-out": plainly(lambda p: {"rule": "leave-one-out"}),
    "train_step": (Parts, by_function),
    "fit": (Parts, by_fit),
}


@pytest.mark.parametrize("name", list(RUNS))
def test_after_close_nothing_of_the_user_is_kept_alive(name: str) -> None:
    make, run = RUNS[name]
    parts = make()
    stopping = run(parts)
    stopping.close()
    values = copy.deepcopy(stopping.estimates)
    references = parts.references()
    del parts
    gc.collect()
    alive = sorted(what for what, reference in references.items() if reference() is not None)
    assert not alive
    assert stopping.reason
    assert stopping.estimates == values
