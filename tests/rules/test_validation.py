"""ValidationStopping: patience, restoring, resuming."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
import torch
from torch import nn

import heldin
from tests.support import runs


def mark(model: nn.Linear, value: float) -> None:
    with torch.no_grad():
        model.weight.fill_(value)


def run(losses: list[float], **options: Any) -> tuple[runs.ValidationStopping, nn.Linear]:
    """A run whose weight is the number of the step."""
    model = nn.Linear(1, 1)
    stopping = runs.ValidationStopping(model, **options)
    for step, loss in enumerate(losses, 1):
        mark(model, step)
        if stopping.step(loss):
            break
    return stopping, model


def test_stops_after_patience_and_brings_the_best_weights_back() -> None:
    stopping, model = run([5, 3, 4, 3.5, 1, 2, 2, 2, 0], patience=3)
    assert (stopping.stopped_step, stopping.best_step, stopping.best_loss) == (8, 5, 1)
    assert model.weight.item() == 5
    assert stopping.criterion == 1.0
    assert stopping.reason == "step 8: loss 2, no better than 1 at step 5 for 3 checks"
    assert [r.raw for r in stopping.history] == [5, 3, 4, 3.5, 1, 2, 2, 2]
    assert stopping.history.stopped is not None
    assert stopping.history.stopped.step == 8


def test_without_restore_the_weights_stay() -> None:
    stopping, model = run([3, 1, 2, 2, 2], patience=2, restore_best=False)
    assert stopping.stopped_step == 4
    assert model.weight.item() == 4
    with pytest.raises(heldin.HeldinError, match="no weights are kept"):
        stopping.restore()


def test_restoring_a_run_that_never_stopped() -> None:
    stopping, model = run([3, 1, 2], patience=9)
    assert not stopping.should_stop
    stopping.restore()
    assert model.weight.item() == 2


def test_buffers_are_restored_too() -> None:
    model = nn.BatchNorm1d(2)
    stopping = runs.ValidationStopping(model, patience=1)
    stopping.step(1.0)
    model(torch.randn(8, 2) + 5)
    assert model.running_mean is not None
    assert model.running_mean.abs().sum() > 0
    stopping.step(2.0)
    assert model.running_mean.abs().sum() == 0


def test_improvement_warmup_every() -> None:
    assert run([3, 2.95, 2.9, 2.85], patience=2, improvement=0.2)[0].stopped_step == 3
    assert run([3, 4, 4, 4, 4, 4], patience=1, warmup=4)[0].stopped_step == 5
    stopping, _ = run([9, 3, 9, 4, 9, 5, 9, 6], patience=2, every=2)
    assert stopping.stopped_step == 6
    assert [r.step for r in stopping.history] == [2, 4, 6]


def test_nan_is_recorded_and_does_not_count() -> None:
    stopping, _ = run([math.nan, 2, math.nan, 3, math.inf, 3], patience=2)
    assert stopping.stopped_step == 6
    assert [bool(r.nonfinite) for r in stopping.history] == [True, False, True, False, True, False]
    assert "the validation loss is nan" in run([1.0, math.nan], patience=2)[0].reason


def test_a_function_is_called_in_evaluation_mode_and_modes_come_back() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    model[0].eval()
    seen = []

    def loss() -> torch.Tensor:
        seen.append((model.training, model[1].training, torch.is_grad_enabled()))
        return model(torch.ones(1, 2)).sum()

    stopping = runs.ValidationStopping(model, loss, every=2)
    for _ in range(4):
        stopping.step()
    assert seen == [(False, False, False)] * 2
    assert (model.training, model[0].training, model[1].training) == (True, False, True)


@pytest.mark.parametrize("at", range(8))
def test_a_resumed_run_is_the_uninterrupted_one(at: int) -> None:
    losses = [5.0, 3.0, math.nan, 3.5, 1.0, 2.0, 2.0, 2.0]
    whole, _ = run(losses, patience=3)
    first, _ = run(losses[:at], patience=3)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    model = nn.Linear(1, 1)
    second = runs.ValidationStopping(model, patience=3)
    second.load_state_dict(torch.load(file, weights_only=True))
    for step in range(at, 8):
        mark(model, step + 1)
        second.step(losses[step])
    assert second.stopped_step == whole.stopped_step == 8
    assert list(map(repr, second.history)) == list(map(repr, whole.history))
    assert second.reason == whole.reason
    assert second.metrics() == whole.metrics()
    assert model.weight.item() == 5


def test_mistakes() -> None:
    model = nn.Linear(1, 1)
    for options, message in (
        ({"patience": 0}, "patience must be"),
        ({"every": 0}, "every must be"),
        ({"warmup": -1}, "warmup must be"),
        ({"improvement": -1}, "improvement must be"),
        ({"loss": 3.0}, "loss must be a function"),
    ):
        with pytest.raises(heldin.HeldinError, match=message):
            runs.ValidationStopping(model, **options)
    with pytest.raises(heldin.HeldinError, match=r"expected a torch\.nn\.Module"):
        runs.ValidationStopping(3)  # type: ignore[arg-type]
    with runs.ValidationStopping(model) as stopping:
        with pytest.raises(heldin.HeldinError, match="no validation loss; pass it to step"):
            stopping.step()
        for state, why in (
            ({}, "not a state that heldin saved"),
            ({"heldin": "EvidenceStopping"}, "state of a EvidenceStopping"),
            ({**stopping.state_dict(), "version": 0}, "has version 0"),
            ({**stopping.state_dict(), "best": None}, "incomplete or damaged"),
            (run([1.0], restore_best=False)[0].state_dict(), "saved with restore_best=False"),
        ):
            with pytest.raises(heldin.HeldinError, match=why):
                stopping.load_state_dict(state)
    with pytest.raises(heldin.HeldinError, match="after close"):
        stopping.step(1.0)
