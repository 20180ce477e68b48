"""heldin.skorch.EarlyStopping against the plain loop."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import heldin
from tests.support import estimated, plain

skorch = pytest.importorskip("skorch")

from skorch.callbacks import Checkpoint, LoadInitState

from heldin.adapters.patches import MethodWrapper
from heldin.skorch import EarlyStopping
from tests.adapters.test_skorch import Net, net

pytestmark = plain.foreign
PLAIN = estimated.CASES[0]


def rule(**options: Any) -> EarlyStopping:
    return EarlyStopping(**estimated.arguments(**options))


def fit(case: plain.Case, callback: Any, *others: Any, **options: Any) -> Net:
    made = net(case, ("auto", callback), *others, **options)
    made.fit(*(t.numpy() for t in plain.data(case.dtype)))
    return made


def used(made: Net) -> EarlyStopping:
    (callback,) = (c for _, c in made.callbacks_ if isinstance(c, EarlyStopping))
    return callback


def expect_no_trace(made: Net) -> None:
    plain.expect_no_trace(made.module_)
    assert not [k for k, v in vars(made).items() if isinstance(v, MethodWrapper)]


@estimated.cases
def test_same_as_plain(case: plain.Case) -> None:
    own = {"eval_loss": estimated.batch_loss} if case.accumulate > 1 else {}
    made = fit(case, rule(**own))  # or the loss were divided by the number of batches
    stopping = used(made).stopping_
    near = 2e-3 if case.bf16 else None
    estimated.expect_same(
        case, stopping, made.module_, near, same_loss=not own, divided=bool(own), shuffle=False
    )
    assert stopping is not None
    expect_no_trace(made)
    assert made.history[-1, "heldin/estimate"] == stopping.history.last().estimate
    assert made.history[-1, "batches", -1, "heldin/standard_error"] > 0


def test_shuffled_rows_are_known() -> None:
    """The order of the epochs is that of the net's own iterator."""
    torch.manual_seed(0)
    made = fit(PLAIN, rule(patience=None), iterator_train__shuffle=True, max_epochs=3)
    state = used(made).run_state()["rule"]
    assert state["rule"]["steps"] == 12
    assert state["seen"] == 3 * plain.ROWS


def test_rows_in_time() -> None:
    order = [7 * i % plain.ROWS for i in range(plain.ROWS)]
    made = fit(PLAIN, rule(time=order))
    estimated.expect_same(PLAIN, used(made).stopping_, made.module_, shuffle=False, time=order)


def test_settings_are_the_estimators() -> None:
    made = net(PLAIN, ("auto", rule()))
    made.set_params(callbacks__auto__budget=3.5)
    made.fit(*(t.numpy() for t in plain.data()))
    stopping: Any = used(made).stopping_
    assert "budget 3.5" in stopping.reason_chosen
    with pytest.raises(heldin.HeldinError, match="LeaveOneOut needs the tensors"):
        EarlyStopping(rule="leave-one-out")


def test_a_pickled_net_goes_on() -> None:
    x, y = (t.numpy() for t in plain.data())
    made = net(PLAIN, ("auto", rule(restore=False)), max_epochs=5)
    made.fit(x, y)
    again = pickle.loads(pickle.dumps(made))
    used(again).restore = True
    again.max_epochs = PLAIN.epochs
    again.partial_fit(x, y)
    stopping = used(again).stopping_
    assert stopping is not None
    estimated.expect_same(PLAIN, stopping, again.module_, shuffle=False, rtol=plain.EXACT)


def test_checkpoints_hold_the_state(tmp_path: Path) -> None:
    x, y = (t.numpy() for t in plain.data())
    saver = Checkpoint(monitor=None, dirname=tmp_path)
    net(PLAIN, ("auto", rule(restore=False)), saver, max_epochs=5).fit(x, y)
    made = net(PLAIN, ("auto", rule()), LoadInitState(Checkpoint(monitor=None, dirname=tmp_path)))
    made.fit(x, y)
    estimated.expect_same(
        PLAIN, used(made).stopping_, made.module_, shuffle=False, rtol=plain.EXACT
    )
    lost = Checkpoint(monitor=None, dirname=tmp_path, f_optimizer=None)
    made = net(PLAIN, ("auto", rule()), LoadInitState(lost))
    with pytest.raises(heldin.HeldinError, match="state of its shadows is not there"):
        made.fit(x, y)
    expect_no_trace(made)


@plain.broken
def test_errors_and_interrupts_leave_no_trace(error: type[BaseException]) -> None:
    fuse = plain.Fuse(error)
    fuse.calls = -30
    made = net(PLAIN, ("auto", rule(patience=None)))
    if error is RuntimeError:
        with pytest.raises(RuntimeError):
            made.fit(plain.Rows(fuse), y=None)
    else:
        made.fit(plain.Rows(fuse), y=None)  # skorch takes an interrupt for an end
    assert len(made.history) > 1
    expect_no_trace(made)


def test_what_has_no_row_numbers_is_refused() -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(zip(*plain.data(), strict=True))

    made = net(PLAIN, ("auto", rule()))
    with pytest.raises(heldin.HeldinError, match="IterableDataset has no row numbers"):
        made.fit(Stream(), y=None)
    expect_no_trace(made)


def test_report_and_model_card() -> None:
    pytest.importorskip("jinja2")
    before = rule()
    with pytest.raises(heldin.HeldinError, match=r"report: there was no run yet; train first"):
        before.report()
    callback = used(fit(PLAIN, rule()))
    page = callback.report(beside={"again": used(fit(PLAIN, rule()))})
    assert f"<h1>Test loss {callback.estimates['loss']}</h1>" in page
    assert "<h2>Confusion matrix</h2>" in page
    assert "<td>0 [0, 0]</td>" in page
    assert f"| test loss | {callback.estimates['loss']} |" in callback.model_card()
