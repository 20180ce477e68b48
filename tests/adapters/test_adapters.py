"""What the adapters to frameworks have in common; no framework is needed for this."""

from __future__ import annotations

import copy
import inspect
import json
import math
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import heldin
from heldin.adapters.session import Session, Settings
from heldin.adapters.stopping import FrameworkStopping
from heldin.rules.callback_hints import ASKED_BY
from heldin.rules.options import Evidence
from heldin.state.packed import packed, unpacked
from tests.support import plain, runs

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


def evidence_session(**options: Any) -> Session:
    return Session("Callback", Settings(Evidence(**options)))


def test_a_state_waits_for_its_run() -> None:
    first = evidence_session(smoothing=0.5)
    model, x = nn.Linear(3, 1), torch.randn(8, 3)
    stopping = first.begin(model)
    for _ in range(3):
        model(x).sum().backward()
        stopping.step()
    state = first.state_dict()
    second = evidence_session(smoothing=0.5)
    second.load_state_dict(state)
    assert second.state_dict() == state
    assert second.begin(model).criterion == stopping.criterion
    third = evidence_session(smoothing=0.9)
    third.load_state_dict(state)
    with pytest.raises(heldin.HeldinError, match="smoothing"):
        third.begin(model)
    first.end()
    second.end()
    plain.expect_no_trace(model)


def test_steps_are_seen_once() -> None:
    model, x = nn.Linear(2, 1), torch.randn(4, 2)
    session = evidence_session(warmup=100)
    session.begin(model, hook=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.SGD([model.bias], lr=0.1)
    for _ in range(2):
        session.begin_batch()
        model(x).sum().backward()
        optimizer.step()
        other.step()  # of the same batch
        torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1).step()  # of another model
    assert session.stopping.counts[0] == 2
    session.begin_batch()
    model(x).sum().backward()
    session.before_step()  # called by the framework
    optimizer.step()
    assert session.stopping.counts[0] == 3

    def closure() -> float:
        loss = model(x).sum()
        loss.backward()
        return float(loss.detach())

    session.begin_batch()
    optimizer.step(closure)
    assert session.stopping.counts[0] == 3
    assert not session.weighed
    session.step()  # after the batch
    assert session.stopping.counts[0] == 4
    session.begin_batch()
    around = heldin.ElementwiseStopping(optimizer, model)
    model(x).sum().backward()
    around.step()
    assert session.stopping.counts[0] == 5
    around.close()
    del session  # a lost one goes with its hooks
    plain.expect_no_trace(model)


def test_all_optimisers_of_an_iteration_stand_still_once_the_rule_has_stopped() -> None:
    model = nn.Linear(2, 1)
    session = evidence_session()
    session.begin(model, hook=True).should_stop = True
    model(torch.randn(4, 2)).sum().backward()
    weights = copy.deepcopy(model.state_dict())
    for optimizer in [torch.optim.SGD([p], lr=0.1) for p in model.parameters()]:
        optimizer.step()
        model(torch.randn(4, 2)).sum().backward()
    torch.testing.assert_close(model.state_dict(), weights, rtol=0, atol=0)
    session.end()


# -- arguments


