"""EvidenceStopping used in a way that cannot work is told so; other uses are left alone."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks

import heldin
from tests.support import runs

# --- the order of calls ----------------------------------------------------------------------


def ordered(order: str, steps: int = 3) -> None:
    """A plain loop of backward, optimiser, a part of it (p), zero_grad and step, by initials."""
    torch.manual_seed(0)
    model, x = nn.Linear(5, 1), torch.randn(8, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    other = torch.optim.SGD([model.bias], lr=0.01)
    calls: dict[str, Callable[[], Any]] = {
        "b": lambda: model(x).square().mean().backward(),
        "o": optimizer.step,
        "p": other.step,
        "z": optimizer.zero_grad,
    }
    with runs.EvidenceStopping(model) as stopping:
        for _ in range(steps):
            for call in order:
                calls.get(call, stopping.step)()


@pytest.mark.parametrize("order", ["bozs", "zbos", "bbozs", "bosz", "bspbos"])
def test_a_step_after_the_optimiser_is_not_accepted_in_silence(order: str) -> None:
    with pytest.warns(heldin.HeldinWarning, match=r"called after optimizer\.step\(\)") as told:
        ordered(order)
    assert len(told) == 1
    assert told[0].filename == __file__


@pytest.mark.parametrize("order", ["bsoz", "zbso", "bbsoz", "bsopz", "bobsoz", "bszo", "obsz"])
def test_other_orders_are_none_of_our_business(order: str) -> None:
    ordered(order)


def by_tasks(combine: Callable[[list[torch.Tensor]], torch.Tensor] | None) -> None:
    """A pass for each of two tasks, zero_grad between them, gradients combined by hand or not."""
    torch.manual_seed(0)
    model, x = nn.Linear(5, 2), torch.randn(8, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with runs.EvidenceStopping(model) as stopping:
        for _ in range(3):
            kept: list[list[torch.Tensor]] = []
            for task in range(2):
                optimizer.zero_grad()
                model(x)[:, task].square().mean().backward()
                kept.append([p.grad for p in model.parameters() if p.grad is not None])
            if combine is not None:
                for p, *grads in zip(model.parameters(), *kept, strict=True):
                    p.grad = combine(grads)
            stopping.step()
            optimizer.step()


def test_gradients_that_are_put_by_hand_are_noticed() -> None:
    with pytest.warns(heldin.HeldinWarning, match=r"a gradient that no pass has left") as told:
        by_tasks(lambda grads: grads[0] + grads[1])
    assert len(told) == 1
    assert told[0].filename == __file__


@pytest.mark.parametrize("combine", [None, lambda grads: grads[1].mul_(0.1)])
def test_gradients_that_passes_have_left_are_not(combine: Any) -> None:
    by_tasks(combine)


def test_closures_and_steps_inside_the_backward_pass_are_no_mistake() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(5, 1), torch.randn(8, 5)
    search = torch.optim.LBFGS(model.parameters(), max_iter=3)
    with runs.EvidenceStopping(model, arming=None, warmup=99) as stopping:

        def closure() -> Any:
            search.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        for _ in range(3):
            search.step(closure)
            stopping.step()
    each = {p: torch.optim.SGD([p], lr=0.01) for p in model.parameters()}

    def at_once(p: Any) -> None:
        each[p].step()
        p.grad = None

    handles = [p.register_post_accumulate_grad_hook(at_once) for p in model.parameters()]
    with runs.EvidenceStopping(model) as stopping:
        for _ in range(3):
            model(x).square().mean().backward()
            stopping.step()
    for handle in handles:
        handle.remove()


def test_passes_that_were_discarded_are_no_mistake() -> None:
    """Two optimisers in turn; the second one's pass is dropped, and one of the first comes next."""
    model, x = nn.Linear(5, 1), torch.randn(8, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with runs.EvidenceStopping(model) as stopping:
        for _ in range(3):
            model(x).square().mean().backward()
            stopping.step()
            optimizer.step()
            model(x).square().mean().backward()
            optimizer.step()
            stopping.discard()


def test_a_lost_rule_leaves_no_hook_on_optimisers() -> None:
    before = set(_global_optimizer_post_hooks)  # other tests' objects may wait to be collected
    runs.EvidenceStopping(nn.Linear(2, 1))
    gc.collect()
    assert set(_global_optimizer_post_hooks) <= before


def test_an_optimiser_of_another_model_may_step_at_any_time() -> None:
    model, other, x = nn.Linear(5, 1), nn.Linear(5, 1), torch.randn(8, 5)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    with runs.EvidenceStopping(model) as stopping:
        model(x).square().mean().backward()
        other(x).sum().backward()
        optimizer.step()
        stopping.step()


# --- runs that evidence cannot stop ------------------------------------------------------------


def fitted_to_zero(model: nn.Module, steps: int, **options: Any) -> None:
    torch.manual_seed(0)
    x = torch.randn(40, 200)
    y = (x[:, 0] > 0).long()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    with runs.EvidenceStopping(model, **options) as stopping:
        for _ in range(steps):
            F.cross_entropy(model(x), y).backward()
            stopping.step()
            optimizer.step()
            optimizer.zero_grad()


def test_a_run_that_evidence_cannot_stop_is_noticed() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(200, 64), nn.ReLU(), nn.Linear(64, 2))
    with pytest.warns(heldin.HeldinWarning, match=r"loss is near zero.*rule='auto'") as told:
        fitted_to_zero(model, 600)
    assert len(told) == 1
    assert told[0].filename == __file__
    model = nn.Sequential(nn.Linear(200, 64), nn.ReLU(), nn.Linear(64, 2))
    fitted_to_zero(model, 600, warmup=1000)  # it was not asked yet


def test_a_run_that_still_learns_is_left_alone() -> None:
    torch.manual_seed(0)
    x = torch.randn(512, 10)
    y = x.sum(1, keepdim=True).sin()
    model = nn.Sequential(nn.Linear(10, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with runs.EvidenceStopping(model, patience=10**6) as stopping:
        for step in range(600):
            rows = slice(64 * (step % 8), 64 * (step % 8 + 1))
            F.mse_loss(model(x[rows]), y[rows]).backward()
            stopping.step()
            optimizer.step()
            optimizer.zero_grad()
