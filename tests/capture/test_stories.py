"""What happens between two steps or in the middle of one, after the graphs are known.

Every story is compared, at each of its steps, with one backward pass per sample."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

import heldin
from heldin.capture.backward import attach, detach
from heldin.capture.ops import OP_RULES
from tests.support import runs
from tests.support.story_runs import LATE, Life, deep, estimators, lived


def another_size(life: Life, number: int) -> None:
    life.loss(*life.batch(5)).backward()
    life.close()


def one_sample(life: Life, number: int) -> None:
    life.loss(*life.batch(1)).backward()
    life.close()


def accumulated(life: Life, number: int) -> None:
    for _ in range(2):
        life.loss(*life.batch()).backward()
    life.close()


def twice_through_one_graph(life: Life, number: int) -> None:
    loss = life.loss(*life.batch())
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=number == LATE[0])
    life.close()
    with pytest.raises(heldin.NotObservable, match="no call of the model is pending"):
        loss.backward()


def gradients_of_gradients(life: Life, number: int) -> None:
    life.loss(*life.batch()).backward(create_graph=True)
    life.decide()
    for parameter in life.model.parameters():
        parameter.grad = None


def a_penalty(life: Life, number: int) -> None:
    penalty = sum(p.square().sum() for p in life.model.parameters())
    (life.loss(*life.batch()) + 0.01 * penalty).backward()
    life.close()


def only_some(life: Life, number: int) -> None:
    first, *_ = life.model.parameters()
    life.loss(*life.batch()).backward(inputs=[first])
    life.decide()
    life.optimizer.zero_grad()


def frozen(life: Life, number: int) -> None:
    first, *_ = life.model.parameters()
    first.requires_grad_(number == LATE[1])
    life.step()


def replaced(life: Life, number: int) -> None:
    assert isinstance(life.model, nn.Sequential)
    life.model[2] = nn.Linear(5, 5).to(life.dtype)
    life.step()


def resized(life: Life, number: int) -> None:
    assert isinstance(life.model, nn.Sequential)
    wide = 6 if number == LATE[0] else 5
    for layer, shape in (life.model[0], (wide, 7)), (life.model[2], (5, wide)):
        layer.weight.data = torch.ones(shape, dtype=life.dtype)
    life.model[0].bias.data = torch.ones(wide, dtype=life.dtype)
    life.loss(*life.batch()).backward()
    life.decide()
    life.model.zero_grad()


def doubled_gradient(life: Life, number: int) -> None:
    x, y = life.batch()
    out = life.model(x)
    out.register_hook(lambda grad: 2 * grad)
    (out - y).square().mean().backward()
    life.compare_totals()
    life.close()


def changed_at_a_node(life: Life, number: int) -> None:
    x, y = life.batch()
    out = life.model(x)
    out.grad_fn.register_prehook(lambda grads: tuple(g * g.abs() for g in grads))
    (out - y).square().mean().backward()
    life.close()


def transposed_gradient(life: Life, number: int) -> None:
    x, y = life.batch()
    out = life.model(x)
    out.register_hook(lambda grad: grad.t().contiguous().t())
    (out - y).square().mean().backward()
    life.close()


def a_pass_inside(life: Life, number: int) -> None:
    """A hook of the user's runs another pass through the graph, before this one gets there."""
    x, y = life.batch()
    out = life.model(x)
    other = out.exp().sum()

    def look(grad: Tensor) -> None:
        handle.remove()
        torch.autograd.grad(other, list(life.model.parameters()), retain_graph=True)

    handle = out.register_hook(look)
    (out - y).square().mean().backward()
    life.close()


def a_backward_inside(life: Life, number: int) -> None:
    x, y = life.batch()
    out = life.model(x)
    other = life.loss(*life.batch())
    out.register_hook(lambda grad: other.backward())
    detach(life.twin)
    (out - y).square().mean().backward()
    life.compare_totals()
    life.close()
    attach(life.twin)


def many_passes_inside(life: Life, number: int) -> None:
    x, y = life.batch()
    out = life.model(x)
    inner = life.model[0].weight

    def look(grad: Tensor) -> None:
        handle.remove()
        torch.autograd.grad(
            out, inner, torch.stack([grad, -grad]), retain_graph=True, is_grads_batched=True
        )

    handle = out.register_hook(look)
    (out - y).square().mean().backward()
    life.close()


