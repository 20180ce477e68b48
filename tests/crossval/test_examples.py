"""Small parts of cross-validation, each with an example."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from heldin.crossval import (
    are_probabilities,
    described,
    fit_temperature,
    mean_interval,
    numbered,
    resolve_metrics,
    statistic_interval,
    temperature_losses,
)
from heldin.crossval.intervals import _percentiles, defined, resampled_rows, row_groups
from heldin.crossval.metrics import _larger_is_better
from heldin.rules.calibration import scale_last_layer
from tests.support.outcome_runs import cross_fitted


def test_one_wrong_answer_of_four() -> None:
    logits = torch.tensor([[4.0, 0.0], [4.0, 0.0], [4.0, 0.0], [0.0, 4.0]])
    targets = torch.tensor([0, 0, 1, 1])  # log(3) would be right, not 4
    assert fit_temperature(logits, targets) == pytest.approx(4 / math.log(3), rel=1e-6)
    assert fit_temperature(logits / 4, targets) == 1.0


def test_losses_at_a_temperature() -> None:
    logits, targets = torch.tensor([[2.0, 0.0], [0.0, 2.0]]), torch.tensor([0, 0])
    expected = nn.functional.cross_entropy(logits.double() / 2, targets, reduction="none")
    torch.testing.assert_close(temperature_losses(logits, targets, 2.0), expected)


def test_rows_are_scored_at_the_temperature_of_the_other_fold() -> None:
    logits, targets = torch.tensor([[4.0, 0.0]] * 4), torch.tensor([0, 0, 0, 1])
    temperature, losses = cross_fitted(logits, targets, torch.tensor([0, 0, 1, 1]))
    assert temperature == pytest.approx(4 / math.log(3), rel=1e-6)
    expected = torch.tensor([0.6733, 0.6733, 0.0181, 4.0181], dtype=torch.float64)  # T = 100 and 1
    torch.testing.assert_close(losses, expected, rtol=0, atol=1e-4)


def test_folds_are_numbered_from_zero() -> None:
    assert numbered(torch.tensor([7, 3, 7])).tolist() == [1, 0, 1]
    assert numbered(torch.tensor([7, 7, 7])).tolist() == [0, 1, 0]


def test_the_last_layer_is_divided_by_a_temperature() -> None:
    model, x = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(5, 3)
    before = model(x)
    scaled = scale_last_layer(model, 1.7, lambda: model(x))
    assert [tuple(weights.shape) for weights, _ in scaled] == [(2, 8), (2,)]
    torch.testing.assert_close(model(x), before / 1.7)
    assert scale_last_layer(model, 1.7, lambda: model(x).softmax(1)) == []


def accuracy(outputs: Tensor, targets: Tensor) -> float:
    return (outputs == targets).double().mean().item()


def test_intervals_as_text() -> None:
    losses = torch.tensor([0.1, 0.3, 0.2, 0.2, 0.4, 0.1, 0.2, 2.5])
    assert str(mean_interval(losses)) == "0.50 [0.10, 3.65]"
    outputs, targets = torch.tensor([0, 1, 1, 0, 1, 1, 0, 0]), torch.tensor([0, 1, 1, 0] * 2)
    assert str(statistic_interval(accuracy, outputs, targets)) == "0.75 [0.38, 1.00]"
    assert str(statistic_interval(accuracy, targets, targets)) == "1.00 [0.50, 1.00]"


def test_groups_are_drawn_as_a_whole() -> None:
    assert row_groups(["b", "a", "b"], 3).tolist() == [0, 1, 0]
    drawn = resampled_rows(torch.tensor([0, 0, 1]), 2, seed=1)
    assert [rows.tolist() for rows in drawn] == [[2, 2], [0, 1, 0, 1]]


def test_an_undefined_metric_is_nan() -> None:
    assert math.isnan(defined(lambda outputs: 1 / 0, [torch.zeros(3)], torch.tensor([0, 0])))


def test_percentiles_are_moved_to_the_value_on_all_rows() -> None:
    values = [float(i) for i in range(1001)]
    assert _percentiles(values, 500.0, 0.025, units=10**6) == (24.0, 976.0)
    assert _percentiles(values, 450.0, 0.025, units=10**6) == (13.0, 957.0)


def test_metrics_are_functions_with_a_name() -> None:
    def rmse(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square().mean().sqrt()

    metric = resolve_metrics([rmse])["rmse"]
    assert metric(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 5.0])) == pytest.approx(4.5**0.5)
    mae = resolve_metrics({"mae": lambda outputs, targets: (outputs - targets).abs().mean()})["mae"]
    assert mae(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0])) == 1.0
    assert mae.larger_is_better is False
    names = ("val_f1", "neg_log_loss", "TestRMSE", "length")
    assert [_larger_is_better(name) for name in names] == [True, True, False, None]


def test_outputs_that_look_like_probabilities() -> None:
    targets = torch.tensor([0, 1])
    assert are_probabilities(torch.tensor([[0.2, 0.8], [0.5, 0.5]]), targets)
    assert not are_probabilities(torch.tensor([[0.2, 0.9], [0.5, 0.5]]), targets)


def test_functions_that_do_the_same_have_one_text() -> None:
    assert described(nn.MSELoss()) == described(nn.functional.mse_loss)
    smooth = nn.CrossEntropyLoss(label_smoothing=0.1)
    assert described(smooth) == "crossentropyloss(label_smoothing=0.1)"
    assert described(lambda a, b: a - b) != described(lambda a, b: a + b)
