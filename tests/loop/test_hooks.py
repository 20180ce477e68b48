"""Hooks: which code registers them, and when they are removed."""

from __future__ import annotations

import copy
import gc
import io
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import heldin
from heldin._private_torch import forward_hooks
from heldin.loop.hooks import (
    after_calls,
    before_calls,
    call_at_steps,
    scaled_gradients,
)
from heldin.model_hook import ModelHook
from heldin.pause import paused

REGISTERS = re.compile(r"\bregister_(\w*hook|optimizer_step\w*)\b")


def test_only_loop_and_capture_register_hooks() -> None:
    root = Path(heldin.__file__).parent
    others = [
        f"{path.relative_to(root)}: {line.strip()}"
        for path in sorted(root.rglob("*.py"))
        if path.relative_to(root).parts[0] not in ("capture", "loop", "_private_torch.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if REGISTERS.search(line) and ">>>" not in line
    ]
    assert not others


class Counter:
    def __init__(self) -> None:
        self.steps = 0

    def count(self, optimizer: object, args: object, kwargs: object) -> None:
        self.steps += 1


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("everywhere", [False, True])
def test_steps_are_counted_until_the_hook_is_removed(after: bool, everywhere: bool) -> None:
    counter, one, other = Counter(), sgd(), sgd()
    remove = call_at_steps(counter.count, None if everywhere else one, after=after)
    one.step()
    other.step()
    with paused():
        one.step()
    assert counter.steps == (2 if everywhere else 1)
    remove()
    one.step()
    assert counter.steps == (2 if everywhere else 1)


def test_a_hook_does_not_keep_its_object() -> None:
    counter, optimizer = Counter(), sgd()
    call_at_steps(counter.count, optimizer)
    lost = weakref.ref(counter)
    del counter
    gc.collect()
    assert lost() is None
    optimizer.step()


def test_calls_are_seen_inside_the_context_only() -> None:
    model, seen = nn.Linear(2, 1), []
    x = torch.ones(3, 2)
    with (
        before_calls(model, lambda: seen.append("before")),
        after_calls([model], lambda module, output: seen.append(output)),
    ):
        output = model(x)
    model(x)
    assert seen[0] == "before"
    assert seen[1] is output
    assert len(seen) == 2


@pytest.mark.parametrize("factor", [0.0, 0.5, 1.0])
def test_gradients_are_scaled(factor: float) -> None:
    weight = nn.Parameter(torch.tensor([1.0, 2.0]))
    with scaled_gradients([weight], factor):
        weight.square().sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, factor * 2 * weight.detach())
    with scaled_gradients([weight], 0.0):
        (weight / torch.tensor([0.0, 1.0])).sum().backward()  # an infinite gradient
    assert torch.equal(weight.grad, factor * 2 * weight.detach())


@pytest.mark.parametrize("rule", ["stacked", "replay", "evidence"])
@pytest.mark.parametrize("whole", ["copied", "saved"])
def test_the_loop_may_copy_and_save_the_whole_model(rule: str, whole: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(40, 3)
    y = (x[:, 0] > 0).long()
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer, loss_fn = torch.optim.Adam(model.parameters(), 0.05), nn.CrossEntropyLoss()
    arguments: dict[str, Any] = {"loss_fn": loss_fn, "data": (x, y)}
    if rule == "replay":
        arguments = {"data": (x, y), "batch_loss": lambda m, batch: loss_fn(m(batch[0]), batch[1])}
    if rule == "evidence":
        arguments = {"rule": "evidence"}
    stopping = heldin.EarlyStopping(model, optimizer, **arguments)
    for _ in stopping.epochs(2):
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()
        if whole == "copied":
            other = copy.deepcopy(model)
        else:
            file = io.BytesIO()
            torch.save(model, file)
            assert b"heldin" not in file.getvalue()  # loaded where heldin is not installed
            file.seek(0)
            other = torch.load(file, weights_only=False)
        assert not any(type(hook) is ModelHook for hook in forward_hooks(other))
        loss_fn(other(x), y).backward()  # not a call of the model
        assert torch.equal(other(x), model(x).detach())
    assert len(stopping.history) >= 2
