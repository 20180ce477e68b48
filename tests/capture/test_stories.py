"""What happens between two steps or in the middle of one, after the graphs are known.

Every story is compared, at each of its steps, with one backward pass per sample."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import heldin
from heldin.capture.backward import attach, detach
from heldin.capture.ops import OP_RULES
from tests.support.story_runs import LATE, Life, estimators, lived


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
    inner = life.model[0].weight  # type: ignore[index]

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

    handle = life.model[0].weight.register_hook(refuse)  # type: ignore[index]
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
