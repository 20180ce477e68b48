"""scikit-learn's own checks, all of them, none expected to fail."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("sklearn")

from sklearn.utils.estimator_checks import parametrize_with_checks

from heldin.sklearn import MLPClassifier, MLPRegressor

# Few and large steps, to be quick; with the defaults the checks pass as well, in many minutes.
QUICK: dict[str, Any] = {"max_iter": 40, "learning_rate_init": 0.05}


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.filterwarnings("ignore:.*no better than a constant:heldin.HeldinWarning")
@pytest.mark.filterwarnings("ignore:.*never fell below:heldin.HeldinWarning")  # noise is noise
@parametrize_with_checks(  # type: ignore[untyped-decorator]
    [
        MLPClassifier((16,), **QUICK),
        MLPRegressor((16,), **QUICK),
        MLPRegressor((), **QUICK),
    ]
)
def test_checks(estimator: Any, check: Any) -> None:
    check(estimator)
