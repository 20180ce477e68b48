"""Estimators with folds: one network by heldin.EarlyStopping, estimates from rows out of fold."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import heldin
from heldin.shadows.labels import fold_labels

pytest.importorskip("sklearn")

import numpy as np
from scipy.special import expit
from sklearn import metrics
from sklearn.model_selection import GroupKFold, KFold, RepeatedKFold, TimeSeriesSplit

from heldin.sklearn import MLPClassifier, MLPRegressor
from heldin.sklearn.data import find_copies
from heldin.sklearn.training import build_network, constant_outputs, make_optimizer, start_at

pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
QUICK: dict[str, Any] = {"max_iter": 60, "learning_rate_init": 0.02, "random_state": 0}
LOSSES = {
    "classes": nn.CrossEntropyLoss(),
    "two": nn.BCEWithLogitsLoss(),
    "numbers": nn.MSELoss(),
}


def rows(kind: str, n: int = 40, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Inputs, targets as a loss takes them, and the number of outputs."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, dtype=torch.float64, generator=generator)
    noisy = x[:, :1] + 0.5 * torch.randn(n, 1, dtype=torch.float64, generator=generator)
    if kind == "classes":
        return x, (noisy[:, 0] > -0.5).long() + (noisy[:, 0] > 0.5).long(), 3
    return x, (noisy > 0).double() if kind == "two" else noisy, 1


def signal(n: int = 120, seed: int = 0) -> tuple[Any, Any, Any]:
    """Inputs, noisy labels, noisy numbers."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, 4))
    score = 1.5 * X[:, 0] - X[:, 1]
    return X, (rng.random(n) < expit(score)).astype(int), score + rng.normal(size=n)


# -- the network


@pytest.mark.parametrize("solver", ["adam", "sgd"])
@pytest.mark.parametrize("kind", ["two", "classes", "numbers"])
def test_the_network_is_that_of_early_stopping(kind: str, solver: str) -> None:
    """Weights of rows, folds, steps, temperature and estimate are those of the rule."""
    x, y, size = rows(kind, 60)
    X = np.clip((x.numpy() - x.numpy().mean(0)) / x.numpy().std(0), -4, 4)
    weights = np.linspace(0.5, 1.5, 60)
    weights /= weights.mean()
    options: dict[str, Any] = {"solver": solver, "batch_size": 16, "standardize": False, **QUICK}
    kind_of_estimator = MLPRegressor if kind == "numbers" else MLPClassifier
    estimator = kind_of_estimator((5,), "tanh", **options)
    labels = y.numpy().ravel()
    estimator.fit(X, labels, sample_weight=weights)
    order = np.array([np.flatnonzero((row == X).all(1))[0] for row in estimator_order(X, labels)])
    seed = int(np.random.RandomState(0).randint(2**31))
    model = build_network([3, 5, size], "tanh", generator=torch.Generator().manual_seed(seed))
    inputs, targets = torch.from_numpy(X[order]), y[order]
    row_weights = torch.from_numpy(weights[order])
    start_at(model, constant_outputs(LOSSES[kind], targets, size, row_weights))
    classes = None if kind == "numbers" else targets.ravel().long()
    stopping = heldin.EarlyStopping(
        model,
        make_optimizer(model, estimator, 16),
        LOSSES[kind],
        (inputs, targets),
        heldin.rules.Folds(folds=fold_labels(60, 10, seed, None, classes)),
        sample_weight=row_weights,
        seed=seed,
    )
    assert isinstance(stopping.rule, heldin.rules.Folds)
    folds, constants = stopping.rule.folds, []
    for number in range(10):
        seen = folds != number
        constants.append(constant_outputs(LOSSES[kind], targets[seen], size, row_weights[seen]))
    stopping._start_shadows([{"2.bias": constant} for constant in constants])
    stopping.fit(16, 60, generator=torch.Generator().manual_seed(seed))
    assert estimator.best_step_ == stopping.best_step > 0  # type: ignore[operator]
    np.testing.assert_allclose(estimator.coefs_[0], model[0].weight.detach().T, rtol=1e-9)  # type: ignore[operator]
    np.testing.assert_allclose(estimator.coefs_[1], model[2].weight.detach().T, rtol=1e-9)  # type: ignore[operator]
    assert estimator.estimate_ == pytest.approx(stopping.estimates["loss"].value)
    assert estimator.temperature_ == pytest.approx(stopping.temperature)
    outputs = stopping.out_of_fold.outputs.double()
    expected = {"numbers": outputs, "two": outputs.sigmoid(), "classes": outputs.softmax(1)}[kind]
    found = estimator.oof_predictions_[order].reshape(60, -1)
    found = found[:, 1:] if kind == "two" else found
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def estimator_order(X: Any, y: Any) -> Any:
    """Return the rows as the estimators sort them."""
    return X[find_copies(X, y.astype(float)).first]


