"""What a function reaches: exchanged, watched, or refused."""

from __future__ import annotations

import functools
import random
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import heldin
from heldin import HeldinError
from heldin.shadows import variables as module
from heldin.shadows.step_check import is_checked
from heldin.shadows.variables import Variables


class Slotted:
    """An object without a dictionary."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> int:
        self.count += 1
        return self.count


class Meter:
    """Counts in the object and in the class."""

    total = 0

    def __init__(self) -> None:
        self.values: dict[str, list[int]] = {"sum": [0]}

    def add(self) -> int:
        Meter.total += 1
        self.values["sum"][0] += 1
        return self.values["sum"][0] + Meter.total


class Counting(nn.Module):
    """A criterion that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self) -> int:
        self.calls += 1
        return self.calls


TOTAL = 0


def count_globally() -> int:
    global TOTAL
    TOTAL += 1
    return TOTAL


def with_default(state: dict[str, int] = {"n": 0}) -> int:  # noqa: B006
    state["n"] += 1
    return state["n"]


def with_attribute() -> int:
    with_attribute.calls += 1  # type: ignore[attr-defined]
    return with_attribute.calls  # type: ignore[attr-defined]


with_attribute.calls = 0  # type: ignore[attr-defined]


def of_another_module() -> Callable[[], Any]:
    other = ModuleType("heldin_test_helpers")
    exec("COUNT = [0]\ndef count():\n    COUNT[0] += 1\n    return COUNT[0]", vars(other))
    sys.modules[other.__name__] = other
    return lambda: other.count()


def in_place(value: Any, change: Callable[[Any], Any]) -> Callable[[], Any]:
    """Return a function that changes a value and returns what it changed it to."""
    return lambda: change(value)


def add_one(array: Any) -> float:
    array += 1
    return float(array[0])


def append(values: Any) -> list[Any]:
    values.append(len(values))
    return list(values)


def next_of(table: Any) -> Any:
    table["n"] += 1
    return dict(table)


def namespace() -> Callable[[], Any]:
    state = SimpleNamespace(step=0)

    def count() -> int:
        state.step += 1
        return int(state.step)

    return count


def closure() -> Callable[[], Any]:
    calls = 0

    def count() -> int:
        nonlocal calls
        calls += 1
        return calls

    return count


KEPT: dict[str, Callable[[], Callable[[], Any]]] = {
    "slots": Slotted,
    "object and class": lambda: Meter().add,
    "criterion": lambda: in_place(Counting(), lambda criterion: criterion()),
    "closure": closure,
    "global": lambda: count_globally,
    "default": lambda: with_default,
    "attribute of the function": lambda: with_attribute,
    "another module": of_another_module,
    "partial": lambda: functools.partial(next_of, {"n": 0}),
    "array": lambda: in_place(np.zeros(2), add_one),
    "tensor": lambda: in_place(torch.zeros(2), add_one),
    "deque": lambda: in_place(deque([0], maxlen=2), append),
    "counter": lambda: in_place(Counter(n=1), next_of),
    "ordered": lambda: in_place(OrderedDict(n=1), next_of),
    "tuple": lambda: in_place(({"n": 0},), lambda value: next_of(value[0])),
    "deep": lambda: in_place([[[[[{"n": 0}]]]]], lambda value: next_of(value[0][0][0][0][0])),
    "namespace": namespace,
    "torch": lambda: in_place(torch.Generator(), lambda g: float(torch.rand((), generator=g))),
    "numpy": lambda: in_place(np.random.default_rng(0), lambda g: g.random()),
    "numpy, old": lambda: in_place(np.random.RandomState(0), lambda g: g.random()),
    "python": lambda: in_place({"noise": random.Random(0)}, lambda g: g["noise"].random()),
}


@pytest.mark.parametrize("name", KEPT)
def test_a_value_is_put_back_wherever_it_is(name: str) -> None:
    function = KEPT[name]()
    variables = Variables(lambda: [("", function)], set(), 100)
    function()
    before = variables.read()
    first, second = function(), function()
    after = variables.read()
    variables.write(before)
    assert [function(), function()] == [first, second]
    assert not Variables.changes(after, variables.read())
    variables.write(after)
    third = function()
    variables.write(after)
    assert function() == third
    assert Variables.changes(before, after)


