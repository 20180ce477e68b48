"""Targets that are classes or numbers, and weights of networks or linear models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from scipy.special import expit, softmax
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.utils.class_weight import compute_class_weight
from sklearn.utils.multiclass import (
    _check_partial_fit_first_call,
    check_classification_targets,
    type_of_target,
)
from sklearn.utils.validation import column_or_1d
from torch import nn

from heldin.tables.assess import Assessment, wider

from .base import Estimator, Layers
from .data import Data, Targets
from .estimates import Interval, calibration, class_scores, number_scores
from .inputs import CLIP, Scaler

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

    def fit(self, X: Any, y: Any, sample_weight: Any = None, groups: Any = None) -> Any:
        """Train on all rows until the rule asks to stop.

        Args:
            X: (n, features), dense or sparse; or a DataFrame, with categories, too.
            y: (n,) labels, or (n, labels) zeros and ones.
            sample_weight: (n,).
            groups: (n,) names or numbers; rows with the same one (of a patient, say) are in the
                same fold.

        Returns:
            The estimator.
        """
        return self._fit(X, y, sample_weight, groups)

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
        """(n, classes) probabilities, in the order of `classes_`: the mean over the networks."""
        outputs = self._outputs(X)
        if outputs.shape[2] > 1 and not self._several:
            return softmax(outputs, axis=2).mean(0)
        return self._both(expit(outputs).mean(0))

    def _both(self, shares: Any) -> Any:
        return shares if self._several else np.hstack([1 - shares, shares])

    def _assessed(self, found: Assessment | None, data: Data, targets: Targets) -> None:
        self.oof_predictions_ = self.shrinkage_ = self.calibration_curve_ = None
        self.estimates_: dict[str, Interval] | None = None
        if found is None:
            return
        self.shrinkage_ = 1 - found.share
        shares = found.predictions.numpy()
        shares = shares if shares.shape[1] > 1 else self._both(shares)
        self.oof_predictions_ = given_rows(shares, data)
        there = np.isfinite(shares).all(1)
        self.estimates_ = {}
        if not self._several:
            codes = data.y.ravel()[there].astype(int)
            self.estimates_ = class_scores(shares[there], codes, wider(len(codes)))
            self.calibration_curve_ = calibration(shares[there], codes)

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

    def fit(self, X: Any, y: Any, sample_weight: Any = None, groups: Any = None) -> Any:
        """Train on all rows until the rule asks to stop.

        Args:
            X: (n, features), dense or sparse; or a DataFrame, with categories, too.
            y: (n,) or (n, outputs) numbers.
            sample_weight: (n,).
            groups: (n,) names or numbers; rows with the same one (of a patient, say) are in the
                same fold.

        Returns:
            The estimator.
        """
        return self._fit(X, y, sample_weight, groups)

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
        """(n,) or (n, outputs) numbers: the mean over the networks."""
        outputs = self._outputs(X).mean(0)
        return outputs[:, 0] if self._one_dimensional else outputs

    def _scale_targets(self, targets: Targets, weights: Any, first: bool) -> Targets:
        """Steps are then in units of the targets' spread, so that these do not matter."""
        y = targets.y
        if first:
            self._centre, self._spread = np.zeros(y.shape[1]), 1.0
            if getattr(self, "standardize", True):
                if self.fit_intercept:
                    self._centre = np.average(y, axis=0, weights=weights)
                squares = np.average((y - self._centre) ** 2, axis=0, weights=weights)
                self._spread = float(np.sqrt(squares.mean())) or 1.0
            self._unit = self._spread**2
        return replace(targets, y=(y - self._centre) / self._spread)

    def _scaled(self, layers: Layers, back: bool) -> Layers:
        if not back:
            layers = super()._scaled(layers, back)
        *others, (weight, bias) = layers
        factor = self._spread if back else 1 / self._spread
        if bias is not None:
            kind, centre = weight.dtype, self._centre
            bias = (bias * factor + centre if back else (bias - centre) * factor).astype(kind)
        layers = [*others, ((weight * factor).astype(weight.dtype), bias)]
        return super()._scaled(layers, back) if back else layers

    def _assessed(self, found: Assessment | None, data: Data, targets: Targets) -> None:
        self.oof_predictions_ = self.shrinkage_ = None
        self.estimates_: dict[str, Interval] | None = None
        if found is None:
            return
        self.shrinkage_ = 1 - found.share
        predicted = found.predictions.numpy() * self._spread + self._centre
        there = np.isfinite(predicted).all(1)
        self.estimates_ = number_scores(predicted[there], data.y[there], wider(int(there.sum())))
        kept = given_rows(predicted, data)
        self.oof_predictions_ = kept[:, 0] if self._one_dimensional else kept


