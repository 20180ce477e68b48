"""What the adapters to frameworks have in common; no framework is needed for this."""

from __future__ import annotations

import copy
import inspect
import json
import math
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import heldin
from heldin.adapters.epochs import Epochs
from heldin.adapters.estimating import OPTIONS
from heldin.adapters.session import BeforeStep, StoppingSession
from heldin.rules.foreign import ASKED_BY
from heldin.state.packed import packed, unpacked
from tests.support import plain

ROOT = Path(__file__).parents[2]
FRAMEWORKS = ["accelerate", "fastai", "ignite", "keras", "lightning", "skorch", "transformers"]


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_missing_framework_is_named_with_its_extra(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in [m for m in sys.modules if m == name or m.startswith(f"{name}.")]:
        monkeypatch.delitem(sys.modules, each)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        ImportError, match=rf"heldin\.{name} needs .*pip install 'heldin\[{name}\]'"
    ):
        plain.imported_again(name)
    assert re.search(rf"^{name} = \[", (ROOT / "pyproject.toml").read_text(), re.M)


def test_the_core_imports_no_framework() -> None:
    code = "import sys, heldin; print(*{name.split('.')[0] for name in sys.modules})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(run.stdout.split()) & {*FRAMEWORKS, "sklearn", "pandas", "matplotlib"}


# -- states as JSON

numbers = st.floats(width=32) | st.integers(-(2**60), 2**60) | st.booleans() | st.none() | st.text()
states = st.recursive(
    numbers,
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from("abcdef"), inner),
    max_leaves=8,
)


@settings(max_examples=50, deadline=None)
@given(states)
def test_packed_states_are_json_and_come_back(state: Any) -> None:
    text = json.dumps(packed(state), allow_nan=False)
    assert repr(unpacked(json.loads(text))) == repr(state)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3)])
def test_packed_tensors_keep_every_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (100 * torch.randn(shape, dtype=torch.float64)).to(dtype)
    back = unpacked(json.loads(json.dumps(packed(tensor), allow_nan=False)))
    assert back.dtype == dtype
    assert torch.equal(back, tensor)
    if len(shape) == 2:
        assert torch.equal(unpacked(packed(tensor.T)), tensor.T)
    wild = torch.tensor([math.nan, math.inf, -math.inf, -0.0]).to(dtype)
    if dtype.is_floating_point:
        assert torch.equal(unpacked(packed(wild)).view(torch.uint8), wild.view(torch.uint8))


# -- runs


def test_a_state_waits_for_its_run() -> None:
    first = StoppingSession("Callback", {"smoothing": 0.5})
    model, x = nn.Linear(3, 1), torch.randn(8, 3)
    stopping = first.begin(model)
    for _ in range(3):
        model(x).sum().backward()
        stopping.step()
    state = first.state_dict()
    second = StoppingSession("Callback", {"smoothing": 0.5})
    second.load_state_dict(state)
    assert second.state_dict() == state
    assert second.begin(model).criterion == stopping.criterion
    third = StoppingSession("Callback", {"smoothing": 0.9})
    third.load_state_dict(state)
    with pytest.raises(heldin.HeldinError, match="smoothing"):
        third.begin(model)
    first.end()
    second.end()
    plain.expect_no_trace(model)


def test_steps_are_seen_once() -> None:
    model, seen = nn.Linear(2, 1), [0]

    def count() -> None:
        seen[0] += 1

    before = BeforeStep(model, count)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.SGD([model.bias], lr=0.1)
    for _ in range(2):
        before.next_iteration()
        optimizer.step()
        other.step()  # of the same iteration
    assert seen == [2]
    before.next_iteration()
    before.weigh()  # called by the framework
    optimizer.step()
    assert seen == [3]
    before.next_iteration()
    optimizer.step(lambda: 0.0)
    assert seen == [3]
    assert before.missed
    before.next_iteration()
    around = heldin.ElementwiseStopping(optimizer, model)
    model(torch.randn(4, 2)).sum().backward()
    around.step()
    assert seen == [4]
    around.close()
    del before  # a lost one goes with its hook
    plain.expect_no_trace(model)


def test_all_optimisers_of_an_iteration_stand_still_once_the_rule_has_stopped() -> None:
    model = nn.Linear(2, 1)
    before = BeforeStep(model, lambda: True)
    model(torch.randn(4, 2)).sum().backward()
    weights = copy.deepcopy(model.state_dict())
    for optimizer in [torch.optim.SGD([p], lr=0.1) for p in model.parameters()]:
        optimizer.step()
        model(torch.randn(4, 2)).sum().backward()
    torch.testing.assert_close(model.state_dict(), weights, rtol=0, atol=0)
    before.close()


# -- arguments

