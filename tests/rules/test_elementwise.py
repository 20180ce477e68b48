"""ElementwiseStopping: the rules of Sec. 3.6 and Eq. 15, around every optimiser."""

from __future__ import annotations

import copy
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
from tests.support.loops import data, net

PLAIN_BACKWARD = torch.autograd.backward

# Every optimiser of torch.optim, with all that can move a weight without a gradient.
OPTIMISERS: dict[str, dict[str, Any]] = {
    "ASGD": {"lambd": 0.1, "weight_decay": 0.1},
    "Adadelta": {"lr": 0.5, "weight_decay": 0.1},
    "Adafactor": {"lr": 0.1, "weight_decay": 0.1},
    "Adagrad": {"lr": 0.1, "weight_decay": 0.1},
    "Adam": {"lr": 0.1, "weight_decay": 0.1, "amsgrad": True},
    "AdamW": {"lr": 0.1, "weight_decay": 0.1},
    "Adamax": {"lr": 0.1, "weight_decay": 0.1},
    "LBFGS": {"lr": 0.1},
    "Muon": {"lr": 0.1, "weight_decay": 0.1},
    "NAdam": {"lr": 0.1, "weight_decay": 0.1, "decoupled_weight_decay": True},
    "RAdam": {"lr": 0.1, "weight_decay": 0.1},
    "RMSprop": {"lr": 0.01, "weight_decay": 0.1, "momentum": 0.9, "centered": True},
    "Rprop": {"lr": 0.1},
    "SGD": {"lr": 0.1, "weight_decay": 0.1, "momentum": 0.9, "nesterov": True},
    "SparseAdam": {"lr": 0.1},
}
CLASSES = {
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
} - {"Optimizer"}


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    if torch.autograd.backward is not PLAIN_BACKWARD:
        gc.collect()  # what was forgotten removes itself
    assert torch.autograd.backward is PLAIN_BACKWARD


def wrapped(model: nn.Module, kind: str = "SGD", **options: Any) -> heldin.ElementwiseStopping:
    optimizer = getattr(torch.optim, kind)(model.parameters(), **OPTIMISERS[kind])
    return heldin.ElementwiseStopping(optimizer, model, **options)


def backward(model: nn.Module, rows: slice = slice(0, 32)) -> None:
    x, y = data(64)
    F.cross_entropy(model(x[rows]), y[rows]).backward()


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def stop_some(optimizer: heldin.ElementwiseStopping, share: float = 0.5) -> dict[str, Tensor]:
    """Let a random share of the weights be stopped, and say which."""
    generator = torch.Generator().manual_seed(7)
    for name, average in optimizer._averages.items():
        low = torch.rand(average.shape, generator=generator) < share
        optimizer._averages[name] = torch.where(low, 0.5, average).contiguous()
    optimizer._updates = 10**6
    return optimizer.masks()


# --- the rule --------------------------------------------------------------------------------


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
        average = optimizer._averages["weight"][0]
        assert torch.allclose(average, 0.25 * 4 + 0.75 * value), correction
        optimizer.close()
    assert torch.allclose(moments.snr, f)


# --- every optimiser -------------------------------------------------------------------------


def test_all_optimisers_of_torch_are_here() -> None:
    assert set(OPTIMISERS) == CLASSES


