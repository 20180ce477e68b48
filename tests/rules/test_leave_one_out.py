"""Approximate leave-one-out: against the same step in weight space, and against retraining."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from heldin.rules import leave_one_out as _leaveoneout
from heldin.rules.displacements import directions, solve
from heldin.rules.unit_steps import unit_gradient_step
from tests.support import runs
from tests.support.leave_one_out_runs import ADAM, SGD, normal


@given(seed=st.integers(0, 10_000), q=st.integers(1, 6), b=st.integers(1, 3), d=st.integers(1, 8))
@settings(deadline=None, max_examples=40)
def test_the_step_is_that_of_each_sample_in_weight_space(seed: int, q: int, b: int, d: int) -> None:
    """(I + P H_(-i)) D_i(new) = D_i + P g_i / M, solved for every sample on its own."""
    jacobian, moved = normal(q, b, d, seed=seed), normal(q, d, seed=seed + 1)
    root = normal(q, b, b, seed=seed + 2)
    curvature, residual = root @ root.transpose(1, 2), normal(q, b, seed=seed + 3)
    times = normal(d, seed=seed + 4).square()
    source, share = 0.3, 0.7
    gram = torch.einsum("jad,d,ibd->jaib", jacobian, times, jacobian)
    shift = torch.einsum("jad,id->jai", jacobian, moved)
    shifts, moves = solve(gram, shift, residual, curvature, source, share)
    for i in range(q):
        hessian = sum(
            (share * jacobian[j].T @ curvature[j] @ jacobian[j] for j in range(q) if j != i),
            torch.zeros(d, d, dtype=torch.float64),
        )
        system = torch.eye(d, dtype=torch.float64) + times[:, None] * hessian
        rhs = moved[i] + times * source * (jacobian[i].T @ residual[i])
        new = torch.linalg.solve(system, rhs)
        torch.testing.assert_close(shifts[:, :, i], jacobian @ new, rtol=1e-6, atol=1e-8)
        step = times * torch.einsum("jad,ja->d", jacobian, moves[:, :, i])
        torch.testing.assert_close(moved[i] + step, new, rtol=1e-6, atol=1e-8)


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
    assert stopping.outputs == classes
    torch.testing.assert_close(stopping._displacements, moved)
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
    assert rule.outputs_only == (memory == 0)
    assert rule.outputs == {"wine": 3, "three directions": 3, "the slope alone": 1}.get(name, 10)


@given(seed=st.integers(0, 1000), c=st.integers(1, 6), count=st.integers(1, 6))
@settings(deadline=None, max_examples=30)
def test_directions_hold_the_slope_and_the_largest_bends(seed: int, c: int, count: int) -> None:
    root = normal(4, c, c, seed=seed)
    hessian, slope = root @ root.transpose(1, 2), normal(4, c, seed=seed + 1)
    basis = directions(slope, lambda v: torch.einsum("qab,qb->qa", hessian, v), count)
    b = min(c, count)
    assert basis.shape == (4, b, c)
    eye = torch.eye(b, dtype=torch.float64).expand(4, b, b)
    torch.testing.assert_close(basis @ basis.transpose(1, 2), eye, rtol=1e-6, atol=1e-8)
    inside = torch.einsum("qbc,qb->qc", basis, torch.einsum("qbc,qc->qb", basis, slope))
    torch.testing.assert_close(inside, slope)
    if 1 < b < c:  # the first leading eigenvectors lie within
        lead = torch.linalg.eigh(hessian).eigenvectors[:, :, 1 - b :]
        torch.testing.assert_close(
            basis.transpose(1, 2) @ (basis @ lead), lead, rtol=1e-6, atol=1e-8
        )


def test_gram_matrices_follow_turning_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A linear model: the state in the outputs is exact if it is turned with the directions."""
    monkeypatch.setattr(_leaveoneout, "FOLLOWED", 40 * 9)  # of the ten: nearly all
    _, full = against_retraining("digits", (), lambda p: SGD(p, lr=0.1), None)
    _, lazy = against_retraining("digits", (), lambda p: SGD(p, lr=0.1), None, memory=0)
    assert lazy.outputs == full.outputs == 9
    assert disagreement(lazy, full) < 0.01


def test_gram_matrices_alone_lose_little_where_one_output_is_followed() -> None:
    _, full = against_retraining(*SINGLE["sgd"])
    _, lazy = against_retraining(*SINGLE["sgd"], memory=0)
    assert lazy.outputs_only
    assert not full.outputs_only
    assert disagreement(lazy, full) < 0.003  # a linear model: J does not change


def test_probes_carry_the_gap() -> None:
    off, rule = against_retraining(*SINGLE["sgd"], probes=20)
    whole, _ = against_retraining(*SINGLE["sgd"])
    assert len(rule._probes) == 20
    assert off < 0.2
    assert whole < off


def test_dropping_the_state_would_be_noticed() -> None:
    """The agreement above is not for free: the training loss alone is far off."""
    off, rule = against_retraining(*SINGLE["gd"])
    table = rule.history.columns()
    gap = torch.tensor(table["estimate"]).log() - torch.tensor(table["training_loss"]).log()
    assert float(gap.abs().mean()) > 5 * off


@pytest.mark.parametrize(
    ("kind", "setting", "travelled"),
    [
        (SGD, {"lr": 0.1}, 0.3),
        (SGD, {"lr": 0.1, "momentum": 0.5}, 0.1 * (1 + 1.5 + 1.75)),
        (SGD, {"lr": 0.1, "momentum": 0.5, "dampening": 0.5}, 0.1 * 3),
        (SGD, {"lr": 1.0, "momentum": 0.5, "nesterov": True}, 1.5 + 1.75 + 1.875),
        (torch.optim.RMSprop, {"lr": 0.1, "momentum": 0.5}, 0.1 * (1 + 1.5 + 1.75)),
        (ADAM, {"lr": 0.1, "betas": (0.9, 0.99)}, 0.3),
    ],
)
def test_pulses_are_those_of_the_optimisers(
    kind: Any, setting: dict[str, Any], travelled: float
) -> None:
    velocity = total = 0.0
    for _ in range(3):
        velocity, far = unit_gradient_step(kind, setting, velocity)
        total += far
    assert math.isclose(total, travelled)
    p = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = kind([p], **setting)
    for _ in range(3):
        p.grad = torch.ones_like(p)
        optimizer.step()
    if kind is SGD:
        assert math.isclose(float(-p.detach()), travelled)
    if kind is ADAM:
        assert math.isclose(float(-p.detach()), travelled, rel_tol=1e-6)
