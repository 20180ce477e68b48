"""Frozen modules are computed once for the model and its shadows, with the same results."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import heldin
from heldin._private_torch import forward_hooks
from heldin.shadows.frozen import frozen_modules
from tests.support import runs

ROWS, WIDTH = 30, 6


class Counted(nn.Module):
    """A frozen trunk that counts the rows that it computes."""

    def __init__(self, last: nn.Module | None = None) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, WIDTH), nn.Tanh(), last or nn.LayerNorm(WIDTH))
        self.rows = 0

    def forward(self, x: Tensor, shift: float = 0.0) -> Tensor:
        self.rows += len(x)
        return self.layers(x) + shift


def probe(last: nn.Module | None = None) -> nn.Sequential:
    torch.manual_seed(1)
    model = nn.Sequential(Counted(last), nn.Linear(WIDTH, 1)).double()
    model[0].requires_grad_(False)
    return model


def test_the_largest_modules_without_a_trained_parameter() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Linear(2, 1))
    assert frozen_modules(model, {id(p) for p in model[1].parameters()}) == [model[0]]


def rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, 4, dtype=torch.float64, generator=generator)
    return x, x[:, :1] + torch.randn(ROWS, 1, dtype=torch.float64, generator=generator)


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def train(model: nn.Module, epochs: int = 6, **options: Any) -> Any:
    torch.manual_seed(2)
    loader = DataLoader(TensorDataset(*rows()), 10, shuffle=True)
    optimizer = torch.optim.Adam(model[1].parameters(), lr=0.05)
    stopping = runs.FoldStopping(
        model, optimizer, data=loader, batch_loss=loss_of, patience=None, **options
    )
    batches = []
    for _ in range(epochs):
        for batch in loader:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
            stopping.step()
            batches.append(batch)
    return stopping, batches, optimizer


def twin_of(shadow: int, label: Tensor, batches: list[Any], last: nn.Module | None = None) -> Any:
    """Train a freshly built model without the rows of a fold."""
    model, (x, _) = probe(last), rows()
    optimizer = torch.optim.Adam(model[1].parameters(), lr=0.05)
    for inputs, targets in batches:
        index = torch.stack([(x == row).all(1).nonzero()[0, 0] for row in inputs])
        seen = label[index] != shadow
        optimizer.zero_grad()
        F.mse_loss(model(inputs[seen]), targets[seen]).backward()
        optimizer.step()
    return model


def test_shadows_agree_with_models_trained_by_hand() -> None:
    model = probe()
    stopping, batches, _ = train(model)
    assert stopping.backend.frozen.reused > 0
    for shadow in range(5):
        twin = twin_of(shadow, stopping.fold_of_row, batches)
        weights = stopping.backend.weights_of(shadow)
        for name, p in twin[1].named_parameters():
            torch.testing.assert_close(weights[f"1.{name}"], p.detach(), rtol=1e-10, atol=1e-12)
        held = stopping.fold_of_row == shadow
        x, y = rows()
        expected = (twin(x[held]) - y[held]).square().flatten().detach()
        torch.testing.assert_close(
            stopping.backend.held_out()[held], expected, rtol=1e-9, atol=1e-12
        )
    stopping.close()


def test_the_trunk_is_computed_once_for_a_batch_and_once_for_held_out_rows() -> None:
    model: Any = probe()
    stopping, batches, optimizer = train(model, epochs=1)
    start, checks = model[0].rows, len(stopping.history)
    loader_rows = 0
    torch.manual_seed(3)
    x, y = rows()
    for index in torch.randperm(ROWS).split(10)[:2]:  # steps 5 and 6, which are not checked
        batch = (x[index], y[index])
        optimizer.zero_grad()
        stopping.add_batch(batch, index)
        loss_of(model, batch).backward()
        optimizer.step()
        stopping.step()
        loader_rows += len(index)
    assert len(batches) == 3
    assert len(stopping.history) > checks
    assert model[0].rows - start <= loader_rows + 10 + 5 * 8  # step 4 computes and compares
    stopping.close()


def test_the_users_training_is_untouched() -> None:
    plain, followed = probe(), probe()
    optimizer = torch.optim.Adam(plain[1].parameters(), lr=0.05)
    torch.manual_seed(2)
    for _ in range(6):
        for batch in DataLoader(TensorDataset(*rows()), 10, shuffle=True):
            optimizer.zero_grad()
            loss_of(plain, batch).backward()
            optimizer.step()
    stopping, *_ = train(followed)
    for a, b in zip(plain.parameters(), followed.parameters(), strict=True):
        assert torch.equal(a, b)
    stopping.close()
    assert "forward" not in vars(followed[0])
    assert not forward_hooks(followed[0])


class Mixing(nn.Module):
    """Subtracts the mean over the batch: rows influence each other."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