class Table(nn.Module):
    """A model for every kind of optimiser: sparse gradients, or matrices only."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 4, sparse=kind == "SparseAdam")
        self.out = None if kind == "SparseAdam" else nn.Linear(4, 3, bias=kind != "Muon")

    def forward(self, index: Tensor) -> Tensor:
        h: Tensor = self.embed(index).sum(1)
        return h if self.out is None else self.out(h)


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
def test_all_implementations_of_adam(options: dict[str, bool]) -> None:
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
        averages = {n: a.clone() for n, a in wrapper._averages.items()}
        with heldin.observe(model) as seen:
            model(x).square().sum().backward()
        wrapper.step()
        wrapper.zero_grad()
        for name, p in model.named_parameters():
            old = averages.get(name, torch.full_like(seen[name].total, 2.0))
            f = seen[name].snr
            expected = torch.where((old < 1) | f.isnan(), old, 0.5 * old + 0.5 * f)
            assert torch.allclose(wrapper._averages[name], expected), (step, name)
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


# --- a torch.optim.Optimizer -----------------------------------------------------------------

SCHEDULERS: dict[str, Any] = {
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5),
    "CosineAnnealingLR": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 5),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.5, total_steps=8),
    "CyclicLR": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.01, 0.5, step_size_up=2),
    "ReduceLROnPlateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [
            torch.optim.lr_scheduler.ConstantLR(o),
            torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
        ],
        [2],
    ),
}


@pytest.mark.parametrize("name", sorted(SCHEDULERS))
def test_schedulers_drive_the_wrapped_optimiser(name: str) -> None:
    def rates(wrap: bool) -> tuple[list[float], dict[str, Tensor]]:
        torch.manual_seed(0)
        model = net()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if wrap:
            optimizer = heldin.ElementwiseStopping(optimizer, model)
        scheduler = SCHEDULERS[name](optimizer)
        seen = []
        for _ in range(5):
            optimizer.zero_grad()
            backward(model)
            optimizer.step()
            scheduler.step(1.0) if name == "ReduceLROnPlateau" else scheduler.step()
            seen.append(optimizer.param_groups[0]["lr"])
        if wrap:
            optimizer.close()
        return seen, values(model)

    plain, watched = rates(False), rates(True)
    assert plain[0] == watched[0]
    assert len(set(plain[0])) > 1
    assert all(torch.equal(plain[1][n], watched[1][n]) for n in plain[1])


def test_a_gradient_scaler_steps_it_and_skips_overflows() -> None:
    model = net(dtype=torch.float32)
    optimizer = wrapped(model, "AdamW")
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    x, y = data(dtype=torch.float32)
    for step in range(6):
        before = values(model)
        updates = optimizer._updates
        loss = F.cross_entropy(model(x), y)
        scaler.scale(loss * (math.inf if step == 2 else 1.0)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        moved = any(not torch.equal(p, before[n]) for n, p in model.named_parameters())
        assert moved == (step != 2) == (optimizer._updates > updates)
        if step == 1:
            held = {n: a.clone() for n, a in optimizer._averages.items()}
        if step == 2:  # nothing is judged by an overflow
            assert all(torch.equal(held[n], a) for n, a in optimizer._averages.items())
        if step == 3:  # whose gradients were thrown away, so that the next step stands alone
            assert not any(torch.equal(held[n], a) for n, a in optimizer._averages.items())
    assert all(bool(a.isfinite().all()) for a in optimizer._averages.values())
    assert scaler.get_scale() == 2.0
    optimizer.close()


def test_a_closure_gives_the_evidence_in_its_first_call() -> None:
    torch.manual_seed(1)
    model = net()
    twin = copy.deepcopy(model)
    a, b = wrapped(model, smoothing=0.5), wrapped(twin, smoothing=0.5)
    x, y = data()
    for _ in range(12):

        def closure() -> float:
            a.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return float(loss.detach())

        expected = F.cross_entropy(model(x), y).item()
        assert a.step(closure) == pytest.approx(expected)
        F.cross_entropy(twin(x), y).backward()
        b.step()
        b.zero_grad()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(p, q)
    assert a.stopped_fraction() == b.stopped_fraction() > 0
    a.close()
    b.close()


def test_further_evaluations_of_a_line_search_do_not_count() -> None:
    model = net()
    x, y = data()
    inner = torch.optim.LBFGS(model.parameters(), max_iter=5, line_search_fn="strong_wolfe")
    optimizer = heldin.ElementwiseStopping(inner, model, smoothing=0.5, start=4.0)
    calls = 0

    def closure() -> float:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return float(loss.detach())

    with heldin.observe(model) as seen:
        F.cross_entropy(model(x), y).backward()
    optimizer._seen.clear()
    expected = 0.5 * 4.0 + 0.5 * seen["3.weight"].snr
    optimizer.step(closure)
    assert calls > 2
    assert optimizer._updates == 1
    assert torch.allclose(optimizer._averages["3.weight"], expected)
    optimizer.step(closure)
    assert optimizer._updates == 2
    optimizer.close()


def test_a_scaler_does_not_take_it_for_a_fused_optimiser() -> None:
    """Fused optimisers unscale by themselves; they would be told so past the wrapper."""
    model = net(dtype=torch.float32)
    inner = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    assert inner._step_supports_amp_scaling
    optimizer = heldin.ElementwiseStopping(inner, model)
    assert not hasattr(optimizer, "_step_supports_amp_scaling")
    scaler = torch.amp.GradScaler("cpu")
    x, y = data(dtype=torch.float32)
    for overflow in (True, False):
        before = values(model)
        scaler.scale(F.cross_entropy(model(x), y) * (math.inf if overflow else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        moved = not torch.equal(model[0].weight, before["0.weight"])
        assert moved != overflow
    assert (model[0].weight - before["0.weight"]).abs().max() < 0.2
    optimizer.close()


def test_zero_grad_may_stand_between_forward_and_backward() -> None:
    model = net()
    optimizer = wrapped(model)
    x, y = data()
    for _ in range(2):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert optimizer._updates == 2
    optimizer.close()


def test_parameter_groups_and_parameters_added_later() -> None:
    model = net()
    model[0].requires_grad_(False)
    optimizer = heldin.ElementwiseStopping(
        torch.optim.SGD(model[3].parameters(), lr=0.1, momentum=0.9), model, start=1.0, smoothing=0
    )
    backward(model)
    optimizer.step()
    assert set(optimizer.stopped_fraction(by="tensor")) == {"3.weight", "3.bias"}
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.01})
    assert optimizer.optimizer.param_groups[1]["lr"] == 0.01
    assert optimizer.stopped_fraction(by="tensor")["0.weight"] == 0.0
    for _ in range(8):
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
    assert optimizer.stopped_fraction(by="tensor")["0.weight"] > 0
    model.append(nn.Linear(3, 3).double())
    optimizer.add_param_group({"params": model[4].parameters()})
    backward(model)
    optimizer.step()
    assert "4.bias" in optimizer._averages

    stranger = nn.Linear(2, 7)
    with pytest.raises(heldin.HeldinError, match=r"group 3 holds a parameter of shape \(7, 2\)"):
        optimizer.add_param_group({"params": stranger.parameters()})
    assert len(optimizer.param_groups) == 3
    optimizer.close()


def test_frozen_weights_keep_their_stops() -> None:
    model = net()
    optimizer = wrapped(model)
    backward(model)
    optimizer.step()
    masks = stop_some(optimizer)
    model[0].requires_grad_(False)
    optimizer.zero_grad()
    backward(model)
    optimizer.step()
    assert torch.equal(optimizer.masks()["0.weight"], masks["0.weight"])
    model[0].requires_grad_(True)
    before = values(model)
    optimizer.zero_grad()
    backward(model)
    optimizer.step()
    assert torch.equal(model[0].weight[masks["0.weight"]], before["0.weight"][masks["0.weight"]])
    optimizer.close()


def test_every_observes_some_steps_and_holds_in_all() -> None:
    model = net()
    optimizer = wrapped(model, every=3, smoothing=0.0)
    updates = []
    for step in range(1, 10):
        assert (torch.autograd.backward is not PLAIN_BACKWARD) == (step % 3 == 0)
        before, masks = values(model), optimizer.masks()
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
        for name, p in model.named_parameters():
            assert torch.equal(p[masks[name]], before[name][masks[name]])
        updates.append(optimizer._updates)
    assert updates == [0, 0, 1, 1, 1, 2, 2, 2, 3]
    assert optimizer.stopped_fraction() > 0
    optimizer.close()


def test_nan_gradients_neither_stop_nor_start_a_weight() -> None:
    model = net()
    optimizer = wrapped(model, "SGD")
    backward(model)
    optimizer.step()
    masks, before = stop_some(optimizer), values(model)
    averages = {name: average.clone() for name, average in optimizer._averages.items()}
    optimizer.zero_grad()
    x, y = data()
    (F.cross_entropy(model(x), y) * math.nan).backward()
    optimizer.step()
    for name, p in model.named_parameters():
        assert torch.equal(optimizer._averages[name], averages[name])
        assert torch.equal(p[masks[name]], before[name][masks[name]])
    optimizer.close()


def test_hooks_and_attributes_of_the_wrapped_optimiser() -> None:
    model = net()
    optimizer = wrapped(model)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    optimizer.register_state_dict_post_hook(lambda o, state: {**state, "extra": 1})
    optimizer.optimizer.answer = 42  # type: ignore[attr-defined]
    backward(model)
    optimizer.step()
    assert calls == ["pre", "post"]
    assert optimizer.state_dict()["extra"] == 1
    assert optimizer.answer == 42
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        _ = optimizer.missing
    with pytest.raises(AttributeError, match="no attribute '_private'"):
        _ = optimizer._private
    assert optimizer.state is optimizer.optimizer.state
    assert optimizer.defaults is optimizer.optimizer.defaults
    assert "lr: 0.1" in repr(optimizer)
    metrics = optimizer.metrics()
    assert set(metrics) == {"heldin/stopped", *(f"heldin/stopped/{n}" for n in values(model))}
    optimizer.close()


def test_after_remove_the_stops_hold() -> None:
    model = net()
    optimizer = wrapped(model)
    backward(model)
    optimizer.step()
    masks, before = stop_some(optimizer), values(model)
    optimizer.close()
    assert torch.autograd.backward is PLAIN_BACKWARD
    backward(model)
    optimizer.step()
    for name, p in model.named_parameters():
        assert torch.equal(p[masks[name]], before[name][masks[name]])


def test_initialising_state_with_zero_gradients_is_allowed() -> None:
    """Distributed checkpointing makes optimisers create their state this way."""
    model = net()
    optimizer = wrapped(model, "Adam")
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert optimizer.state
    optimizer.close()


def test_mistakes() -> None:
    model = net()
    backward(model)
    optimizer = wrapped(model)
    with pytest.raises(heldin.HeldinError, match="Wrap the optimiser before the forward pass"):
        optimizer.step()
    with pytest.raises(heldin.HeldinError, match="cannot be pickled or copied"):
        copy.deepcopy(optimizer)
    with pytest.raises(heldin.HeldinError, match="by must be None or 'tensor'"):
        optimizer.stopped_fraction(by="layer")  # type: ignore[call-overload]
    optimizer.close()
    with pytest.raises(heldin.HeldinError, match="that the model has not"):
        heldin.ElementwiseStopping(torch.optim.SGD(net().parameters()), model)
    with pytest.raises(heldin.HeldinError, match=r"expected a torch\.optim\.Optimizer"):
        heldin.ElementwiseStopping(model, model)  # type: ignore[arg-type]
    for options, message in (
        ({"smoothing": 1.0}, "smoothing must lie"),
        ({"start": 0.5}, "start must be a number >= 1"),
        ({"every": 0}, "every must be"),
        ({"correction": "x"}, "correction: expected"),
        ({"dead": "x"}, "dead: expected"),
    ):
        with pytest.raises(heldin.HeldinError, match=message):
            wrapped(model, **options)


# --- resuming --------------------------------------------------------------------------------


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
    for name, average in run.optimizer._averages.items():
        assert torch.equal(average, own["averages"][name])
    run.optimizer.close()