def given_rows(values: Any, data: Data) -> Any:
    """(given, ...): of the rows as they were given; the mean of a row's copies, nan if it has none.

    >>> data = Data(None, None, None, None, np.array([0, 0, 2]), 3)
    >>> given_rows(np.array([[1.0], [3.0], [5.0]]), data).ravel()
    array([ 2., nan,  5.])
    """
    total = np.zeros((data.given, values.shape[1]))
    np.add.at(total, data.index, values)
    count = np.bincount(data.index, minlength=data.given)[:, None]
    return np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0)


class Hidden(Estimator):
    """Weights layer by layer, as scikit-learn's MLPs keep them, for standardised inputs."""

    standardize: bool
    activation: str
    activation_: str

    def _between(self) -> str:
        return self.activation_

    def _settle(self, targets: Targets, few: bool) -> None:
        bounded = few and not isinstance(targets.loss, nn.MSELoss)
        units = "tanh" if bounded else "relu"
        self.activation_ = units if self.activation == "auto" else self.activation

    def _scale(self, X: Any, weights: Any, first: bool) -> Any:
        if first:
            self._scaler = None
            if self.standardize:
                dense = isinstance(X, np.ndarray)
                self._scaler = Scaler(CLIP, with_mean=dense).fit(X, weights)
        return self._prepared(X)

    def _prepared(self, X: Any) -> Any:
        if self._scaler is None:
            return X
        if self._scaler.standard.with_mean and not isinstance(X, np.ndarray):
            raise self._refuse("the first rows were dense, so these must be")
        return self._scaler(X)

    def _precision(self, X: Any) -> Any:
        """Standardised inputs need no double precision, which costs twice the time."""
        return X.dtype if self._scaler is None else np.dtype(np.float32)

    def _all_layers(self) -> list[Layers]:
        return [list(member) for member in self.members_]

    def _keep_layers(self, members: list[Layers]) -> None:
        self.members_ = members
        self.coefs_ = [weight for weight, _ in members[-1]]
        self.intercepts_ = [bias for _, bias in members[-1]]
        self.n_layers_ = len(members[-1]) + 1


class Linear(Estimator):
    """One layer. Inputs are standardised for training, and the weights are those without."""

    coef_: Any
    intercept_: Any

    def _scale(self, X: Any, weights: Any, first: bool) -> Any:
        dense = isinstance(X, np.ndarray)
        if first:
            self._scaler = Scaler(with_mean=dense and self.fit_intercept).fit(X, weights)
        if self._scaler.standard.with_mean and not dense:
            raise self._refuse("the first rows were dense, so these must be")
        return self._scaler(X)

    def _scaled(self, layers: Layers, back: bool) -> Layers:
        ((weight, bias),) = layers
        scaler = self._scaler.standard
        spread = scaler.scale_[:, None].astype(weight.dtype)
        plain = weight / spread if back else weight
        moved = scaler.mean_ @ plain if scaler.with_mean else 0.0
        if bias is not None:
            bias = (bias - moved if back else bias + moved).astype(weight.dtype)
        return [(plain if back else weight * spread, bias)]

    def _all_layers(self) -> list[Layers]:
        bias = np.atleast_1d(self.intercept_) if self.fit_intercept else None
        return [[(np.atleast_2d(self.coef_).T, bias)]]

    def _keep_layers(self, members: list[Layers]) -> None:
        ((weight, bias),) = members[-1]
        self.coef_ = np.ascontiguousarray(weight.T)
        self.intercept_ = np.zeros(weight.shape[1]) if bias is None else bias