@pytest.mark.parametrize(
    "last", [Mixing(), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)], ids=lambda m: type(m).__name__
)
def test_trunks_whose_rows_are_not_independent_are_computed_every_time(last: nn.Module) -> None:
    model = probe(copy.deepcopy(last))
    stopping, batches, _ = train(model, shadows=2)
    if not isinstance(last, nn.Dropout):
        twin = twin_of(1, stopping.fold_of_row, batches, copy.deepcopy(last))
        for name, p in twin[1].named_parameters():
            weights = stopping.backend.weights_of(1)[f"1.{name}"]
            torch.testing.assert_close(weights, p.detach(), rtol=1e-9, atol=1e-12)
    checks = len(stopping.history)
    assert stopping.backend.frozen.reused <= 2 * checks  # blocks of held-out rows, at checks only
    stopping.close()


def test_other_arguments_are_noticed() -> None:
    """The trunk gets a number that changes from step to step, and a batch that is changed."""

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.head = Counted(), nn.Linear(WIDTH, 1)
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.trunk(2 * x, shift=float(len(x))))

    torch.manual_seed(1)
    model = Shifted().double()
    model.trunk.requires_grad_(False)
    start = copy.deepcopy(model.state_dict())
    x, y = rows()
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(x, y), 10)
    stopping = runs.FoldStopping(
        model, optimizer, data=loader, batch_loss=loss_of, patience=None, shadows=1
    )
    batches = []
    for batch in loader:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        stopping.step()
        batches.append(batch)
    twin = Shifted().double()
    twin.load_state_dict(start)
    own = torch.optim.SGD(twin.head.parameters(), lr=0.01)
    for number, (inputs, targets) in enumerate(batches):
        seen = stopping.fold_of_row[10 * number : 10 * number + 10] != 0
        own.zero_grad()
        F.mse_loss(twin(inputs[seen]), targets[seen]).backward()
        own.step()
    weights = stopping.backend.weights_of(0)["head.weight"]
    torch.testing.assert_close(weights, twin.head.weight.detach(), rtol=1e-10, atol=1e-12)
    stopping.close()


def test_a_step_of_the_users_own() -> None:
    """With train_step, and a trunk in evaluation mode with dropout."""
    model = probe(nn.Dropout(0.5))
    model[0].eval()
    optimizer = torch.optim.Adam(model[1].parameters(), lr=0.05)
    loader = DataLoader(TensorDataset(*rows()), 10, shuffle=True)

    def train_step(batch: Any) -> None:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        nn.utils.clip_grad_norm_(model[1].parameters(), 0.5)
        optimizer.step()

    stopping = heldin.EarlyStopping(
        model, optimizer, data=loader, batch_loss=loss_of, train_step=train_step, patience=None
    )
    for _ in range(4):
        for batch in loader:
            stopping.train(batch)
    inner: Any = stopping.following
    assert inner.backend.frozen.reused > 10
    stopping.close()


def test_copies_and_pickles_of_the_model_have_no_hooks_of_ours() -> None:
    model = probe()
    stopping, *_ = train(model, epochs=1)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    x, _ = rows()
    torch.testing.assert_close(loaded(x), model(x))
    copy.deepcopy(model)(x).sum().backward()
    stopping.close()
