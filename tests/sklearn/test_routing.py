"""scikit-learn's metadata routing passes weights and groups on to the estimators."""

from __future__ import annotations

from typing import Any

import pytest

sklearn = pytest.importorskip("sklearn")

import numpy as np
from sklearn.exceptions import UnsetMetadataPassedError
from sklearn.model_selection import GridSearchCV, GroupKFold, cross_validate
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from heldin.sklearn import MLPClassifier, MLPRegressor

SMALL: dict[str, Any] = {
    "hidden_layer_sizes": (3,),
    "max_iter": 20,
    "cv": 2,
    "random_state": 0,
}
pytestmark = [
    pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning"),
    pytest.mark.filterwarnings("ignore:.*no better than a constant:heldin.HeldinWarning"),
]


@pytest.fixture(autouse=True)
def _routing() -> Any:
    with sklearn.config_context(enable_metadata_routing=True):
        yield


def rows() -> tuple[Any, Any, Any, Any]:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(60, 3))
    y = (3 * x[:, 0] + generator.normal(size=60) > 0).astype(int)
    return x, y, generator.uniform(0.5, 2, 60), np.repeat(np.arange(12), 5)


class Noted(MLPClassifier):
    """Takes down what `fit` got."""

    calls: list[tuple[Any, Any]] = []  # noqa: RUF012

    def fit(self, X: Any, y: Any, sample_weight: Any = None, groups: Any = None) -> Any:
        self.calls.append((sample_weight, groups))
        return super().fit(X, y, sample_weight, groups)


def test_a_search_passes_weights_and_groups() -> None:
    x, y, weights, groups = rows()
    Noted.calls.clear()
    estimator = Noted(**SMALL).set_fit_request(sample_weight=True, groups=True)
    estimator.set_score_request(sample_weight=True)
    search = GridSearchCV(estimator, {"alpha": [1e-4]}, cv=GroupKFold(3), refit=True)
    search.fit(x, y, sample_weight=weights, groups=groups)
    *parts, (last_weights, last_groups) = Noted.calls
    assert len(parts) == 3
    for part, (train, _) in zip(parts, GroupKFold(3).split(x, y, groups), strict=True):
        np.testing.assert_array_equal(part[0], weights[train])
        np.testing.assert_array_equal(part[1], groups[train])
    np.testing.assert_array_equal(last_weights, weights)
    np.testing.assert_array_equal(last_groups, groups)
    expected = MLPClassifier(alpha=1e-4, **SMALL).fit(x, y, sample_weight=weights, groups=groups)
    np.testing.assert_array_equal(search.best_estimator_.coefs_[0], expected.coefs_[0])


def test_a_pipeline_passes_groups() -> None:
    x, y, _, groups = rows()
    regressor = MLPRegressor(**SMALL).set_fit_request(groups=True)
    pipeline = make_pipeline(StandardScaler(), regressor).fit(x, y.astype(float), groups=groups)
    expected = MLPRegressor(**SMALL).fit(StandardScaler().fit_transform(x), y, groups=groups)
    assert pipeline[-1].estimate_ == expected.estimate_
    ungrouped = MLPRegressor(**SMALL).fit(StandardScaler().fit_transform(x), y)
    assert pipeline[-1].estimate_ != ungrouped.estimate_


def test_what_is_not_asked_for_is_refused() -> None:
    x, y, weights, _ = rows()
    with pytest.raises(UnsetMetadataPassedError, match=r"\[sample_weight\] are passed"):
        cross_validate(MLPClassifier(**SMALL), x, y, params={"sample_weight": weights})
