"""ElementwiseStopping: the rules of Sec. 3.6 and Eq. 15, around every optimiser."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import heldin
from heldin.criterion.masking import keep
from tests.support.elementwise_runs import (
    CLASSES,
    OPTIMISERS,
    Table,
    backward,
    stop_some,
    values,
    wrapped,
)
from tests.support.loops import data, net
from tests.support.reading import averages

PLAIN_BACKWARD = torch.autograd.backward


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    if torch.autograd.backward is not PLAIN_BACKWARD:
        gc.collect()  # what was forgotten removes itself
    assert torch.autograd.backward is PLAIN_BACKWARD


@pytest.mark.parametrize("greedy", [True, False])
def test_the_papers_rule_by_hand(greedy: bool) -> None:
    """SGD with the mask of Eq. 15, from one gradient per sample."""
    b, start, lr = 0.6, 3.0, 0.3
    model = nn.Linear(6, 2).double()
    x = torch.randn(40, 6).double()
    y = (x[:, 0] > 0).long()
    w = values(model)
    c = {name: torch.full_like(p, 1 - start) for name, p in w.items()}
    off = {name: torch.zeros_like(p, dtype=torch.bool) for name, p in w.items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    wrapper = heldin.ElementwiseStopping(optimizer, model, greedy=greedy, smoothing=b, start=start)
    switched_on = 0
    for step in range(30):
        rows = torch.randperm(40)[:20]
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        wrapper.step()
        wrapper.zero_grad()

        p = torch.softmax(x[rows] @ w["weight"].T + w["bias"], 1) - F.one_hot(y[rows], 2)
        for name, g in {"weight": p[:, :, None] * x[rows][:, None], "bias": p}.items():
            f = 20 * g.mean(0) ** 2 / g.var(0)
            c[name] = b * c[name] + (1 - b) * (1 - f)
            before = off[name]
            off[name] = (before | (c[name] > 0)) if greedy else c[name] > 0
            switched_on += int((before & ~off[name]).sum())
            w[name] = torch.where(off[name], w[name], w[name] - lr * g.mean(0))
        for name, value in model.named_parameters():
            assert torch.equal(wrapper.masks()[name], off[name]), step
            assert torch.allclose(value, w[name], rtol=1e-12, atol=1e-14), step
    wrapper.close()
    fraction = sum(int(m.sum()) for m in off.values()) / 14
    assert 0 < fraction == wrapper.stopped_fraction()
    assert wrapper.stopped_fraction(by="tensor")["bias"] == float(off["bias"].double().mean())
    assert (switched_on > 0) != greedy


def test_nothing_stops_in_the_warm_up_and_nothing_is_copied() -> None:
    model = net()
    optimizer = wrapped(model, smoothing=0.9, start=10.0)
    assert math.log(10) / math.log(1 / 0.9) > 21
    for _ in range(21):
        backward(model)
        optimizer.step()
        assert optimizer.stopped_fraction() == 0.0
    for _ in range(60):
        backward(model)
        optimizer.step()
    assert optimizer.stopped_fraction() > 0.1
    optimizer.close()


@pytest.mark.parametrize("dead", ["out", "zero"])
def test_dead_weights_keep_going_unless_told_otherwise(dead: Any) -> None:
    model = nn.Linear(4, 1, bias=False)
    x = torch.randn(16, 4) + 5.0  # a signal so strong that no live weight stops
    x[:, 2:] = 0.0
    optimizer = heldin.ElementwiseStopping(
        torch.optim.SGD(model.parameters(), lr=1e-4), model, smoothing=0.5, dead=dead
    )
    for _ in range(20):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
    expected = [False, False, dead == "zero", dead == "zero"]
    assert optimizer.masks()["weight"][0].tolist() == expected
    optimizer.close()


def test_corrections_reach_the_averages() -> None:
    c = torch.randn(12, 5).double() + 0.5
    moments = heldin.Moments(c.sum(0), c.square().sum(0), 12)
    f = 12 * c.mean(0) ** 2 / c.var(0)
    expected = {None: f, "gaussian": f * 9 / 11, "symmetric": f * 12 / (11 + f)}
    for correction, value in expected.items():
        model = nn.Linear(5, 1, bias=False).double()
        optimizer = wrapped(model, smoothing=0.25, start=4.0, correction=correction)
        model(c).sum().backward()
        optimizer.step()
        average = averages(optimizer)["weight"][0]
        assert torch.allclose(average, 0.25 * 4 + 0.75 * value), correction
        optimizer.close()
    assert torch.allclose(moments.snr, f)


def test_all_optimisers_of_torch_are_here() -> None:
    assert set(OPTIMISERS) == CLASSES


@pytest.mark.parametrize("kind", sorted(OPTIMISERS))
def test_a_stopped_weight_does_not_move_by_one_bit(kind: str) -> None:
    model, twin = Table(kind), Table(kind)
    twin.load_state_dict(model.state_dict())
    optimizer = wrapped(model, kind)
    plain = getattr(torch.optim, kind)(twin.parameters(), **OPTIMISERS[kind])
    index = torch.randint(0, 9, (20, 3))
    y = torch.randint(0, 3, (20,))

    def closure(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(index), y)
        loss.backward()
        return loss

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if kind == "LBFGS":
            optimizer.step(lambda: float(closure(model, optimizer).detach()))
        else:
            closure(model, optimizer)
            optimizer.step()

    for _ in range(3):  # momentum, second moments, slow averages get going
        step(model, optimizer)
        step(twin, plain)
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q), f"{name}: the wrapper changed training with no weight stopped"

    masks, before = stop_some(optimizer), values(model)
    step(model, optimizer)
    step(twin, plain)
    reference = values(twin)
    for name, p in model.named_parameters():
        assert torch.equal(p, torch.where(masks[name], before[name], reference[name])), name
    for _ in range(5):
        step(model, optimizer)
    for name, p in model.named_parameters():
        assert masks[name].any()
        assert torch.equal(p[masks[name]], before[name][masks[name]]), name
        assert not torch.equal(p[~masks[name]], before[name][~masks[name]]), name
    optimizer.close()


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"foreach": False}])
def test_all_implementations_of_adam(options: dict[str, Any]) -> None:
    model = net(dtype=torch.float32)
    inner = torch.optim.AdamW(model.parameters(), lr=0.1, **options)
    optimizer = heldin.ElementwiseStopping(inner, model)
    x, y = data(dtype=torch.float32)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    masks, before = stop_some(optimizer), values(model)
    for _ in range(3):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    for name, p in model.named_parameters():
        assert torch.equal(p[masks[name]], before[name][masks[name]])
        assert not torch.equal(p, before[name])
    optimizer.close()


class Large(nn.Module):
    """More weights than are worked on at a time, and a weight that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(300, 500)
        self.second = nn.Linear(500, 3)
        self.second.weight = nn.Parameter(torch.randn(500, 3).T / 20)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x).relu())
        return out


