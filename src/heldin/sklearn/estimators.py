"""Estimators of classes and of numbers: targets, predictions, scores."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy.special import expit, softmax
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.calibration import calibration_curve
from sklearn.utils.class_weight import compute_class_weight
from sklearn.utils.multiclass import (
    _check_partial_fit_first_call,
    check_classification_targets,
    type_of_target,
)
from sklearn.utils.validation import column_or_1d
from torch import nn

from .base import Estimator, Score
from .data import Data, Targets

__all__ = ["MLPClassifier", "MLPRegressor"]

BINS = 10  # of the calibration curve
SMALL, LARGE = 1e-100, 1e100  # deviations whose squares, and sums of these, are in range


class MLPClassifier(ClassifierMixin, Estimator):  # type: ignore[misc]
    """A neural network for classes, called as scikit-learn's `MLPClassifier`.

    The network trains on every row by `heldin.EarlyStopping`. Beside it, in one stack of weights,
    five shadows train without a fifth of the rows each (up to 100 rows: ten, without a tenth), so
    that every row is out of fold for one. The out-of-fold losses decide when to stop, by which
    temperature to divide the logits, and what to expect on new rows. If they are no lower than
    those of the class frequencies, a warning says so, and the frequencies are predicted.

    `early_stopping` is the rule:

    - "auto", or True: as above; if the networks do not fit into 1 GB, by "evidence".
    - "folds": as above, or an error.
    - "evidence": by `heldin.rules.Evidence` over whole epochs; no shadows, no estimate.
    - "validation": by the loss on `validation_fraction` of the rows, which are held out, with
      `n_iter_no_change` and `tol`.
    - False: until the training loss has not improved by `tol` for `n_iter_no_change` epochs.
    - A rule of `heldin.rules`: Auto(memory=), Folds(folds=3), Evidence(...).

    Rows that are equal in every input and in the target share a fold: they are trained on as one
    row with the sum of their weights, so that a row given twice is a row of weight 2. Equal rows
    that chance explains, in tables of few categories, are separate observations. (Sparse inputs
    too large to be made dense have no folds, and their rows are not compared.)

    Args:
        hidden_layer_sizes, solver, alpha, batch_size, learning_rate, learning_rate_init, power_t,
            max_iter, shuffle, random_state, tol, verbose, warm_start, momentum,
            nesterovs_momentum, validation_fraction, beta_1, beta_2, epsilon, n_iter_no_change: as
            in scikit-learn, with these differences. solver="lbfgs" is refused. max_iter is a limit
            that the rule should not reach. No hidden layer, (), is a linear model. verbose may be a
            function of the epoch, the training loss and the status of the rule. warm_start is for
            rules without folds.
        activation: as in scikit-learn, or "auto": "tanh" for classes of up to 300 rows, else
            "relu" (and in `partial_fit`).
        weight_decay: decoupled weight decay, as in AdamW; None: 0.3, or 0 with a penalty alpha.
        early_stopping: the rule.
        standardize: whether inputs are scaled to mean 0 and standard deviation 1, cut off at 4, and
            used in single precision.
        cv: the folds: None (five, up to 100 rows ten, at random), their number, a splitter of
            scikit-learn that tests each row at most once, such as `TimeSeriesSplit` for rows in the
            order of time, or a list of such splits.
        class_weight: None, "balanced" or a mapping from labels to weights.
        metrics: more scores for `estimates_`: names of scikit-learn's scorers, or a mapping of
            names to functions of out-of-fold predictions and targets (tensors; the numbers of the
            classes); needs folds.
        monitor: what the weights are chosen by: "loss", or the name of a scikit-learn scorer, whose
            largest out-of-fold value is taken; needs folds.

    Attributes:
        classes_, coefs_, intercepts_, n_iter_, loss_, loss_curve_, t_, n_layers_, n_outputs_,
            out_activation_, n_features_in_, feature_names_in_: as in scikit-learn, for standardised
            inputs. Losses are without the penalty.
        activation_: the one between the layers.
        oof_predictions_: (n, classes) out-of-fold predictions (nan for rows of weight 0), or None
            for rules without folds.
        estimates_: the loss on new rows as "loss", "accuracy", "auc" and `metrics`, each a
            `heldin.Interval` by a bootstrap of out-of-fold rows, or of groups.
        run_: the finished `heldin.EarlyStopping`, with `report()`, `plan()`, `committee()` and so
            on, for rules with folds; its targets are standardised, and copies are one row. A pickle
            does not contain it. `heldin.compare` takes fitted estimators as they are.
        calibration_curve_: predicted probabilities and observed frequencies, out of fold.
        n_copies_: number of rows that repeat another one and share its fold.
        temperature_: by which the logits were divided; inf if the class frequencies are predicted;
            None for rules without folds.
        stopping_rule_, stopping_choice_, stopping_reason_: the rule, why it was chosen, and its
            last status.
        stopped_: whether the rule asked to stop before `max_iter` epochs were over.
        n_steps_, best_step_: optimiser steps taken, and the step whose weights were kept.
        evidence_curve_: the criterion after each epoch (early_stopping="evidence"), or None.
        estimate_, estimate_error_: estimated loss on new rows, and the width of its interval over
            3.92; None for rules without folds.
        estimate_curve_: the estimated loss at every check.
        history_: record of the rule, with `plot()`.

    >>> from sklearn.datasets import load_breast_cancer
    >>> X, y = load_breast_cancer(return_X_y=True)
    >>> model = MLPClassifier((10,), learning_rate_init=0.02, random_state=0)
    >>> model.fit(X[:200], y[:200]).score(X[200:], y[200:]) > 0.93
    True
    >>> accuracy = model.estimates_["accuracy"]
    >>> 0.9 < accuracy.low < accuracy.value < accuracy.high
    True
    """

    def __init__(
        self,
        hidden_layer_sizes: Any = (100,),
        activation: str = "auto",
        *,
        solver: str = "adam",
        alpha: float = 0.0,
        weight_decay: float | None = None,
        batch_size: Any = "auto",
        learning_rate: str = "constant",
        learning_rate_init: float = 0.003,
        power_t: float = 0.5,
        max_iter: int = 2000,
        shuffle: bool = True,
        random_state: Any = None,
        tol: float = 1e-4,
        verbose: Any = False,
        warm_start: bool = False,
        momentum: float = 0.9,
        nesterovs_momentum: bool = True,
        early_stopping: Any = "auto",
        validation_fraction: float = 0.1,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-8,
        n_iter_no_change: int = 10,
        standardize: bool = True,
        cv: Any = None,
        class_weight: Any = None,
        metrics: Any = None,
        monitor: str = "loss",
    ) -> None:
        self._set_parameters(locals())

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
            return Targets(y, nn.BCEWithLogitsLoss())
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
            return Targets(codes[:, None].astype(np.float64), nn.BCEWithLogitsLoss(), True)
        self.n_outputs_, self.out_activation_ = len(self.classes_), "softmax"
        return Targets(codes, nn.CrossEntropyLoss(), True)

    def _weigh(self, targets: Targets, weights: Any) -> Any:
        if self.class_weight is None:
            return weights
        if not targets.single:
            raise self._refuse("class_weight is for one class per row; use sample_weight")
        codes = targets.y.ravel().astype(int)
        class_weights = compute_class_weight(
            self.class_weight, classes=self.classes_, y=self.classes_[codes], sample_weight=weights
        )
        return weights * class_weights[codes]

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None, classes: Any = None) -> Any:
        """Train for one pass over the rows given; no rule stops it.

        Args:
            X, y, sample_weight: as in `fit`.
            classes: all labels that there will be; needed in the first call.

        Returns:
            The estimator.
        """
        _check_partial_fit_first_call(self, classes)
        return super().partial_fit(X, y, sample_weight)

    def predict(self, X: Any) -> Any:
        """Return (n,) labels, or (n, labels) zeros and ones."""
        shares = self.predict_proba(X)
        if self._several:
            return (shares > 0.5).astype(int)
        return self.classes_[shares.argmax(1)]

    def predict_proba(self, X: Any) -> Any:
        """Return (n, classes) probabilities, in the order of `classes_`."""
        return self._predictions(self._outputs(X))

    def _predictions(self, outputs: Any) -> Any:
        if outputs.shape[1] > 1 and not self._several:
            return softmax(outputs, axis=1)
        shares = expit(outputs)
        return shares if self._several else np.concatenate([1 - shares, shares], 1)

    def _assess(self, labels: Any, data: Data) -> None:
        super()._assess(labels, data)
        self.calibration_curve_ = None
        if self._record is not None and not self._several:
            rows = self._record.outputs.numpy(), self._record.targets.numpy()
            self.calibration_curve_ = calibration(*rows)

    def _truth(self, y: Any) -> Any:
        return (y if self._several else y.ravel()).astype(int)

    def _scores(self) -> Mapping[str, Score]:
        return {} if self._several else {"accuracy": _accuracy, "auc": _areas}

    def _row_losses(self, predicted: Any, y: Any) -> Any:
        wrong, rows = 1 - predicted, np.arange(len(y))
        chosen = np.where(y, predicted, wrong) if self._several else predicted[rows, y]
        losses = -np.log(np.maximum(chosen, np.finfo(float).tiny))
        return losses.reshape(len(y), -1).mean(1)

    def predict_log_proba(self, X: Any) -> Any:
        """Return the (n, classes) logarithms of the probabilities."""
        with np.errstate(divide="ignore"):
            return np.log(self.predict_proba(X))


class MLPRegressor(RegressorMixin, Estimator):  # type: ignore[misc]
    """A neural network for numbers, called as scikit-learn's `MLPRegressor`.

    See `MLPClassifier` for arguments and attributes; the loss is the mean squared error, the scores
    in `estimates_` are "rmse" and "r2". With `standardize`, targets are scaled inside, too; losses
    and estimates are those of the targets as given.

    >>> from sklearn.datasets import load_diabetes
    >>> X, y = load_diabetes(return_X_y=True)
    >>> model = MLPRegressor((10,), learning_rate_init=0.02, random_state=0).fit(X[:300], y[:300])
    >>> model.score(X[300:], y[300:]) > 0.4
    True
    """

    def __init__(
        self,
        hidden_layer_sizes: Any = (100,),
        activation: str = "auto",
        *,
        solver: str = "adam",
        alpha: float = 0.0,
        weight_decay: float | None = None,
        batch_size: Any = "auto",
        learning_rate: str = "constant",
        learning_rate_init: float = 0.003,
        power_t: float = 0.5,
        max_iter: int = 2000,
        shuffle: bool = True,
        random_state: Any = None,
        tol: float = 1e-4,
        verbose: Any = False,
        warm_start: bool = False,
        momentum: float = 0.9,
        nesterovs_momentum: bool = True,
        early_stopping: Any = "auto",
        validation_fraction: float = 0.1,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-8,
        n_iter_no_change: int = 10,
        standardize: bool = True,
        cv: Any = None,
        metrics: Any = None,
        monitor: str = "loss",
    ) -> None:
        self._set_parameters(locals())

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def _targets(self, y: Any, first: bool) -> Targets:
        self._one_dimensional = y.ndim == 1
        y = y.reshape(len(y), -1).astype(np.float64)
        size = float(np.abs(y - y.mean(0)).max())
        if size and not SMALL < size < LARGE:
            raise self._refuse(
                f"targets that differ by {size:.3g} have squares that are out of range; divide "
                f"them by {size:.0e}"
            )
        self.n_outputs_, self.out_activation_ = y.shape[1], "identity"
        return Targets(y, nn.MSELoss())

    def predict(self, X: Any) -> Any:
        """Return (n,) or (n, outputs) numbers."""
        return self._predictions(self._outputs(X))

    def _predictions(self, outputs: Any) -> Any:
        return outputs[:, 0] if self._one_dimensional else outputs

    def _truth(self, y: Any) -> Any:
        return y[:, 0] if self._one_dimensional else y

    def _scores(self) -> Mapping[str, Score]:
        return {"rmse": _root_mean_square, "r2": _r2}

    def _row_losses(self, predicted: Any, y: Any) -> Any:
        return np.square(predicted - y).reshape(len(y), -1).mean(1)


def _accuracy(shares: Any, codes: Any, weights: Any) -> float:
    return float(np.average(shares.argmax(1) == codes, weights=weights))


def _areas(shares: Any, codes: Any, weights: Any) -> float:
    """Return the area under the ROC curve; the mean over classes, each against the others."""
    areas = []
    for number in range(shares.shape[1]) if shares.shape[1] > 2 else [1]:
        truth = codes == number
        if truth.any() and not truth.all():
            levels, at = np.unique(shares[:, number], return_inverse=True)
            ones, zeros = (np.bincount(at, weights * part, len(levels)) for part in (truth, ~truth))
            below = zeros.cumsum() - zeros / 2  # a tie counts half
            areas.append((ones * below).sum() / (ones.sum() * zeros.sum()))
    return float(np.mean(areas)) if areas else math.nan


def _root_mean_square(predicted: Any, y: Any, weights: Any) -> float:
    squares = np.square(predicted.reshape(len(y), -1) - y.reshape(len(y), -1)).mean(1)
    return math.sqrt(np.average(squares, weights=weights))


def _r2(predicted: Any, y: Any, weights: Any) -> float:
    around = _root_mean_square(np.average(y, axis=0, weights=weights)[None] + 0 * y, y, weights)
    return 1 - (_root_mean_square(predicted, y, weights) / around) ** 2 if around else math.nan


def calibration(probabilities: Any, codes: Any) -> tuple[Any, Any]:
    """Return predicted probabilities and observed shares, in up to ten bins of equal counts.

    They are of the second class, or of the predicted class if there are more than two.
    """
    if probabilities.shape[1] == 2:
        predicted, truth = probabilities[:, 1], codes == 1
    else:
        predicted, truth = probabilities.max(1), probabilities.argmax(1) == codes
    bins = max(1, min(BINS, len(codes) // 10))
    predicted = np.clip(predicted, 0, 1)
    shares, means = calibration_curve(truth, predicted, n_bins=bins, strategy="quantile")
    return means, shares
