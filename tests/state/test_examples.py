"""Small parts of saved states, of messages and of hooks, each with an example."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from heldin.errors import (
    FrameworkName,
    HeldinError,
    NamedArguments,
    did_you_mean,
    docs,
    more,
    way_out,
)
from heldin.model_hook import ModelHook
from heldin.pause import is_paused, paused
from heldin.state.estimates import interval_coverage
from heldin.state.files import leftovers, replacing
from heldin.state.schema import Saved, schema_error


def test_where_a_state_does_not_match_its_schema() -> None:
    form = {"step": int, "names": [str]}
    assert schema_error({"step": 3, "names": ["a", "b"]}, form) is None
    error = schema_error({"step": 3, "names": ["a", None]}, form)
    assert error == "['names'][1] is a NoneType, not str"


def test_a_file_is_replaced_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "numbers.txt"
    with replacing(path) as part:
        part.write_text("1 2 3")
        assert not path.exists()
    assert path.read_text() == "1 2 3"
    assert leftovers(path) == []


def test_coverage_is_that_of_the_study() -> None:
    assert interval_coverage(5, False, rows=50) == 0.98
    assert interval_coverage(5, True, rows=50) is None


def test_ends_of_messages() -> None:
    page = "https://heldin.github.io/heldin/when-it-goes-wrong.html#not-observable"
    assert docs("when-it-goes-wrong.html#not-observable") == page
    assert more("not-observable") == f"({page})"
    assert did_you_mean("fits", ["fit", "predict"]) == "did you mean 'fit'?"
    assert did_you_mean("nothing", ["fit", "predict"]) == ""
    assert way_out("heldin.EarlyStopping", "pass train_step=...") == "pass train_step=..."
    in_framework = way_out(FrameworkName("EarlyStoppingCallback"), "pass train_step=...")
    assert in_framework.startswith("leave out the callback, hook or option that does so, or use ")


def test_the_argument_that_is_meant_is_named() -> None:
    class Rule(NamedArguments):
        def __init__(self, patience: int = 5) -> None: ...

    with pytest.raises(HeldinError, match="argument 'patiense'; did you mean 'patience'"):
        Rule(patiense=3)  # type: ignore[call-arg]


def test_a_copy_of_a_model_has_no_hook() -> None:
    model, calls = nn.Linear(1, 1), []
    model.register_forward_pre_hook(ModelHook(lambda module, args: calls.append(1)))
    model(torch.ones(1))
    copy.deepcopy(model)(torch.ones(1))
    assert calls == [1]


def test_hooks_are_paused_inside_a_context() -> None:
    assert not is_paused()
    with paused():
        assert is_paused()
    assert not is_paused()


def test_attributes_are_saved_with_those_of_base_classes() -> None:
    class Counter(Saved):
        _saved: ClassVar[dict[str, Any]] = {"_count": int}

        def __init__(self, count: int = 0) -> None:
            self._count = count

    class Run(Counter):
        _saved: ClassVar[dict[str, Any]] = {"names": [str], "inner": Counter.saved_schema()}

        def __init__(self, count: int, names: list[str]) -> None:
            super().__init__(count)
            self.names, self.inner = names, Counter(2 * count)

    run, other = Run(3, ["a"]), Run(0, [])
    state = run.state_dict()
    assert state == {"count": 3, "names": ["a"], "inner": {"count": 6}}
    assert schema_error(state, Run.saved_schema()) is None
    run.names.append("b")  # the state does not change with the run
    other.load_state_dict(state)
    other.names.append("c")
    assert other.state_dict() == {"count": 3, "names": ["a", "c"], "inner": {"count": 6}}
    assert state["names"] == ["a"]
