"""What else one can install: each with its defaults, on the same rows."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin

from .problems import SmallProblem

__all__ = ["METHODS", "Method", "fitted", "installed"]


@dataclass(frozen=True)
class Method:
    """A way to predict.

    Attributes:
        make: (whether the targets are classes, seed) -> an estimator of scikit-learn's kind.
        kind: "network", "trees", "linear" or "constant".
        needs: the package that must be installed.
        single: whether inputs must be in single precision.
        constants: names of modules' variables, and what they are while it is fitted.
    """

    make: Callable[[bool, int], Any]
    kind: str
    needs: str = "sklearn"
    single: bool = False
    constants: Mapping[str, Any] = field(default_factory=dict)


def _scaled(model: Any) -> Any:
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return make_pipeline(StandardScaler(), model)


def _constant(classes: bool, seed: int) -> Any:
    from sklearn import dummy

    return dummy.DummyClassifier() if classes else dummy.DummyRegressor()


def _linear(classes: bool, seed: int) -> Any:
    from sklearn import linear_model

    if classes:
        return _scaled(_LogisticCV())
    return _scaled(linear_model.RidgeCV(alphas=np.logspace(-3, 4, 15)))


class _LogisticCV(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """LogisticRegressionCV by the log loss; where a class has fewer than two rows, C is 1."""

    def fit(self, x: Any, y: Any) -> Any:
        from sklearn import linear_model

        self.classes_ = np.unique(y)
        fewest = int(np.bincount(y).min())
        if fewest < 2:
            self._model = linear_model.LogisticRegression(max_iter=1000).fit(x, y)
        else:
            self._model = linear_model.LogisticRegressionCV(
                cv=min(5, fewest), scoring="neg_log_loss", max_iter=1000
            ).fit(x, y)
        return self

    def predict_proba(self, x: Any) -> Any:
        """Of the model that was chosen."""
        return self._model.predict_proba(x)


def _forest(classes: bool, seed: int) -> Any:
    from sklearn import ensemble

    kind = ensemble.RandomForestClassifier if classes else ensemble.RandomForestRegressor
    return kind(random_state=seed)


def _boosting(classes: bool, seed: int) -> Any:
    from sklearn import ensemble as of

    kind = of.HistGradientBoostingClassifier if classes else of.HistGradientBoostingRegressor
    return kind(random_state=seed)


def _mlp(early_stopping: bool) -> Callable[[bool, int], Any]:
    def make(classes: bool, seed: int) -> Any:
        from sklearn import compose, neural_network, preprocessing

        options = {"random_state": seed, "early_stopping": early_stopping, "max_iter": 1000}
        if classes:
            return _scaled(neural_network.MLPClassifier(**options))
        return compose.TransformedTargetRegressor(
            _scaled(neural_network.MLPRegressor(**options)),
            transformer=preprocessing.StandardScaler(),
        )

    return make


def _catboost(classes: bool, seed: int) -> Any:
    import catboost

    kind = catboost.CatBoostClassifier if classes else catboost.CatBoostRegressor
    return kind(random_seed=seed, verbose=0, thread_count=1, allow_writing_files=False)


def _lightgbm(classes: bool, seed: int) -> Any:
    import lightgbm

    kind = lightgbm.LGBMClassifier if classes else lightgbm.LGBMRegressor
    return kind(random_state=seed, n_jobs=1, verbose=-1)


def _xgboost(classes: bool, seed: int) -> Any:
    import xgboost

    kind = xgboost.XGBClassifier if classes else xgboost.XGBRegressor
    return kind(random_state=seed, n_jobs=1)


# What a search draws from, by package. Ranges are those that the packages' own guides name.
SPACES: Mapping[str, Mapping[str, Any]] = {
    "lightgbm": {
        "learning_rate": [0.01, 0.03, 0.1], "n_estimators": [50, 100, 300],
        "num_leaves": [4, 8, 16, 31], "min_child_samples": [2, 5, 10, 20],
        "reg_lambda": [0.0, 1.0, 10.0], "colsample_bytree": [0.5, 0.8, 1.0],
    },
    "xgboost": {
        "learning_rate": [0.01, 0.03, 0.1, 0.3], "n_estimators": [50, 100, 300],
        "max_depth": [2, 3, 4, 6], "min_child_weight": [1, 3, 10],
        "reg_lambda": [0.1, 1.0, 10.0], "subsample": [0.6, 0.8, 1.0],
    },
    "catboost": {
        "learning_rate": [0.01, 0.03, 0.1], "iterations": [100, 300],
        "depth": [2, 4, 6], "l2_leaf_reg": [1.0, 3.0, 10.0],
    },
}  # fmt: skip
TRIALS, TUNING_FOLDS = 20, 5


def _tuned(package: str, plain: Callable[[bool, int], Any]) -> Callable[[bool, int], Any]:
    """The best of 20 random settings by five folds, trained on all rows."""

    def make(classes: bool, seed: int) -> Any:
        from sklearn.model_selection import KFold, RandomizedSearchCV, StratifiedKFold

        folds = StratifiedKFold if classes else KFold
        return RandomizedSearchCV(
            plain(classes, seed),
            SPACES[package],
            n_iter=TRIALS,
            cv=folds(TUNING_FOLDS, shuffle=True, random_state=seed),
            scoring="neg_log_loss" if classes else "neg_mean_squared_error",
            random_state=seed,
        )

    return make


def _tabular_prior(package: str, name: str) -> Callable[[bool, int], Any]:
    """A pretrained network whose weights come from a hub; without them a fit fails."""

    def make(classes: bool, seed: int) -> Any:
        module = importlib.import_module(package)
        kind = getattr(module, f"{name}{'Classifier' if classes else 'Regressor'}")
        return kind(random_state=seed)

    return make


def _pytabkit(name: str) -> Callable[[bool, int], Any]:
    def make(classes: bool, seed: int) -> Any:
        import pytabkit

        options: dict[str, Any] = {"random_state": seed, "device": "cpu", "n_threads": 1}
        if classes:  # judged by the log loss, so its validation rows are judged by it, too
            options["val_metric_name"] = "cross_entropy"
        return getattr(pytabkit, f"{name}_{'Classifier' if classes else 'Regressor'}")(**options)

    return make


def ours(**options: Any) -> Callable[[bool, int], Any]:
    """heldin's network, with the options that are not the default."""

    def make(classes: bool, seed: int) -> Any:
        from heldin import sklearn as estimators

        kind = estimators.MLPClassifier if classes else estimators.MLPRegressor
        return kind(random_state=seed, **options)

    return make