def test_tensors_of_any_size_and_memory_layout() -> None:
    model = Large().double()
    assert not model.second.weight.is_contiguous()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=0.1)
    wrapper = heldin.ElementwiseStopping(optimizer, model, smoothing=0.5, start=2.0)
    x = torch.randn(10, 300).double()
    for step in range(8):
        before, masks = values(model), wrapper.masks()
        before_step = averages(wrapper)
        with heldin.observe(model) as seen:
            model(x).square().sum().backward()
        wrapper.step()
        wrapper.zero_grad()
        for name, p in model.named_parameters():
            old = before_step.get(name, torch.full_like(seen[name].total, 2.0))
            f = seen[name].snr
            expected = torch.where((old < 1) | f.isnan(), old, 0.5 * old + 0.5 * f)
            assert torch.allclose(averages(wrapper)[name], expected), (step, name)
            off = wrapper.masks()[name]
            assert bool((off | ~masks[name]).all())
            assert torch.equal(p[off], before[name][off])
    assert 0 < wrapper.stopped_fraction() < 1
    wrapper.close()


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.filter_too_much])
@given(
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    st.lists(
        st.tuples(
            st.floats(width=16),
            st.floats(width=16),
            st.sampled_from([0.0, 0.5, math.nextafter(1.0, 0.0), 1.0, 1.5, 1e30, math.inf]),
        ),
        min_size=1,
        max_size=30,
    ),
)
def test_putting_back_is_bit_by_bit(
    dtype: torch.dtype, rows: list[tuple[float, float, float]]
) -> None:
    now, before, average = (torch.tensor(column) for column in zip(*rows, strict=True))
    now, before = now.to(dtype), before.to(dtype)
    average = average.to(torch.float64 if dtype == torch.float64 else torch.float32)
    expected = torch.where(average < 1, before, now)
    keep(now, before, average)
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    assert torch.equal(now.view(integer), expected.view(integer))


