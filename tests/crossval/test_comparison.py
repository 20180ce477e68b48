"""Two runs compared, and several in a table."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from heldin.crossval import (
    Comparison,
    Difference,
    RunRecord,
    compare,
    resolve_metrics,
)
from heldin.crossval.intervals import resampled_rows, row_groups
from heldin.errors import HeldinError

ROWS = torch.arange(60)


def accuracy(outputs: Tensor, targets: Tensor) -> float:
    return float((outputs == targets).double().mean())


def spread(outputs: Tensor, targets: Tensor) -> float:
    return float(outputs.double().std())


METRICS = resolve_metrics([accuracy, spread])


def run(shift: float = 0.0, wrong: int = 10, seed: int = 0, **changes: Any) -> RunRecord:
    """A run whose first rows are wrong."""
    generator = torch.Generator().manual_seed(0)
    losses = torch.randn(60, generator=generator, dtype=torch.float64).exp()
    noise = torch.Generator().manual_seed(seed)
    losses = losses + shift + 0.1 * torch.randn(60, generator=noise, dtype=torch.float64)
    targets = ROWS % 3
    outputs = torch.where(wrong > ROWS, (targets + 1) % 3, targets)
    fields: dict[str, Any] = {
        "row_losses": losses,
        "outputs": outputs,
        "targets": targets,
        "rows": ROWS,
        "folds": ROWS % 5,
        "metrics": METRICS,
    }
    return RunRecord(**{**fields, **changes})


def test_paired_differences() -> None:
    a, b = run(0.0, wrong=10, seed=1), run(0.2, wrong=20, seed=2)
    comparison = compare(a, b)
    gaps = a.row_losses - b.row_losses
    assert list(comparison) == ["loss", "accuracy", "spread"]
    assert comparison.difference == pytest.approx(float(gaps.mean()))
    assert comparison.standard_error == pytest.approx(float(gaps.std()) / math.sqrt(60), rel=0.1)
    unpaired = float(a.row_losses.std()) / math.sqrt(60)
    assert comparison.standard_error < unpaired / 5
    assert comparison.probability == 1.0
    better = comparison["accuracy"]
    assert (better.a, better.b) == pytest.approx((50 / 60, 40 / 60))
    assert better.difference == pytest.approx(10 / 60)
    assert better.standard_error == pytest.approx(math.sqrt(10 / 60 * 50 / 60 / 60), rel=0.1)
    assert better.probability > 0.99
    assert math.isnan(comparison["spread"].probability)  # whether more is better is unknown
    assert comparison["spread"].standard_error > 0


def test_resampling_by_hand() -> None:
    a, b = run(0.0, seed=1), run(0.01, seed=2)
    comparison = compare(a, b, resamplings=200, seed=7)
    draws = list(resampled_rows(row_groups(None, 60), 200, 7))
    gaps = torch.stack([(a.row_losses - b.row_losses)[rows].mean() for rows in draws])
    assert comparison.standard_error == pytest.approx(float(gaps.std()))
    assert comparison.probability == pytest.approx(float((gaps < 0).double().mean()))
    assert 0 < comparison.probability < 1


def test_the_other_way_round() -> None:
    a, b = run(0.0, 10, seed=1), run(0.01, 12, seed=2)
    first, second = compare(a, b), compare(b, a)
    for name in ("loss", "accuracy"):
        assert first[name].difference == pytest.approx(-second[name].difference)
        assert first[name].standard_error == pytest.approx(second[name].standard_error)
        assert first[name].probability == pytest.approx(1 - second[name].probability)


def test_a_run_and_itself() -> None:
    comparison = compare(run(), run())
    assert (comparison.difference, comparison.standard_error) == (0, 0)
    assert comparison.probability == 0.5
    assert comparison["accuracy"].probability == 0.5
    assert repr(comparison).startswith("there is no clear difference between a and b on 60")


def test_groups_are_drawn_jointly() -> None:
    rows = torch.arange(60)
    gaps = (rows // 6 % 2).double()  # the same in each group of six
    single = compare(run(), run(row_losses=run().row_losses + gaps))
    groups = [f"patient {i // 6}" for i in range(60)]
    grouped = compare(run(groups=groups), run(row_losses=run().row_losses + gaps, groups=groups))
    assert grouped.difference == single.difference
    assert grouped.standard_error > 2 * single.standard_error


def test_one_sentence() -> None:
    text = repr(compare(run(0.0, 10, 1), run(0.2, 20, 2), names=("small", "large")))
    assert text.startswith("small is better than large on 60 rows: loss ")
    assert "accuracy 0.833 against 0.667, a difference of 0.17 [0.07, 0.26], better" in text
    assert text.count("better in") == 2  # not for the metric of unknown mode
    assert "\n" not in text
    assert "a is worse than b" in repr(compare(run(0.2, seed=2), run(0.0, seed=1)))


@pytest.mark.parametrize(("share", "percent"), [(0.999, 99), (1.0, 100), (0.001, 1), (0.0, 0)])
def test_certain_only_if_always(share: float, percent: int) -> None:
    text = str(Difference("loss", 0.5, 0.6, -0.1, 0.01, share))
    assert text.endswith(f"better in {percent} % of the resamplings")


def test_objects_with_a_record() -> None:
    stopping = SimpleNamespace(record=lambda: run())
    assert isinstance(compare(stopping, run()), Comparison)
    assert len(compare(stopping, run())) == 3


def test_a_metric_that_one_run_lacks() -> None:
    assert list(compare(run(), run(metrics={}, outputs=None, targets=None))) == ["loss"]


def test_losses_that_are_not_finite() -> None:
    losses = run().row_losses.clone()
    losses[3] = torch.inf
    comparison = compare(run(), run(row_losses=losses))
    assert comparison.difference == -math.inf
    assert math.isnan(comparison.standard_error)
    assert math.isnan(comparison.probability)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"rows": ROWS + 1}, "different rows \\(60 and 60\\)"),
        ({"folds": ROWS % 4}, "different folds"),
        ({"groups": ROWS // 2}, "different groups"),
        ({"targets": (ROWS + 1) % 3}, "different targets"),
    ],
)
def test_refused_where_rows_differ(other: dict[str, Any], message: str) -> None:
    with pytest.raises(HeldinError, match=message):
        compare(run(), run(**other))


def test_folds_with_other_numbers_are_the_same_folds() -> None:
    assert compare(run(), run(folds=4 - ROWS % 5)).difference == 0


def test_what_is_no_run() -> None:
    with pytest.raises(HeldinError, match="3 has no record of its rows"):
        compare(run(), 3)
    with pytest.raises(HeldinError, match="resamplings must be a whole number >= 2"):
        compare(run(), run(), resamplings=1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"row_losses": torch.ones(3)}, "row_losses has 3 entries for 60 rows"),
        ({"outputs": torch.ones(3)}, "outputs has 3 entries"),
        ({"targets": torch.ones(3)}, "targets has 3 entries"),
        ({"groups": [1]}, "groups has 1 entries"),
        ({"outputs": None}, "metrics are computed from outputs and targets"),
        ({"rows": ROWS.flip(0)}, "ascending"),
    ],
)
def test_mistakes_in_a_record(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(HeldinError, match=message):
        run(**fields)


def test_different_losses_are_not_compared() -> None:
    a, b = run(loss="mseloss"), run(0.2, loss="l1loss")
    comparison = compare(a, b)
    assert list(comparison) == ["accuracy", "spread"]
    assert "loss" not in comparison
    assert "the losses are different ones (mseloss and l1loss)" in repr(comparison)
    with pytest.raises(HeldinError, match="different ones"):
        comparison.difference  # noqa: B018
    plain: dict[str, Any] = {"metrics": {}, "outputs": None, "targets": None}
    with pytest.raises(HeldinError, match="losses are different"):
        compare(run(loss="mseloss", **plain), run(loss="l1loss", **plain))


def test_metrics_of_one_name_with_different_functions_are_not_compared() -> None:
    one, other, same = (
        resolve_metrics({"accuracy": function})
        for function in (accuracy, spread, lambda o, t: accuracy(o, t))
    )
    assert list(compare(run(metrics=one), run(metrics=one))) == ["loss", "accuracy"]
    for metrics in (other, same):
        comparison = compare(run(metrics=one), run(metrics=metrics))
        assert list(comparison) == ["loss"]
        with pytest.raises(HeldinError, match="different functions for the metric 'accuracy'"):
            comparison["accuracy"]
