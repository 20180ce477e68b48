"""Damaged, foreign and older states are refused, and change nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import heldin
from tests.support import runs
from tests.support.loops import close
from tests.support.states import same

RULES = [
    "EvidenceStopping",
    "EvidenceStopping, window",
    "ElementwiseStopping",
    "ValidationStopping",
    "FoldStopping",
    "FoldStopping, train",
    "FoldStopping, replay",
    "ShadowStopping",
    "LeaveOneOutStopping",
    "LeaveOneOutStopping, lazy",
]
STEPS = 7


def rule(name: str, width: int = 3) -> Any:
    """A stopping rule in the middle of a run."""
    return run(name, width)[0]


def run(name: str, width: int = 3) -> tuple[Any, Callable[[], None]]:
    """The same, and a function that takes a step of the run."""
    torch.manual_seed(1)
    x = torch.randn(12, 4)
    y = x[:, :1] + torch.randn(12, 1)
    plain = "train" in name or name.startswith("E")
    middle = nn.Tanh() if plain else nn.BatchNorm1d(width)
    model = nn.Sequential(nn.Linear(4, width), middle, nn.Linear(width, 1))
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.05)
    kind, _, option = name.partition(", ")
    if kind == "EvidenceStopping":
        made: Any = runs.EvidenceStopping(model, window=4 if option else 1, coordinates=3)
    elif kind == "ElementwiseStopping":
        made = optimizer = heldin.ElementwiseStopping(optimizer, model, smoothing=0.5)
    elif kind == "ValidationStopping":
        made = runs.ValidationStopping(model, lambda: F.mse_loss(model(x), y))
    else:
        options: dict[str, Any] = {"engine": "replay"} if option == "replay" else {}
        options |= {"memory": 400} if option == "lazy" else {}
        if kind == "LeaveOneOutStopping":
            model.eval()
        made = getattr(runs, kind)(model, optimizer, F.mse_loss, (x, y), **options)
    if option == "train":
        made.train(max_steps=STEPS)

    def step() -> None:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        if kind in ("EvidenceStopping", "ValidationStopping"):
            made.step()
        optimizer.step()
        if kind not in ("EvidenceStopping", "ValidationStopping", "ElementwiseStopping"):
            made.step()

    for _ in range(0 if option == "train" else STEPS):
        step()
    return made, step


def places(state: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of everything in a nested state; of many alike, the first two."""
    items = state.items() if isinstance(state, dict) else enumerate(state)
    for key, value in items:
        if isinstance(key, int) and key > 1:
            continue
        yield (*path, key)
        if isinstance(value, (dict, list)):
            yield from places(value, (*path, key))


def changed(state: Any, path: tuple[Any, ...], change: Callable[[Any], Any]) -> Any:
    """A copy of the state with something else in one place."""
    state = copy.deepcopy(state)
    at = state
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = change(at[path[-1]])
    return state


def without(state: Any, path: tuple[Any, ...]) -> Any:
    state = copy.deepcopy(state)
    at = state
    for key in path[:-1]:
        at = at[key]
    del at[path[-1]]
    return state


def of_heldin(path: tuple[Any, ...], state: Any) -> bool:
    """Whether heldin answers for what is there: not for the inside of an optimiser's state,
    which torch.optim checks, and not for lists and dicts in which anything may be missing."""
    return "param_groups" not in path and path[:1] != ("state",)


def free(path: tuple[Any, ...]) -> bool:
    """Whether an entry may be absent: names of groups and parameters that a run need not have."""
    parents = {"groups", "live", "counts", "sums", "nonfinite", "averages", "turns", "kept"}
    parents |= {"known", "pending", "ratios"}
    return bool(parents & {str(key) for key in path[:-1]}) or "state" in path or len(path) == 0


def refused(made: Any, state: Any, what: Any) -> None:
    before = copy.deepcopy(made.state_dict())
    with pytest.raises(heldin.HeldinError) as raised:
        made.load_state_dict(state)
    assert len(str(raised.value)) > 40, what
    assert same(made.state_dict(), before), what


@pytest.mark.parametrize("name", RULES)
def test_no_key_may_be_missing(name: str) -> None:
    made = rule(name)
    state = made.state_dict()
    done = 0
    for path in places(state):
        if path == ("heldin",) and name.startswith("Elementwise"):
            continue  # it is in the wrapped optimiser's state too, for get_state_dict
        if isinstance(path[-1], str) and of_heldin(path, state) and not free(path):
            refused(made, without(state, path), path)
            done += 1
    assert done >= 8
    close(made)


@pytest.mark.parametrize("name", RULES)
def test_every_value_has_its_type_and_shape(name: str) -> None:
    made = rule(name)
    state = made.state_dict()
    done = 0
    for path in places(state):
        if not of_heldin(path, state):
            continue
        value: Any = state
        for key in path:
            value = value[key]
        other = 3 if isinstance(value, (str, dict, list)) else "damaged"
        refused(made, changed(state, path, lambda _: other), path)
        if isinstance(value, Tensor) and value.dim():
            longer = torch.cat([value, value[:1]]) if len(value) else torch.ones(3, 3)
            refused(made, changed(state, path, lambda _: longer), (path, "longer"))
            refused(made, changed(state, path, lambda v: v[None]), (path, "another dimension"))
        done += 1
    assert done >= 12
    close(made)


@pytest.mark.parametrize("name", RULES)
def test_other_models_settings_rules_and_versions(name: str) -> None:
    made, other = rule(name), rule(name, width=5)
    state = made.state_dict()
    own = "heldin" if name.startswith("Elementwise") else None

    def put(key: str, value: Any) -> Any:
        if own is None:
            return {**state, key: value}
        return {**state, own: {**state[own], key: value}}

    refused(other, state, "another model")
    damaged: list[tuple[str, Any]] = [
        ("version", 0),
        ("version", 99),
        ("version", None),
        ("heldin", "SomethingElse"),
        ("heldin", 3),
        ("settings", {}),
    ]
    for key, value in damaged:
        refused(made, put(key, value), (key, value))
    others: list[Any] = [{}, None, 3, [], {"state": {}, "param_groups": []}, "EvidenceStopping"]
    for foreign in others:
        refused(made, foreign, foreign)
    made.load_state_dict(copy.deepcopy(state))  # its own is welcome
    assert same(made.state_dict(), state)
    for each in (made, other):
        close(each)


def test_a_wrapped_model_is_the_same_model() -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    model = nn.Sequential(nn.Linear(3, 2))
    with runs.EvidenceStopping(model) as a, runs.EvidenceStopping(Wrapper(model)) as b:
        b.load_state_dict(a.state_dict())


def test_a_state_of_buffers_is_not_changed_by_what_follows() -> None:
    made, step = run("FoldStopping")
    state = made.state_dict()
    kept = copy.deepcopy(state)
    step()
    assert same(state, kept)
    assert not same(made.state_dict(), kept)
