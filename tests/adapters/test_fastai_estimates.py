"""heldin.fastai.EarlyStopping against the plain loop."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

import heldin
from tests.support import estimated, plain

pytest.importorskip("fastai")

from fastai.callback.mixup import MixUp
from fastai.callback.schedule import lr_find  # noqa: F401  (a patch of Learner)
from fastai.callback.training import GradientAccumulation
from fastai.optimizer import SGD, Adam

from heldin.adapters.patches import MethodWrapper
from heldin.fastai import EarlyStopping
from tests.adapters.test_fastai import learner

pytestmark = plain.foreign
PLAIN = estimated.CASES[0]


def rule(**options: Any) -> EarlyStopping:
    return EarlyStopping(**estimated.arguments(**options))


def fit(learn: Any, epochs: int) -> None:
    with learn.no_bar(), learn.no_logging():
        learn.fit(epochs)


def expect_no_trace(learn: Any) -> None:
    plain.expect_no_trace(learn.model)
    for owner in (learn, learn.dls.train, learn.opt):
        assert not [k for k, v in vars(owner).items() if isinstance(v, MethodWrapper)]
    assert not [m for m in learn.metrics if m.name.startswith("heldin/")]


@pytest.mark.parametrize("case", [c for c in estimated.CASES if c.accumulate == 1], ids=str)
def test_same_as_plain(case: plain.Case) -> None:
    callback = rule()
    learn = learner(case, callback)
    fit(learn, case.epochs)
    near = 2e-3 if case.bf16 else None
    estimated.expect_same(case, callback.stopping, learn.model.net, shuffle=False, rtol=near)
    expect_no_trace(learn)
    assert callback.stopping is not None
    assert learn.recorder.metric_names[-3:-1] == ["heldin/estimate", "heldin/standard_error"]
    assert learn.recorder.values[-1][-2] == pytest.approx(callback.stopping.history[-1].estimate)


def test_accumulated_batches() -> None:
    case = estimated.CASES[2]
    callback = rule(patience=None)
    learn = learner(case, callback)
    fit(learn, 8)  # of 58 rows, 48 in a step and what is left over in the next
    state = callback.state_dict()["rule"]
    assert 8 * plain.ROWS - 48 < state["seen"] <= 8 * plain.ROWS
    assert 5 < state["step"] < 12


def test_more_rows_than_are_to_be_accumulated() -> None:
    """fastai divides by the number that was asked for, and steps on whole batches."""
    callback = rule(rule="shadow", restore=False, patience=None)
    learn = learner(PLAIN, callback)
    learn.add_cb(GradientAccumulation(20))
    twin = copy.deepcopy(learn.model)
    fit(learn, 1)  # two steps, each on two batches of 16 rows
    stopping: Any = callback.stopping
    optimizer = plain.sgd(twin)
    x, y = plain.data()
    for start in (0, 32):
        rows = torch.arange(start, min(start + 32, plain.ROWS))
        kept = rows[stopping.fold_of_row[rows] < 0]
        (learn.loss_func(twin(x[kept]), y[kept]) * len(rows) / 20).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = estimated.last_shadows(callback.state_dict())[0]["weights"]
    for name, weight in twin.named_parameters():
        torch.testing.assert_close(found[name], weight.detach())


@pytest.mark.parametrize("kind", [SGD, Adam])
def test_optimisers_of_fastai(kind: Any) -> None:
    """A shadow takes the same steps as a model that is trained without its rows."""
    callback = rule(rule="shadow", restore=False, patience=None)
    learn = learner(PLAIN, callback, opt_func=kind)
    start = copy.deepcopy(learn.model)
    fit(learn, 3)
    stopping: Any = callback.stopping
    seen = (stopping.fold_of_row < 0).nonzero().flatten()
    twin = learner(PLAIN, opt_func=kind)
    twin.model.load_state_dict(start.state_dict())
    x, y = plain.data()
    batches = [[i for i in range(a, min(a + 16, plain.ROWS)) if i in seen] for a in (0, 16, 32, 48)]
    twin.create_opt()
    twin.opt.set_hyper("lr", plain.RATE)
    for _ in range(3):
        for rows in batches:
            twin.loss_func(twin.model(x[rows]), y[rows]).backward()
            twin.opt.step()
            twin.opt.zero_grad()
    found = estimated.last_shadows(callback.state_dict())[0]["weights"]
    for name, weight in twin.model.named_parameters():
        torch.testing.assert_close(found[name], weight.detach())
    expect_no_trace(learn)


@pytest.mark.parametrize("pickled", [False, True])
def test_fits_go_on(pickled: bool) -> None:
    callback = rule(reset_on_fit=False, restore=False)
    learn = learner(PLAIN, callback)
    fit(learn, 5)
    callback.restore = True
    session = callback._run
    session.restores = True
    if pickled:
        learn.remove_cb(callback)
        callback = pickle.loads(pickle.dumps(callback))
        learn.add_cb(callback)
    fit(learn, PLAIN.epochs)
    found = callback.stopping
    assert found is not None
    estimated.expect_same(PLAIN, found, learn.model.net, shuffle=False, rtol=1e-12)


def test_a_second_fit_that_starts_anew_is_warned_about() -> None:
    learn = learner(PLAIN, rule())
    fit(learn, 1)
    learn.create_opt()
    with pytest.warns(heldin.HeldinWarning, match="perhaps on the rows they hold out"):
        fit(learn, 1)


def test_a_second_fit_with_the_same_optimiser_is_refused() -> None:
    learn = learner(PLAIN, rule())
    fit(learn, 1)
    message = "the optimiser has already taken steps"
    with pytest.warns(heldin.HeldinWarning), pytest.raises(heldin.HeldinError, match=message):
        fit(learn, 1)
    expect_no_trace(learn)


def test_searching_a_rate_is_not_followed() -> None:
    callback = rule()
    learn = learner(PLAIN, callback, valid=16)
    with learn.no_bar(), learn.no_logging():
        learn.lr_find(num_it=8, show_plot=False)
    assert callback.stopping is None


def test_a_cycle_of_rates_is_warned_of() -> None:
    learn = learner(PLAIN, rule())
    told = pytest.warns(heldin.HeldinWarning, match=r"fit_one_cycle .* fixed end.*finish=True")
    with learn.no_bar(), learn.no_logging(), told:
        learn.fit_one_cycle(1)


def test_what_mixes_rows_is_refused() -> None:
    learn = learner(PLAIN, rule(), MixUp())
    with pytest.raises(heldin.HeldinError, match="MixUp mixes rows"):
        fit(learn, 1)
    expect_no_trace(learn)


@plain.broken
def test_errors_and_interrupts_leave_no_trace(error: type[BaseException]) -> None:
    learn = learner(PLAIN, rule(patience=None))
    fuse = plain.Fuse(error)
    fuse.calls = -30
    learn.dls.train.dataset = plain.Rows(fuse)
    with pytest.raises(error):
        fit(learn, 40)
    assert len(learn.recorder.losses) > 3
    expect_no_trace(learn)
