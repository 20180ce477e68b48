"""heldin.accelerate against the plain loop."""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import heldin
from tests.support import plain

accelerate = pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState

from heldin.accelerate import EarlyStopping

pytestmark = plain.foreign


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Accelerate keeps its state in singletons."""
    yield
    for kind in (AcceleratorState, GradientState, PartialState):
        kind._reset_state()


def run(
    case: plain.Case,
    stop: int | None = None,
    folder: Path | None = None,
    resume: int = 0,
    tracker: Any = None,
) -> tuple[EarlyStopping, nn.Module]:
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="bf16" if case.bf16 else "no",
        gradient_accumulation_steps=case.accumulate,
        log_with=tracker,
        project_dir=folder,
    )
    if tracker is not None:
        accelerator.init_trackers("heldin")
    model = plain.net(case.dtype)
    loader: Any = DataLoader(TensorDataset(*plain.data(case.dtype)), batch_size=case.batch)
    model, optimizer, loader = accelerator.prepare(model, plain.sgd(model), loader)
    with EarlyStopping(
        accelerator, model, loader=loader, rule=case.rule, log_groups=tracker is not None
    ) as stopping:
        done = 0
        if resume and folder is not None:
            accelerator.load_state(str(folder))
            done = resume
        skipped: Any = accelerator.skip_first_batches(loader, done % 4) if done % 4 else loader
        first = done // 4
        for epoch in range(first, case.epochs):
            for x, y in skipped if epoch == first else loader:
                with accelerator.accumulate(model):
                    with accelerator.autocast():
                        loss = F.cross_entropy(model(x), y)
                    accelerator.backward(loss)
                    if stopping.step():
                        if tracker is not None:
                            accelerator.log(stopping.metrics(), step=done)
                            accelerator.end_training()
                        return stopping, model
                    if tracker is not None:
                        accelerator.log(stopping.metrics(), step=done)
                    if case.clip and accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), case.clip)
                    optimizer.step()
                    optimizer.zero_grad()
                done += 1
                if done == stop and folder is not None:
                    accelerator.save_state(str(folder))
                    return stopping, model
    return stopping, model


@plain.cases
def test_same_as_plain(case: plain.Case) -> None:
    stopping, model = run(case)
    plain.expect_same(case, stopping.stopping, model)
    plain.expect_no_trace(model)


@pytest.mark.parametrize("case", [plain.CASES[0], plain.CASES[4]], ids=lambda case: case.name)
@pytest.mark.parametrize("step", [20, 22])
def test_exact_resume(case: plain.Case, step: int, tmp_path: Path) -> None:
    run(case, stop=step, folder=tmp_path)
    stopping, model = run(case, folder=tmp_path, resume=step)
    plain.expect_same(case, stopping.stopping, model, rtol=plain.EXACT)


def test_wrong_settings_are_refused_at_once() -> None:
    with pytest.raises(heldin.HeldinError, match=r"EarlyStopping: .*'smoothness'"):
        EarlyStopping(Accelerator(cpu=True), nn.Linear(1, 1), smoothness=0.5)


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    case = plain.CASES[0]
    stopping, _ = run(case, folder=tmp_path, tracker="tensorboard")
    events = EventAccumulator(str(tmp_path / "heldin"))
    events.Reload()
    values = [r.criterion for r in stopping.stopping.history]
    logged = [e.value for e in events.Scalars("heldin/criterion")]
    assert logged == pytest.approx(values, rel=1e-6)
    assert events.Scalars("heldin/group/0.weight")


def test_mlflow(mlflow_uri: str, tmp_path: Path) -> None:
    import mlflow

    case = plain.CASES[0]
    stopping, _ = run(case, folder=tmp_path, tracker="mlflow")
    client = mlflow.MlflowClient(mlflow_uri)
    experiment = client.get_experiment_by_name("heldin")
    (found,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(found.info.run_id, "heldin/criterion")
    values = [r.criterion for r in stopping.stopping.history]
    assert [m.value for m in sorted(history, key=lambda m: m.step)] == pytest.approx(values)


def _process(rank: int, port: int, folder: str) -> None:
    """The second process alone asks for a stop, in its fourth step."""

    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(plain.net(torch.float32))
    optimizer = plain.sgd(model)
    x, y = plain.data(torch.float32)
    stopping = EarlyStopping(accelerator, model, rule=heldin.rules.Evidence(warmup=10**6))
    steps = 0
    while steps < 20:
        steps += 1
        accelerator.backward(F.cross_entropy(model(x), y))
        stopping.stopping.should_stop = bool(rank) and steps == 4
        if stopping.step():
            break
        optimizer.step()
        optimizer.zero_grad()
    Path(folder, str(rank)).write_text(str(steps))


@pytest.mark.skipif(not torch.distributed.is_available(), reason="no torch.distributed")
def test_all_processes_stop_in_the_same_step(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_process, (port, str(tmp_path)), nprocs=2)  # type: ignore[attr-defined]
    assert [(tmp_path / name).read_text() for name in "01"] == ["4", "4"]


@plain.broken
def test_errors_and_interrupts_leave_no_trace(error: type[BaseException]) -> None:
    """Also without a `with` block: the accelerator keeps no rule alive."""
    fuse = plain.Fuse(error)
    accelerator, model = Accelerator(cpu=True), plain.net()

    def loop() -> None:
        stopping = EarlyStopping(accelerator, model, rule="evidence")
        x, y = plain.data()
        while True:
            fuse()
            accelerator.backward(F.cross_entropy(model(x), y))
            stopping.step()

    with pytest.raises(error) as caught:
        loop()
    del caught
    gc.collect()
    plain.expect_no_trace(model)


def test_objects_in_the_wrong_place_are_named() -> None:
    accelerator, model = Accelerator(cpu=True), plain.net()
    with pytest.raises(heldin.HeldinError, match=r"accelerator must be .* of type Sequential"):
        EarlyStopping(model, accelerator)
    with pytest.raises(heldin.HeldinError, match=r"model must be .* of type SGD"):
        EarlyStopping(accelerator, plain.sgd(model))  # type: ignore[arg-type]
