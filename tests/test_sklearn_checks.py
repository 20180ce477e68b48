"""scikit-learn's own checks, all of them, none expected to fail."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("sklearn")

from sklearn.utils.estimator_checks import parametrize_with_checks

from heldin.sklearn import LinearRegression, LogisticRegression, MLPClassifier, MLPRegressor


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@parametrize_with_checks(
    [MLPClassifier(), MLPRegressor(), LogisticRegression(), LinearRegression()]
)
def test_checks(estimator: Any, check: Any) -> None:
    check(estimator)
