"""The finished run of an estimator: rules, records, comparisons, callbacks of scikit-learn."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

import heldin

sklearn = pytest.importorskip("sklearn")

from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_diabetes
from sklearn.metrics import log_loss

from heldin.sklearn import MLPClassifier, MLPRegressor

QUICK: dict[str, Any] = {"learning_rate_init": 0.02, "random_state": 0, "max_iter": 60}
pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")


def cancer() -> tuple[Any, Any]:
    X, y = load_breast_cancer(return_X_y=True)
    return X[:90], y[:90]


def test_the_run_and_its_estimates() -> None:
    X, y = cancer()
    model = MLPClassifier((6,), metrics=["f1"], **QUICK).fit(X, y)
    assert isinstance(model.run_, heldin.EarlyStopping)
    assert list(model.estimates_) == ["loss", "accuracy", "auc", "f1"]
    assert all(isinstance(each, heldin.Interval) for each in model.estimates_.values())
    loss = model.estimates_["loss"]
    assert loss == model.run_.estimates["loss"]
    assert model.estimate_ == loss.value == pytest.approx(model.run_.estimates["loss"].value)
    assert model.estimate_error_ == pytest.approx((loss.high - loss.low) / 3.92)
    assert model.temperature_ == model.run_.temperature
    assert model.run_.plan().steps == model.best_step_
    assert len(model.run_.committee().members) == 11
    assert "heldin/loss" in model.run_.summary()
    assert "Test loss" in str(model.run_.report())


@pytest.mark.parametrize("copies", [False, True])
def test_the_run_has_the_row_numbers_of_the_rows_given(copies: bool) -> None:
    X, y = cancer()
    if copies:
        X, y = np.concatenate([X, X[20:50]]), np.concatenate([y, y[20:50]])
    weights = np.ones(len(y))
    weights[3] = 0
    model = MLPClassifier((6,), **QUICK).fit(X, y, weights)
    held = model.run_.out_of_fold
    assert held.rows.tolist() == [row for row in range(90) if row != 3]
    np.testing.assert_array_equal(held.targets.flatten(), y[held.rows])
    shares = held.outputs.double().sigmoid().flatten()
    np.testing.assert_allclose(shares, model.oof_predictions_[held.rows, 1], atol=1e-5)
    record = model.run_.record()
    worst = int(record.rows[record.row_losses.argmax()])
    assert worst == np.nanargmax(
        np.abs(model.oof_predictions_[:, 1][: 90 if copies else None] - y[:90])
    )


def test_two_estimators_are_compared() -> None:
    X, y = cancer()
    one = MLPClassifier((6,), metrics=["f1"], **QUICK).fit(X, y)
    other = MLPClassifier((), metrics=["f1"], **QUICK).fit(X, y)
    found = heldin.compare(one, other)
    assert found["loss"].a == pytest.approx(log_loss(y, one.oof_predictions_))
    assert {*found} == {"loss", "f1"}
    of_runs = heldin.compare(one.run_, other.run_)
    assert of_runs.difference == pytest.approx(found.difference, abs=0.02)
    again = pickle.loads(pickle.dumps(one))
    assert again.run_ is None  # it holds all the data
    assert heldin.compare(again, other).difference == found.difference
    assert str(again.estimates_) == str(one.estimates_)
    plain = MLPClassifier(early_stopping="evidence", **QUICK).fit(X, y)
    assert plain.run_ is plain.estimates_ is None
    with pytest.raises(heldin.HeldinError, match="no out-of-fold predictions"):
        heldin.compare(plain, other)


def test_losses_of_a_record_are_in_the_units_of_the_targets() -> None:
    X, y = load_diabetes(return_X_y=True)
    model = MLPRegressor((6,), **QUICK).fit(X[:80], y[:80])
    record = model.record()
    assert float(record.row_losses.mean()) == pytest.approx(
        np.square(model.oof_predictions_ - y[:80]).mean()
    )
    assert model.estimate_ == pytest.approx(float(record.row_losses.mean()), rel=1e-4)
    assert record.rows.tolist() == list(range(80))


RULES: dict[str, tuple[Any, int]] = {
    "folds": (heldin.rules.Folds(folds=3), 3),
    "shadows": (heldin.rules.Folds(folds=4, shadows=2), 2),
    "name": ("shadow", 1),
    "labels": (heldin.rules.Folds(folds=[i % 4 for i in range(90)]), 4),
    "splits": (
        heldin.rules.Folds(folds=[(range(45), range(45, 90)), (range(45, 90), range(45))]),
        2,
    ),
    "auto": (heldin.rules.Auto(memory=2**28), 10),
}


@pytest.mark.parametrize("name", [*RULES])
def test_rules(name: str) -> None:
    rule, shadows = RULES[name]
    X, y = cancer()
    model = clone(MLPClassifier((4,), early_stopping=rule, **QUICK)).fit(X, y)
    assert model.stopping_rule_ == "folds"
    record = model.record()
    assert len(record.folds.unique()) == shadows
    tested = np.isfinite(model.oof_predictions_).all(1)
    assert np.flatnonzero(tested).tolist() == record.rows.tolist()
    if name == "labels":  # rows of one label share a shadow
        assert len(set(zip(np.arange(90) % 4, record.folds.tolist(), strict=True))) == 4


def test_evidence_with_options() -> None:
    X, y = cancer()
    rule = heldin.rules.Evidence(window="epoch", estimator="exact", warmup=10**6)
    model = MLPClassifier((4,), early_stopping=rule, **QUICK).fit(X, y)
    assert model.stopping_rule_ == "evidence"
    assert not model.stopped_


@pytest.mark.parametrize(
    ("rule", "cv", "message"),
    [
        (heldin.rules.Auto(budget=2), None, "have no budget"),
        (heldin.rules.LeaveOneOut(), None, "take Auto, Folds and Evidence"),
        (heldin.rules.Folds(rows=0.25), None, "light shadows"),
        (heldin.rules.Folds(folds=3), 4, "leave one of them out"),
    ],
)
def test_rules_that_are_refused(rule: Any, cv: Any, message: str) -> None:
    with pytest.raises(heldin.HeldinError, match=message):
        MLPClassifier(early_stopping=rule, cv=cv, **QUICK).fit(*cancer())


class Counting:
    """A callback of scikit-learn that asks to stop after some epochs."""

    def __init__(self, last: int) -> None:
        self.last, self.epochs, self.ended = last, 0, 0

    def setup(self, estimator: Any, context: Any) -> None:
        """Begin."""

    def teardown(self, estimator: Any, context: Any) -> None:
        """Note the end."""
        self.ended += 1

    def on_fit_task_begin(self, estimator: Any, context: Any) -> None:
        """Do nothing."""

    def on_fit_task_end(self, estimator: Any, context: Any) -> bool:
        """Count an epoch."""
        self.epochs += context.task_name == "epoch"
        return self.epochs >= self.last


@pytest.mark.parametrize("rule", ["folds", "evidence"])
def test_callbacks_of_scikit_learn(rule: str) -> None:
    pytest.importorskip("sklearn.callback")
    callback = Counting(5)
    model = MLPClassifier((4,), early_stopping=rule, **QUICK).set_callbacks(callback)
    model.fit(*cancer())
    assert (callback.epochs, callback.ended, model.n_iter_) == (5, 1, 5)
    assert model.predict(cancer()[0]).shape == (90,)


def test_folds_of_rows_have_the_numbers_of_the_rows_given() -> None:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(60, 3))
    y = X[:, 0] + rng.normal(size=60)
    X[50:], y[50:] = X[:10], y[:10]
    run = MLPRegressor((4,), max_iter=3, random_state=0).fit(X, y).run_
    record = run.record()
    assert run.following.fold_of_row[record.rows].tolist() == record.folds.tolist()
