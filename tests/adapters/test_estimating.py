"""What the adapters' `EarlyStopping` have in common; no framework is needed for this."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import heldin
from heldin.adapters.session import Session, Settings
from heldin.loop.loaders import LoaderRecorder
from heldin.pause import is_paused
from tests.support import runs

ROWS = 24
SETTINGS = Settings(heldin.rules.Folds(average="best"))


def rows() -> TensorDataset:
    x = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return TensorDataset(x, x[:, :1] + 1)


def mse(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def test_loaders_over_the_same_rows_are_followed_together() -> None:
    first: Any = DataLoader(rows(), batch_size=4)
    second: Any = DataLoader(rows(), batch_size=4, sampler=range(8, ROWS))
    recorder = LoaderRecorder(first)
    recorder.follow(second)
    recorder.follow(second)
    assert recorder.find(next(iter(first))).rows.tolist() == [0, 1, 2, 3]
    assert recorder.find(next(iter(second))).rows.tolist() == [8, 9, 10, 11]
    recorder.close()
    assert "_get_iterator" not in vars(first)
    assert "_get_iterator" not in vars(second)


class ByWeight:
    """Accumulated batches count by a weight of their own."""

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        return mse(model, batch)

    def shares(self, batches: list[Any]) -> list[float]:
        return [float(batch[0][0, 0].abs()) for batch in batches]


def test_a_loss_says_how_accumulated_batches_count() -> None:
    model = nn.Linear(3, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(rows(), batch_size=6)
    label = torch.arange(ROWS) == 7  # one row, of the second batch, is hidden
    stopping = runs.ShadowStopping(
        model, optimizer, data=loader, batch_loss=ByWeight(), hidden=label
    )
    twin = nn.Linear(3, 1).double()
    twin.load_state_dict(model.state_dict())
    x, y = rows().tensors
    for i, batch in enumerate(loader):
        if i == 2:
            break
        (batch[0][0, 0].abs() * mse(model, batch)).backward()
        stopping.add_batch(batch)
        kept = torch.tensor([j for j in range(6 * i, 6 * i + 6) if j != 7])
        (x[kept][0, 0].abs() * mse(twin, (x[kept], y[kept]))).backward()
    assert not stopping.pending
    optimizer.step()
    assert stopping.pending
    stopping.step()
    assert not stopping.pending
    expected = twin.weight.detach() - 0.1 * twin.weight.grad  # type: ignore[operator]
    torch.testing.assert_close(stopping._backend.weights_of(0)["weight"], expected)  # type: ignore[union-attr]


class Tempered(nn.Module):
    """Has a number that its loop changes, and a list that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 1).double()
        self.temperature = 1.0
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.temperature)
        out: Tensor = self.net(x) * self.temperature
        return out


def test_shadows_follow_the_attributes_of_the_model() -> None:
    model, used = Tempered(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(shadow: Any, batch: Any) -> Tensor:
        found = mse(shadow, batch)
        if is_paused() and torch.is_grad_enabled():
            used.append((shadow.temperature, len(shadow.seen)))
        return found

    loader = DataLoader(rows(), batch_size=8)
    stopping = runs.FoldStopping(model, optimizer, data=loader, batch_loss=loss, shadows=1)
    for number, batch in enumerate(loader):
        model.temperature = 1.0 + number
        mse(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        stopping.step()
    assert set(used) == {(1.0, 1), (2.0, 2), (3.0, 3)}
    assert model.seen == [1.0, 2.0, 3.0]


def begun(session: Session, model: nn.Module, **options: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = DataLoader(rows(), batch_size=6)
    session.follow(batches)
    session.begin(model, optimizer, mse, batches, **options)
    return optimizer, batches


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(heldin.HeldinError, match=r"several processes.*rule='evidence'"):
        begun(Session("Callback", SETTINGS), nn.Linear(3, 1).double())


def test_a_session_goes_on_from_the_last_weights_and_not_from_the_restored_ones() -> None:
    model, session = nn.Linear(3, 1).double(), Session("Callback", SETTINGS)
    optimizer, batches = begun(session, model)
    for batch in batches:
        mse(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        session.add(batch)
        session.step()
    last = model.weight.detach().clone()
    session.finish()
    assert not session.running
    assert "_get_iterator" not in vars(batches)
    state = session.state_dict()
    with torch.no_grad():
        model.weight.zero_()  # as if it had been loaded from elsewhere
    second = Session("Callback", SETTINGS)
    with pytest.raises(heldin.HeldinError, match="state of its shadows is not there"):
        begun(second, model, resumed=True)
    second.load_state_dict(state)
    begun(second, model, resumed=True)
    assert torch.equal(model.weight, last)
    second.end()
    with pytest.raises(heldin.HeldinError, match="not a state of Callback"):
        second.load_state_dict({"step": 3})
