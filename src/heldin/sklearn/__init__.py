"""Neural networks for scikit-learn that train on every row and know when to stop.

They have the interface of scikit-learn's own, which hold rows out for early stopping.

>>> from heldin.sklearn import MLPRegressor
>>> from sklearn.datasets import load_diabetes
>>> model = MLPRegressor((10,), random_state=0).fit(*load_diabetes(return_X_y=True))
>>> model.stopping_rule_
'folds'
>>> 2500 < model.estimate_ < 3500            # mean squared error on new rows
True
"""

from __future__ import annotations

try:
    import sklearn as _sklearn  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"heldin.sklearn: {error.name} is not installed; pip install 'heldin[sklearn]'"
    ) from error

from .estimators import MLPClassifier, MLPRegressor

__all__ = ["MLPClassifier", "MLPRegressor"]
