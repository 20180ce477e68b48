"""Leave-one-out in whole runs: stops, weights, schedules, resumed runs, refusals."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import heldin
from heldin.rules import jacobians as _jacobians
from tests.support import runs
from tests.support.leave_one_out_runs import ADAM, SGD, normal


def fit(steps: int = 400, loss_fn: Any = F.mse_loss, **options: Any) -> tuple[Any, nn.Module]:
    torch.manual_seed(0)
    x = normal(40, 30)
    y = x[:, :1] + normal(40, 1, seed=1)
    model = nn.Linear(30, 1).double()
    rate = 0.02 / (40 if getattr(loss_fn, "reduction", "") == "sum" else 1)
    optimizer = SGD(model.parameters(), lr=rate)
    weight = options.pop("weight", torch.ones(40, dtype=torch.float64))
    stopping = runs.LeaveOneOutStopping(model, optimizer, loss_fn, (x, y), **options)
    for _ in range(steps):
        if "sample_weight" in options:
            (weight * (model(x) - y).square()[:, 0]).mean().backward()
        else:
            loss_fn(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if stopping.step():
            break
    return stopping, model


def test_it_stops_and_restores() -> None:
    stopping, model = fit(2000)
    assert stopping.should_stop
    assert 0 < stopping.best_step < stopping.stopped_step / 2
    last = model.weight.detach().clone()
    stopping.restore()
    assert not torch.equal(model.weight, last)
    bagged, _ = fit(300, patience=None, average="bagged")
    assert len(bagged.shares) > 1


def test_a_sum_is_a_mean_with_another_rate() -> None:
    mean, _ = fit(100, patience=None)
    total, _ = fit(100, nn.MSELoss(reduction="sum"), patience=None)
    torch.testing.assert_close(
        torch.tensor(mean.history.columns()["estimate"]),
        torch.tensor(total.history.columns()["estimate"]),
    )


def test_sample_weights_act_as_a_weighted_loss() -> None:
    weight = normal(40, seed=5).abs() + 0.1
    weight /= weight.mean()
    given_apart, _ = fit(60, patience=None, sample_weight=4 * weight, weight=weight)

    torch.manual_seed(0)
    x = normal(40, 30)
    y = torch.cat([x[:, :1] + normal(40, 1, seed=1), weight[:, None]], dim=1)

    def weighted(o: Tensor, t: Tensor) -> Tensor:
        return (t[:, 1] * (o[:, 0] - t[:, 0]).square()).mean()

    model = nn.Linear(30, 1).double()
    optimizer = SGD(model.parameters(), lr=0.02)
    stopping = runs.LeaveOneOutStopping(model, optimizer, weighted, (x, y), patience=None)
    for _ in range(60):
        weighted(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        stopping.step()
    torch.testing.assert_close(
        torch.tensor(given_apart.history.columns()["estimate"]),
        torch.tensor(stopping.history.columns()["estimate"]),
    )


def test_losses_without_curvature_and_with_negative_curvature() -> None:
    for loss_fn in (F.l1_loss, lambda o, t: (1 + (o - t).square()).log().mean()):
        stopping, _ = fit(50, loss_fn, patience=None)
        assert all(math.isfinite(record.estimate) for record in stopping.history)
        last = stopping.history[-1]
        assert last.estimate > last.training_loss


def test_schedules_and_groups() -> None:
    """Half the rate for twice the steps is the same flow; frozen groups do not move."""
    x = normal(20, 5)
    y = x[:, :1] + normal(20, 1, seed=1)
    ends = []
    for rate, steps in ((0.01, 100), (0.005, 200)):
        torch.manual_seed(0)
        model = nn.Linear(5, 1).double()
        groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.0}]
        optimizer = SGD(groups, lr=rate)
        stopping = runs.LeaveOneOutStopping(
            model, optimizer, F.mse_loss, (x, y), patience=None, grid=1.05
        )
        for _ in range(steps):
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            stopping.step()
        stopping.restore()
        assert torch.equal(stopping._displacements[:, -1], torch.zeros(20, dtype=torch.float64))
        ends.append(stopping.history[-1].estimate)
    assert math.isclose(ends[0], ends[1], rel_tol=2e-3)


def test_a_resumed_run_goes_on_bit_for_bit() -> None:
    x, y = normal(20, 5), normal(20, 1, seed=1)

    def parts() -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        optimizer = ADAM(model.parameters(), lr=0.01)
        return model, optimizer, runs.LeaveOneOutStopping(model, optimizer, F.mse_loss, (x, y))

    def go(model: Any, optimizer: Any, stopping: Any, steps: int) -> None:
        for _ in range(steps):
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            stopping.step()

    whole, first, second = parts(), parts(), parts()
    go(*whole, 60)
    go(*first, 23)
    file = io.BytesIO()
    torch.save([part.state_dict() for part in first], file)
    file.seek(0)
    for part, state in zip(second, torch.load(file, weights_only=True), strict=True):
        part.load_state_dict(state)
    go(*second, 37)
    assert list(second[2].history) == list(whole[2].history)
    assert torch.equal(second[2]._displacements, whole[2]._displacements)


def test_refusals() -> None:
    x, y = normal(20, 5), normal(20, 1, seed=1)
    model = nn.Linear(5, 1).double()
    with pytest.raises(heldin.HeldinError, match="how Adagrad moves"):
        runs.LeaveOneOutStopping(model, torch.optim.Adagrad(model.parameters()), F.mse_loss, (x, y))
    optimizer = SGD(model.parameters(), lr=0.1)
    with pytest.raises(heldin.HeldinError, match="probes must be a whole number >= 2"):
        runs.LeaveOneOutStopping(model, optimizer, F.mse_loss, (x, y), probes=1)
    other = nn.Linear(5, 1).double()
    with pytest.raises(heldin.HeldinError, match="none of its parameters"):
        runs.LeaveOneOutStopping(other, optimizer, F.mse_loss, (x, y))
    stopping = runs.LeaveOneOutStopping(model, optimizer, F.mse_loss, (x, y))
    F.mse_loss(model(x), y).backward()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    optimizer.step()
    with pytest.raises(heldin.HeldinError, match="another parameter group"):
        stopping.step()


class Branching(nn.Module):
    """No vmap: what it does depends on the data."""

    whole = False

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 4)
        self.norm = nn.LayerNorm(4)
        self.last, self.scale = nn.Linear(4, 3), nn.Parameter(torch.full((3, 1), 0.7))
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.norm(self.inner(x).tanh())
        h = self.inner(h @ self.inner.weight).sin()
        h = F.linear(h, self.last.weight * self.scale, self.last.bias)
        return h if self.whole or bool(h.square().sum() > 0) else 2 * h


class Fixed(Branching):
    """The same function without the branch."""

    whole = True


def test_captured_jacobians_are_those_of_torch_func() -> None:
    torch.manual_seed(3)
    model = Fixed().double()
    names = [name for name, _ in model.named_parameters()]
    x, directions = normal(6, 5), normal(6 * 2, 3).view(6, 2, 3)
    expected = _jacobians.mapped(model, names, [x], directions)
    found = _jacobians.captured(model, names, [x], directions)
    assert list(found) == names
    for name in names:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-10, atol=1e-13)
    only = _jacobians.captured(model, names[:1], [x], directions)
    torch.testing.assert_close(only[names[0]], expected[names[0]])
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_a_model_that_torch_func_cannot_map_is_captured() -> None:
    x, y = normal(20, 5), normal(20, 3, seed=1)
    results = []
    for kind, way in ((Branching, _jacobians.captured), (Fixed, _jacobians.mapped)):
        torch.manual_seed(4)
        model = kind().double()
        optimizer = SGD([p for n, p in model.named_parameters() if n != "unused"], lr=0.1)
        stopping = runs.LeaveOneOutStopping(model, optimizer, F.mse_loss, (x, y))
        assert stopping._jacobian_fn is way
        for _ in range(20):
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            stopping.step()
        results.append(torch.tensor(stopping.history.columns()["estimate"]))
    torch.testing.assert_close(*results, rtol=1e-9, atol=0)


def test_a_model_without_derivatives_by_samples_is_refused() -> None:
    class Hiding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(5, 1)

        def forward(self, x: Tensor) -> Tensor:
            h = x.detach().requires_grad_()
            result: Tensor = checkpoint(self.inner, h, use_reentrant=True)
            return result

    x, y = normal(20, 5), normal(20, 1, seed=1)
    model = Hiding().double()
    with pytest.raises(heldin.HeldinError, match=r"neither through.*rule='folds'"):
        runs.LeaveOneOutStopping(model, SGD(model.parameters(), lr=0.1), F.mse_loss, (x, y))
