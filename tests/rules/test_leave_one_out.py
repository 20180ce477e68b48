"""Approximate leave-one-out, against dense matrices and retraining; whole runs, refusals."""

from __future__ import annotations

import io
import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import heldin
from heldin.rules import leave_one_out as _leaveoneout
from tests.support import runs
from tests.support.leave_one_out_runs import ADAM, SGD, normal
from tests.support.reading import rule_state


def displacements(stopping: Any) -> Tensor:
    moved: Tensor = rule_state(stopping)["rule"]["moved"]
    return moved


def naive(
    model: nn.Module, x: Tensor, y: Tensor, losses: Any, moved: Tensor, times: Tensor, left: Tensor
) -> tuple[Tensor, Tensor]:
    """The rule written down sample by sample with dense matrices; new D and the estimate."""
    params = dict(model.named_parameters())
    sizes = [p.numel() for p in params.values()]

    def outputs(flat: Tensor) -> Tensor:
        parts = [s.view_as(p) for s, p in zip(flat.split(sizes), params.values(), strict=True)]
        return torch.func.functional_call(model, dict(zip(params, parts, strict=True)), (x,))

    flat = torch.cat([p.detach().flatten() for p in params.values()])
    jacobian = torch.func.jacrev(outputs)(flat)  # (n, c, d)
    o = outputs(flat).detach()
    n = len(o)

    def one(output: Tensor, target: Tensor) -> Tensor:
        return losses(output[None], target[None])[0]

    slope = torch.func.jacrev(one)
    slopes = [slope(o[i], y[i]) for i in range(n)]
    hessians = [torch.func.jacrev(slope)(o[i], y[i]) for i in range(n)]
    new, shifted = torch.empty_like(moved), o.clone()
    for i in range(n):
        h = sum(jacobian[j].T @ hessians[j] @ jacobian[j] / n for j in range(n) if j != i)
        # weight decay acts in the same implicit step: (1 + ...) D = D + ...
        system = torch.eye(len(flat), dtype=torch.float64) + (times * left)[:, None] * h
        rhs = left * moved[i] + times * left * (jacobian[i].T @ slopes[i]) / n
        new[i] = torch.linalg.solve(system, rhs)
        shifted[i] += jacobian[i] @ new[i]
    return new, losses(shifted, y)


def mse(o: Tensor, t: Tensor) -> Tensor:
    return F.mse_loss(o, t, reduction="none").mean(1)


def entropy(o: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(o, t, reduction="none")


@pytest.mark.parametrize("classes", [1, 3])
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_the_whole_rule_against_dense_matrices(classes: int, decay: float) -> None:
    torch.manual_seed(0)
    n = 9
    x = normal(n, 4)
    y = normal(n, 1, seed=1) if classes == 1 else torch.arange(n) % 3
    loss_fn, losses = (F.mse_loss, mse) if classes == 1 else (F.cross_entropy, entropy)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, classes)).double()
    optimizer = SGD(model.parameters(), lr=0.2, weight_decay=decay, momentum=0.5)
    stopping = runs.LeaveOneOutStopping(model, optimizer, loss_fn, (x, y), patience=None)
    width = sum(p.numel() for p in model.parameters())
    moved = torch.zeros(n, width, dtype=torch.float64)
    estimates, since, velocity = [float(losses(model(x), y).detach().mean())], 0.0, 0.0
    for step in range(1, 12):
        loss_fn(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        velocity = 0.5 * velocity + 1
        since += 0.2 * velocity
        stopping.step()
        if stopping.history[-1].step == step:
            times = torch.full((width,), since, dtype=torch.float64)
            with torch.no_grad():
                moved, rows = naive(model, x, y, losses, moved, times, 1 / (1 + decay * times))
            estimates.append(float(rows.mean()))
            since = 0.0
    assert stopping.backend.outputs == classes
    torch.testing.assert_close(displacements(stopping), moved)
    torch.testing.assert_close(
        torch.tensor(stopping.history.columns()["estimate"]), torch.tensor(estimates)
    )
    assert len(estimates) == 8


def disagreement(approximate: Any, exact: Any) -> float:
    """Mean |log ratio| of two estimates along a run."""
    a = torch.tensor(approximate.history.columns()["estimate"])
    b = torch.tensor(exact.history.columns()["estimate"])
    return float((a.log() - b.log()).abs().mean())


def problem(name: str, n: int) -> tuple[Tensor, Tensor, Any]:
    datasets = pytest.importorskip("sklearn.datasets")
    x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:n]
    x, y = torch.tensor(x)[order].double(), torch.tensor(y)[order]
    x = ((x - x.mean(0)) / x.std(0).clamp(min=1e-9)).clamp(-5, 5)
    if name == "diabetes":
        return x, ((y - y.mean()) / y.std())[:, None], F.mse_loss
    if name == "breast_cancer":
        return x, y[:, None].double(), F.binary_cross_entropy_with_logits
    return x, y.long(), F.cross_entropy


