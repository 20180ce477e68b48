"""Single weights stopped, by a wrapper that is an optimiser like any other."""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import heldin
from tests.support.elementwise_runs import SCHEDULERS, backward, stop_some, values, wrapped
from tests.support.loops import data, net
from tests.support.reading import averages, updates

PLAIN_BACKWARD = torch.autograd.backward


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    if torch.autograd.backward is not PLAIN_BACKWARD:
        gc.collect()  # what was forgotten removes itself
    assert torch.autograd.backward is PLAIN_BACKWARD


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
        count = updates(optimizer)
        loss = F.cross_entropy(model(x), y)
        scaler.scale(loss * (math.inf if step == 2 else 1.0)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        moved = any(not torch.equal(p, before[n]) for n, p in model.named_parameters())
        assert moved == (step != 2) == (updates(optimizer) > count)
        if step == 1:
            held = averages(optimizer)
        if step == 2:  # nothing is judged by an overflow
            assert all(torch.equal(held[n], a) for n, a in averages(optimizer).items())
        if step == 3:  # whose gradients were thrown away, so that the next step stands alone
            assert not any(torch.equal(held[n], a) for n, a in averages(optimizer).items())
    assert all(bool(a.isfinite().all()) for a in averages(optimizer).values())
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

    twin = copy.deepcopy(model)
    with heldin.observe(twin) as seen:
        F.cross_entropy(twin(x), y).backward()
    expected = 0.5 * 4.0 + 0.5 * seen["3.weight"].snr
    optimizer.step(closure)
    assert calls > 2
    assert updates(optimizer) == 1
    assert torch.allclose(averages(optimizer)["3.weight"], expected)
    optimizer.step(closure)
    assert updates(optimizer) == 2
    optimizer.close()


def test_a_scaler_does_not_take_it_for_a_fused_optimiser() -> None:
    """Fused optimisers unscale by themselves; they would be told so past the wrapper."""
    model: Any = net(dtype=torch.float32)
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
    assert updates(optimizer) == 2
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
    assert "4.bias" in averages(optimizer)

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
    counts = []
    for step in range(1, 10):
        assert (torch.autograd.backward is not PLAIN_BACKWARD) == (step % 3 == 0)
        before, masks = values(model), optimizer.masks()
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
        for name, p in model.named_parameters():
            assert torch.equal(p[masks[name]], before[name][masks[name]])
        counts.append(updates(optimizer))
    assert counts == [0, 0, 1, 1, 1, 2, 2, 2, 3]
    assert optimizer.stopped_fraction() > 0
    optimizer.close()


def test_nan_gradients_neither_stop_nor_start_a_weight() -> None:
    model = net()
    optimizer = wrapped(model, "SGD")
    backward(model)
    optimizer.step()
    masks, before = stop_some(optimizer), values(model)
    held = averages(optimizer)
    optimizer.zero_grad()
    x, y = data()
    (F.cross_entropy(model(x), y) * math.nan).backward()
    optimizer.step()
    for name, p in model.named_parameters():
        assert torch.equal(averages(optimizer)[name], held[name])
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
    with pytest.raises(heldin.HeldinError, match="that is not in the model"):
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