def test_iterators_are_named_unless_they_belong_to_the_loop() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.loop, self.extra = iter([1]), iter([2])

        def step(self, batch: Any) -> Any:
            return next(self.extra)

    variables = Variables(lambda: [("", Trainer().step)], set(), 100)
    variables.read()
    assert variables.iterators == ["self.extra"]


def test_a_growing_log_is_not_searched() -> None:
    log: list[Tensor] = [torch.zeros(1)] * 100
    variables = Variables(lambda: [("log", log)], set(), 100)
    assert len(variables.read()) == 2
    log.append(torch.ones(1))
    assert len(variables.read()) == 1


def test_what_the_loop_resets_is_reset_for_a_shadow() -> None:
    state = {"a": 1, "b": 1}
    variables = Variables(lambda: [("state", state)], set(), 100)
    before = variables.read()
    state["a"] = 5
    shadow = Variables.changes(before, variables.read())
    variables.write(before)
    state["b"] = 7
    Variables.take_over(shadow, before, variables.read())
    variables.write(shadow)
    assert state == {"a": 5, "b": 7}


def test_saved_values_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    generator, state = torch.Generator().manual_seed(0), {"n": 3, "rows": [1.0]}
    variables = Variables(lambda: [("g", generator), ("state", state)], set(), 100)
    values = variables.read()
    first = torch.rand((), generator=generator)
    state["n"] = 4
    saved = variables.saved(values)
    variables.write(variables.loaded(saved))
    assert state == {"n": 3, "rows": [1.0]}
    assert torch.equal(torch.rand((), generator=generator), first)
    monkeypatch.setattr(module, "MOST", 0)
    with pytest.raises(ValueError, match="no variable"):
        variables.loaded(saved)
    assert variables.loaded(saved, partly=True) == {}


# --- runs -------------------------------------------------------------------------------------


class Hidden(Dataset[Any]):
    """An object that heldin leaves alone."""

    reads = 0

    def __getitem__(self, row: int) -> float:
        self.reads += 1
        return 1 + 0.1 * (self.reads % 6 == 0)


def problem() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    torch.manual_seed(0)
    x = torch.randn(24, 3, dtype=torch.float64)
    model = nn.Linear(3, 1, dtype=torch.float64)
    loader = DataLoader(TensorDataset(x, x[:, :1]), 6)
    return model, torch.optim.Adam(model.parameters(), 0.1), loader


def mse(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


@pytest.mark.parametrize("how", ["counter", "batch"])
def test_what_cannot_be_put_back_is_refused_before_any_shadow(how: str) -> None:
    model, optimizer, loader = problem()
    hidden, calls = Hidden(), 0

    def step(batch: Any) -> None:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        (mse(model, batch) * (hidden[0] if how == "counter" else 1.0)).backward()
        optimizer.step()
        if how == "batch":
            batch[0].mul_(0.9)

    stopping = heldin.EarlyStopping(
        model, optimizer, data=loader, batch_loss=mse, rule="folds", train_step=step
    )
    with pytest.raises(HeldinError, match=r"a second time .* state=\[\.\.\.\].* Start the run"):
        stopping.train(next(iter(loader)))
    assert calls <= 1  # nothing of it is in the user's variables


def test_a_buffer_that_the_loop_computes_is_refused_and_one_that_it_sets_is_followed() -> None:
    _, _, loader = problem()
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    norm: Any = model[1]
    stopping = heldin.EarlyStopping(model, optimizer, data=loader, batch_loss=mse, rule="folds")

    def train() -> None:
        for batch in loader:
            optimizer.zero_grad()
            mse(model, batch).backward()
            optimizer.step()

    with stopping:
        train()
        norm.reset_running_stats()
        train()
        backend = stopping.following.backend
        assert {int(shadow.buffers[2]) for shadow in backend.shadows} == {len(loader)}
        with torch.no_grad():
            model(next(iter(loader))[0])  # in training mode
        with pytest.raises(HeldinError, match="changed the buffer 'running_mean'"):
            train()


def test_every_geometric_interval_has_steps_that_are_checked() -> None:
    plans = [[n for n in range(1, 5000) if is_checked(n, seed)] for seed in range(5)]
    for plan in plans:
        assert plan[:8] == list(range(1, 9))
        for power in range(3, 12):
            inside = [n for n in plan if 1 << power < n < 2 << power]
            assert inside
        assert 100 < len(plan) < 200
    assert len({tuple(plan) for plan in plans}) == 5