def against_retraining(
    name: str, hidden: tuple[int, ...], make: Any, batch: int | None, n: int = 40, **options: Any
) -> tuple[float, Any]:
    """Train once, with the rule beside all n models without one row each."""
    x, y, loss_fn = problem(name, n)
    torch.manual_seed(0)
    classes = int(y.max()) + 1 if loss_fn is F.cross_entropy else 1
    sizes = [x.shape[1], *hidden, classes]
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), nn.Tanh()]
    model = nn.Sequential(*layers[:-1]).double()
    optimizer = make(model.parameters())
    rows = (x, y)
    exact = runs.FoldStopping(
        model, optimizer, loss_fn, rows, list(range(n)), grid=1.25, patience=None, average="best"
    )
    rule = runs.LeaveOneOutStopping(model, optimizer, loss_fn, rows, patience=None, **options)
    generator = torch.Generator().manual_seed(0)
    queue: list[Tensor] = []
    for _ in range(250):
        if not queue:
            order = torch.randperm(n, generator=generator) if batch else torch.arange(n)
            queue = list(order.split(batch or n))
        index = queue.pop()
        loss_fn(model(x[index]), y[index]).backward()
        optimizer.step()
        optimizer.zero_grad()
        exact.step(indices=index)
        rule.step()
    return disagreement(rule, exact), rule


SINGLE: dict[str, Any] = {
    "gd": ("breast_cancer", (), lambda p: SGD(p, lr=0.1), None),
    "sgd": ("breast_cancer", (), lambda p: SGD(p, lr=0.05), 10),
    "momentum": ("diabetes", (), lambda p: SGD(p, lr=0.005, momentum=0.9), 10),
    "nesterov": ("diabetes", (), lambda p: SGD(p, lr=0.005, momentum=0.9, nesterov=True), None),
    "decay": ("diabetes", (), lambda p: SGD(p, lr=0.02, weight_decay=0.3), 10),
    "hidden": ("breast_cancer", (8,), lambda p: SGD(p, lr=0.1), None),
    "adam": ("breast_cancer", (), lambda p: ADAM(p, lr=0.01), 10),
    "adam, coupled decay": ("diabetes", (), lambda p: ADAM(p, lr=0.01, weight_decay=0.1), 10),
    "adamw": ("diabetes", (), lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=1.0), 10),
    "rmsprop": ("diabetes", (), lambda p: torch.optim.RMSprop(p, lr=0.003), 10),
}


@pytest.mark.parametrize("name", SINGLE)
def test_single_outputs_agree_with_retraining_within_3_percent(name: str) -> None:
    off, _ = against_retraining(*SINGLE[name])
    assert off < 0.03


# data, hidden layers, optimiser, batch, samples x directions that are followed, memory
SEVERAL: dict[str, Any] = {
    "wine": ("wine", (), lambda p: SGD(p, lr=0.1), None, 1000, 2**28),
    "digits": ("digits", (12,), lambda p: SGD(p, lr=0.1), 20, 1000, 2**28),
    "three directions": ("digits", (12,), lambda p: SGD(p, lr=0.1), 20, 120, 2**28),
    "the slope alone": ("digits", (), lambda p: SGD(p, lr=0.1), None, 40, 2**28),
    "Gram matrices only": ("digits", (8,), lambda p: SGD(p, lr=0.1), None, 1000, 0),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_several_classes_agree_with_retraining_within_12_percent(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    *setting, followed, memory = SEVERAL[name]
    monkeypatch.setattr(_leaveoneout, "FOLLOWED", followed)
    off, rule = against_retraining(*setting, memory=memory)
    assert off < 0.12
    assert rule.backend.outputs_only == (memory == 0)
    assert rule.backend.outputs == {"wine": 3, "three directions": 3, "the slope alone": 1}.get(
        name, 10
    )


def test_gram_matrices_follow_turning_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A linear model: the state in the outputs is exact if it is turned with the directions."""
    monkeypatch.setattr(_leaveoneout, "FOLLOWED", 40 * 9)  # of the ten: nearly all
    _, full = against_retraining("digits", (), lambda p: SGD(p, lr=0.1), None)
    _, lazy = against_retraining("digits", (), lambda p: SGD(p, lr=0.1), None, memory=0)
    assert lazy.backend.outputs == full.backend.outputs == 9
    assert disagreement(lazy, full) < 0.01


def test_gram_matrices_alone_lose_little_where_one_output_is_followed() -> None:
    _, full = against_retraining(*SINGLE["sgd"])
    _, lazy = against_retraining(*SINGLE["sgd"], memory=0)
    assert lazy.backend.outputs_only
    assert not full.backend.outputs_only
    assert disagreement(lazy, full) < 0.003  # a linear model: J does not change


def test_probes_carry_the_gap() -> None:
    off, rule = against_retraining(*SINGLE["sgd"], probes=20)
    whole, _ = against_retraining(*SINGLE["sgd"])
    assert len(rule_state(rule)["rule"]["probes"]) == 20
    assert off < 0.2
    assert whole < off


def test_dropping_the_state_would_be_noticed() -> None:
    """The agreement above is not for free: the training loss alone is far off."""
    off, rule = against_retraining(*SINGLE["gd"])
    table = rule.history.columns()
    gap = torch.tensor(table["estimate"]).log() - torch.tensor(table["training_loss"]).log()
    assert float(gap.abs().mean()) > 5 * off


def fit(steps: int = 400, loss_fn: Any = F.mse_loss, **options: Any) -> tuple[Any, Any]:
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
        groups: list[dict[str, Any]] = [
            {"params": [model.weight]},
            {"params": [model.bias], "lr": 0.0},
        ]
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
        assert torch.equal(displacements(stopping)[:, -1], torch.zeros(20, dtype=torch.float64))
        ends.append(stopping.history[-1].estimate)
    assert math.isclose(ends[0], ends[1], rel_tol=2e-3)


def test_a_resumed_run_goes_on_bit_for_bit() -> None:
    x, y = normal(20, 5), normal(20, 1, seed=1)

    def parts() -> tuple[Any, Any, Any]:
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
    assert torch.equal(displacements(second[2]), displacements(whole[2]))


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
