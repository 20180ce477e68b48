"""Damaged, foreign and older states and checkpoints are refused, and change nothing."""

from __future__ import annotations

import copy
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import heldin
from tests.support import runs
from tests.support.loops import close

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
    torch.manual_seed(1)
    x = torch.randn(12, 4)
    y = x[:, :1] + torch.randn(12, 1)
    plain = "train" in name or name.startswith("E")
    middle = nn.Tanh() if plain else nn.BatchNorm1d(width)
    model = nn.Sequential(nn.Linear(4, width), middle, nn.Linear(width, 1))
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.05)
    kind, _, option = name.partition(", ")
    if kind == "EvidenceStopping":
        made: Any = runs.EvidenceStopping(model, window=4 if option else 1, budget=3)
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
        return made
    for _ in range(STEPS):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        if kind in ("EvidenceStopping", "ValidationStopping"):
            made.step()
        optimizer.step()
        if kind not in ("EvidenceStopping", "ValidationStopping", "ElementwiseStopping"):
            made.step()
    return made


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


def same(a: Any, b: Any) -> bool:
    """Equal to the last bit, nan included."""
    if isinstance(a, Tensor):
        return torch.equal(a.nan_to_num(-9.0), b.nan_to_num(-9.0))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b) or (a != a and b != b)


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
    for key, value in [
        ("version", 0),
        ("version", 99),
        ("version", None),
        ("heldin", "SomethingElse"),
        ("heldin", 3),
        ("settings", {}),
    ]:
        refused(made, put(key, value), (key, value))
    for foreign in ({}, None, 3, [], {"state": {}, "param_groups": []}, "EvidenceStopping"):
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
    made = rule("FoldStopping")
    state = made.state_dict()
    kept = copy.deepcopy(state)
    model, (x, y) = made._model, made._backend._source._tensors
    made._optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    made._optimizer.step()
    made.step()
    assert same(state, kept)
    assert not same(made.state_dict(), kept)


# --- checkpoints -----------------------------------------------------------------------------


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    made = rule("EvidenceStopping")
    states = {
        "model": made._model.state_dict(),
        "stopping": made.state_dict(),
        "generator": torch.Generator().manual_seed(1).get_state(),
        "nothing": None,
        "numbers": [1, math.inf, True, "a"],
    }
    heldin.state.save(tmp_path / "a.ckpt", **states)
    heldin.state.save(str(tmp_path / "a.ckpt"), **states)  # over the old one
    assert same(heldin.state.load(tmp_path / "a.ckpt"), states)
    assert same(torch.load(tmp_path / "a.ckpt", weights_only=True), states)  # a plain file, too
    assert os.listdir(tmp_path) == ["a.ckpt"]
    close(made)


def test_every_flipped_or_missing_byte_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    heldin.state.save(path, weights=torch.arange(40.0), step=3)
    whole = path.read_bytes()
    for place in range(0, len(whole), 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 64]) + whole[place + 1 :])
        with pytest.raises(heldin.HeldinError, match=r"a\.ckpt"):
            heldin.state.load(path)
        path.write_bytes(whole[:place])
        with pytest.raises(heldin.HeldinError, match="no checkpoint that heldin"):
            heldin.state.load(path)
    path.write_bytes(whole)
    assert heldin.state.load(path)["step"] == 3


def test_foreign_and_newer_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    torch.save({"step": 3}, path)
    with pytest.raises(heldin.HeldinError, match="no checkpoint that heldin"):
        heldin.state.load(path)
    heldin.state.save(path, step=3)
    path.write_bytes(path.read_bytes().replace(b"checkpoint 000001", b"checkpoint 000002"))
    with pytest.raises(heldin.HeldinError, match=r"has version 2 .*reads version 1"):
        heldin.state.load(path)
    with pytest.raises(FileNotFoundError):
        heldin.state.load(tmp_path / "none.ckpt")


def test_what_could_not_be_loaded_does_not_replace_what_can(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    heldin.state.save(path, step=3)
    with pytest.raises(heldin.HeldinError, match="something besides tensors"):
        heldin.state.save(path, step=4, path=Path("x"))
    with pytest.raises((AttributeError, TypeError, RuntimeError)):
        heldin.state.save(path, step=4, function=lambda: 3)
    assert heldin.state.load(path) == {"step": 3}
    assert os.listdir(tmp_path) == ["a.ckpt"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_an_error_while_writing_leaves_the_old_checkpoint(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "a.ckpt"
    heldin.state.save(path, step=3)
    monkeypatch.setattr(os, call, full)
    with pytest.raises(OSError, match="No space"):
        heldin.state.save(path, step=4)
    monkeypatch.undo()
    assert heldin.state.load(path) == {"step": 3}
    assert os.listdir(tmp_path) == ["a.ckpt"]


KILLED = """
import os, signal, sys
import heldin
from heldin.state import checkpoint
from tests.support import runs

def killed(*_):
    os.kill(os.getpid(), signal.SIGKILL)

checkpoint._digest = killed
heldin.state.save(sys.argv[1], step=4)
"""


@pytest.mark.skipif(os.name != "posix", reason="no locks, no kill -9")
def test_killed_writers_leave_one_unfinished_file_at_most(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    for _ in range(3):
        run = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False)
        assert run.returncode == -signal.SIGKILL
    assert len(os.listdir(tmp_path)) == 1
    heldin.state.save(path, step=5)
    assert os.listdir(tmp_path) == ["a.ckpt"]
    assert heldin.state.load(path) == {"step": 5}


@pytest.mark.parametrize("locks", [True, False])
def test_threads_that_save_to_one_path_do_not_collide(
    locks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not locks:

        def refuse(*_: Any) -> None:
            raise OSError(95, "Operation not supported")

        monkeypatch.setattr("heldin.state.parts.fcntl.flock", refuse)
    path, errors = tmp_path / "a.ckpt", []

    def write(thread: int) -> None:
        try:
            for step in range(20):
                heldin.state.save(path, thread=thread, step=step, weights=torch.ones(1000))
                assert heldin.state.load(path)["weights"].sum() == 1000
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert os.listdir(tmp_path) == ["a.ckpt"]
    assert heldin.state.load(path)["step"] == 19
