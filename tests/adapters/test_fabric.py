"""heldin.fabric.EarlyStopping against the plain loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("lightning")

from lightning.fabric import Fabric

import heldin
from heldin.fabric import EarlyStopping
from tests.support import plain

pytestmark = plain.foreign
LOSS = nn.CrossEntropyLoss()


def parts() -> tuple[nn.Module, Any, DataLoader[Any]]:
    torch.manual_seed(0)
    x = torch.randn(50, 4)
    rows = TensorDataset(x, (x[:, 0] > 0).long())
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    order = torch.Generator().manual_seed(1)
    return model, optimizer, DataLoader(rows, 10, shuffle=True, generator=order)


def batch_loss(model: Any, batch: Any) -> Any:
    return LOSS(model(batch[0]), batch[1])


def in_fabric(precision: Any = "32-true") -> Any:
    fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
    model, optimizer, loader = parts()
    return (fabric, *fabric.setup(model, optimizer), fabric.setup_dataloaders(loader))


@pytest.mark.parametrize("loss", [{"loss_fn": LOSS}, {"batch_loss": batch_loss}], ids=[*"ab"])
def test_same_as_plain(loss: dict[str, Any]) -> None:
    rule = heldin.rules.Folds(folds=3)
    model, optimizer, loader = parts()
    expected = heldin.EarlyStopping(model, optimizer, data=loader, rule=rule, **loss)
    torch.manual_seed(2)
    for _ in expected.epochs(8):
        for batch in loader:
            optimizer.zero_grad()
            batch_loss(model, batch).backward()
            optimizer.step()
    fabric, module, optimizer, loader = in_fabric()
    stopping = EarlyStopping(module, optimizer, data=loader, rule=rule, **loss)
    torch.manual_seed(2)
    for _ in stopping.epochs(8):
        for batch in loader:
            optimizer.zero_grad()
            fabric.backward(batch_loss(module, batch))
            optimizer.step()
    for column in ("step", "estimate", "standard_error"):
        assert stopping.history.columns()[column] == expected.history.columns()[column]
    for name, value in model.state_dict().items():
        assert torch.equal(module.state_dict()[name], value)


def test_reduced_precision_by_its_own_step() -> None:
    fabric, model, optimizer, loader = in_fabric("bf16-mixed")

    def train_step(batch: Any) -> Any:
        optimizer.zero_grad()
        loss = batch_loss(model, batch)
        fabric.backward(loss)
        optimizer.step()
        return loss.dtype

    stopping = EarlyStopping(model, optimizer, LOSS, loader, "folds", train_step=train_step)
    for _ in stopping.epochs(8):
        for batch in loader:
            assert stopping.train(batch) == torch.float32
    first, best = stopping.history[0], min(stopping.history, key=lambda each: each.estimate)
    assert best.estimate < 0.7 * first.estimate
    assert stopping.out_of_fold.outputs.dtype == torch.bfloat16  # as in the loop


def test_true_precision_casts_as_fabric_does() -> None:
    fabric, model, optimizer, loader = in_fabric("64-true")
    stopping = EarlyStopping(model, optimizer, LOSS, loader, "folds", verify=True)
    for _ in stopping.epochs(4):
        for batch in loader:
            optimizer.zero_grad()
            fabric.backward(batch_loss(model, batch))  # of outputs in single precision
            optimizer.step()
    assert stopping.out_of_fold.outputs.dtype == torch.float64
    assert len(stopping.history) > 3


def test_what_is_refused() -> None:
    model, optimizer, loader = parts()
    with pytest.raises(heldin.HeldinError, match=r"as fabric\.setup returned them"):
        EarlyStopping(model, optimizer, LOSS, loader)
    _, model, optimizer, loader = in_fabric("bf16-mixed")
    with pytest.raises(heldin.HeldinError, match="give train_step="):
        EarlyStopping(model, optimizer, LOSS, loader)
    model._strategy = object()
    with pytest.raises(heldin.HeldinError, match="object shards or moves the weights"):
        EarlyStopping(model, optimizer, LOSS, loader)
