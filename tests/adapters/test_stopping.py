"""What the callbacks of all frameworks have in common: arguments, names, refusals."""

from __future__ import annotations

import inspect
import random
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import heldin
from heldin.adapters.stopping import FrameworkStopping
from heldin.rules import callback_hints, elementwise
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
    assert base - {*facade} == {"restore", "verbose", "log_groups"}
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
    pytest.importorskip("skorch")
    from heldin import skorch

    class Mine(skorch.EarlyStopping):
        def on_epoch_begin(self, net: Any, **datasets: Any) -> None:
            self.epochs = getattr(self, "epochs", 0) + 1
            super().on_epoch_begin(net, **datasets)

    from skorch import NeuralNetRegressor

    x = torch.randn(20, 2).numpy()
    for rule, kind in (("folds", runs.FoldFollower), ("evidence", runs.EvidenceFollower)):
        callback = Mine(rule)
        assert isinstance(callback, Mine)
        net = NeuralNetRegressor(
            nn.Linear(2, 1), train_split=None, max_epochs=2, verbose=0, callbacks=[callback]
        )
        net.fit(x, x[:, :1])
        used = next(c for _, c in net.callbacks_ if isinstance(c, Mine))
        assert isinstance(used.stopping_, kind)
        assert used.epochs == 2

    class Hidden(skorch.EarlyStopping):
        def __init__(self) -> None:
            super().__init__("evidence")

    assert Hidden().by_evidence


@pytest.mark.parametrize(
    ("kind", "callbacks"),
    [
        (heldin.EarlyStopping, callback_hints.CALLBACKS),
        (heldin.ElementwiseStopping, elementwise.CALLBACKS),
    ],
)
def test_an_object_for_own_loops_in_the_place_of_a_callback_is_named(
    kind: Any, callbacks: dict[str, str]
) -> None:
    model = nn.Linear(2, 1)
    sgd = plain.sgd(model)
    if kind is heldin.ElementwiseStopping:
        core: Any = heldin.ElementwiseStopping(sgd, model)
    else:
        core = heldin.EarlyStopping(model, sgd, rule="evidence")
    for asked, adapter in callback_hints.ASKED_BY.items():
        if adapter not in callbacks:
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
    for name in ("checks", "smoothing", "window"):
        with pytest.raises(heldin.HeldinError, match=name) as caught:
            runs.EvidenceStopping(big, **{name: big})
        assert len(str(caught.value)) < 200
    with pytest.raises(heldin.HeldinError, match="of type SGD"):
        runs.EvidenceStopping(big, plain.sgd(big))
