"""Stopping by evidence when something goes wrong, and what a rule leaves behind."""

from __future__ import annotations

import gc
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import heldin
from tests.support import runs
from tests.support.loops import Dial, data, net

PLAIN_BACKWARD = torch.autograd.backward


@pytest.fixture(autouse=True)
def _nothing_left() -> Any:
    torch.manual_seed(0)
    yield
    if torch.autograd.backward is not PLAIN_BACKWARD:
        gc.collect()  # what was forgotten removes itself
    assert torch.autograd.backward is PLAIN_BACKWARD


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("window", [1, 2])
def test_inf_and_nan_are_recorded_and_harmless(bad: float, window: int) -> None:
    def run(values: list[float]) -> runs.EvidenceStopping:
        dial = Dial()
        with runs.EvidenceStopping(dial, smoothing=0.5, window=window) as stopping:
            for value in values:
                if math.isfinite(value):
                    dial.show(value)
                else:
                    dial(torch.tensor([value, 1.0]).double()).sum().backward()
                assert not stopping.step()
        return stopping

    clean, spoilt = run([-5, -5, -2, -2]), run([-5, -5, bad, bad, -2, -2])
    assert clean.criterion == spoilt.criterion
    record = spoilt.history[2 // window]
    assert record.nonfinite == ("weight",)
    assert math.isnan(record.raw)
    assert record.criterion == clean.history[1 // window].criterion


class Two(nn.Module):
    """Two weights, the second with a gain on its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(1))
        self.b = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor, gain: float) -> torch.Tensor:
        return self.a * x + self.b * (gain * x)


def test_a_step_with_one_bad_parameter_has_no_value() -> None:
    """The other groups' mean would be another quantity than the one that is averaged."""
    model, x = Two(), torch.tensor([1.0, 2.0, 4.0])
    with runs.EvidenceStopping(model) as stopping:
        for gain in (1.0, math.nan):
            model(x, gain).sum().backward()
            stopping.step()
    good, bad = stopping.history
    assert bad.nonfinite == stopping.evidence.nonfinite == ("b",)
    assert math.isfinite(stopping.evidence.criterion)
    assert math.isnan(bad.raw)
    assert stopping.criterion == good.raw


def test_the_reason_names_the_parameter_with_a_nan() -> None:
    dial = Dial()
    with runs.EvidenceStopping(dial) as stopping:
        dial(torch.tensor([math.nan, 1.0]).double()).sum().backward()
        stopping.step()
        assert stopping.reason == "step 1: no value, inf or nan in the contributions to 'weight'"
        assert math.isnan(stopping.criterion)


def test_a_bad_step_in_a_window_is_left_out() -> None:
    dial = Dial()
    with runs.EvidenceStopping(dial, smoothing=0, window=2) as stopping:
        dial(torch.tensor([math.nan, 1.0]).double()).sum().backward()
        stopping.step()
        dial.show(-3.0)
        stopping.step()
    assert stopping.criterion == pytest.approx(-3.0)
    assert stopping.history[0].nonfinite == ("weight",)


def test_a_single_sample_is_skipped() -> None:
    dial = Dial()
    with runs.EvidenceStopping(dial, smoothing=0.5) as stopping:
        dial.show(-3.0)
        stopping.step()
        dial(torch.ones(1).double()).sum().backward()
        stopping.step()
    assert stopping.criterion == pytest.approx(-3.0)
    assert "a single sample has no variance" in stopping.reason


def test_step_before_any_backward_is_an_error_but_a_skipped_batch_is_not() -> None:
    dial = Dial()
    with runs.EvidenceStopping(dial) as stopping:
        with pytest.raises(heldin.HeldinError, match="no backward pass through the model was seen"):
            stopping.step()
        dial.show(-1.0)
        assert not stopping.step()
        assert not stopping.step()
        assert "no backward pass was seen" in stopping.reason
    with pytest.raises(heldin.HeldinError, match="after close"):
        stopping.step()


def test_a_skipped_batch_in_the_first_window_is_no_error() -> None:
    dial = Dial()
    with runs.EvidenceStopping(dial, window=2, smoothing=0) as stopping:
        dial.show(-1.0)
        stopping.step()
        stopping.step()
    assert stopping.criterion == pytest.approx(-1.0)
    assert stopping.history[0].count == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"smoothing": 1.0}, r"smoothing must lie in \[0, 1\), got 1.0"),
        ({"smoothing": -0.1}, "smoothing must lie"),
        ({"smoothing": "0.9"}, "smoothing must lie"),
        ({"window": 0}, "window must be a whole number >= 1, got 0"),
        ({"window": 1.5}, "window must be a whole number"),
        ({"patience": 0}, "patience must be"),
        ({"warmup": -1}, "warmup must be a whole number >= 0"),
        ({"every": 0}, "every must be"),
        ({"arming": -1.0}, "arming must be"),
        ({"arming": math.nan}, "arming must be"),
        ({"groups": "layer"}, "groups: expected 'tensor', 'all'"),
        ({"groups": {"0.weight": "a"}}, "'0.bias' has no entry"),
        ({"correction": "student"}, "correction: expected None, 'gaussian' or 'symmetric'"),
        ({"dead": "skip"}, "dead: expected 'out' or 'zero'"),
        ({"reduction": "none"}, "reduction must be 'mean' or 'sum'"),
        ({"history": 1}, "history must be"),
    ],
)
def test_bad_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(heldin.HeldinError, match=message):
        runs.EvidenceStopping(net(), **options)


def test_bad_models() -> None:
    with pytest.raises(heldin.HeldinError, match="no parameter that requires a gradient"):
        runs.EvidenceStopping(net().requires_grad_(False))
    with pytest.raises(heldin.HeldinError, match=r"expected a torch\.nn\.Module"):
        runs.EvidenceStopping([nn.Linear(2, 2)])  # type: ignore[arg-type]


def test_metrics_are_flat_floats() -> None:
    model, (x, y) = net(), data()
    with runs.EvidenceStopping(model, groups=lambda name: name.split(".")[0]) as stopping:
        assert stopping.metrics() == {
            "heldin/count": 0.0,
            "heldin/armed": 0.0,
            "heldin/should_stop": 0.0,
        }
        F.cross_entropy(model(x), y).backward()
        stopping.step()
        metrics = stopping.metrics()
    assert {"heldin/criterion", "heldin/raw", "heldin/group/0", "heldin/group/3"} <= set(metrics)
    assert all(type(value) is float for value in metrics.values())


def test_removing_leaves_the_model_as_it_was() -> None:
    model = net()
    stopping = runs.EvidenceStopping(model)
    assert model._forward_hooks
    stopping.close()
    stopping.close()
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert torch.autograd.backward is PLAIN_BACKWARD


def test_a_forgotten_one_removes_itself() -> None:
    model = net()
    stopping = runs.EvidenceStopping(model)
    del stopping
    gc.collect()
    assert not model._forward_hooks


def test_training_is_untouched() -> None:
    def train(watched: bool) -> list[torch.Tensor]:
        torch.manual_seed(3)
        model, (x, y) = net(dropout=0.5), data()
        optimizer = torch.optim.Adam(model.parameters())
        stopping = runs.EvidenceStopping(model, every=2, patience=99) if watched else None
        for _ in range(6):
            rows = torch.randint(0, 64, (16,))
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            if stopping is not None:
                stopping.step()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach() for p in model.parameters()]

    for plain, watched in zip(train(False), train(True), strict=True):
        assert torch.equal(plain, watched)