# what a framework calls otherwise, and what only its callback has
OWN_NAMES = {"patience": "early_stopping_patience"}


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_every_option_is_in_the_signature(name: str) -> None:
    """With the default and the type that it has in the rule itself."""
    pytest.importorskip(name)
    module = pytest.importorskip(f"heldin.{name}", exc_type=ImportError)
    callback = getattr(module, "EvidenceStopping", None)
    if name == "transformers":
        callback = module.EvidenceStoppingCallback
    pairs = [(callback, heldin.EvidenceStopping)]
    single = {"lightning": "ElementwiseStopping", "skorch": "ElementwiseStopping"}
    if name == "transformers":
        pairs.append((module.elementwise, heldin.ElementwiseStopping))
    elif name in single:
        pairs.append((module.ElementwiseStopping, heldin.ElementwiseStopping))
    for found, rule in pairs:
        own = inspect.signature(found).parameters
        assert not [p for p in own.values() if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        for option, wanted in inspect.signature(rule).parameters.items():
            if option in ("model", "optimizer"):
                continue
            key = option if option in own else OWN_NAMES[option]
            epochs = option == "window" and name != "accelerate"  # whose epochs are the loop's
            assert own[key].default == wanted.default, option
            also = " | Literal['epoch']" if epochs else ""
            assert (
                own[key].annotation.replace('"', "'") == wanted.annotation.replace('"', "'") + also
            )


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_auto_stopping_is_spelled_out_alike(name: str) -> None:
    """All of its arguments are in every framework, with the rule's own defaults."""
    module = pytest.importorskip(f"heldin.{name}", exc_type=ImportError)
    kind = "AutoStoppingCallback" if name == "transformers" else "AutoStopping"
    own = inspect.signature(getattr(module, kind)).parameters
    assert not [p for p in own.values() if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    missing = {"fastai": {"eval_data"}, "keras": {"eval_data", "eval_loss", "engine"}}
    assert {*OPTIONS} - {*own} == missing.get(name, set())
    for rule in (heldin.FoldStopping, heldin.stopping):
        for option, wanted in inspect.signature(rule).parameters.items():
            if option in own and option in OPTIONS and option not in ("rule", "average"):
                known = own[option].default
                assert known == wanted.default or option == "memory", option
    assert (own["rule"].default, own["restore"].default) == ("auto", True)
    assert own["memory"].default == inspect.signature(heldin.stopping).parameters["memory"].default


@pytest.mark.parametrize("kind", [heldin.EvidenceStopping, heldin.ElementwiseStopping])
def test_a_plain_rule_in_the_place_of_a_callback_is_named(kind: type) -> None:
    model = nn.Linear(2, 1)
    given = (plain.sgd(model), model) if kind is heldin.ElementwiseStopping else (model,)
    core = kind(*given)
    for asked, adapter in ASKED_BY.items():
        if adapter not in core._callbacks:
            continue
        assert not hasattr(core, asked)
        if adapter == "fastai":
            core.learn = None
        with pytest.raises(heldin.HeldinError, match=rf"use heldin\.{adapter}\."):
            getattr(core, asked)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = core.nonsense
    core.close()


def test_wrong_values_are_not_printed_at_length() -> None:
    big = nn.Sequential(*[nn.Linear(2, 2) for _ in range(9)])
    for name in ("patience", "smoothing", "window"):
        for make in (
            lambda **o: StoppingSession("Callback", o),
            partial(heldin.EvidenceStopping, big),
        ):
            with pytest.raises(heldin.HeldinError, match=name) as caught:
                make(**{name: big})
            assert len(str(caught.value)) < 200
    with pytest.raises(heldin.HeldinError, match="of type SGD"):
        heldin.EvidenceStopping(big, plain.sgd(big))


# -- epochs


def run_epochs(number: int, batches: int, **options: Any) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(3, 1), torch.randn(8, 3)
    epochs = Epochs("Callback")
    with heldin.EvidenceStopping(model, arming=None, **options) as stopping:
        for _ in range(number):
            epochs.begin(stopping)
            for _ in range(batches):
                epochs.batch()
                model(x).square().mean().backward()
                stopping.step()
                model.zero_grad()
            epochs.end(stopping)


def test_very_many_epochs_without_a_stop_are_noticed() -> None:
    with pytest.warns(heldin.HeldinWarning, match=r"200 epochs.*stopping\('auto'") as told:
        run_epochs(220, 10, patience=10**6)
    assert len(told) == 1
    run_epochs(220, 2, patience=10**6)  # few steps in many epochs say nothing
    run_epochs(150, 14, patience=10**6)


# -- a window as long as an epoch


@pytest.mark.parametrize(
    ("steps", "every", "window"), [(7, 1, 7), (7 / 3, 1, 3), (7, 3, 2), (1, 5, 1)]
)
def test_a_window_of_an_epoch_has_its_observed_steps(steps: float, every: int, window: int) -> None:
    session = StoppingSession("Callback", {"window": "epoch", "every": every})
    assert session.begin(plain.net(), steps).window == window
    session.end()


@pytest.mark.parametrize("steps", [None, math.inf])
def test_an_epoch_without_an_end_is_refused(steps: float | None) -> None:
    session = StoppingSession("Callback", {"window": "epoch"})
    with pytest.raises(heldin.HeldinError, match=r"Callback: window='epoch' .* pass their number"):
        session.begin(plain.net(), steps)


def test_other_words_for_a_window_are_refused() -> None:
    with pytest.raises(heldin.HeldinError, match="window"):
        StoppingSession("Callback", {"window": "epochs"})


def test_a_run_that_goes_on_keeps_its_window() -> None:
    """The next part of the data may have another length, or tell none."""
    session = StoppingSession("Callback", {"window": "epoch"})
    session.begin(plain.net(), 7)
    state = session.state_dict()
    session.end()
    for steps in (3, None):
        session = StoppingSession("Callback", {"window": "epoch"})
        session.load_state_dict(state)
        assert session.begin(plain.net(), steps).window == 7
        session.end()