def early_stopping(name: str) -> Any:
    pytest.importorskip(name)
    module = pytest.importorskip(f"heldin.{name}", exc_type=ImportError)
    kind = "EarlyStoppingCallback" if name == "transformers" else "EarlyStopping"
    assert kind in module.__all__
    assert not [n for n in module.__all__ if n.startswith(("Auto", "Evidence"))]
    return getattr(module, kind)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_all_frameworks_take_the_same_arguments(name: str) -> None:
    """By their names, in the signature that editors show, and as `heldin.EarlyStopping` does."""
    own = inspect.signature(early_stopping(name)).parameters
    assert not [p for p in own.values() if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    base = {*inspect.signature(FrameworkStopping.__init__).parameters} - {"self"}
    assert base <= {*own}
    facade = inspect.signature(heldin.EarlyStopping).parameters
    assert base - {*facade} == {"restore", "log_groups"}
    for option in base & {*facade}:
        assert own[option].default == facade[option].default, option


@pytest.mark.parametrize("name", [n for n in FRAMEWORKS if n not in ("ignite", "accelerate")])
def test_making_a_callback_draws_no_random_number(name: str) -> None:
    """The others are made with a model, in a run: see test_untouched.py."""
    kind = early_stopping(name)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    for rule in ("auto", "folds", "shadow", "evidence", heldin.rules.Evidence.paper()):
        callback = kind(rule)
        assert isinstance(callback, kind)
        assert callback.by_evidence == (rule == "evidence" or not isinstance(rule, str))
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert repr(states[2]) == repr(np.random.get_state())


def test_a_class_derived_by_a_user_follows_either_rule() -> None:
    skorch = pytest.importorskip("heldin.skorch")

    class Mine(skorch.EarlyStopping):  # type: ignore[misc]
        def on_epoch_begin(self, net: Any, **datasets: Any) -> None:
            self.epochs = getattr(self, "epochs", 0) + 1
            super().on_epoch_begin(net, **datasets)

    from skorch import NeuralNetRegressor

    x = torch.randn(20, 2).numpy()
    for rule, kind in (("folds", runs.FoldFollower), ("evidence", runs.EvidenceStopping)):
        callback = Mine(rule)
        assert isinstance(callback, Mine)
        net = NeuralNetRegressor(
            nn.Linear(2, 1), train_split=None, max_epochs=2, verbose=0, callbacks=[callback]
        )
        net.fit(x, x[:, :1])
        used = next(c for _, c in net.callbacks_ if isinstance(c, Mine))
        assert isinstance(used.stopping_, kind)
        assert used.epochs == 2

    class Hidden(skorch.EarlyStopping):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__("evidence")

    assert Hidden().by_evidence


@pytest.mark.parametrize("kind", [runs.EvidenceStopping, heldin.ElementwiseStopping])
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
        with pytest.raises(heldin.HeldinError, match=name) as caught:
            runs.EvidenceStopping(big, **{name: big})
        assert len(str(caught.value)) < 200
    with pytest.raises(heldin.HeldinError, match="of type SGD"):
        runs.EvidenceStopping(big, plain.sgd(big))


# -- epochs


def run_epochs(number: int, batches: int, **options: Any) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(3, 1), torch.randn(8, 3)
    session = evidence_session(arm_threshold=None, **options)
    session.begin(model)
    for _ in range(number):
        for _ in range(batches):
            session.begin_batch()
            model(x).square().mean().backward()
            session.before_step()
            model.zero_grad()
        session.end_epoch()
    session.end()


def test_very_many_epochs_without_a_stop_are_noticed() -> None:
    with pytest.warns(heldin.HeldinWarning, match=r"200 epochs.*Use rule='auto'") as told:
        run_epochs(220, 10, checks=10**6)
    assert len(told) == 1
    run_epochs(220, 2, checks=10**6)  # few steps in many epochs say nothing
    run_epochs(150, 14, checks=10**6)


# -- a window as long as an epoch


@pytest.mark.parametrize(
    ("steps", "every", "window"), [(7, 1, 7), (7 / 3, 1, 3), (7, 3, 2), (1, 5, 1)]
)
def test_a_window_of_an_epoch_has_its_observed_steps(steps: float, every: int, window: int) -> None:
    session = evidence_session(window="epoch", check_every=every)
    assert session.begin(plain.net(), epoch_steps=steps).window == window
    session.end()


@pytest.mark.parametrize("steps", [None, math.inf])
def test_an_epoch_without_an_end_is_refused(steps: float | None) -> None:
    session = evidence_session(window="epoch")
    with pytest.raises(heldin.HeldinError, match=r"Callback: window='epoch' .* pass their number"):
        session.begin(plain.net(), epoch_steps=steps)


def test_other_words_for_a_window_are_refused() -> None:
    with pytest.raises(heldin.HeldinError, match="window"):
        Evidence(window="epochs")  # type: ignore[arg-type]


def test_a_run_that_goes_on_keeps_its_window() -> None:
    """The next part of the data may have another length, or tell none."""
    session = evidence_session(window="epoch")
    session.begin(plain.net(), epoch_steps=7)
    state = session.state_dict()
    session.end()
    for steps in (3, None):
        session = evidence_session(window="epoch")
        session.load_state_dict(state)
        assert session.begin(plain.net(), epoch_steps=steps).window == 7
        session.end()