def broken_off(life: Life, number: int) -> None:
    x, y = life.batch()
    out = life.model(x)

    def refuse(grad: Tensor) -> None:
        raise ValueError("no")

    handle = life.model[0].weight.register_hook(refuse)
    with pytest.raises(ValueError, match="no"):
        (out - y).square().mean().backward()
    handle.remove()
    life.optimizer.zero_grad()
    life.clear()
    life.step()


def packed(life: Life, number: int) -> None:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        loss = life.loss(*life.batch())
    loss.backward()
    life.close()


def other_data(life: Life, number: int) -> None:
    """The saved rows are replaced while the pass is under way."""
    x, y = life.batch()
    out = life.model(x)

    def put(grad: Tensor) -> None:
        x.data = torch.ones_like(x)

    out.register_hook(put)
    (out - y).square().mean().backward()
    life.close()


def evaluated(life: Life, number: int) -> None:
    life.model.eval()
    with torch.no_grad():
        life.model(life.batch()[0])
    life.model.train()
    life.step()


def two_calls(life: Life, number: int) -> None:
    (life.loss(*life.batch()) + life.loss(*life.batch())).backward()
    life.close()


def a_call_without_a_pass(life: Life, number: int) -> None:
    life.model(life.batch()[0])
    life.step()


def another_loss(life: Life, number: int) -> None:
    x, y = life.batch()
    (life.model(x) - y).abs().mean().backward()
    life.close()


def infinite(life: Life, number: int) -> None:
    x, y = life.batch()
    x[3, 2] = math.inf if number == LATE[0] else math.nan
    (life.model(x) - y).square().mean().backward()
    life.decide()
    life.optimizer.zero_grad()


def alike(life: Life, number: int) -> None:
    """All samples are the same: the variance is lost in rounding."""
    x, y = life.batch()
    life.loss(x[:1].expand(12, -1), y[:1].expand(12, -1)).backward()
    life.close()


def nothing_at_all(life: Life, number: int) -> None:
    (0 * life.loss(*life.batch())).backward()
    life.close()


def through_the_function(life: Life, number: int) -> None:
    torch.autograd.backward([life.loss(*life.batch())])
    life.close()


def a_rule_of_ones_own(life: Life, number: int) -> None:
    ours = OP_RULES["AddmmBackward0"]
    OP_RULES["AddmmBackward0"] = lambda use: ours(use)
    life.step()
    OP_RULES["AddmmBackward0"] = ours


def in_another_precision(life: Life, number: int) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = life.loss(*life.batch())
    loss.backward()
    life.close()


def larger_memory(life: Life, number: int) -> None:
    """A graph with more to read takes the memory of all."""
    assert isinstance(life.model, nn.Sequential)
    life.model.append(nn.Linear(3, 3).to(life.dtype))
    life.step()


def a_step_inside(life: Life, number: int) -> None:
    x, y = life.batch()
    out = life.model(x)

    def close(grad: Tensor) -> None:
        life.decide()

    out.register_hook(close)
    (out - y).square().mean().backward()
    life.close()


STORIES = [
    a_step_inside,
    another_size, one_sample, accumulated, twice_through_one_graph, gradients_of_gradients,
    a_penalty, only_some, frozen, replaced, resized, doubled_gradient, changed_at_a_node,
    transposed_gradient, a_pass_inside, a_backward_inside, many_passes_inside, broken_off, packed,
    other_data, evaluated, two_calls, a_call_without_a_pass, another_loss, infinite, alike,
    nothing_at_all, through_the_function, a_rule_of_ones_own, in_another_precision, larger_memory,
]  # fmt: skip


@estimators
@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@pytest.mark.filterwarnings("ignore:.*has built another graph before:heldin.HeldinWarning")
def test_stories(story: Callable[[Life, int], None], estimator: Any) -> None:
    lived(story, **estimator)


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
        return self.last(Gate.apply(self.first(x).tanh(), self.closed))


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
    inside: list[Any] = []
    make = RemovableHandle.__init__

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
            return Marked.apply(super().forward(x))

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
