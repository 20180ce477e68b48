"""EvidenceStopping in all kinds of training loops."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import heldin
from tests.support import runs
from tests.support.elementwise_runs import OPTIMISERS, SCHEDULERS, Table
from tests.support.loops import data, net, slow_groups
from tests.support.reading import updates


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def expect(stopping: runs.EvidenceStopping, groups: dict[str, float]) -> None:
    assert stopping.evidence.groups == pytest.approx(groups, rel=1e-7)


def twin_of(model: nn.Module, *batches: Any) -> dict[str, float]:
    """The values of the slow twin, a copy that is not observed."""
    return slow_groups(copy.deepcopy(model), batches)


@pytest.mark.parametrize("kind", sorted(OPTIMISERS))
def test_every_optimiser(kind: str) -> None:
    """The test is about the gradient: whatever uses it, the values are those of the weights."""
    model = Table(kind).double()
    optimizer = getattr(torch.optim, kind)(model.parameters(), **OPTIMISERS[kind])
    index, y = torch.randint(0, 9, (20, 3)), torch.randint(0, 3, (20,))
    stopping = runs.EvidenceStopping(model, smoothing=0, patience=10**6)
    steps = 0

    def closure() -> float:
        nonlocal steps
        steps += 1
        optimizer.zero_grad()
        loss = F.cross_entropy(model(index), y)
        loss.backward()
        stopping.step()
        check = heldin.evidence(one_step(model, index, y))
        assert stopping.evidence.groups == pytest.approx(check.groups, rel=1e-9)
        return float(loss.detach())

    first = closure()
    for _ in range(5):
        optimizer.step(closure)
    assert closure() < first
    assert [r.step for r in stopping.history] == list(range(1, steps + 1))
    stopping.close()


def one_step(model: nn.Module, index: Tensor, y: Tensor) -> dict[str, heldin.Moments]:
    """Moments of a step from one backward pass per sample."""
    rows: dict[str, list[Tensor]] = {}
    for i in range(len(y)):
        loss = F.cross_entropy(model(index[i : i + 1]), y[i : i + 1])
        names, parameters = zip(*model.named_parameters(), strict=True)
        for name, g in zip(names, torch.autograd.grad(loss, parameters), strict=True):
            rows.setdefault(name, []).append(g.to_dense() / len(y))
    return {
        name: heldin.Moments(sum(c), sum(g.square() for g in c), len(c))  # type: ignore[arg-type]
        for name, c in rows.items()
    }


@pytest.mark.parametrize("name", sorted(SCHEDULERS))
def test_schedulers(name: str) -> None:
    model, (x, y) = net(), data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = SCHEDULERS[name](optimizer)
    with runs.EvidenceStopping(model, smoothing=0) as stopping:
        for _ in range(4):
            F.cross_entropy(model(x), y).backward()
            stopping.step()
            expect(stopping, twin_of(model, (x, y)))
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step(1.0) if name == "ReduceLROnPlateau" else scheduler.step()


@pytest.mark.parametrize("window", [1, 2])
def test_gradient_scaler_and_clipping(window: int) -> None:
    """Scaled losses give the same values; an overflow is recorded and does no harm."""
    model, (x, y) = net(dtype=torch.float32), data(dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1)
    plain = heldin.evidence(observed(model, x, y), across="median").criterion
    with runs.EvidenceStopping(model, smoothing=0, window=window) as stopping:
        for step in range(8):
            loss = F.cross_entropy(model(x), y) * (math.inf if step in (2, 3) else 1.0)
            scale = scaler.get_scale()
            scaler.scale(loss).backward()
            assert not stopping.step(scale=scale)
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert scaler.get_scale() != scale
        for record in stopping.history:
            if record.step in (3, 4):
                assert math.isnan(record.raw)
                assert set(record.nonfinite) == set(dict(model.named_parameters()))
            elif window == 1:
                assert record.raw == pytest.approx(plain, rel=1e-4)
            else:  # twice the samples: twice the evidence, but for m - 1 in the variance
                assert 1 - record.raw == pytest.approx(2 * (1 - plain) * 127 / 126, rel=1e-4)


def observed(model: nn.Module, x: Tensor, y: Tensor) -> heldin.Observation:
    with heldin.observe(model) as seen:
        F.cross_entropy(model(x), y).backward()
    model.zero_grad()
    return seen


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = net()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.body, x, use_reentrant=False)
        return out


def test_activation_checkpointing() -> None:
    model, (x, y) = Checkpointed(), data()
    with runs.EvidenceStopping(model, smoothing=0) as stopping:
        for _ in range(3):
            F.cross_entropy(model(x), y).backward()
            stopping.step()
            expect(stopping, twin_of(model, (x, y)))
            model.zero_grad()


def test_parameter_groups_of_an_optimiser_as_groups() -> None:
    model, (x, y) = net(), data()
    with runs.EvidenceStopping(
        model, parameter_groups=lambda n: n.split(".")[1], smoothing=0
    ) as stopping:
        F.cross_entropy(model(x), y).backward()
        stopping.step()
        values = twin_of(model, (x, y))
    f = {name: 1 - value for name, value in values.items()}
    live = stopping.evidence.live
    assert live == {"weight": 64, "bias": 11}
    weight = (40 * f["0.weight"] + 24 * f["3.weight"]) / 64
    bias = (8 * f["0.bias"] + 3 * f["3.bias"]) / 11
    assert stopping.criterion == pytest.approx(1 - (weight + bias) / 2, rel=1e-9)


def test_freezing_and_unfreezing() -> None:
    model, (x, y) = net(), data()
    with runs.EvidenceStopping(model, smoothing=0) as stopping:
        for frozen in (False, True, True, False):
            model[0].requires_grad_(not frozen)
            model.zero_grad()
            F.cross_entropy(model(x), y).backward()
            stopping.step()
            model[0].requires_grad_(True)
            values = twin_of(model, (x, y))
            if frozen:
                values = {n: v for n, v in values.items() if n.startswith("3")}
            expect(stopping, values)
    assert [len(r.groups) for r in stopping.history] == [4, 2, 2, 4]
    assert len(stopping.history.columns()["group/0.weight"]) == 4


def test_a_parameter_unfrozen_within_a_window_counts_its_own_samples() -> None:
    model, (x, y) = net(), data(40)
    batches = [(x[:20], y[:20]), (x[20:], y[20:])]
    with runs.EvidenceStopping(model, smoothing=0, window=2) as stopping:
        model[0].requires_grad_(False)
        for a, b in batches:
            F.cross_entropy(model(a), b).backward()
            stopping.step()
            model[0].requires_grad_(True)
        both, last = twin_of(model, *batches), twin_of(model, batches[1])
        expect(stopping, {n: (last if n.startswith("0") else both)[n] for n in both})


def test_parameters_added_later() -> None:
    model, (x, y) = net(), data()
    with runs.EvidenceStopping(model, smoothing=0) as stopping:
        F.cross_entropy(model(x), y).backward()
        stopping.step()
        model.append(nn.Linear(3, 3).double())
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        stopping.step()
        expect(stopping, twin_of(model, (x, y)))
    assert "4.weight" in stopping.evidence.groups


def test_evaluation_between_steps_does_not_count() -> None:
    model, (x, y) = net(), data()
    with runs.EvidenceStopping(model, smoothing=0) as stopping:
        for evaluate in (False, True):
            F.cross_entropy(model(x), y).backward()
            if evaluate:
                model(x[:3])  # somebody forgot no_grad
                with torch.no_grad():
                    model(x)
            stopping.step()
            model.zero_grad()
        first, second = stopping.history
    assert first.groups == second.groups
    assert first.count == second.count == 64


def test_two_at_once() -> None:
    """Whole-model and element-wise stopping watch the same model."""
    model, (x, y) = net(), data()
    optimizer = heldin.ElementwiseStopping(torch.optim.SGD(model.parameters(), lr=0.1), model)
    with runs.EvidenceStopping(model, smoothing=0) as stopping:
        for _ in range(3):
            expected = twin_of(model, (x, y))
            F.cross_entropy(model(x), y).backward()
            stopping.step()
            expect(stopping, expected)
            optimizer.step()
            optimizer.zero_grad()
    assert updates(optimizer) == 3
    optimizer.close()


def test_an_overfitting_run_stops_well_before_its_end() -> None:
    """Twenty noisy rows, thirty weights: the test loss turns, and the rule stops near there."""
    x, hidden = torch.randn(20, 30), torch.randn(5000, 30)
    truth = torch.zeros(30, 1)
    truth[0] = 1.0
    y = x @ truth + torch.randn(20, 1)
    model = nn.Linear(30, 1)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    losses = []
    with runs.EvidenceStopping(model) as stopping:
        for _ in range(2000):
            with torch.no_grad():
                losses.append(float(F.mse_loss(model(hidden), hidden @ truth)))
            F.mse_loss(model(x), y).backward()
            if stopping.step():
                break
            optimizer.step()
            optimizer.zero_grad()
        at_stop = losses[-1]
        for _ in range(2000):
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        at_end = float(F.mse_loss(model(hidden), hidden @ truth))
    assert stopping.stopped_step is not None
    assert at_stop < 0.5 * at_end
    assert at_stop < losses[0]
