"""heldin.lightning.EarlyStopping against the plain loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, IterableDataset

import heldin
from tests.support import estimated, plain

lightning = pytest.importorskip("lightning")

from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from heldin.lightning import EarlyStopping, clip_by

pytestmark = plain.foreign
PLAIN = estimated.CASES[0]


class Module(lightning.LightningModule):
    """Does not use its own forward, logs, and asks for the epoch, as many do."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.net = plain.net(dtype)
        self.losses: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert self.current_epoch < 1000
        assert batch_idx < 4
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        self.losses.append(loss.detach())
        return {"loss": loss}

    def configure_optimizers(self) -> Any:
        return plain.sgd(self.net)


class Manual(Module):
    """Accumulates and clips by itself."""

    def __init__(self, case: plain.Case) -> None:
        super().__init__(case.dtype)
        self.automatic_optimization = False
        self.case = case

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.manual_backward(loss / self.case.accumulate)
        if (batch_idx + 1) % self.case.accumulate and batch_idx != 3:
            return loss
        if self.case.clip is not None:
            self.clip_gradients(optimizer, self.case.clip, "norm")
        optimizer.step()
        optimizer.zero_grad()
        return loss


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


def rule(**options: Any) -> EarlyStopping:
    return EarlyStopping(**estimated.arguments(**options))


@estimated.cases
def test_same_as_plain(case: plain.Case) -> None:
    callback, module, batches = rule(), Module(case.dtype), estimated.loader(case)
    fit = trainer(case, callback)
    fit.fit(module, batches)
    estimated.expect_same(case, callback.stopping, module.net)
    assert callback.stopping is not None
    assert fit.global_step == callback.stopping.stopped_step
    assert callback.stopped_epoch == fit.current_epoch - 1
    estimated.expect_no_trace(module, batches)
    assert not vars(fit.strategy).keys() & {"process_dataloader"}
    assert not vars(fit.precision_plugin).keys() & {"convert_input"}
    batches_seen = 4 * callback.stopped_epoch + 4
    assert len(module.losses) <= batches_seen  # those of the shadows are not among them


@pytest.mark.parametrize("case", estimated.CASES[:3], ids=lambda case: case.name)
def test_manual_optimisation(case: plain.Case) -> None:
    callback, module = rule(), Manual(case)
    trainer(case, callback, gradient_clip_val=None, accumulate_grad_batches=1).fit(
        module, estimated.loader(case)
    )
    divided = case.accumulate > 1
    estimated.expect_same(case, callback.stopping, module.net, divided=divided)
    estimated.expect_no_trace(module)


def test_rows_in_time() -> None:
    order = [7 * i % plain.ROWS for i in range(plain.ROWS)]
    callback, module = rule(rule="folds", time=order), Module()
    trainer(PLAIN, callback).fit(module, estimated.loader(PLAIN))
    estimated.expect_same(PLAIN, callback.stopping, module.net, rule="folds", time=order)
    stopping: Any = callback.stopping
    last = [row for row, label in enumerate(stopping.fold_of_row.tolist()) if label == 4]
    assert {order[row] for row in last} == {*range(plain.ROWS - len(last), plain.ROWS)}


def test_light_shadows() -> None:
    light = heldin.rules.Folds(shadows=2, rows=0.5)
    callback, module = EarlyStopping(light, patience=None), Module()
    trainer(PLAIN, callback, max_epochs=2).fit(module, estimated.loader(PLAIN))
    stopping: Any = callback.stopping
    assert stopping.backend.draw.share == 0.5


def test_folds() -> None:
    callback, module = rule(rule="folds"), Module()
    trainer(PLAIN, callback).fit(module, estimated.loader(PLAIN))
    stopping = callback.stopping
    assert stopping is not None
    assert stopping.backend.engine == "replay"
    estimated.expect_same(PLAIN, stopping, module.net, rule="folds")
    assert len(module.losses) == stopping.stopped_step


