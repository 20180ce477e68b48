"""heldin.fastai against the plain loop."""

from __future__ import annotations

import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import heldin
from tests.support import plain

pytest.importorskip("fastai")

from fastai.callback.core import Callback
from fastai.callback.schedule import lr_find  # noqa: F401  (a patch of Learner)
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.optimizer import SGD, OptimWrapper

from heldin.adapters.patches import MethodWrapper
from heldin.fastai import EarlyStopping

pytestmark = plain.foreign


class Autocast(nn.Module):
    def __init__(self, case: plain.Case) -> None:
        super().__init__()
        self.net, self.case = plain.net(case.dtype), case

    def forward(self, x: Any) -> Any:
        with self.case.autocast():
            return self.net(x)


class Single(Callback):
    """fastai's Recorder takes losses of single precision only."""

    def after_loss(self) -> None:
        self.learn.loss = self.learn.loss.float()


def learner(case: plain.Case, *callbacks: Any, **options: Any) -> Any:
    rows = TensorDataset(*plain.data(case.dtype))
    valid = options.pop("valid", 0)  # rows to validate on
    loaders = DataLoaders(
        DataLoader(rows, bs=case.batch, shuffle=False, drop_last=False, num_workers=0),
        DataLoader(TensorDataset(*(a[:valid] for a in rows.tensors)), bs=16, num_workers=0),
        device="cpu",
    )

    def loss(outputs: Any, y: Any) -> Any:
        with case.autocast():
            return F.cross_entropy(outputs, y)

    own: list[Any] = [GradientAccumulation(48)] if case.accumulate > 1 else []
    own += [GradientClip(case.clip)] if case.clip else []
    optimizer = partial(OptimWrapper, opt=torch.optim.SGD, momentum=plain.MOMENTUM)
    return Learner(
        loaders,
        Autocast(case),
        loss_func=loss,
        opt_func=options.pop("opt_func", optimizer),
        lr=plain.RATE,
        cbs=[Single(), *own, *callbacks],
        **options,
    )


def fit(learn: Any, epochs: int) -> None:
    with learn.no_bar(), learn.no_logging():
        learn.fit(epochs, plain.RATE)


def rule(case: plain.Case, **options: Any) -> EarlyStopping:
    return EarlyStopping(case.rule, **options)


@plain.cases
def test_same_as_plain(case: plain.Case) -> None:
    """fastai accumulates until it has enough rows, over the ends of epochs."""
    callback = rule(case)
    learn = learner(case, callback)
    fit(learn, case.epochs)
    how = {"rows": 48, "flush": False} if case.accumulate > 1 else {}
    plain.expect_same(case, callback.stopping, learn.model.net, **how)
    plain.expect_no_trace(learn.model)
    assert all(p.grad is None or not p.grad.any() for p in learn.model.parameters())


def test_the_recorder_has_the_last_epoch() -> None:
    case = plain.CASES[0]
    callback = rule(case, log_groups=True)
    learn = learner(case, callback)
    fit(learn, case.epochs)
    names = list(learn.recorder.metric_names)
    assert "heldin/criterion" in names
    assert len(learn.recorder.values) == 11
    assert callback.stopping is not None
    values = [r.criterion for r in callback.stopping.history]
    column = [row[names.index("heldin/criterion") - 1] for row in learn.recorder.values]
    assert column == [*values[3::4], values[-1]]
    assert {len(row) for row in learn.recorder.values} == {len(names) - 2}  # no epoch, no time
    group = learn.recorder.values[-1][names.index("heldin/group/net.0.weight") - 1]
    assert group == callback.stopping.evidence.groups["net.0.weight"]
    assert not len(learn.metrics)


def test_tells(capsys: pytest.CaptureFixture[str]) -> None:
    case = plain.CASES[0]
    for verbose in (True, False):
        learn = learner(case, rule(case, verbose=verbose))
        with learn.no_bar():
            learn.fit(case.epochs)
        told = "EarlyStopping: stopped at step 42 (step 42: criterion 0.03595 > 0"
        assert (told in capsys.readouterr().out) is verbose


def test_each_fit_starts_anew_or_goes_on() -> None:
    case = plain.CASES[0]
    callback = rule(case)
    learn = learner(case, callback)
    fit(learn, 2)
    fit(learn, 3)
    assert callback.stopping is not None
    assert [r.step for r in callback.stopping.history] == list(range(1, 13))
    callback = rule(case, reset_on_fit=False)
    learn = learner(case, callback)
    fit(learn, 5)
    fit(learn, 30)
    plain.expect_same(case, callback.stopping, learn.model.net)


@pytest.mark.parametrize("pickled", [False, True])
def test_exact_resume(pickled: bool, tmp_path: Path) -> None:
    case = plain.CASES[4]
    callback = rule(case)
    learn = learner(case, callback, path=tmp_path)
    fit(learn, 5)
    learn.save("half")
    torch.save(callback.state_dict(), tmp_path / "stopping.pt")
    if pickled:
        callback.learn = None
        callback = pickle.loads(pickle.dumps(callback))
    else:
        callback = rule(case)
        callback.load_state_dict(torch.load(tmp_path / "stopping.pt", weights_only=True))
    learn = learner(case, callback, path=tmp_path)
    learn.load("half")
    fit(learn, 30)
    plain.expect_same(case, callback.stopping, learn.model.net, rtol=plain.EXACT)


def test_a_search_for_a_learning_rate_is_not_watched(tmp_path: Path) -> None:
    case = plain.CASES[0]
    callback = rule(case)
    learn = learner(case, callback, path=tmp_path)
    with learn.no_bar(), learn.no_logging():
        learn.lr_find(num_it=10, show_plot=False, suggest_funcs=())
    assert callback.stopping is None
    fit(learn, case.epochs)
    assert callback.stopping is not None


def test_wrong_settings_are_refused_at_once() -> None:
    with pytest.raises(heldin.HeldinError, match=r"EarlyStopping: .*'smoothness'"):
        EarlyStopping(smoothness=0.5)


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from fastai.callback.tensorboard import TensorBoardCallback
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    case = plain.CASES[0]
    callback = rule(case)
    board = TensorBoardCallback(log_dir=tmp_path, trace_model=False, log_preds=False)
    fit(learner(case, board, callback, opt_func=SGD, valid=5), case.epochs)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert callback.stopping is not None
    values = [r.criterion for r in callback.stopping.history]
    logged = [e.value for e in events.Scalars("heldin/criterion")]
    assert logged == pytest.approx([*values[3::4], values[-1]], rel=1e-6)


# -- every way out


@plain.broken
@pytest.mark.parametrize("place", ["begin", "loss", "callback", "last"])
def test_errors_and_interrupts_leave_no_trace(place: str, error: type[BaseException]) -> None:
    case, fuse = plain.CASES[0], plain.Fuse(error)

    class Burning(Callback):
        def before_fit(self) -> None:
            if place == "begin":
                raise error("broken")

        def after_loss(self) -> None:
            if place == "loss":
                fuse()

        def after_batch(self) -> None:
            if place == "callback":
                fuse()

        def after_epoch(self) -> None:
            if place == "last":
                fuse()

    learn = learner(case, EarlyStopping(heldin.rules.Evidence(warmup=100)), Single(), Burning())
    with pytest.raises(error, match="broken"):
        learn.fit(9)
    plain.expect_no_trace(learn.model)
    if place == "begin":  # nothing that would do anything
        return
    assert not [v for v in vars(learn).values() if isinstance(v, MethodWrapper)]
    assert not [m for m in learn.metrics if m.name.startswith("heldin")]
