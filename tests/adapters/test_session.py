"""A session follows a run in a framework; no framework is needed for this."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import heldin
from heldin.adapters.session import Session, length
from heldin.pause import is_paused
from heldin.rules.options import Evidence
from heldin.shadows.held_out import FrameworkLoss
from tests.support import plain, runs

ROWS = 24
RULE = heldin.rules.Folds(average="best")


def rows() -> TensorDataset:
    x = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return TensorDataset(x, x[:, :1] + 1)


def mse(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


class ByWeight(FrameworkLoss):
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
    assert not stopping.observer.pending
    optimizer.step()
    assert stopping.observer.pending
    stopping.step()
    assert not stopping.observer.pending
    expected = twin.weight.detach() - 0.1 * twin.weight.grad
    torch.testing.assert_close(stopping.backend.weights_of(0)["weight"], expected)


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
        begun(Session("Callback", RULE), nn.Linear(3, 1).double())


def test_a_session_goes_on_from_the_last_weights_and_not_from_the_restored_ones() -> None:
    model, session = nn.Linear(3, 1).double(), Session("Callback", RULE)
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
    second = Session("Callback", RULE)
    with pytest.raises(heldin.HeldinError, match="state of its shadows is not there"):
        begun(second, model, resumed=True)
    second.load_state_dict(state)
    begun(second, model, resumed=True)
    assert torch.equal(model.weight, last)
    second.end()
    with pytest.raises(heldin.HeldinError, match="not a state of Callback"):
        second.load_state_dict({"step": 3})


def test_a_length_that_is_unknown() -> None:
    assert (length([1, 2, 3]), length(iter([1, 2, 3]))) == (3, None)


def evidence_session(**options: Any) -> Session:
    return Session("Callback", Evidence(**options))


def test_a_state_waits_for_its_run() -> None:
    first = evidence_session(smoothing=0.5)
    model, x = nn.Linear(3, 1), torch.randn(8, 3)
    stopping = first.begin(model)
    for _ in range(3):
        model(x).sum().backward()
        stopping.step()
    state = first.state_dict()
    second = evidence_session(smoothing=0.5)
    second.load_state_dict(state)
    assert second.state_dict() == state
    assert second.begin(model).criterion == stopping.criterion
    third = evidence_session(smoothing=0.9)
    third.load_state_dict(state)
    with pytest.raises(heldin.HeldinError, match="smoothing"):
        third.begin(model)
    first.end()
    second.end()
    plain.expect_no_trace(model)


def test_steps_are_seen_once() -> None:
    model, x = nn.Linear(2, 1), torch.randn(4, 2)
    session = evidence_session(warmup=100)
    session.begin(model, hook=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.SGD([model.bias], lr=0.1)
    for _ in range(2):
        session.begin_batch()
        model(x).sum().backward()
        optimizer.step()
        other.step()  # of the same batch
        torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1).step()  # of another model
    assert session.stopping.counts[0] == 2
    session.begin_batch()
    model(x).sum().backward()
    session.before_step()  # called by the framework
    optimizer.step()
    assert session.stopping.counts[0] == 3

    def closure() -> float:
        loss = model(x).sum()
        loss.backward()
        return float(loss.detach())

    session.begin_batch()
    optimizer.step(closure)
    assert session.stopping.counts[0] == 3
    assert not session.evidence_formed
    session.step()  # after the batch
    assert session.stopping.counts[0] == 4
    session.begin_batch()
    around = heldin.ElementwiseStopping(optimizer, model)
    model(x).sum().backward()
    around.step()
    assert session.stopping.counts[0] == 5
    around.close()
    del session  # a lost one goes with its hooks
    plain.expect_no_trace(model)


def test_all_optimisers_of_an_iteration_stand_still_once_the_rule_has_stopped() -> None:
    model = nn.Linear(2, 1)
    session = evidence_session()
    session.begin(model, hook=True).should_stop = True
    model(torch.randn(4, 2)).sum().backward()
    weights = copy.deepcopy(model.state_dict())
    for optimizer in [torch.optim.SGD([p], lr=0.1) for p in model.parameters()]:
        optimizer.step()
        model(torch.randn(4, 2)).sum().backward()
    torch.testing.assert_close(model.state_dict(), weights, rtol=0, atol=0)
    session.end()


def run_epochs(number: int, batches: int, **options: Any) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(3, 1), torch.randn(8, 3)
    session = evidence_session(arm_threshold=None, **options)
    session.begin(model)
    for _ in range(number):
        for _ in range(batches):
            session.begin_batch()
            model(x).square().mean().backward()
            session.before_step()
            model.zero_grad()
        session.end_epoch()
    session.end()


def test_very_many_epochs_without_a_stop_are_noticed() -> None:
    with pytest.warns(heldin.HeldinWarning, match=r"100 epochs.*use rule='auto'") as told:
        run_epochs(120, 10, checks=10**6)
    assert len(told) == 1
    run_epochs(120, 2, checks=10**6)  # few steps in many epochs say nothing
    run_epochs(90, 14, checks=10**6)


@pytest.mark.parametrize(
    ("steps", "every", "window"), [(7, 1, 7), (7 / 3, 1, 3), (7, 3, 2), (1, 5, 1)]
)
def test_a_window_of_an_epoch_has_its_observed_steps(steps: float, every: int, window: int) -> None:
    session = evidence_session(window="epoch", check_every=every)
    assert session.begin(plain.net(), epoch_steps=steps).rule.window == window
    session.end()


@pytest.mark.parametrize("steps", [None, math.inf])
def test_an_epoch_without_an_end_is_refused(steps: float | None) -> None:
    session = evidence_session(window="epoch")
    with pytest.raises(heldin.HeldinError, match=r"Callback: window='epoch' .* pass their number"):
        session.begin(plain.net(), epoch_steps=steps)


def test_other_words_for_a_window_are_refused() -> None:
    with pytest.raises(heldin.HeldinError, match="window"):
        Evidence(window="epochs")  # type: ignore[arg-type]


def test_a_run_that_goes_on_keeps_its_window() -> None:
    """The next part of the data may have another length, or tell none."""
    session = evidence_session(window="epoch")
    session.begin(plain.net(), epoch_steps=7)
    state = session.state_dict()
    session.end()
    for steps in (3, None):
        session = evidence_session(window="epoch")
        session.load_state_dict(state)
        assert session.begin(plain.net(), epoch_steps=steps).rule.window == 7
        session.end()