# -- estimators


def test_one_network_predicts() -> None:
    X, labels, numbers = signal()
    model = MLPClassifier((6,), **QUICK).fit(X, labels)
    scaled = np.clip((X - X.mean(0)) / X.std(0), -4, 4)

    def outputs(model: Any, units: Any) -> Any:
        first, second = model.coefs_
        return units(scaled @ first + model.intercepts_[0]) @ second + model.intercepts_[1]

    assert model.activation_ == "tanh"
    shares = expit(outputs(model, np.tanh))
    np.testing.assert_allclose(model.predict_proba(X)[:, 1:], shares, rtol=1e-9)
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again.predict_proba(X), model.predict_proba(X))
    line = MLPRegressor((6,), **QUICK).fit(X, numbers)
    assert line.activation_ == "relu"
    predicted = outputs(line, lambda values: np.maximum(values, 0))[:, 0]
    np.testing.assert_allclose(line.predict(X), predicted, rtol=1e-9)
    assert line.loss_ == pytest.approx(np.mean((predicted - numbers) ** 2), rel=1e-4)


@pytest.mark.parametrize(("rows", "cv", "missed"), [(100, None, 10), (101, None, 21), (60, 3, 20)])
def test_every_row_is_new_to_a_shadow(rows: int, cv: int | None, missed: int) -> None:
    """Up to a hundred rows a shadow misses a tenth of them."""
    X, _, numbers = signal(rows)
    model = MLPRegressor((4,), cv=cv, **QUICK).fit(X, numbers)
    assert np.isfinite(model.oof_predictions_).all()
    folds = model.record().folds
    assert len(folds) == rows
    assert int(folds.bincount().max()) == missed


def test_units_are_bounded_for_few_rows_of_classes() -> None:
    X, labels, numbers = signal(301)
    options: dict[str, Any] = {**QUICK, "max_iter": 2, "learning_rate_init": 1e-3}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        few = MLPClassifier((4,), **options).fit(X[:300], labels[:300])
        many = MLPClassifier((4,), **options).fit(X, labels)
        asked = MLPClassifier((4,), activation="logistic", **options).fit(X, labels)
        line = MLPRegressor((4,), **options).fit(X[:100], numbers[:100])
        parts = MLPClassifier((4,), **options).partial_fit(X[:50], labels[:50], classes=[0, 1])
    found = [model.activation_ for model in (few, many, asked, line, parts)]
    assert found == ["tanh", "relu", "logistic", "relu", "relu"]