class Run:
    def __init__(self, kind: str, **options: Any) -> None:
        torch.manual_seed(3)
        self.model = net(dropout=0.2, dtype=torch.float32)
        self.x, self.y = data(dtype=torch.float32)
        self.optimizer = wrapped(self.model, kind, smoothing=0.7, start=3.0, **options)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.95)

    def step(self) -> None:
        rows = torch.randint(0, 64, (24,))
        F.cross_entropy(self.model(self.x[rows]), self.y[rows]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()

    def state(self) -> dict[str, Any]:
        parts = {n: getattr(self, n).state_dict() for n in ("model", "optimizer", "scheduler")}
        return {**parts, "rng": torch.get_rng_state()}

    def load(self, state: dict[str, Any]) -> None:
        for name in ("model", "optimizer", "scheduler"):
            getattr(self, name).load_state_dict(state[name])
        torch.set_rng_state(state["rng"])


@pytest.mark.parametrize("kind", ["SGD", "AdamW", "RMSprop"])
@pytest.mark.parametrize("options", [{}, {"greedy": False}, {"every": 2}], ids=str)
def test_a_resumed_run_is_the_uninterrupted_one(kind: str, options: Any, tmp_path: Any) -> None:
    whole, saved = Run(kind, **options), []
    for step in range(12):
        torch.save(whole.state(), tmp_path / f"{step}.pt")
        saved.append(tmp_path / f"{step}.pt")
        whole.step()
    final = values(whole.model)
    masks = whole.optimizer.masks()
    assert 0 < whole.optimizer.stopped_fraction() < 1
    for done, file in enumerate(saved):
        run = Run(kind, **options)
        run.load(torch.load(file, weights_only=True))
        for _ in range(12 - done):
            run.step()
        for name, value in values(run.model).items():
            assert torch.equal(value, final[name]), (done, name)
            assert torch.equal(run.optimizer.masks()[name], masks[name])
        run.optimizer.close()
    whole.optimizer.close()


def test_foreign_states_are_refused_and_change_nothing() -> None:
    run = Run("AdamW")
    run.step()
    state = run.optimizer.state_dict()
    plain = run.optimizer.optimizer.state_dict()
    own = state["heldin"]
    bad = [
        (plain, "state of a plain optimiser"),
        ({**plain, "heldin": {**own, "version": 2}}, "has version 2"),
        ({**plain, "heldin": {**own, "heldin": "EvidenceStopping"}}, "of a EvidenceStopping"),
        ({**plain, "heldin": {**own, "averages": {"x": torch.ones(2)}}}, "parameter 'x' of shape"),
        ({**plain, "heldin": {**own, "averages": 3}}, "incomplete or damaged"),
        (Run("AdamW", greedy=False).optimizer.state_dict(), "saved with greedy=False"),
    ]
    for foreign, message in bad:
        with pytest.raises(heldin.HeldinError, match=message):
            run.optimizer.load_state_dict(foreign)
    for name, average in averages(run.optimizer).items():
        assert torch.equal(average, own["averages"][name])
    run.optimizer.close()
