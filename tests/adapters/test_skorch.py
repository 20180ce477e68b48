"""heldin.skorch against the plain loop."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import heldin
from tests.support import plain

skorch = pytest.importorskip("skorch")

from skorch.callbacks import Checkpoint, GradientNormClipping, LoadInitState, TensorBoard

from heldin.skorch import EarlyStopping, ElementwiseStopping
from tests.support import runs

pytestmark = plain.foreign


class Module(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.net = plain.net(dtype)

    def forward(self, x: Any) -> Any:
        return self.net(x)


class Net(skorch.NeuralNetClassifier):
    """With autocast and accumulation, as skorch's own FAQ has it."""

    clip: float | None = None

    def __init__(self, *args: Any, bf16: bool = False, accumulate: int = 1, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.bf16, self.accumulate = bf16, accumulate

    def infer(self, x: Any, **params: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
            return super().infer(x, **params)

    def get_loss(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
            return super().get_loss(*args, **kwargs) / self.accumulate

    def train_step(self, batch: Any, **params: Any) -> Any:
        if self.accumulate == 1:
            return super().train_step(batch, **params)
        step = self.train_step_single(batch, **params)
        number = len(self.history[-1, "batches"])
        if number % self.accumulate == 0 or number == 4:
            if self.clip:
                nn.utils.clip_grad_norm_(self.module_.parameters(), self.clip)
            self.optimizer_.step()
            self.optimizer_.zero_grad()
        return step


def net(case: plain.Case, *callbacks: Any, **options: Any) -> Net:
    clipping = [GradientNormClipping(case.clip)] if case.clip else []
    settings = {
        "module__dtype": case.dtype,
        "criterion": nn.CrossEntropyLoss,
        "optimizer": torch.optim.SGD,
        "lr": plain.RATE,
        "optimizer__momentum": plain.MOMENTUM,
        "batch_size": case.batch,
        "max_epochs": case.epochs,
        "train_split": None,
        "verbose": 0,
        "bf16": case.bf16,
        "accumulate": case.accumulate,
        "callbacks": [*clipping, *callbacks],
    }
    made = Net(Module, **{**settings, **options})
    made.clip = case.clip
    return made


def fitted(case: plain.Case, *callbacks: Any, **options: Any) -> Net:
    x, y = plain.data(case.dtype)
    return net(case, *callbacks, **options).fit(x.numpy(), y.numpy())


def rule(case: plain.Case, **options: Any) -> EarlyStopping:
    return EarlyStopping(case.rule, **options)


def used(model: Net, kind: type = EarlyStopping) -> Any:
    return next(callback for _, callback in model.callbacks_ if isinstance(callback, kind))


@plain.cases
def test_same_as_plain(case: plain.Case) -> None:
    callback = rule(case)
    model = fitted(case, callback)
    plain.expect_same(case, callback.stopping_, model.module_)
    plain.expect_no_trace(model.module_)


def test_the_history_has_the_stop() -> None:
    """The last epoch, though incomplete, has its entries like the others."""
    case = plain.CASES[0]
    model = fitted(case, rule(case))
    stopping = used(model).stopping_
    values = [r.criterion for r in stopping.history]
    losses = model.history[:, "train_loss"]
    assert len(losses) == 11
    assert model.history[-1, "heldin/criterion"] == values[-1]
    flat = [v for row in model.history[:, "batches", :, "heldin/criterion"] for v in row]
    assert flat == values
    assert model.history[:, "train_batch_count"] == [4] * 10 + [2]


def test_groups_on_request() -> None:
    case = plain.CASES[0]
    model = fitted(case, rule(case, log_groups=True))
    record = used(model).stopping_.history[-1]
    key = "heldin/group/net.0.weight"
    assert model.history[-1, key] == record.groups["net.0.weight"]


def test_tells_if_the_net_is_verbose(capsys: pytest.CaptureFixture[str]) -> None:
    case = plain.CASES[0]
    fitted(case, rule(case), verbose=0)
    assert capsys.readouterr().out == ""
    fitted(case, rule(case), verbose=1)
    out = capsys.readouterr().out
    assert "EarlyStopping: stopped at step 42 (step 42: criterion 0.03595 > 0" in out
    assert "heldin/criterion" in out.splitlines()[0]


# -- going on


def test_fit_starts_anew_and_partial_fit_goes_on() -> None:
    case = plain.CASES[0]
    x, y = (a.numpy() for a in plain.data())
    model = net(case, rule(case), max_epochs=5)
    model.fit(x, y)
    model.fit(x, y)
    assert [r.step for r in used(model).stopping_.history] == list(range(1, 21))
    for how in (copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), lambda m: m):
        again = how(model)
        again.set_params(max_epochs=30)
        again.partial_fit(x, y)
        plain.expect_same(case, used(again).stopping_, again.module_, rtol=plain.EXACT)


def test_cloned_and_searched() -> None:
    from sklearn.base import clone
    from sklearn.model_selection import GridSearchCV

    case = plain.CASES[0]
    x, y = (a.numpy() for a in plain.data())
    model = net(case, ("evidence", rule(case)), max_epochs=3)
    rules = [heldin.rules.Evidence(smoothing=s) for s in (0.5, 0.9)]
    search = GridSearchCV(clone(model), {"callbacks__evidence__rule": rules}, cv=2).fit(x, y)
    stopping = used(search.best_estimator_).stopping_
    assert stopping.rule.smoothing == search.best_params_["callbacks__evidence__rule"].smoothing


def test_another_kind_of_rule_may_be_set() -> None:
    case = plain.CASES[0]
    x, y = (a.numpy() for a in plain.data())
    model = net(case, ("early", rule(case)), max_epochs=2)
    model.set_params(callbacks__early__rule="folds").fit(x, y)
    assert isinstance(used(model).stopping_, runs.FoldFollower)
    model.set_params(callbacks__early__rule="evidence").fit(x, y)
    assert isinstance(used(model).stopping_, runs.EvidenceFollower)


def test_wrong_settings_are_refused_at_once() -> None:
    with pytest.raises(heldin.HeldinError, match=r"EarlyStopping: .*'smoothness'"):
        EarlyStopping(smoothness=0.5)


def test_prediction_during_training_does_not_count() -> None:
    class Nosy(skorch.callbacks.Callback):
        def on_batch_end(self, net: Any, batch: Any = None, training: Any = None, **_: Any) -> None:
            if training:
                net.predict(batch[0])

    case = plain.CASES[0]
    callback = rule(case)
    model = fitted(case, Nosy(), callback)
    plain.expect_same(case, callback.stopping_, model.module_)


# -- loggers


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    case = plain.CASES[0]
    with SummaryWriter(str(tmp_path)) as writer:
        model = fitted(case, TensorBoard(writer), rule(case))
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    values = [r.criterion for r in used(model).stopping_.history]
    logged = [e.value for e in events.Scalars("heldin/criterion")]
    assert logged == pytest.approx([*values[3::4], values[-1]], rel=1e-6)


def test_mlflow(mlflow_uri: str) -> None:
    import mlflow
    from skorch.callbacks import MlflowLogger

    client = mlflow.MlflowClient(mlflow_uri)
    run = client.create_run(client.create_experiment("heldin"))
    case = plain.CASES[0]
    model = fitted(case, MlflowLogger(run, client), rule(case))
    found = client.get_metric_history(run.info.run_id, "heldin/criterion")
    values = [r.criterion for r in used(model).stopping_.history]
    logged = [m.value for m in sorted(found, key=lambda m: m.step)]
    assert logged == pytest.approx([*values[3::4], values[-1]])


# -- single weights


def test_elementwise() -> None:
    """As in a plain loop, and pickled in the middle as well."""
    case = plain.CASES[0]
    x, y = (a.numpy() for a in plain.data())
    expected, reference = plain.train_elementwise(case, epochs=15)
    for split in (False, True):
        model = net(case, ElementwiseStopping(smoothing=0.9), max_epochs=7 if split else 15)
        model.fit(x, y)
        if split:
            model = pickle.loads(pickle.dumps(model))
            model.set_params(max_epochs=8)
            model.partial_fit(x, y)
        optimizer = used(model, ElementwiseStopping).optimizer_
        fractions = optimizer.stopped_fraction(by="tensor")
        same = {f"net.{n}": v for n, v in expected.stopped_fraction("tensor").items()}
        assert fractions == same
        for p, q in zip(model.module_.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p, q)
        assert model.history[-1, "heldin/stopped"] == optimizer.stopped_fraction() > 0.05
        assert type(model.optimizer_) is torch.optim.SGD


def test_elementwise_beside_evidence() -> None:
    case = plain.CASES[0]
    callback = rule(case)
    model = fitted(case, ElementwiseStopping(smoothing=0.99), callback)
    plain.expect_same(case, callback.stopping_, model.module_)


# -- every way out


@plain.broken
@pytest.mark.parametrize("place", ["step", "data", "callback"])
@pytest.mark.parametrize("kind", [partial(EarlyStopping, "evidence"), ElementwiseStopping])
def test_errors_and_interrupts_leave_no_trace(
    kind: Callable[[], Any], place: str, error: type[BaseException]
) -> None:
    case, fuse = plain.CASES[0], plain.Fuse(error)

    class Burning(skorch.callbacks.Callback):
        def on_batch_end(self, net: Any, **_: Any) -> None:
            if place == "callback":
                fuse()

    class Net2(Net):
        def get_loss(self, *args: Any, **kwargs: Any) -> Any:
            if place == "step":
                fuse()
            return super().get_loss(*args, **kwargs)

    model = net(case, kind(), Burning())
    model.__class__ = Net2
    x, y = (a.numpy() for a in plain.data())
    data = plain.Rows(fuse) if place == "data" else x
    with pytest.raises(error, match="broken") if error is RuntimeError else nullcontext():
        model.fit(data, None if place == "data" else y)
    assert fuse.calls == 6
    plain.expect_no_trace(model.module_)
    assert "fit_loop" not in vars(model)
    assert type(model.optimizer_) is torch.optim.SGD


def test_several_optimisers_make_one_step() -> None:
    case = plain.CASES[4]

    class Two(Net):
        def initialize_optimizer(self, *args: Any, **kwargs: Any) -> Any:
            super().initialize_optimizer(*args, **kwargs)
            first, second = self.module_.net[0], self.module_.net[2]
            self.optimizer_ = plain.sgd(first)
            self.second_ = plain.sgd(second)
            return self

        def train_step(self, batch: Any, **params: Any) -> Any:
            self.module_.zero_grad()
            step = self.train_step_single(batch, **params)
            self.optimizer_.step()
            self.second_.step()
            return step

    callback = rule(case)
    model = net(case, callback)
    model.__class__ = Two
    model.fit(*(a.numpy() for a in plain.data()))
    plain.expect_same(case, callback.stopping_, model.module_)


def test_a_model_that_nobody_trains_is_noticed() -> None:
    case = plain.CASES[0]

    class Other(Net):
        def train_step(self, batch: Any, **params: Any) -> Any:
            return {"loss": torch.zeros(()), "y_pred": torch.zeros(len(batch[0]), 3)}

    model = net(case, rule(case), max_epochs=2)
    model.__class__ = Other
    with pytest.warns(heldin.HeldinWarning, match=r"no backward pass .* whole epoch of 4 batches"):
        model.fit(*(a.numpy() for a in plain.data()))


# -- skorch's own checkpoints


@pytest.mark.parametrize("first", [True, False])
def test_exact_resume_from_a_checkpoint(first: bool, tmp_path: Path) -> None:
    case = plain.CASES[4]
    x, y = (a.numpy() for a in plain.data())

    def callbacks() -> list[Any]:
        checkpoint = Checkpoint(monitor=None, dirname=tmp_path)
        others = [checkpoint, LoadInitState(checkpoint)]
        return [rule(case), *others] if first else [*others, rule(case)]

    net(case, *callbacks(), max_epochs=5).fit(x, y)
    model = net(case, *callbacks())
    model.fit(x, y)
    assert len(model.history) > 5
    plain.expect_same(case, used(model).stopping_, model.module_, rtol=plain.EXACT)


def test_a_state_that_was_not_saved_is_missed(tmp_path: Path) -> None:
    case = plain.CASES[0]
    x, y = (a.numpy() for a in plain.data())
    checkpoint = Checkpoint(monitor=None, dirname=tmp_path, f_optimizer=None)
    net(case, rule(case), checkpoint, max_epochs=5).fit(x, y)
    model = net(case, rule(case), LoadInitState(checkpoint), max_epochs=1)
    with pytest.warns(heldin.HeldinWarning, match=r"after 5 epochs.*f_optimizer"):
        model.fit(x, y)


def test_stopped_weights_come_back_from_a_checkpoint(tmp_path: Path) -> None:
    case = plain.CASES[0]
    x, y = (a.numpy() for a in plain.data())
    _, reference = plain.train_elementwise(case, epochs=15)
    for epochs in (7, 8):
        checkpoint = Checkpoint(monitor=None, dirname=tmp_path)
        callbacks = [checkpoint, LoadInitState(checkpoint), ElementwiseStopping(smoothing=0.9)]
        model = net(case, *callbacks, max_epochs=epochs)
        model.fit(x, y)
    for p, q in zip(model.module_.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q)
