"""heldin.lightning against the plain loop."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import heldin
from tests.support import inside, plain

lightning = pytest.importorskip("lightning")

from heldin.lightning import EarlyStopping, ElementwiseStopping

pytestmark = plain.foreign


class Module(lightning.LightningModule):
    """Does not use its own forward, as many do not."""

    def __init__(self, dtype: torch.dtype = torch.float64, manual: bool = False) -> None:
        super().__init__()
        self.net = plain.net(dtype)
        self.automatic_optimization = not manual
        self.scheduled = False

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        if self.automatic_optimization:
            return {"loss": F.cross_entropy(self.net(x), y), "extra": x.mean()}
        optimizer = self.optimizers()
        loss = F.cross_entropy(self(x), y)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = plain.sgd(self.net)
        if self.scheduled:
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]
        return optimizer


def loader(case: plain.Case) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*plain.data(case.dtype)), batch_size=case.batch)


def trainer(case: plain.Case, *callbacks: Any, **options: Any) -> Any:
    settings = {
        "callbacks": list(callbacks),
        "max_epochs": case.epochs,
        "precision": "bf16-mixed" if case.bf16 else "64-true",
        "gradient_clip_val": case.clip,
        "accumulate_grad_batches": case.accumulate,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
    }
    return lightning.Trainer(**{**settings, **options})


def rule(case: plain.Case, **options: Any) -> EarlyStopping:
    return EarlyStopping(case.rule, **options)


@plain.cases
def test_same_as_plain(case: plain.Case) -> None:
    callback, module = rule(case), Module(case.dtype)
    fit = trainer(case, callback)
    fit.fit(module, loader(case))
    plain.expect_same(case, callback.stopping, module.net)
    assert callback.stopping is not None
    assert fit.global_step == callback.stopping.stopped_step
    assert callback.stopped_epoch == fit.current_epoch - 1
    plain.expect_no_trace(module)


def test_manual_optimisation() -> None:
    case = plain.CASES[0]
    callback, module = rule(case), Module(manual=True)
    trainer(case, callback).fit(module, loader(case))
    plain.expect_same(case, callback.stopping, module.net)


def test_validation_does_not_count() -> None:
    class Validated(Module):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    case = plain.CASES[0]
    callback, module = rule(case), Validated()
    fit = trainer(case, callback, val_check_interval=2)
    fit.fit(module, loader(case), loader(case))
    assert "val_loss" in fit.callback_metrics
    plain.expect_same(case, callback.stopping, module.net)


def test_familiar_after_a_few_batches() -> None:
    """The number of a batch does not make each one a new kind of call."""
    case = plain.CASES[0]
    callback, module = rule(case), Module()
    trainer(case, callback).fit(module, loader(case))
    assert callback.stopping is not None
    assert (
        len(inside.collector(callback.stopping).plan_cache) == 2
    )  # full batches, and the last ones


def test_minimal_epochs_and_steps_are_respected() -> None:
    case = plain.CASES[0]
    for options, steps in (({"min_steps": 70}, 70), ({"min_epochs": 15}, 60)):
        callback, module = rule(case), Module()
        fit = trainer(case, callback, **options)
        fit.fit(module, loader(case))
        assert callback.stopping is not None
        assert callback.stopping.stopped_step == 42
        assert fit.global_step == steps
        assert callback.stopped_epoch == 10


def test_the_step_after_minimal_steps_leaves_the_weights() -> None:
    """min_steps = the stop: nothing moves in it; one more: it is an ordinary step."""
    case = plain.CASES[0]
    _, final = plain.train(case)
    for steps, same in ((42, True), (43, False)):
        module = Module()
        trainer(case, rule(case), min_steps=steps).fit(module, loader(case))
        assert torch.equal(module.net[0].weight, final[0].weight) is same  # type: ignore[arg-type]


def test_tells(capsys: pytest.CaptureFixture[str]) -> None:
    case = plain.CASES[0]
    for verbose in (False, True):
        callback = rule(case, verbose=verbose)
        trainer(case, callback).fit(Module(), loader(case))
        told = [line for line in capsys.readouterr().out.splitlines() if "criterion" in line]
        assert bool(told) is verbose
    assert told == [f"EarlyStopping: {callback.conclusion}"]
    message = "step 42: criterion 0.03595 > 0, check 1 of 1. Signaling Trainer to stop."
    assert callback.stopping_reason_message == message


# -- checkpoints


@pytest.mark.parametrize("case", [plain.CASES[0], plain.CASES[4]], ids=lambda case: case.name)
@pytest.mark.parametrize("steps", [20, 22])
def test_exact_resume(case: plain.Case, steps: int, tmp_path: Path) -> None:
    """From a checkpoint at the end of an epoch, or in the middle of one."""
    first = trainer(case, rule(case), max_steps=steps)
    first.fit(Module(), loader(case))
    path = tmp_path / "run.ckpt"
    first.save_checkpoint(path)
    states = torch.load(path, weights_only=True)["callbacks"]
    state = states["heldin.lightning.EarlyStopping.evidence"]
    assert state["run"]["step"] == steps

    callback, module = rule(case), Module()
    again: Any = loader(case)
    second = trainer(case, callback)
    if steps % 4:
        again = Skipping(again, steps % 4)
    second.fit(module, again, ckpt_path=path, weights_only=True)
    plain.expect_same(case, callback.stopping, module.net, rtol=plain.EXACT)


class Skipping:
    """A loader that knows where it was, as Lightning asks for to resume in mid-epoch."""

    def __init__(self, loader: Any, skip: int) -> None:
        self.loader, self.skip = loader, skip

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Any:
        skip, self.skip = self.skip, 0
        for i, batch in enumerate(self.loader):
            if i >= skip:
                yield batch


def test_other_settings_are_refused_on_resume(tmp_path: Path) -> None:
    case = plain.CASES[0]
    first = trainer(case, rule(case), max_steps=8)
    first.fit(Module(), loader(case))
    first.save_checkpoint(tmp_path / "run.ckpt")
    second = trainer(case, EarlyStopping(heldin.rules.Evidence(smoothing=0.5)))
    module = Module()
    with pytest.raises(heldin.HeldinError, match=r"smoothing=0\.7"):
        second.fit(module, loader(case), ckpt_path=tmp_path / "run.ckpt", weights_only=True)
    plain.expect_no_trace(module)


def test_fit_twice_goes_on() -> None:
    case = plain.CASES[0]
    callback, module = rule(case), Module()
    fit = trainer(case, callback, max_epochs=5)
    fit.fit(module, loader(case))
    fit.fit_loop.max_epochs = case.epochs
    assert callback.stopping is not None
    assert not callback.stopping.should_stop
    optimizer = fit.optimizers[0]
    module.configure_optimizers = lambda: optimizer  # type: ignore[method-assign]
    fit.fit(module, loader(case))
    assert [r.step for r in callback.stopping.history] == list(range(1, 43))
    plain.expect_same(case, callback.stopping, module.net)


def test_an_error_in_training_leaves_no_trace() -> None:
    class Broken(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 2:
                raise RuntimeError("broken")
            return super().training_step(batch, batch_idx)

    case, module = plain.CASES[0], Broken()
    callbacks = [rule(case), ElementwiseStopping()]
    with pytest.raises(RuntimeError, match="broken"):
        trainer(case, *callbacks).fit(module, loader(case))
    plain.expect_no_trace(module)


def test_wrong_settings_are_refused_at_once() -> None:
    with pytest.raises(heldin.HeldinError, match=r"EarlyStopping: .*'smoothness'"):
        EarlyStopping(smoothness=0.5)
    with pytest.raises(heldin.HeldinError, match="'warmup'; it is an option of the rule: rule="):
        EarlyStopping(warmup=3)
    with pytest.raises(heldin.HeldinError, match="patience must be a number of epochs"):
        EarlyStopping(patience=0)
    with pytest.raises(heldin.HeldinError, match="the one that the framework trains"):
        EarlyStopping(model=nn.Linear(1, 1))


# -- logging


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from lightning.pytorch.loggers import TensorBoardLogger
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    case = plain.CASES[0]
    callback = rule(case, log_groups=True)
    logger = TensorBoardLogger(tmp_path)
    elementwise = ElementwiseStopping(smoothing=0.9, log_groups=True)
    trainer(case, callback, elementwise, logger=logger, max_epochs=10).fit(Module(), loader(case))
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    assert callback.stopping is not None
    history = list(callback.stopping.history)
    logged = [(e.step, e.value) for e in events.Scalars("heldin/criterion")]
    assert [step for step, _ in logged] == list(range(len(history)))
    assert len(history) > 30
    assert [v for _, v in logged] == pytest.approx([r.criterion for r in history], rel=1e-6)
    group = [e.value for e in events.Scalars("heldin/group/net.0.weight")]
    assert group == pytest.approx([r.groups["net.0.weight"] for r in history], rel=1e-6)
    stopped = [e.value for e in events.Scalars("heldin/stopped")]
    assert stopped[0] == 0
    assert stopped[-1] == pytest.approx(elementwise.optimizers[0].stopped_fraction())
    assert events.Scalars("heldin/stopped/net.0.bias")


def test_mlflow(mlflow_uri: str) -> None:
    import mlflow
    from lightning.pytorch.loggers import MLFlowLogger

    case = plain.CASES[0]
    callback = rule(case)
    logger = MLFlowLogger(tracking_uri=mlflow_uri)
    trainer(case, callback, logger=logger).fit(Module(), loader(case))
    client = mlflow.MlflowClient(mlflow_uri)
    found = client.get_metric_history(logger.run_id, "heldin/criterion")
    assert callback.stopping is not None
    expected = [r.criterion for r in callback.stopping.history]
    assert [m.value for m in sorted(found, key=lambda m: m.step)] == pytest.approx(expected)
    run = client.get_run(logger.run_id)
    assert run.data.metrics["heldin/should_stop"] == 1.0
    assert not any(name.startswith("heldin/group") for name in run.data.metrics)


# -- single weights


@pytest.mark.parametrize("scheduled", [False, True])
def test_elementwise(scheduled: bool, tmp_path: Path) -> None:
    """As in a plain loop, and from a checkpoint in the middle as well."""
    case = plain.CASES[0]
    expected, model = plain.train_elementwise(case, epochs=15)
    before: dict[str, float] = {}
    for split in (False, True):
        callback, module = ElementwiseStopping(smoothing=0.9), Module()
        module.scheduled = scheduled
        fit = trainer(case, callback, max_epochs=7 if split else 15)
        fit.fit(module, loader(case))
        if split:
            fit.save_checkpoint(tmp_path / "run.ckpt")
            callback, module = ElementwiseStopping(smoothing=0.9), Module()
            module.scheduled = scheduled
            trainer(case, callback, max_epochs=15).fit(
                module, loader(case), ckpt_path=tmp_path / "run.ckpt", weights_only=True
            )
        (optimizer,) = callback.optimizers
        fractions = optimizer.stopped_fraction(by="tensor")
        if not scheduled:
            same = {f"net.{n}": v for n, v in expected.stopped_fraction("tensor").items()}
            assert fractions == same
            for p, q in zip(module.net.parameters(), model.parameters(), strict=True):
                torch.testing.assert_close(p, q)
        elif split:
            assert fractions == before
        before = fractions
        assert 0.05 < optimizer.stopped_fraction() < 1
        plain.expect_no_trace(module)


def test_elementwise_beside_evidence() -> None:
    case = plain.CASES[0]
    callback, other, module = rule(case), ElementwiseStopping(smoothing=0.99), Module()
    trainer(case, other, callback).fit(module, loader(case))
    plain.expect_same(case, callback.stopping, module.net)  # no weight has stopped by then
    assert other.optimizers[0].state_dict()["heldin"]["updates"] == 42
    plain.expect_no_trace(module)
    assert math.isclose(other.optimizers[0].stopped_fraction(), 0.0)


# -- every way out


@plain.broken
def test_errors_and_interrupts_leave_no_trace(error: type[BaseException]) -> None:
    case, fuse = plain.CASES[0], plain.Fuse(error)
    callback, module = rule(case), Module()
    with pytest.raises((error, SystemExit)):
        trainer(case, callback).fit(module, DataLoader(plain.Rows(fuse), batch_size=16))
    plain.expect_no_trace(module)


# -- several optimisers


class Two(Module):
    """Manual optimisation with an optimiser for each layer."""

    def __init__(self) -> None:
        super().__init__(manual=True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
        return loss

    def configure_optimizers(self) -> Any:
        return [plain.sgd(self.net[0]), plain.sgd(self.net[2])]


def test_several_optimisers_make_one_step() -> None:
    case = plain.CASES[4]
    callback, module = rule(case), Two()
    trainer(case, callback).fit(module, loader(case))
    plain.expect_same(case, callback.stopping, module.net)


def test_a_line_search_is_one_step() -> None:
    """An optimiser that calls its closure many times; the first gives the evidence."""

    class Searching(Module):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.net.parameters(), lr=0.01, max_iter=5)

    case = plain.Case("search", special={"warmup": 100})
    callback = rule(case)
    trainer(case, callback, max_epochs=2).fit(Searching(), loader(case))
    assert callback.stopping is not None
    assert [(r.step, r.count) for r in callback.stopping.history] == [
        (1, 16), (2, 16), (3, 16), (4, 10), (5, 16), (6, 16), (7, 16), (8, 10)
    ]  # fmt: skip


def test_settings_in_a_configuration_file(tmp_path: Path) -> None:
    """LightningCLI knows every option by its name."""
    pytest.importorskip("jsonargparse")
    from lightning.pytorch.cli import LightningCLI

    callback = {"class_path": "heldin.lightning.EarlyStopping", "init_args": {"rule": "evidence"}}
    cli = LightningCLI(
        Module,
        args={"trainer": {"callbacks": [callback], "logger": False}, "model": {}},
        run=False,
        save_config_callback=None,
    )
    found = [c for c in cli.trainer.callbacks if isinstance(c, EarlyStopping)]
    assert found[0].by_evidence
