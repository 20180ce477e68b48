"""heldin.ignite.EarlyStopping against the plain loop."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import heldin
from tests.support import estimated, plain

ignite = pytest.importorskip("ignite")

from ignite.engine import Engine, Events, create_supervised_trainer
from ignite.handlers import Checkpoint, DiskSaver, EMAHandler

from heldin.ignite import EarlyStopping

pytestmark = plain.foreign
PLAIN = estimated.CASES[0]


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
    settings = estimated.arguments(clip=case.clip, **options)
    with case.autocast():
        return trainer, model, optimizer, EarlyStopping(model, optimizer, loss, **settings)


@estimated.cases
def test_same_as_plain(case: plain.Case) -> None:
    """Ignite goes on accumulating over the end of an epoch."""
    trainer, model, _, stopping = made(case)
    batches = estimated.loader(case)
    stopping.attach(trainer)
    trainer.run(batches, max_epochs=case.epochs)
    near = 2e-3 if case.bf16 else 1e-4 if case.clip else None  # the hook clips a second time
    estimated.expect_same(case, stopping.stopping, model, flush=False, rtol=near)
    estimated.expect_no_trace(model, batches)
    assert stopping.stopping is not None
    assert trainer.state.iteration == (stopping.stopping.stopped_step or 0) * case.accumulate
    assert trainer.state.metrics["heldin/should_stop"] == 1.0
    assert trainer.state.metrics["heldin/standard_error"] > 0


def test_iterations_that_pass_over_their_batch() -> None:
    model = plain.net()
    optimizer, twin = plain.sgd(model), copy.deepcopy(model)
    taken: list[Any] = []

    def process(engine: Engine, batch: Any) -> None:
        number = engine.state.iteration % 4
        loss = estimated.batch_loss(model, batch)
        if number == 1:  # a nan, say
            return
        optimizer.zero_grad()
        loss.backward()
        if number == 2:
            return
        optimizer.step()
        taken.append(batch)

    trainer = Engine(process)
    settings: dict[str, Any] = {"rule": "shadow", "patience": None, "restore": False}
    stopping: Any = EarlyStopping(model, optimizer, batch_loss=estimated.batch_loss, **settings)
    x, y = plain.data()
    rows = [(a, b, i) for i, (a, b) in enumerate(zip(x, y, strict=True))]
    stopping.attach(trainer)
    trainer.run(estimated.loader(PLAIN, dataset=rows), max_epochs=3)
    own, label = plain.sgd(twin), stopping.stopping.fold_of_row
    for a, b, numbers in taken:
        kept = label[numbers] < 0
        own.zero_grad()
        F.cross_entropy(twin(a[kept]), b[kept]).backward()
        own.step()
    found = estimated.last_shadows(stopping.state_dict())[0]["weights"]
    for name, weight in twin.named_parameters():
        torch.testing.assert_close(found[name], weight.detach())


def test_exact_resume(tmp_path: Path) -> None:
    """From a checkpoint that a handler attached earlier has written."""
    trainer, model, optimizer, stopping = made(PLAIN)
    parts = {"model": model, "optimizer": optimizer, "trainer": trainer, "stopping": stopping}
    saver = Checkpoint(parts, DiskSaver(str(tmp_path)))
    trainer.add_event_handler(Events.EPOCH_COMPLETED(once=5), saver)
    stopping.attach(trainer)
    trainer.run(estimated.loader(PLAIN, shuffle=False), max_epochs=6)

    trainer, model, optimizer, stopping = made(PLAIN)
    parts = {"model": model, "optimizer": optimizer, "trainer": trainer, "stopping": stopping}
    stopping.attach(trainer)
    (path,) = tmp_path.glob("*.pt")
    Checkpoint.load_objects(parts, path)
    trainer.run(estimated.loader(PLAIN, shuffle=False), max_epochs=PLAIN.epochs)
    estimated.expect_same(PLAIN, stopping.stopping, model, shuffle=False, rtol=plain.EXACT)


def test_a_pause_is_none_for_the_rule() -> None:
    trainer, model, _, stopping = made(PLAIN)
    batches = estimated.loader(PLAIN, shuffle=False)
    stopping.attach(trainer)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=6), trainer.interrupt)
    trainer.run(batches, max_epochs=PLAIN.epochs)
    assert trainer.state.iteration == 6
    trainer.run(batches, max_epochs=PLAIN.epochs)
    estimated.expect_same(PLAIN, stopping.stopping, model, shuffle=False)
    estimated.expect_no_trace(model, batches)


def test_any_batch_by_a_loss_of_ones_own() -> None:
    trainer, model, optimizer, _ = made(PLAIN)
    stopping = EarlyStopping(
        model, optimizer, batch_loss=estimated.batch_loss, **estimated.arguments()
    ).attach(trainer)
    trainer.run(estimated.loader(PLAIN), max_epochs=PLAIN.epochs)
    estimated.expect_same(PLAIN, stopping.stopping, model)


def test_what_cannot_be_followed_is_refused() -> None:
    trainer, model, optimizer, stopping = made(PLAIN)
    stopping.attach(trainer)
    with pytest.raises(heldin.HeldinError, match=r"must be a torch\.utils\.data\.DataLoader"):
        trainer.run(list(estimated.loader(PLAIN)), max_epochs=1)
    estimated.expect_no_trace(model)
    with pytest.raises(heldin.HeldinError, match="either loss_fn"):
        EarlyStopping(model, optimizer)
    with pytest.raises(heldin.HeldinError, match="optimizer must be the one that trains"):
        EarlyStopping(model, F.cross_entropy)  # type: ignore[arg-type]


@pytest.mark.parametrize("every", [1, 2])
def test_averages_of_weights_are_refused(every: int) -> None:
    trainer, model, _, stopping = made(PLAIN)
    EMAHandler(model).attach(trainer, event=Events.ITERATION_COMPLETED(every=every))
    stopping.attach(trainer)
    with pytest.raises(heldin.HeldinError, match=r"EMAHandler keeps .* use .*averaged_model="):
        trainer.run(estimated.loader(PLAIN), max_epochs=1)
    estimated.expect_no_trace(model)


@plain.broken
def test_errors_and_interrupts_leave_no_trace(error: type[BaseException]) -> None:
    fuse = plain.Fuse(error)
    fuse.calls = -30
    trainer, model, _, stopping = made(PLAIN, patience=None)
    stopping.attach(trainer)
    batches = DataLoader(plain.Rows(fuse), batch_size=16)
    with pytest.raises(error):
        trainer.run(batches, max_epochs=40)
    assert trainer.state.iteration > 3
    estimated.expect_no_trace(model, batches)


class Rows(torch.utils.data.Dataset[Any]):
    def __init__(self, count: int, shift: float) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(count, 5, generator=generator) + shift

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> Any:
        return self.x[row], self.x[row, :1]


def test_a_run_reads_no_rows_of_one_that_failed() -> None:
    estimates = []
    for fails in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(5, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        rule, groups = (
            heldin.rules.Folds(shadows=2, engine="replay"),
            [row // 2 for row in range(80)],
        )
        stopping = EarlyStopping(model, optimizer, F.mse_loss, rule=rule, groups=groups)
        trainer = create_supervised_trainer(model, optimizer, F.mse_loss)
        stopping.attach(trainer)
        if fails:
            with pytest.raises(heldin.HeldinError, match="60 rows"):
                trainer.run(DataLoader(Rows(60, 5.0), 10), max_epochs=1)
            trainer = create_supervised_trainer(model, optimizer, F.mse_loss)
            stopping.attach(trainer)
        trainer.run(DataLoader(Rows(80, 0.0), 10), max_epochs=1)
        estimates.append([record.estimate for record in stopping.stopping.history])
    assert estimates[0] == estimates[1]


def test_on_check_of_a_copy_has_the_copy() -> None:
    calls: list[Any] = []
    model = nn.Linear(5, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rule = heldin.rules.Folds(shadows=2, engine="replay")
    first = EarlyStopping(model, optimizer, F.mse_loss, rule=rule, on_check=calls.append)
    copied: Any = copy.deepcopy(first)
    del first
    trainer = create_supervised_trainer(copied._model, copied._optimizer, F.mse_loss)
    copied.attach(trainer)
    trainer.run(DataLoader(Rows(40, 0.0), 10), max_epochs=2)
    assert calls
    assert all(each is copied for each in calls)
