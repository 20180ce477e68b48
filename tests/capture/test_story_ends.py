"""Single stories of observed runs, and what is left when they end."""

from __future__ import annotations

import math
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tests.support import runs
from tests.support.story_runs import LATE, Life, deep, estimators, lived


class Gate(torch.autograd.Function):
    """Lets no gradient through if it is closed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, closed: bool) -> Tensor:
        ctx.closed = closed
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None if ctx.closed else grad, None


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.closed = nn.Linear(7, 5), nn.Linear(5, 3), False

    def forward(self, x: Tensor) -> Tensor:
        return self.last(Gate.apply(self.first(x).tanh(), self.closed))  # type: ignore[no-any-return]


@estimators
def test_layers_that_no_gradient_comes_to(estimator: Any) -> None:
    def story(life: Life, number: int) -> None:
        life.model.closed = True  # type: ignore[assignment]
        life.loss(*life.batch()).backward()
        life.decide()
        assert life.rule.evidence.groups.keys() == {"last.weight", "last.bias"}
        life.model.closed = False  # type: ignore[assignment]
        life.optimizer.zero_grad()

    lived(story, make=Gated, **estimator)


def test_a_layer_that_takes_another_name() -> None:
    """Names are looked up again when a pass meets a leaf that is not the model's."""
    scale = nn.Parameter(torch.ones(()))

    def story(life: Life, number: int) -> None:
        if number == LATE[0]:
            life.model.first = nn.Sequential(life.model.first)  # type: ignore[arg-type]
        other = nn.Linear(2, 1)
        (other(torch.randn(4, 2)).sum() * scale).backward()
        life.step()

    life = lived(story, make=Gated)
    assert "first.0.weight" in life.rule.evidence.groups


def test_another_pass_while_the_hooks_are_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """As another thread may run it: registering a hook is Python."""
    model, other = nn.Linear(7, 3), nn.Linear(7, 3)
    x = torch.randn(12, 7)
    rule = at_work(model, x)
    make, inside = RemovableHandle.__init__, []

    def switched(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        if not inside:
            inside.append(True)
            other(x).square().mean().backward()

    with monkeypatch.context() as patch:
        patch.setattr(RemovableHandle, "__init__", switched)
        model(x).square().mean().backward()
    assert inside
    before = rule.evidence
    rule.step()
    assert rule.evidence == before
    rule.close()


class Scaled(nn.Module):
    """Uses factors that change from one step to another."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(7, 3)), nn.Parameter(torch.randn(3))
        self.alpha = self.beta = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight, alpha=self.alpha, beta=self.beta)


@pytest.mark.parametrize("which", ["alpha", "beta"])
def test_factors_that_change(which: str) -> None:
    def story(life: Life, number: int) -> None:
        setattr(life.model, which, 0.5)
        life.step()
        setattr(life.model, which, 1.0)

    lived(story, make=Scaled)


def test_two_passes_after_steps_of_one_have_a_value() -> None:
    """All backward passes since the last step count, whatever the steps before were like."""
    model = deep().double()
    with runs.EvidenceStopping(model, estimator="exact") as rule:
        for passes in [1, 1, 1, 1, 1, 2, 3, 1, 2]:
            for _ in range(passes):
                model(torch.randn(6, 7).double()).square().mean().backward()
            rule.step()
            assert rule.evidence.count == 6 * passes
            assert math.isfinite(rule.evidence.criterion)


def at_work(model: nn.Module, x: Tensor) -> runs.EvidenceStopping:
    rule = runs.EvidenceStopping(model)
    for _ in range(4):
        model(x).square().mean().backward()
        rule.step()
    return rule


def test_nothing_is_kept_alive() -> None:
    class Marked(torch.autograd.Function):
        """Its node can be watched."""

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            marks.append(weakref.ref(ctx))
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad

    class Model(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return Marked.apply(super().forward(x))  # type: ignore[no-any-return]

    marks: list[weakref.ref[Any]] = []
    model, x = Model(7, 3), torch.randn(12, 7)
    rule = at_work(model, x)
    assert all(mark() is None for mark in marks)
    kept = weakref.ref(model.weight)
    rule.close()
    del model
    assert kept() is None


def test_a_resumed_run_is_the_same_to_the_last_bit() -> None:
    def run(stop: int | None) -> list[float]:
        torch.manual_seed(0)
        model = deep()
        rule = runs.EvidenceStopping(model)
        batches = [torch.randn(12, 7) for _ in range(20)]
        for i, x in enumerate(batches):
            if i == stop:
                state, rule_before = rule.state_dict(), rule
                rule = runs.EvidenceStopping(model)
                rule.load_state_dict(state)
                rule_before.close()
            model(x).square().mean().backward()
            rule.step()
        rule.close()
        return rule.history.columns()["criterion"]

    assert run(None) == run(12)