def test_a_hundred_thousand_rows() -> None:
    """Checks look at some of the rows, and every row still has its prediction out of fold."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(100_000, 4)).astype(np.float32)
    y = X[:, 0] + rng.normal(size=100_000) > 0
    options: dict[str, Any] = {"max_iter": 2, "batch_size": 5000, "random_state": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = MLPClassifier((4,), learning_rate_init=0.05, **options).fit(X, y)
    assert model.oof_predictions_.shape == (100_000, 2)
    accuracy = model.estimates_["accuracy"]
    assert 0.7 < accuracy.low < accuracy.value < accuracy.high < 0.8
    assert accuracy.high - accuracy.low < 0.02


def test_standardised_inputs_are_trained_in_single_precision() -> None:
    """What is kept, and what is predicted, has the precision of the inputs."""
    X, labels, numbers = signal()
    model = MLPRegressor((6,), **QUICK).fit(X, 1e8 + numbers)
    assert {part.dtype for part in model.coefs_} == {np.dtype(np.float64)}
    first = model.coefs_[0]
    np.testing.assert_array_equal(first, first.astype(np.float32))
    plain = MLPRegressor((6,), **QUICK).fit(X, numbers)
    np.testing.assert_allclose(model.predict(X) - 1e8, plain.predict(X), atol=0.05)
    raw = MLPClassifier((6,), standardize=False, **QUICK).fit(X, labels).coefs_[0]
    assert (raw != raw.astype(np.float32)).any()


def test_a_network_that_has_seen_every_row_has_no_new_fold() -> None:
    X, labels, _ = signal()
    model = MLPClassifier((6,), warm_start=True, **QUICK).fit(X, labels)
    with pytest.raises(heldin.HeldinError, match="has seen every row, and no fold is new to it"):
        model.fit(X, labels)


@pytest.mark.parametrize(
    ("kind", "hidden"), [(MLPClassifier, (100,)), (MLPRegressor, (100,)), (MLPClassifier, ())]
)
def test_noise_is_predicted_by_a_constant(kind: Any, hidden: tuple[int, ...]) -> None:
    rng = np.random.default_rng(1)
    X, y = rng.normal(size=(60, 20)), rng.random(60) < 0.3
    y = y.astype(float) if kind is MLPRegressor else y
    with pytest.warns(heldin.HeldinWarning, match="no better than a constant"):
        model = kind(hidden, **QUICK).fit(X, y)
    assert model.temperature_ == np.inf
    new = 100 * rng.normal(size=(5, 20))
    found = model.predict(new) if kind is MLPRegressor else model.predict_proba(new)[:, 1]
    np.testing.assert_allclose(found, y.mean(), rtol=1e-6)


def test_linear_models_start_at_the_constant() -> None:
    X, labels, _ = signal()
    rare = labels * (np.arange(len(labels)) % 4 == 0)
    model = MLPClassifier((), early_stopping=False, max_iter=1, learning_rate_init=1e-12)
    model.fit(X, rare)
    np.testing.assert_allclose(model.predict_proba(X)[:, 1], rare.mean(), rtol=1e-6)


# -- rows out of fold


def test_predictions_out_of_fold_have_the_order_of_the_rows() -> None:
    X, labels, numbers = signal()
    weights = np.ones(len(X))
    weights[[3, 8]] = 0, 2
    for kind, y in ((MLPClassifier, labels), (MLPRegressor, numbers)):
        model = kind(**QUICK).fit(X, y, sample_weight=weights)
        found = model.oof_predictions_
        assert len(found) == len(X)
        gone = np.isnan(found).reshape(len(X), -1).any(1)
        assert np.flatnonzero(gone).tolist() == [3]
        order = np.random.default_rng(0).permutation(len(X))
        again = kind(**QUICK).fit(X[order], y[order], sample_weight=weights[order])
        np.testing.assert_allclose(again.oof_predictions_, found[order], rtol=1e-6)
        said = found[:, 1] if kind is MLPClassifier else found
        assert np.corrcoef(said[~gone], y[~gone])[0, 1] > 0.4
    assert MLPClassifier(early_stopping="evidence", **QUICK).fit(X, labels).oof_predictions_ is None


def test_a_prediction_out_of_fold_does_not_know_its_row() -> None:
    """Labels are in no relation to inputs that tell every row: in-sample fits are perfect."""
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(80, 40)), rng.normal(size=80)
    model = MLPRegressor((30,), max_iter=300, random_state=0)
    with pytest.warns(heldin.HeldinWarning, match="no better than a constant"):
        model.fit(X, y)
    predictions_out_of_fold: Any = model.oof_predictions_
    assert abs(np.corrcoef(predictions_out_of_fold, y)[0, 1]) < 0.6


def test_scores_are_those_of_scikit_learn() -> None:
    X, labels, numbers = signal()
    model = MLPClassifier((6,), **QUICK).fit(X, labels)
    shares, found = model.oof_predictions_, model.estimates_
    assert found["accuracy"].value == pytest.approx(
        metrics.accuracy_score(labels, shares.argmax(1))
    )
    assert found["auc"].value == pytest.approx(metrics.roc_auc_score(labels, shares[:, 1]))
    said, happened = model.calibration_curve_
    assert len(said) == len(happened) <= 10
    line = MLPRegressor((6,), **QUICK).fit(X, numbers)
    predicted = line.oof_predictions_
    root = metrics.mean_squared_error(numbers, predicted) ** 0.5
    assert line.estimates_["rmse"].value == pytest.approx(root)
    assert line.estimates_["r2"].value == pytest.approx(metrics.r2_score(numbers, predicted))
    for interval in [*found.values(), *line.estimates_.values()]:
        assert interval.low < interval.value < interval.high
    three = np.digitize(numbers, [-1, 1])
    several = MLPClassifier((6,), **QUICK).fit(X, three)
    expected = metrics.roc_auc_score(three, several.oof_predictions_, multi_class="ovr")
    assert several.estimates_["auc"].value == pytest.approx(expected)


@pytest.mark.filterwarnings("ignore:.*no better than a constant")
def test_groups_are_kept_together() -> None:
    """Rows come in fours that are nearly equal; what is learnt of one is of no use elsewhere."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(30, 5))
    X = np.repeat(centres, 4, 0) + 0.01 * rng.normal(size=(120, 5))
    y = np.repeat(rng.normal(size=30), 4)
    groups = np.repeat([f"patient {i}" for i in range(30)], 4)
    options: dict[str, Any] = {"max_iter": 200, "learning_rate_init": 0.02, "random_state": 0}
    blind = MLPRegressor((30,), **options).fit(X, y)
    aware = MLPRegressor((30,), **options).fit(X, y, groups=groups)
    assert aware.estimate_ > 1.5 * blind.estimate_
    split = MLPRegressor((30,), cv=GroupKFold(3), **options).fit(X, y, groups=groups)
    with pytest.raises(heldin.HeldinError, match="all rows are in one group"):
        MLPRegressor((30,), **options).fit(X, y, groups=np.zeros(120))
    assert split.estimate_ > 1.5 * blind.estimate_


