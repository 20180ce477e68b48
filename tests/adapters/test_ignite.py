"""heldin.ignite against the plain loop."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import heldin
from tests.support import plain

ignite = pytest.importorskip("ignite")

from ignite.engine import Engine, Events, create_supervised_trainer
from ignite.handlers import Checkpoint, DiskSaver

from heldin.ignite import EarlyStopping

pytestmark = plain.foreign


def loader(case: plain.Case) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*plain.data(case.dtype)), batch_size=case.batch)


def made(case: plain.Case, **options: Any) -> tuple[Any, nn.Module, Any, EarlyStopping]:
    model = plain.net(case.dtype)
    optimizer = plain.sgd(model)

    def clip(*_: Any) -> None:
        if case.clip:
            nn.utils.clip_grad_norm_(model.parameters(), case.clip)

    optimizer.register_step_pre_hook(clip)

    def loss(outputs: Any, y: Any) -> Any:
        with case.autocast():
            return F.cross_entropy(outputs, y)

    def forward(model: nn.Module, x: Any) -> Any:
        with case.autocast():
            return model(x)

    trainer = create_supervised_trainer(
        model, optimizer, loss, gradient_accumulation_steps=case.accumulate, model_fn=forward
    )
    return trainer, model, optimizer, EarlyStopping(model, rule=case.rule, **options)


@plain.cases
def test_same_as_plain(case: plain.Case) -> None:
    """Ignite goes on accumulating over the end of an epoch."""
    trainer, model, _, stopping = made(case)
    stopping.attach(trainer)
    trainer.run(loader(case), max_epochs=case.epochs)
    plain.expect_same(case, stopping.stopping, model, flush=False)
    plain.expect_no_trace(model)
    assert stopping.stopping is not None
    assert trainer.state.iteration == (stopping.stopping.stopped_step or 0) * case.accumulate
    assert trainer.state.metrics["heldin/should_stop"] == 1.0


@pytest.mark.parametrize("case", [plain.CASES[0], plain.CASES[4]], ids=lambda case: case.name)
def test_exact_resume(case: plain.Case, tmp_path: Path) -> None:
    trainer, model, optimizer, stopping = made(case)
    stopping.attach(trainer)
    parts = {"trainer": trainer, "model": model, "optimizer": optimizer, "stopping": stopping}
    saver = Checkpoint(parts, DiskSaver(tmp_path, create_dir=True), n_saved=None)
    trainer.add_event_handler(Events.EPOCH_COMPLETED(once=5), saver)
    trainer.run(loader(case), max_epochs=case.epochs)

    trainer, model, optimizer, stopping = made(case)
    stopping.attach(trainer)
    parts = {"trainer": trainer, "model": model, "optimizer": optimizer, "stopping": stopping}
    (path,) = tmp_path.glob("*.pt")
    Checkpoint.load_objects(parts, torch.load(path, weights_only=True))
    trainer.run(loader(case), max_epochs=case.epochs)
    plain.expect_same(case, stopping.stopping, model, rtol=plain.EXACT)


def test_run_again_starts_anew_and_more_epochs_go_on() -> None:
    case = plain.Case("long", special={"warmup": 100})
    trainer, model, _, stopping = made(case)
    stopping.attach(trainer)
    trainer.run(loader(case), max_epochs=3)
    trainer.run(loader(case), max_epochs=5)
    assert stopping.stopping is not None
    assert [r.step for r in stopping.stopping.history] == list(range(1, 21))
    trainer.run(loader(case), max_epochs=5)  # as many as before: a new run
    assert [r.step for r in stopping.stopping.history] == list(range(1, 21))
    plain.expect_no_trace(model)


def test_steps_with_a_closure() -> None:
    """Nothing is seen before such a step; it is weighed after it."""
    case = plain.CASES[0]
    _, model, optimizer, stopping = made(case)

    def update(engine: Any, batch: Any) -> None:
        def closure() -> Any:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(batch[0]), batch[1])
            loss.backward()
            return loss

        optimizer.step(closure)

    trainer = Engine(update)
    stopping.attach(trainer)
    trainer.run(loader(case), max_epochs=case.epochs)
    plain.expect_same(case, stopping.stopping, None)


def test_tells(capsys: pytest.CaptureFixture[str]) -> None:
    case = plain.CASES[0]
    trainer, _, _, stopping = made(case)
    stopping.attach(trainer)
    trainer.run(loader(case), max_epochs=case.epochs)
    told = "EarlyStopping: stopped at step 42 (step 42: criterion 0.03595 > 0, check 1 of 1)"
    assert told in capsys.readouterr().out


def test_wrong_settings_are_refused_at_once() -> None:
    with pytest.raises(heldin.HeldinError, match=r"EarlyStopping: .*'smoothness'"):
        EarlyStopping(nn.Linear(1, 1), smoothness=0.5)


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from ignite.handlers.tensorboard_logger import TensorboardLogger
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    case = plain.CASES[0]
    trainer, _, _, stopping = made(case, log_groups=True)
    stopping.attach(trainer)
    with TensorboardLogger(str(tmp_path)) as logger:
        logger.attach_output_handler(
            trainer, Events.ITERATION_COMPLETED, tag="training", metric_names="all"
        )
        trainer.run(loader(case), max_epochs=case.epochs)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert stopping.stopping is not None
    history = list(stopping.stopping.history)
    logged = [(e.step, e.value) for e in events.Scalars("training/heldin/criterion")]
    assert [s for s, _ in logged] == list(range(1, 43))
    assert [v for _, v in logged] == pytest.approx([r.criterion for r in history], rel=1e-6)
    assert events.Scalars("training/heldin/group/0.weight")


def test_mlflow(mlflow_uri: str) -> None:
    import mlflow
    from ignite.handlers.mlflow_logger import MLflowLogger

    case = plain.CASES[0]
    trainer, _, _, stopping = made(case)
    stopping.attach(trainer)
    with MLflowLogger(mlflow_uri) as logger:
        run = mlflow.active_run().info.run_id
        logger.attach_output_handler(
            trainer, Events.ITERATION_COMPLETED, tag="training", metric_names="all"
        )
        trainer.run(loader(case), max_epochs=case.epochs)
    found = mlflow.MlflowClient(mlflow_uri).get_metric_history(run, "training heldin/criterion")
    assert stopping.stopping is not None
    values = [r.criterion for r in stopping.stopping.history]
    assert [m.value for m in sorted(found, key=lambda m: m.step)] == pytest.approx(values)


# -- every way out


@plain.broken
@pytest.mark.parametrize("place", ["step", "data", "handler"])
def test_errors_and_interrupts_leave_no_trace(place: str, error: type[BaseException]) -> None:
    case, fuse = plain.CASES[0], plain.Fuse(error)
    trainer, model, optimizer, stopping = made(case)
    stopping.attach(trainer)
    if place == "step":
        optimizer.register_step_pre_hook(fuse)
    elif place == "handler":
        trainer.add_event_handler(Events.ITERATION_COMPLETED, fuse)
    rows = plain.Rows(fuse) if place == "data" else TensorDataset(*plain.data())
    with pytest.raises(error, match="broken"):
        trainer.run(DataLoader(rows, batch_size=16), max_epochs=5)
    plain.expect_no_trace(model)
    assert fuse.calls == 6
    # later training goes on, past the step at which the rule would have stopped
    before = copy.deepcopy(model.state_dict())
    x, y = plain.data()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert all(bool((before[n] != w).any()) for n, w in model.state_dict().items())


def test_an_interrupted_run_goes_on_where_it_was() -> None:
    case = plain.CASES[0]
    trainer, model, _, stopping = made(case)
    stopping.attach(trainer)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=6), lambda t: t.interrupt())
    trainer.run(loader(case), max_epochs=case.epochs)
    assert trainer.state.iteration == 6
    plain.expect_no_trace(model)
    trainer.run(loader(case), max_epochs=case.epochs)
    plain.expect_same(case, stopping.stopping, model, rtol=plain.EXACT)
    plain.expect_no_trace(model)


# -- what is trained, and by how many


def test_several_optimisers_make_one_step() -> None:
    """Window and step counts are those of a single optimiser, and all stand still at the stop."""
    case = plain.CASES[4]
    _, model, _, stopping = made(case)
    optimizers = [
        torch.optim.SGD(part.parameters(), lr=plain.RATE, momentum=plain.MOMENTUM)
        for part in (model[0], model[2])
    ]

    def update(engine: Any, batch: Any) -> None:
        model.zero_grad()
        F.cross_entropy(model(batch[0]), batch[1]).backward()
        for optimizer in optimizers:
            optimizer.step()

    trainer = Engine(update)
    stopping.attach(trainer)
    trainer.run(loader(case), max_epochs=case.epochs)
    plain.expect_same(case, stopping.stopping, model)


def test_a_model_that_nobody_trains_is_noticed() -> None:
    case = plain.CASES[0]
    trainer, _, _, _ = made(case)
    stopping = EarlyStopping(plain.net(), rule=case.rule).attach(trainer)
    with pytest.warns(heldin.HeldinWarning, match=r"no backward pass .* whole epoch of 4 batches"):
        trainer.run(loader(case), max_epochs=2)
    assert stopping.stopping is not None
    # accumulating over more than an epoch is no such thing
    case = plain.Case("slow", accumulate=6)
    trainer, _, _, stopping = made(case)
    stopping.attach(trainer)
    trainer.run(loader(case), max_epochs=3)
    case = plain.Case("rare", special={"every": 9})
    trainer, _, _, stopping = made(case)
    stopping.attach(trainer)
    trainer.run(loader(case), max_epochs=3)


def test_objects_in_the_wrong_place_are_named() -> None:
    trainer, model, _, stopping = made(plain.CASES[0])
    with pytest.raises(heldin.HeldinError, match=r"model must be the model .* type Engine"):
        EarlyStopping(trainer)
    with pytest.raises(heldin.HeldinError, match=r"trainer must be the trainer.* type Sequential"):
        stopping.attach(model)
    core: Any = heldin.EarlyStopping(model, plain.sgd(model), rule="evidence")
    with pytest.raises(heldin.HeldinError, match=r"use heldin\.ignite\.EarlyStopping"):
        core.attach(trainer)
    with pytest.raises(heldin.HeldinError, match="the class for plain loops"):
        EarlyStopping(core)
    core.close()
