"""Parameters and data of the estimators: checked, and made arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from numbers import Integral
from typing import Any

import numpy as np
from scipy import sparse
from sklearn.base import BaseEstimator, is_classifier, is_regressor
from sklearn.model_selection import check_cv, train_test_split
from sklearn.utils import check_array, check_X_y
from sklearn.utils.validation import _check_sample_weight, check_consistent_length, validate_data
from torch import nn

from heldin.tables.trainer import TrainingConfig

from .inputs import Categories, Gaps, check_names, has_categories, missing_labels
from .parameters import InvalidParameter, check_parameters

__all__ = ["Checked", "Data", "Targets"]

DENSE = 2**28  # bytes up to which sparse inputs are made dense once, not batch by batch
DECAY = 0.3  # of the weights, times the rate, in each step


@dataclass(frozen=True, eq=False)
class Targets:
    """What the network learns.

    Attributes:
        y: (n,) class numbers, or (n, outputs) numbers.
        outputs: of the network.
        loss: of outputs and targets.
        single: whether each row belongs to one class.
    """

    y: Any
    outputs: int
    loss: nn.Module
    single: bool = False


@dataclass(frozen=True, eq=False)
class Data:
    """Rows that count, as arrays.

    Attributes:
        X, y, weights, groups: of these rows; groups are whole numbers, or None.
        index: the number of each among those given.
        given: how many were given.
        splits: pairs of row numbers, of those given, to see and to be asked about; or None.
    """

    X: Any
    y: Any
    weights: Any
    groups: Any
    index: Any
    given: int
    splits: Any = None

    def take(self, index: Any, weights: Any) -> Data:
        """Some rows, perhaps more than once, with weights of their own."""
        groups = None if self.groups is None else self.groups[index]
        X, y, rows = self.X[index], self.y[index], self.index[index]
        return Data(X, y, weights, groups, rows, self.given, self.splits)


class Checked(BaseEstimator):  # type: ignore[misc]
    """What an estimator does before it trains."""

    early_stopping: Any
    cv: Any
    validation_fraction: float
    _encoder: Any
    _gaps: Gaps

    # -- parameters

    def _remember(self, given: Mapping[str, Any]) -> None:
        """Arguments of the constructor become attributes, untouched, as scikit-learn wants it."""
        for name, value in given.items():
            if name not in ("self", "__class__"):
                setattr(self, name, value)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.input_tags.allow_nan = True
        return tags

    def _refuse(self, message: str) -> InvalidParameter:
        return InvalidParameter(f"{type(self).__name__}: {message}")

    def _rule(self, groups: Any = None) -> Any:
        """Check the parameters; the name of the rule."""
        given = self.get_params(deep=False)
        check_parameters(type(self).__name__, given)
        rule = {True: "auto", False: "none"}.get(self.early_stopping, self.early_stopping)
        slows_down = given["learning_rate"] == "adaptive" and given["solver"] == "sgd"
        if slows_down and rule != "none":
            raise self._refuse(
                "learning_rate='adaptive' waits until the training loss no longer falls, which a "
                "stopping rule is to prevent; use early_stopping=False or another learning_rate"
            )
        if rule in ("auto", "folds"):
            return rule
        for name, value in (("committee", given.get("committee", 1)), ("cv", self.cv)):
            if value not in ("auto", None, 1):
                raise self._refuse(
                    f"{name}={value!r} needs folds, and early_stopping={self.early_stopping!r} has "
                    "none; use early_stopping='auto'"
                )
        if groups is not None:
            raise self._refuse(
                f"groups need folds, and early_stopping={self.early_stopping!r} has none; use "
                "early_stopping='auto'"
            )
        return rule

    def _config(self) -> TrainingConfig:
        given = self.get_params(deep=False)
        names = {f.name for f in fields(TrainingConfig)} & given.keys()
        config = TrainingConfig(**{n: given[n] for n in names if n != "weight_decay"})
        decay = given.get("weight_decay", 0.0)
        if decay and given["alpha"]:
            raise self._refuse(
                f"alpha={given['alpha']} and weight_decay={decay} are two ways to keep weights "
                "small; give one of them"
            )
        if decay is None:  # unless alpha is asked for
            decay = 0.0 if given["alpha"] else DECAY
        return replace(config, weight_decay=decay)

    # -- data

    def _numbers(self, X: Any, y: Any, first: bool) -> tuple[Any, Any]:
        """Arrays without gaps and categories; y as it is if it is None."""
        if has_categories(X) if first else self._encoder is not None:
            if not hasattr(X, "columns"):
                raise self._refuse("it was fitted on a DataFrame with categories; give one")
            check_names(X, type(self).__name__)
            validate_data(self, X, skip_check_array=True, reset=first)
            if first:
                self._encoder = Categories(X, type(self).__name__)
            X = self._encoder(X)
            if y is None:
                X = check_array(X, dtype=np.float64, ensure_all_finite="allow-nan")
            else:
                X, y = check_X_y(
                    X,
                    y,
                    dtype=np.float64,
                    ensure_all_finite="allow-nan",
                    multi_output=True,
                    y_numeric=is_regressor(self),
                )
        else:
            if first:
                self._encoder = None
            options: dict[str, Any] = {} if y is None else {"multi_output": True}
            found = validate_data(
                self,
                X,
                "no_validation" if y is None else y,
                accept_sparse="csr",
                dtype=(np.float64, np.float32),
                ensure_all_finite="allow-nan",
                reset=first,
                **options,
                **({} if y is None else {"y_numeric": is_regressor(self)}),
            )
            X, y = (found, None) if y is None else found
        if sparse.issparse(X) and math.prod(X.shape) * X.dtype.itemsize <= DENSE:
            X = X.toarray()
        if sparse.issparse(X):
            if np.isnan(X.data).any():
                raise self._refuse("missing values (NaN) are for dense inputs; fill them")
            return X, y
        if first:
            self._gaps = Gaps().fit(X)
        return self._gaps(X), y

    def _checked(self, X: Any, y: Any, sample_weight: Any, groups: Any, first: bool) -> Data:
        """Without the rows whose weight is zero."""
        if y is None:
            raise self._refuse("requires y to be passed, but the target y is None")
        gaps = missing_labels(y)
        if len(gaps):
            raise self._refuse(
                f"y has no label in {len(gaps)} rows (the first is row {gaps[0]}); leave them out"
            )
        X, y = self._numbers(X, y, first)
        weights = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
        if groups is not None:
            check_consistent_length(X, groups)
            groups = np.unique(np.asarray(groups), return_inverse=True)[1]
            if groups.max() < 1:
                raise self._refuse("groups: all rows are in one group; there must be at least two")
        used = np.flatnonzero(weights > 0)
        if not len(used):
            raise self._refuse("all sample weights are zero; at least some rows must count")
        n, splits = len(weights), None
        if self.cv is not None and not isinstance(self.cv, Integral):
            made = check_cv(self.cv, y, classifier=is_classifier(self))
            splits = list(made.split(X, y, groups))
        data = Data(X, y, weights, groups, np.arange(n), n, splits)
        return data if len(used) == len(weights) else data.take(used, weights[used])

    def _split(self, targets: Targets, seed: int) -> tuple[Any, Any]:
        """Numbers of the rows to train on and to hold out."""
        n, labels = len(targets.y), targets.y.ravel() if targets.single else None
        if round(n * self.validation_fraction) < 2:
            raise self._refuse(
                f"validation_fraction={self.validation_fraction} of {n} rows is not two; raise it, "
                "or use a rule that holds nothing out"
            )
        if labels is not None and np.unique(labels, return_counts=True)[1].min() < 2:
            labels = None
        try:
            return tuple(
                train_test_split(
                    np.arange(n),
                    test_size=self.validation_fraction,
                    random_state=seed,
                    stratify=labels,
                )
            )
        except ValueError as error:
            raise self._refuse(f"early_stopping='validation': {error}") from error