METHODS: Mapping[str, Method] = {
    "heldin": Method(ours(), "network"),
    "constant": Method(_constant, "constant"),
    "linear CV": Method(_linear, "linear"),
    "random forest": Method(_forest, "trees"),
    "hist gradient boosting": Method(_boosting, "trees"),
    "scikit-learn MLP": Method(_mlp(False), "network"),
    "scikit-learn MLP (early stopping)": Method(_mlp(True), "network"),
    "CatBoost": Method(_catboost, "trees", "catboost"),
    "LightGBM": Method(_lightgbm, "trees", "lightgbm"),
    "XGBoost": Method(_xgboost, "trees", "xgboost"),
    "CatBoost (tuned)": Method(_tuned("catboost", _catboost), "trees", "catboost"),
    "LightGBM (tuned)": Method(_tuned("lightgbm", _lightgbm), "trees", "lightgbm"),
    "XGBoost (tuned)": Method(_tuned("xgboost", _xgboost), "trees", "xgboost"),
    "TabPFN": Method(_tabular_prior("tabpfn", "TabPFN"), "network", "tabpfn"),
    "TabICL": Method(_tabular_prior("tabicl", "TabICL"), "network", "tabicl"),
    "RealMLP": Method(_pytabkit("RealMLP_TD"), "network", "pytabkit", single=True),
    "TabM": Method(_pytabkit("TabM_D"), "network", "pytabkit", single=True),
}


def installed() -> list[str]:
    """The methods that can be run here."""
    return [name for name, m in METHODS.items() if importlib.util.find_spec(m.needs) is not None]


@contextmanager
def _set(constants: Mapping[str, Any]) -> Iterator[None]:
    """Other values for constants, in this block."""
    before = []
    try:
        for name, value in constants.items():
            where, _, what = name.rpartition(".")
            module = importlib.import_module(where)
            before.append((module, what, getattr(module, what)))
            setattr(module, what, value)
        yield
    finally:
        for module, what, value in before:
            setattr(module, what, value)


def fitted(method: Method, problem: SmallProblem) -> tuple[Any, Any]:
    """The estimator, trained, and its predictions of the test rows."""
    x, x_test, y = problem.x, problem.x_test, problem.y
    if method.single:
        x, x_test = x.astype(np.float32), x_test.astype(np.float32)
        y = y if problem.classes else y.astype(np.float32)
    with warnings.catch_warnings(), _set(method.constants):
        warnings.simplefilter("ignore")
        model = method.make(bool(problem.classes), problem.seed).fit(x, y)
        return model, model.predict_proba(x_test) if problem.classes else model.predict(x_test)
