"""`metrics=` of the estimators, against scikit-learn's scores of out-of-fold predictions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import heldin
from heldin.crossval import resolve_metrics, statistic_interval

sklearn = pytest.importorskip("sklearn")

from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_diabetes, load_wine
from sklearn.metrics import f1_score, mean_absolute_error, median_absolute_error, roc_auc_score

from heldin.sklearn import MLPClassifier, MLPRegressor

QUICK: dict[str, Any] = {"hidden_layer_sizes": (6,), "learning_rate_init": 0.02, "random_state": 0}


def cancer(rows: int = 80) -> tuple[Any, Any]:
    X, y = load_breast_cancer(return_X_y=True)
    return X[:rows], np.array(["ill", "well"])[y[:rows]]


def test_two_classes_with_names_and_copies() -> None:
    X, y = cancer()
    X, y = np.vstack([X, X[:10]]), np.concatenate([y, y[:10]])
    model = MLPClassifier(metrics=["f1", "roc_auc"], **QUICK).fit(X, y)
    assert model.n_copies_ == 10
    out_of_fold, estimates = model.oof_predictions_, model.estimates_
    predicted = model.classes_[out_of_fold.argmax(1)]
    assert estimates["f1"].value == pytest.approx(f1_score(y, predicted, pos_label="well"))
    assert estimates["roc_auc"].value == pytest.approx(
        roc_auc_score(y == "well", out_of_fold[:, 1])
    )
    assert estimates["f1"].low < estimates["f1"].value <= estimates["f1"].high
    assert {"accuracy", "auc"} < estimates.keys()


def test_several_classes() -> None:
    X, y = load_wine(return_X_y=True)
    own = {"classes": lambda outputs, targets: outputs.shape[1] + 0 * targets.sum()}
    model = MLPClassifier(metrics={"macro": "f1_macro", **own}, **QUICK).fit(X[::2], y[::2])
    predicted = model.oof_predictions_.argmax(1)
    expected = f1_score(y[::2], predicted, average="macro")
    assert model.estimates_["macro"].value == pytest.approx(expected)
    assert model.estimates_["classes"].value == 3


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_several_labels() -> None:
    X, y = load_wine(return_X_y=True)
    labels = np.stack([y == 0, y == 2], 1).astype(int)
    model = MLPClassifier(metrics=["f1_micro"], **QUICK).fit(X[::2], labels[::2])
    expected = f1_score(labels[::2], model.oof_predictions_ > 0.5, average="micro")
    assert model.estimates_["f1_micro"].value == pytest.approx(expected)


@pytest.mark.parametrize("outputs", [1, 2])
def test_numbers(outputs: int) -> None:
    X, y = load_diabetes(return_X_y=True)
    X, y = X[:80], y[:80]
    y = y if outputs == 1 else np.stack([y, -2 * y], 1)
    names = ["neg_mean_absolute_error", "neg_median_absolute_error"]
    model = MLPRegressor(metrics=names, **QUICK).fit(X, y)
    errors = [f(y, model.oof_predictions_) for f in (mean_absolute_error, median_absolute_error)]
    for name, error in zip(names, errors, strict=True):
        assert model.estimates_[name].value == pytest.approx(-error)


def test_groups_are_drawn_jointly() -> None:
    X, y = load_diabetes(return_X_y=True)
    groups = np.arange(80) // 8
    name = "neg_mean_absolute_error"
    model = MLPRegressor(metrics=[name], **QUICK).fit(X[:80], y[:80], groups=groups)
    rows = torch.as_tensor(model.oof_predictions_), torch.as_tensor(y[:80])
    (metric,) = resolve_metrics([name]).values()
    expected = statistic_interval(metric, *rows, groups)
    assert str(model.estimates_[name]) == str(expected)
    assert expected.low != statistic_interval(metric, *rows).low


MISTAKES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "name": ({"metrics": ["f2"]}, {}, "no scorer 'f2'"),
    "rule": ({"metrics": ["f1"], "early_stopping": "evidence"}, {}, "metrics need folds"),
    "weights": ({"metrics": ["f1"]}, {"sample_weight": np.arange(1, 81)}, "count every row once"),
}


@pytest.mark.parametrize("name", [*MISTAKES])
def test_refused(name: str) -> None:
    options, data, message = MISTAKES[name]
    with pytest.raises(heldin.HeldinError, match=message):
        MLPClassifier(**options, **QUICK).fit(*cancer(), **data)


def test_an_estimator_with_metrics_is_cloned() -> None:
    model = MLPClassifier(metrics=["f1"], **QUICK)
    assert clone(model).get_params()["metrics"] == ["f1"]


@pytest.mark.parametrize("kind", ["classes", "numbers"])
def test_weights_are_chosen_by_a_score(kind: str) -> None:
    generator = np.random.default_rng(3)
    x = generator.normal(size=(90, 4))
    signal = x[:, 0] + 1.5 * generator.normal(size=90)
    y = np.where(signal > 0, "yes", "no") if kind == "classes" else signal
    scorer = "accuracy" if kind == "classes" else "r2"
    make = MLPClassifier if kind == "classes" else MLPRegressor
    model = make((16,), random_state=0, monitor=scorer).fit(x, y)
    run = model.run_
    inner = run.following
    values = [inner.metric_values(number)[scorer] for number in range(len(run.history))]
    chosen = [record.step for record in run.history].index(run.best_step)
    assert values[chosen] == max(values)
    assert model.estimates_[scorer].value == pytest.approx(values[chosen], abs=1e-6)


def test_a_score_to_choose_by_is_checked() -> None:
    x, y = np.random.default_rng(0).normal(size=(40, 2)), np.arange(40) % 2
    with pytest.raises(ValueError, match="Did you mean 'accuracy'"):
        MLPClassifier(monitor="accuracy_").fit(x, y)
    with pytest.raises(ValueError, match="monitor='accuracy' needs folds"):
        MLPClassifier(monitor="accuracy", early_stopping="evidence").fit(x, y)
