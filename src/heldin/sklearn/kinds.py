"""Targets that are classes or numbers, and weights of networks or linear models."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.special import expit, softmax
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.preprocessing import StandardScaler
from sklearn.utils.class_weight import compute_class_weight
from sklearn.utils.multiclass import (
    _check_partial_fit_first_call,
    check_classification_targets,
    type_of_target,
)
from sklearn.utils.validation import column_or_1d
from torch import nn

from .base import Estimator, Layers, Targets

__all__ = ["Classifier", "Hidden", "Linear", "Regressor"]


class Classifier(ClassifierMixin, Estimator):  # type: ignore[misc]
    """From labels to targets and back."""

    class_weight: Any
    classes_: Any
    n_outputs_: int

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_label = True
        return tags

    def _targets(self, y: Any, first: bool) -> Targets:
        if y.ndim == 2 and y.shape[1] == 1:
            y = column_or_1d(y, warn=True)
        check_classification_targets(y)
        if type_of_target(y) == "multilabel-indicator":
            y = np.asarray(y.toarray() if hasattr(y, "toarray") else y, np.float64)
            if first:
                self.classes_ = np.arange(y.shape[1])
            self.n_outputs_, self.out_activation_, self._several = y.shape[1], "logistic", True
            return Targets(y, y.shape[1], nn.BCEWithLogitsLoss())
        if y.ndim != 1:
            raise self._refuse(f"labels must be one for each row, got an array of shape {y.shape}")
        if first:
            self.classes_ = np.unique(y)
        unknown = np.setdiff1d(y, self.classes_)
        if len(unknown):
            raise self._refuse(f"y has labels that are not among classes_: {unknown.tolist()}")
        if len(self.classes_) < 2:
            raise self._refuse(
                "there must be samples of at least 2 classes, but the data contains only one "
                f"class: {self.classes_[0]!r}"
            )
        codes = np.searchsorted(self.classes_, y).astype(np.int64)
        self._several = False
        if len(self.classes_) == 2:
            self.n_outputs_, self.out_activation_ = 1, "logistic"
            return Targets(codes[:, None].astype(np.float64), 1, nn.BCEWithLogitsLoss(), True)
        self.n_outputs_, self.out_activation_ = len(self.classes_), "softmax"
        return Targets(codes, len(self.classes_), nn.CrossEntropyLoss(), True)

    def _weigh(self, targets: Targets, weights: Any) -> Any:
        if self.class_weight is None:
            return weights
        if not targets.single:
            raise self._refuse("class_weight is for one class per row; use sample_weight")
        codes = targets.y.ravel().astype(int)
        each = compute_class_weight(
            self.class_weight, classes=self.classes_, y=self.classes_[codes], sample_weight=weights
        )
        return weights * each[codes]

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Any:
        """Train on all rows until the rule asks to stop.

        Args:
            X: (n, features), dense or sparse.
            y: (n,) labels, or (n, labels) zeros and ones.
            sample_weight: (n,).

        Returns:
            The estimator.
        """
        return self._fit(X, y, sample_weight)

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None, classes: Any = None) -> Any:
        """Train for one pass over the rows given; no rule stops it.

        Args:
            X: (n, features), dense or sparse.
            y: (n,) labels, or (n, labels) zeros and ones.
            sample_weight: (n,).
            classes: all labels that there will be; needed in the first call.

        Returns:
            The estimator.
        """
        _check_partial_fit_first_call(self, classes)
        return self._partial_fit(X, y, sample_weight)

    def predict(self, X: Any) -> Any:
        """(n,) labels, or (n, labels) zeros and ones."""
        shares = self.predict_proba(X)
        if self._several:
            return (shares > 0.5).astype(int)
        return self.classes_[shares.argmax(1)]

    def predict_proba(self, X: Any) -> Any:
        """(n, classes) probabilities, in the order of `classes_`."""
        outputs = self._outputs(X)
        if outputs.shape[1] > 1 and not self._several:
            return softmax(outputs, axis=1)
        shares = expit(outputs)
        return shares if self._several else np.hstack([1 - shares, shares])

    def predict_log_proba(self, X: Any) -> Any:
        """(n, classes) logarithms of the probabilities."""
        with np.errstate(divide="ignore"):
            return np.log(self.predict_proba(X))


class Regressor(RegressorMixin, Estimator):  # type: ignore[misc]
    """From numbers to targets and back."""

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def _targets(self, y: Any, first: bool) -> Targets:
        self._one_dimensional = y.ndim == 1
        y = y.reshape(len(y), -1).astype(np.float64)
        self.n_outputs_, self.out_activation_ = y.shape[1], "identity"
        return Targets(y, y.shape[1], nn.MSELoss())

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Any:
        """Train on all rows until the rule asks to stop.

        Args:
            X: (n, features), dense or sparse.
            y: (n,) or (n, outputs) numbers.
            sample_weight: (n,).

        Returns:
            The estimator.
        """
        return self._fit(X, y, sample_weight)

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Any:
        """Train for one pass over the rows given; no rule stops it.

        Args:
            X: (n, features), dense or sparse.
            y: (n,) or (n, outputs) numbers.
            sample_weight: (n,).

        Returns:
            The estimator.
        """
        return self._partial_fit(X, y, sample_weight)

    def predict(self, X: Any) -> Any:
        """(n,) or (n, outputs) numbers."""
        outputs = self._outputs(X)
        return outputs[:, 0] if self._one_dimensional else outputs


class Hidden(Estimator):
    """Weights layer by layer, as scikit-learn's MLPs keep them."""

    def _layers(self) -> Layers:
        return list(zip(self.coefs_, self.intercepts_, strict=True))

    def _keep_layers(self, layers: Layers) -> None:
        self.coefs_ = [weight for weight, _ in layers]
        self.intercepts_ = [bias for _, bias in layers]
        self.n_layers_ = len(layers) + 1


class Linear(Estimator):
    """One layer. Inputs are standardised for training, and the weights are those without."""

    coef_: Any
    intercept_: Any

    def _scale(self, X: Any, weights: Any, first: bool) -> Any:
        dense = isinstance(X, np.ndarray)
        if first:
            self._scaler = StandardScaler(with_mean=dense and self.fit_intercept)
            self._scaler.fit(X, sample_weight=weights)
        if self._scaler.with_mean and not dense:
            raise self._refuse("the first rows were dense, so these must be")
        return self._scaler.transform(X)

    def _scaled(self, layers: Layers, back: bool) -> Layers:
        ((weight, bias),) = layers
        spread = self._scaler.scale_[:, None].astype(weight.dtype)
        plain = weight / spread if back else weight
        moved = self._scaler.mean_ @ plain if self._scaler.with_mean else 0.0
        if bias is not None:
            bias = (bias - moved if back else bias + moved).astype(weight.dtype)
        return [(plain if back else weight * spread, bias)]

    def _layers(self) -> Layers:
        bias = np.atleast_1d(self.intercept_) if self.fit_intercept else None
        return [(np.atleast_2d(self.coef_).T, bias)]

    def _keep_layers(self, layers: Layers) -> None:
        ((weight, bias),) = layers
        self.coef_ = np.ascontiguousarray(weight.T)
        self.intercept_ = np.zeros(weight.shape[1]) if bias is None else bias