def test_folds_may_be_in_the_order_of_time() -> None:
    X, labels, _ = signal()
    model = MLPClassifier((6,), cv=TimeSeriesSplit(4), **QUICK).fit(X, labels)
    assert np.isnan(model.oof_predictions_[:24]).all()
    assert np.isfinite(model.oof_predictions_[24:]).all()
    with pytest.raises(heldin.HeldinError, match="is tested by two splits"):
        MLPClassifier((6,), cv=RepeatedKFold(), **QUICK).fit(X, labels)
    splits = [*KFold(4).split(X)]
    with pytest.raises(heldin.HeldinError, match="folds tears groups apart"):
        MLPClassifier((6,), cv=splits, **QUICK).fit(X, labels, groups=np.arange(120) // 7)


def test_rows_in_time_are_split_as_by_scikit_learn() -> None:
    X, labels, _ = signal()
    model = MLPClassifier((6,), cv=TimeSeriesSplit(4), **QUICK).fit(X, labels)
    order = np.random.default_rng(0).permutation(len(X))
    shuffled = MLPClassifier((6,), cv=4, **QUICK).fit(X[order], labels[order], time=order)
    assert np.array_equal(shuffled.oof_predictions_, model.oof_predictions_[order], equal_nan=True)
    assert shuffled.estimate_ == model.estimate_
    assert shuffled.estimate_error_ != model.estimate_error_  # by stretches of time


def test_many_rows_in_time_have_one_shadow_of_the_last_block() -> None:
    X, labels, _ = signal(1200)
    model = MLPClassifier((4,), max_iter=2, random_state=0).fit(X, labels, time=range(1200))
    tested = np.isfinite(model.oof_predictions_).reshape(1200, -1).all(1)
    assert np.flatnonzero(tested).tolist() == [*range(1000, 1200)]


@pytest.mark.parametrize(
    ("parameters", "options", "message"),
    [
        ({"early_stopping": "validation"}, {}, "time needs folds"),
        ({"cv": TimeSeriesSplit(3)}, {}, "leave groups out, cv a number"),
        ({}, {"groups": range(30)}, "leave groups out, cv a number"),
        ({"cv": 40}, {}, "30 different times, which do not fill 41 blocks"),
    ],
)
def test_what_time_excludes_is_refused(
    parameters: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    X, labels, _ = signal(30)
    with pytest.raises(heldin.HeldinError, match=message):
        MLPClassifier((4,), **parameters).fit(X, labels, time=range(30), **options)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"cv": 3, "early_stopping": "validation"}, "cv=3 needs folds"),
        ({"cv": 1}, "'cv' parameter of MLPClassifier must be"),
        ({"alpha": 0.1, "weight_decay": 0.1}, "give one of them"),
        ({"standardize": 1}, "'standardize' parameter of MLPClassifier must be"),
    ],
)
def test_what_cannot_be_is_refused(parameters: dict[str, Any], message: str) -> None:
    X, labels, _ = signal(30)
    with pytest.raises(heldin.HeldinError, match=message):
        MLPClassifier((4,), **parameters).fit(X, labels)
    with pytest.raises(heldin.HeldinError, match="groups need folds"):
        MLPClassifier((4,), early_stopping="evidence").fit(X, labels, groups=labels)


def test_a_shadow_starts_at_the_constant_of_the_rows_that_it_sees() -> None:
    """Later rows are higher: a mean that knew of them would have a lower loss."""
    X, y = np.random.default_rng(0).normal(size=(60, 2)), np.arange(60.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = MLPRegressor((3,), cv=3, max_iter=1, random_state=0).fit(X, y, time=y)
    past = [y[: 15 * k].mean() for k in (1, 2, 3)]
    losses = [np.mean((y[15 * k : 15 * k + 15] - past[k - 1]) ** 2) for k in (1, 2, 3)]
    assert model.estimate_curve_[0] == pytest.approx(np.mean(losses), rel=1e-5)