def test_validation_on_the_same_loader_does_not_count() -> None:
    class Validated(Module):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    callback, module, batches = rule(), Validated(), estimated.loader(PLAIN, shuffle=False)
    fit = trainer(PLAIN, callback, val_check_interval=2)
    fit.fit(module, batches, batches)
    assert "val_loss" in fit.callback_metrics
    estimated.expect_same(PLAIN, callback.stopping, module.net, shuffle=False)


def test_the_number_of_steps_may_be_asked_for_before_the_run() -> None:
    class Scheduled(Module):
        def configure_optimizers(self) -> Any:
            assert self.trainer.estimated_stepping_batches > 1  # which sets the loaders up
            return super().configure_optimizers()

    callback, module = rule(), Scheduled()
    trainer(PLAIN, callback).fit(module, estimated.loader(PLAIN))
    estimated.expect_same(PLAIN, callback.stopping, module.net)


def test_batches_may_change_on_their_way_to_the_module() -> None:
    class Moved(Module):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return [batch[0] + 0.0, batch[1]]  # another tensor

    callback, module = rule(), Moved()
    trainer(PLAIN, callback).fit(module, estimated.loader(PLAIN))
    estimated.expect_same(PLAIN, callback.stopping, module.net)


def test_a_loss_of_ones_own_is_estimated() -> None:
    """One for each row here, and groups are held out together."""

    def errors(module: Any, batch: Any) -> Tensor:
        return (module.net(batch[0]).argmax(1) != batch[1]).double()

    groups = [i // 2 for i in range(plain.ROWS)]
    callback = rule(eval_loss=errors, groups=groups, restore=False, rule="folds")
    module = Module()
    trainer(PLAIN, callback, max_epochs=3).fit(module, estimated.loader(PLAIN))
    stopping = callback.stopping
    assert stopping is not None
    curves = [stopping.row_losses(number) for number in range(len(stopping.history))]
    assert {len(curve) for curve in curves} == {plain.ROWS}
    assert {float(v) for v in curves[0]} == {0.0, 1.0}
    label = stopping.fold_of_row.view(-1, 2)
    assert torch.equal(label[:, 0], label[:, 1])
    assert callback.state_dict()["run"]["rule"]["step"] == 12


def test_without_restoring_the_last_weights_stay() -> None:
    found = {}
    for restore in (True, False):
        callback, module = rule(restore=restore), Module()
        trainer(PLAIN, callback).fit(module, estimated.loader(PLAIN))
        found[restore] = module.net[0].weight.detach()  # type: ignore[operator]
    model = plain.net()
    optimizer = plain.sgd(model)
    batches, steps = estimated.loader(PLAIN), 0
    assert callback.stopping is not None
    while steps < (callback.stopping.stopped_step or 0):
        for batch in batches:
            if steps < (callback.stopping.stopped_step or 0):
                estimated.batch_loss(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
                steps += 1
    torch.testing.assert_close(found[False], model[0].weight.detach())  # type: ignore[operator]
    assert not torch.equal(found[True], found[False])


def test_patience_in_epochs() -> None:
    """Of four steps each, after the best step."""
    callback = rule(patience=3)
    trainer(PLAIN, callback).fit(Module(), estimated.loader(PLAIN))
    assert callback.stopping.stopped_step == callback.stopping.best_step + 12 < 160


# -- checkpoints


@pytest.mark.parametrize("steps", [20, 22])
def test_exact_resume(steps: int, tmp_path: Path) -> None:
    """From a checkpoint that was made during the run: between epochs, or in the middle of one."""
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=steps, save_top_k=-1)
    options = {"enable_checkpointing": True, "max_steps": steps}
    first = trainer(PLAIN, rule(), saver, **options)
    first.fit(Module(), estimated.loader(PLAIN, shuffle=False))
    (path,) = tmp_path.glob("*.ckpt")
    state = torch.load(path, weights_only=True)["callbacks"]["heldin.lightning.EarlyStopping"]
    assert state["run"]["rule"]["step"] == steps

    callback, module = rule(), Module()
    batches: Any = estimated.loader(PLAIN, shuffle=False)
    if steps % 4:  # Lightning leaves it to the sampler to go on in the middle of an epoch
        batches = DataLoader(
            batches.dataset, batch_sampler=Skipping(list(batches.batch_sampler), steps % 4)
        )
    trainer(PLAIN, callback).fit(module, batches, ckpt_path=path, weights_only=True)
    estimated.expect_same(PLAIN, callback.stopping, module.net, rtol=plain.EXACT, shuffle=False)


class Skipping:
    """A batch sampler that knows where it was."""

    def __init__(self, batches: list[list[int]], skip: int) -> None:
        self.batches, self.skip = batches, skip

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Any:
        skip, self.skip = self.skip, 0
        return iter(self.batches[skip:])


def test_after_the_end_training_goes_on_from_the_last_weights(tmp_path: Path) -> None:
    """What was restored is for use; the optimiser and the shadows are further on."""
    callback, module = rule(patience=None), Module()
    first = trainer(PLAIN, callback, max_epochs=20)
    first.fit(module, estimated.loader(PLAIN))
    first.save_checkpoint(tmp_path / "run.ckpt")
    again, other = rule(patience=None, restore=False), Module()
    trainer(PLAIN, again, max_epochs=21).fit(
        other, estimated.loader(PLAIN), ckpt_path=tmp_path / "run.ckpt", weights_only=True
    )
    straight, third = rule(patience=None, restore=False), Module()
    batches = estimated.loader(PLAIN)
    trainer(PLAIN, straight, max_epochs=20).fit(third, batches)
    last = third.net[0].weight.detach().clone()  # type: ignore[operator]
    assert callback.stopping is not None
    assert callback.stopping.best_step < 40
    assert not torch.equal(module.net[0].weight, last)  # type: ignore[arg-type]
    torch.testing.assert_close(callback.state_dict()["run"]["last"]["net.0.weight"], last)
    assert again.stopping is not None
    assert again.state_dict()["run"]["rule"]["step"] == 84


def test_other_settings_are_refused_on_resume(tmp_path: Path) -> None:
    first = trainer(PLAIN, rule(), max_steps=8)
    first.fit(Module(), estimated.loader(PLAIN))
    first.save_checkpoint(tmp_path / "run.ckpt")
    module, batches = Module(), estimated.loader(PLAIN)
    with pytest.raises(heldin.HeldinError, match=r"grid=1\.2"):
        trainer(PLAIN, rule(grid=1.5)).fit(
            module, batches, ckpt_path=tmp_path / "run.ckpt", weights_only=True
        )
    estimated.expect_no_trace(module, batches)


# -- logs


def test_logged(tmp_path: Path) -> None:
    callback, logger = rule(), CSVLogger(tmp_path)
    fit = trainer(PLAIN, callback, logger=logger)
    fit.fit(Module(), estimated.loader(PLAIN))
    stopping = callback.stopping
    assert stopping is not None
    assert {"heldin/estimate", "heldin/standard_error"} <= {*fit.progress_bar_metrics}
    assert "train_loss" in fit.callback_metrics
    text = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    assert "heldin/best_estimate" in text[0]
    column = text[0].split(",").index("heldin/estimate")
    texts = [line.split(",") for line in text[1:]]
    values = sorted({float(cells[column]) for cells in texts if cells[column]})
    last = dict(zip(text[0].split(","), texts[-1], strict=True))
    summary = callback.summary()
    assert {name: float(last[name]) for name in summary} == pytest.approx(summary)
    assert values == pytest.approx(sorted(r.estimate for r in stopping.history if r.step))


# -- what cannot be followed


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(zip(*plain.data(), strict=True))


class Two(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [plain.sgd(self.net[0]), plain.sgd(self.net[2])]


class Backward(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        F.cross_entropy(self.net(batch[0]), batch[1]).backward()
        self.optimizers().step()


@pytest.mark.parametrize(
    ("module", "data", "message"),
    [
        (Module(), DataLoader(Stream(), batch_size=4), "IterableDataset has no row numbers.*map-"),
        (Module(), {"a": DataLoader([1.0])}, "must be a torch.utils.data.DataLoader"),  # type: ignore[arg-type]
        (Two(), None, "trained by 2 optimisers.*groups of one optimiser"),
        (Backward(PLAIN), None, "self.manual_backward"),
    ],
)
def test_what_cannot_be_followed_is_refused(module: Any, data: Any, message: str) -> None:
    batches = data if data is not None else estimated.loader(PLAIN)
    with pytest.raises(heldin.HeldinError, match=message):
        trainer(PLAIN, rule(), gradient_clip_val=None).fit(module, batches)
    estimated.expect_no_trace(module, batches if data is None else None)


def averaging(name: str, **options: Any) -> Any:
    """Return a callback of Lightning that averages weights; that of users begins at step 3."""
    callbacks = pytest.importorskip("lightning.pytorch.callbacks")
    base: Any = getattr(callbacks, name, None)
    if base is None:
        pytest.skip(f"this version of Lightning has no {name}")

    class FromStep(base):
        asked = 0

        def should_update(self, step_idx: Any = None, epoch_idx: Any = None) -> bool:
            self.asked += step_idx is not None
            return step_idx is not None and step_idx >= 3

    return base(**options) if options else FromStep()


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("ema", [True, False])
def test_averages_of_weights_are_followed(ema: bool, first: bool) -> None:
    """Each shadow has an average of its own; that of the best step is evaluated and restored."""
    rows = torch.arange(plain.ROWS)

    class Normalised(Module):
        def __init__(self) -> None:
            super().__init__()
            self.net.insert(1, torch.nn.BatchNorm1d(12).double())
            torch.nn.init.constant_(self.net[1].weight, 1.3)  # type: ignore[arg-type]

    def averaged(kept: Tensor, steps: int) -> Any:
        """Train a module without some rows in a plain loop; return it with its average."""
        module = Normalised()
        decay = {"multi_avg_fn": get_ema_multi_avg_fn(0.8)} if ema else {}
        average = AveragedModel(module, use_buffers=True, **decay)
        optimizer = plain.sgd(module.net)
        x, y = plain.data()
        for step, batch in enumerate([*rows.split(PLAIN.batch)] * 3):
            if step == steps:
                break
            seen = batch[kept[batch]]
            optimizer.zero_grad()
            F.cross_entropy(module.net(x[seen]), y[seen]).backward()
            optimizer.step()
            if ema or step >= 3:
                average.update_parameters(module)
        return module, average

    callback = rule(rule="folds", average="best", patience=None)
    ema_options = {"decay": 0.8} if ema else {}
    average = averaging("EMAWeightAveraging" if ema else "WeightAveraging", **ema_options)
    module, pair = Normalised(), [callback, average]
    fit = trainer(PLAIN, *(pair if first else pair[::-1]), max_epochs=3)
    fit.fit(module, estimated.loader(PLAIN, shuffle=False))
    step, held = callback.best_step, callback.out_of_fold
    assert step is not None
    assert 4 < step <= 12
    if not ema:
        assert average.asked == fit.global_step  # once for each step
    expected = averaged(torch.ones(plain.ROWS, dtype=torch.bool), step)[1].module.eval()
    torch.testing.assert_close(module.state_dict(), expected.state_dict())
    x, y = plain.data()
    for fold in held.folds.unique().tolist():
        own = averaged(held.folds != fold, step)[1].module.eval()
        torch.testing.assert_close(held.outputs[held.folds == fold], own.net(x[held.folds == fold]))
    loss = F.cross_entropy(held.outputs, y)
    assert callback.estimates["loss"].value == pytest.approx(float(loss.detach()))
    estimated.expect_no_trace(module)


def test_exact_resume_with_averages(tmp_path: Path) -> None:
    def run(*callbacks: Any, path: Any = None, **options: Any) -> tuple[Any, Any]:
        callback, module = rule(rule="folds"), Module()
        ema = averaging("EMAWeightAveraging", decay=0.8)
        fit = trainer(PLAIN, ema, callback, *callbacks, **options)
        batches = estimated.loader(PLAIN, shuffle=False)
        fit.fit(module, batches, ckpt_path=path, weights_only=True)
        return callback, module

    whole, expected = run()
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=8, save_top_k=-1)
    run(saver, enable_checkpointing=True, max_steps=8)
    resumed, module = run(path=next(tmp_path.glob("*.ckpt")))
    assert str(resumed.stopping.history.columns()) == str(whole.stopping.history.columns())
    torch.testing.assert_close(module.state_dict(), expected.state_dict(), rtol=0, atol=0)


def test_averages_that_are_not_followed_are_refused() -> None:
    def fit(average: Any) -> Any:
        run = trainer(PLAIN, rule(), average, gradient_clip_val=None)
        run.fit(Module(), estimated.loader(PLAIN))
        return run

    with pytest.raises(heldin.HeldinError, match=r"StochasticWeightAveraging.*averaged_model="):
        fit(lightning.pytorch.callbacks.StochasticWeightAveraging(0.01))
    by_epoch = averaging("EMAWeightAveraging", update_every_n_steps=0, update_starting_at_epoch=1)
    with pytest.raises(heldin.HeldinError, match="averages weights at the end of an epoch"):
        fit(by_epoch)
    run = fit(averaging("EMAWeightAveraging", decay=0.9))
    with pytest.raises(heldin.HeldinError, match="EMAWeightAveraging is followed in one process"):
        run.fit(run.lightning_module, estimated.loader(PLAIN))


def test_wrong_settings_are_refused_at_once() -> None:
    for options, message in (
        ({"rule": "leave-one-out"}, "LeaveOneOut needs the tensors of all rows"),
        ({"rule": heldin.rules.Validation(data=[])}, "Validation is what the framework's own"),
        ({"rule": "fold"}, "did you mean 'folds'"),
        ({"budget": 0}, "budget must be a number above 0"),
        ({"rule": "folds", "budget": 2}, "budget: it is an option of rule='auto'"),
        ({"rule": "shadow", "memory": 2**20}, "memory: it is an option of rule='auto'"),
        ({"patience": 0}, "EarlyStopping: patience must be a number of epochs >= 1"),
        ({"seed": -1}, "seed must be"),
        ({"restore": 1}, "restore must be True or False"),
        ({"eval_loss": 1}, "eval_loss must be a function"),
        ({"log_groups": True}, "log_groups is for rule='evidence'"),
        ({"rule": "evidence", "groups": [1]}, "groups has no effect with rule 'evidence'"),
        ({"rule": "evidence", "patience": 3}, "Evidence\\(checks=3\\)"),
        ({"rule": "evidence", "restore": False}, "restore has no effect"),
        ({"budge": 3}, "unknown argument 'budge'; is it 'budget'"),
    ):
        with pytest.raises(heldin.HeldinError, match=message):
            EarlyStopping(**options)


@plain.broken
def test_errors_and_interrupts_leave_no_trace(error: type[BaseException]) -> None:
    fuse, module = plain.Fuse(RuntimeError), Module()
    fuse.calls, fuse.error = -40, error  # the rule looks at rows as well

    batches = DataLoader(plain.Rows(fuse), batch_size=16)
    fit = trainer(PLAIN, rule(patience=None))
    with pytest.raises((error, SystemExit)):
        fit.fit(module, batches)
    assert 0 < fit.global_step < 160
    estimated.expect_no_trace(module, batches)
    assert not vars(fit.strategy).keys() & {"process_dataloader"}


class Reloaded(Module):
    """Has another dataset in every epoch."""

    def train_dataloader(self) -> Any:
        rows = [*zip(*plain.data(), strict=True)]
        return DataLoader(rows[:: -1 if self.current_epoch else 1], batch_size=16)  # type: ignore[arg-type]


def test_other_rows_in_a_later_epoch_are_refused() -> None:
    fit = trainer(PLAIN, rule(), reload_dataloaders_every_n_epochs=1)
    with pytest.raises(heldin.HeldinError, match="one over other rows"):
        fit.fit(Reloaded())


@pytest.mark.parametrize(
    ("algorithm", "expected"), [("value", [2.0, 2.0]), ("norm", [1.2, 1.6]), (None, [1.2, 1.6])]
)
def test_gradients_are_clipped_as_lightning_does(
    algorithm: str | None, expected: list[float]
) -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([3.0, 4.0])
    clip_by(2.0, algorithm)([weight])
    assert weight.grad.tolist() == pytest.approx(expected, rel=1e-5)
