"""Rows that repeat, sample weights, few rows, extreme numbers: the estimators stay honest."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

pytest.importorskip("sklearn")

import numpy as np
from sklearn.model_selection import KFold

import heldin
from heldin.sklearn import MLPClassifier, MLPRegressor
from heldin.sklearn.training import Trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning"),
    pytest.mark.filterwarnings("ignore:.*no better than a constant:heldin.HeldinWarning"),
]
OPTIONS: dict[str, Any] = {"max_iter": 300, "random_state": 0}
CHANCE = np.log(2)


def coin_flips(n: int = 60) -> tuple[Any, Any]:
    """Inputs that say nothing about the labels."""
    rng = np.random.default_rng(0)
    return rng.normal(size=(n, 5)), rng.integers(0, 2, n)


# -- copies and weights


@pytest.mark.parametrize("options", [{}, {"shuffle": False}, {"early_stopping": "folds"}])
def test_copies_do_not_leak_between_folds(options: dict[str, Any]) -> None:
    X, y = coin_flips()
    model = MLPClassifier(**OPTIONS, **options).fit(X.repeat(4, 0), y.repeat(4))
    assert model.n_copies_ == 180
    assert model.estimate_ > CHANCE - 2 * model.estimate_error_
    assert model.estimates_["accuracy"].low < 0.5
    assert model.oof_predictions_.shape == (240, 2)
    np.testing.assert_array_equal(model.oof_predictions_[::4], model.oof_predictions_[1::4])


@pytest.mark.parametrize("shuffle", [True, False])
def test_copies_share_a_part_of_a_validation_split(
    shuffle: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(40, 3)).repeat(4, 0), rng.integers(0, 2, 40).repeat(4)
    parts: list[set[bytes]] = []
    run = Trainer.run

    def spy(self: Trainer, rule: str, held_out: Any, report: Any) -> Any:
        for rows in (self.x, held_out[0]):
            parts.append({row.tobytes() for row in rows[slice(None)].numpy()})
        return run(self, rule, held_out, report)

    monkeypatch.setattr(Trainer, "run", spy)
    options: dict[str, Any] = {"early_stopping": "validation", "max_iter": 3, "random_state": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        MLPClassifier((4,), shuffle=shuffle, **options).fit(X, y)
    trained, held_out = parts
    assert (len(trained), len(held_out)) == (36, 4)
    assert not trained & held_out


def test_copies_in_different_groups_share_a_fold() -> None:
    X, y = coin_flips()
    model = MLPClassifier(**OPTIONS).fit(X.repeat(4, 0), y.repeat(4), groups=np.arange(240) % 120)
    assert model.estimate_ > CHANCE - 2 * model.estimate_error_


def test_whole_sample_weights_do_not_leak_between_folds() -> None:
    X, y = coin_flips()
    weights = np.random.default_rng(1).integers(1, 20, len(y))
    model = MLPClassifier(**OPTIONS).fit(X, y, sample_weight=weights)
    assert model.estimate_ > CHANCE - 2 * model.estimate_error_
    rare = MLPClassifier(**OPTIONS).fit(X, y, sample_weight=np.where(y, 9, 1))
    share = 9 * y.sum() / (9 * y.sum() + (1 - y).sum())
    constant = -(share * np.log(share) + (1 - share) * np.log(1 - share))
    assert rare.estimate_ > constant - 2 * rare.estimate_error_


def test_a_row_given_twice_is_a_row_of_weight_two() -> None:
    X, y = coin_flips()
    times = np.random.default_rng(0).integers(0, 4, len(y))
    order = np.random.default_rng(1).permutation(len(y))
    model = MLPClassifier(**OPTIONS, batch_size=20)
    by_copies = model.fit(X.repeat(times, 0), y.repeat(times))
    expected, scores = by_copies.predict_proba(X), by_copies.estimates_
    by_weight = model.fit(X[order], y[order], sample_weight=times[order])
    np.testing.assert_allclose(by_weight.predict_proba(X), expected, rtol=1e-12)
    assert str(by_weight.estimates_["accuracy"]) == str(scores["accuracy"])


def test_scores_weigh_rows_and_not_classes() -> None:
    X, y = coin_flips()
    weights = np.random.default_rng(2).uniform(0.1, 3, len(y))
    model = MLPClassifier(**OPTIONS).fit(X, y, sample_weight=weights)
    right = model.oof_predictions_.argmax(1) == y
    assert model.estimates_["accuracy"].value == pytest.approx(np.average(right, weights=weights))
    model = MLPClassifier(**OPTIONS, class_weight={0: 1, 1: 9}).fit(X, y)
    right = model.oof_predictions_.argmax(1) == y
    assert model.estimates_["accuracy"].value == pytest.approx(right.mean())


def test_the_record_weighs_rows_beside_copies() -> None:
    X, y = coin_flips()
    weights = np.random.default_rng(2).uniform(0.1, 3, len(y))
    model = MLPClassifier(**OPTIONS).fit(X.repeat(2, 0), y.repeat(2), weights.repeat(2))
    assert model.n_copies_ == len(y)
    own = model.oof_predictions_[::2][np.arange(len(y)), y]
    expected = np.average(-np.log(own), weights=weights)
    assert float(model.record().row_losses.mean()) == pytest.approx(expected)


def test_intervals_do_not_depend_on_the_order_of_rows() -> None:
    X, y = coin_flips()
    order = np.random.default_rng(1).permutation(len(y))
    model = MLPRegressor((4,), metrics=["neg_median_absolute_error"], **OPTIONS)
    expected = model.fit(X, X[:, 0]).estimates_
    found = model.fit(X[order], X[order, 0]).estimates_
    for name, interval in expected.items():
        np.testing.assert_allclose([*found[name]], [*interval], rtol=1e-6)


# -- few rows, one class, extreme numbers


def test_four_rows_have_no_interval() -> None:
    X, _ = coin_flips(4)
    line = MLPRegressor((3,), **OPTIONS).fit(X, X[:, 0])
    assert line.estimate_ > 0
    assert all(np.isnan(interval.low) for interval in line.estimates_.values())
    assert np.isnan(line.estimate_error_)


def test_a_constant_has_an_area_of_one_half() -> None:
    X, y = coin_flips()
    model = MLPClassifier(**OPTIONS).fit(X, y)
    assert model.temperature_ == np.inf
    assert model.estimates_["auc"].value == 0.5


@pytest.mark.parametrize("kind", ["groups", "cv", "single row", "copies of a row"])
def test_folds_that_leave_one_class_are_refused(kind: str) -> None:
    X, _ = coin_flips(20)
    y = np.repeat([0, 1], 10)
    options: dict[str, Any] = {}
    groups = y if kind == "groups" else None
    if kind == "cv":
        options["cv"] = KFold(2)
    if kind in ("single row", "copies of a row"):
        y = (np.arange(20) < 1 + 4 * (kind == "copies of a row")).astype(int)
        X[:5] = X[0] if kind == "copies of a row" else X[:5]
    with pytest.raises(
        heldin.HeldinError, match="one fold leaves for training are all of one class"
    ):
        MLPClassifier((3,), **OPTIONS, **options).fit(X, y, groups=groups)


@pytest.mark.parametrize("size", [1e-200, 1e154, 1e200, 1e300])
@pytest.mark.parametrize("standardize", [True, False])
def test_numbers_out_of_range_are_refused(size: float, standardize: bool) -> None:
    X, _ = coin_flips(20)
    model = MLPRegressor((3,), standardize=standardize, **OPTIONS)
    with pytest.raises(heldin.HeldinError, match="squares that are out of range; divide them by"):
        model.fit(X, size * X[:, 0])


def test_inputs_out_of_range_are_refused() -> None:
    X, y = coin_flips(20)
    X[:, 2] *= 1e200
    with pytest.raises(heldin.HeldinError, match="column 2 has numbers whose squares are out"):
        MLPClassifier((3,), **OPTIONS).fit(X, y)


def test_large_weights_are_those_divided() -> None:
    X, y = coin_flips()
    weights = np.random.default_rng(0).uniform(0.5, 1, len(y))
    model = MLPClassifier((3,), **OPTIONS)
    plain = model.fit(X, y, sample_weight=weights).estimates_
    large = model.fit(X, y, sample_weight=2.0**1000 * weights).estimates_
    assert str(plain["accuracy"]) == str(large["accuracy"])
