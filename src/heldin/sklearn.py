"""Neural networks and linear models for scikit-learn that train on every row.

They are called as scikit-learn's own. Where those hold rows out to know when to stop, these stop
without: change the import, keep the rows.

>>> from heldin.sklearn import MLPClassifier
>>> from sklearn.datasets import load_iris
>>> X, y = load_iris(return_X_y=True)
>>> model = MLPClassifier(random_state=0).fit((X - X.mean(0)) / X.std(0), y)
>>> model.stopping_rule_
'folds'
>>> model.estimate_ < 0.2                    # of the loss on new rows, without a held-out row
True
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

try:
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
except ImportError as error:
    raise ImportError(
        f"heldin.sklearn: {error.name} is not installed; pip install 'heldin[sklearn]'"
    ) from error
import torch
from torch import nn

from ._estimators import Estimator, Layers, Targets
from ._network import Pace

__all__ = ["LinearRegression", "LogisticRegression", "MLPClassifier", "MLPRegressor"]


class _Classifier(ClassifierMixin):  # type: ignore[misc]
    """From labels to targets and back."""

    class_weight: Any
    classes_: Any
    n_outputs_: int

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_label = True
        return tags

    def _targets(self, y: Any, first: bool) -> Targets:
        me: Any = self
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
            raise me._refuse(f"labels must be one for each row, got an array of shape {y.shape}")
        if first:
            self.classes_ = np.unique(y)
        unknown = np.setdiff1d(y, self.classes_)
        if len(unknown):
            raise me._refuse(f"y has labels that are not among classes_: {unknown.tolist()}")
        if len(self.classes_) < 2:
            raise me._refuse(
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
        me: Any = self
        if self.class_weight is None:
            return weights
        if not targets.single:
            raise me._refuse("class_weight is for one class per row; use sample_weight")
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
        me: Any = self
        return me._fit(X, y, sample_weight)

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
        me: Any = self
        _check_partial_fit_first_call(self, classes)
        return me._partial_fit(X, y, sample_weight)

    def predict(self, X: Any) -> Any:
        """(n,) labels, or (n, labels) zeros and ones."""
        shares = self.predict_proba(X)
        if self._several:
            return (shares > 0.5).astype(int)
        return self.classes_[shares.argmax(1)]

    def predict_proba(self, X: Any) -> Any:
        """(n, classes) probabilities, in the order of `classes_`."""
        me: Any = self
        outputs = me._outputs(X)
        if outputs.shape[1] > 1 and not self._several:
            return softmax(outputs, axis=1)
        shares = expit(outputs)
        return shares if self._several else np.hstack([1 - shares, shares])

    def predict_log_proba(self, X: Any) -> Any:
        """(n, classes) logarithms of the probabilities."""
        with np.errstate(divide="ignore"):
            return np.log(self.predict_proba(X))


class _Regressor(RegressorMixin):  # type: ignore[misc]
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
        me: Any = self
        return me._fit(X, y, sample_weight)

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Any:
        """Train for one pass over the rows given; no rule stops it.

        Args:
            X: (n, features), dense or sparse.
            y: (n,) or (n, outputs) numbers.
            sample_weight: (n,).

        Returns:
            The estimator.
        """
        me: Any = self
        return me._partial_fit(X, y, sample_weight)

    def predict(self, X: Any) -> Any:
        """(n,) or (n, outputs) numbers."""
        me: Any = self
        outputs = me._outputs(X)
        return outputs[:, 0] if self._one_dimensional else outputs


class _Hidden(Estimator):
    """Weights layer by layer, as scikit-learn's MLPs keep them."""

    def _layers(self) -> Layers:
        return list(zip(self.coefs_, self.intercepts_, strict=True))

    def _keep_layers(self, layers: Layers) -> None:
        self.coefs_ = [weight for weight, _ in layers]
        self.intercepts_ = [bias for _, bias in layers]
        self.n_layers_ = len(layers) + 1


class _Linear(Estimator):
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


class MLPClassifier(_Classifier, _Hidden):
    """A neural network for classes, called as scikit-learn's `MLPClassifier`.

    It trains on every row. Which rule stops it is `early_stopping`:

    - "auto", or True: five shadow models in lock-step for fewer than 1,000 rows, one shadow above;
      see `heldin.stopping`. Where that does not fit into memory, "evidence".
    - "folds", "shadow", "leave-one-out": that rule, see `heldin.FoldStopping`,
      `heldin.ShadowStopping`, `heldin.LeaveOneOutStopping`.
    - "evidence": `heldin.EvidenceStopping` over whole epochs. The fastest.
    - "validation": holds `validation_fraction` of the rows out and watches the loss there, with
      `n_iter_no_change` and `tol`.
    - False: until the training loss has not improved by `tol` for `n_iter_no_change` epochs.

    Equal rows are put together, with their weights added: a row given twice counts as a row of
    weight 2 (not with shuffle=False, and not in sparse inputs too large to be made dense).

    Args:
        hidden_layer_sizes, activation, solver, alpha, batch_size, learning_rate,
            learning_rate_init, power_t, max_iter, shuffle, random_state, tol, verbose, warm_start,
            momentum, nesterovs_momentum, validation_fraction, beta_1, beta_2, epsilon,
            n_iter_no_change: as in scikit-learn, but for solver="lbfgs", which is refused, and
            max_iter, a limit that the rule should not reach.
        early_stopping: the rule.
        class_weight: None, "balanced" or a mapping from labels to weights.

    Attributes:
        classes_, coefs_, intercepts_, n_iter_, loss_, loss_curve_, t_, n_layers_, n_outputs_,
            out_activation_: as in scikit-learn. Losses are without the penalty.
        stopping_rule_, stopping_choice_, stopping_reason_: the rule, why it was this one, and what
            it said at the end.
        n_steps_, best_step_: optimiser steps taken, and the one whose weights were kept.
        evidence_curve_: the criterion after each epoch (early_stopping="evidence"), or None.
        estimate_, estimate_error_, estimate_curve_: estimated loss on new rows, its standard error,
            and the estimate at every check, for the rules that have one, or None.
        history_: the rule's own record, with `plot()`.

    >>> from sklearn.datasets import load_breast_cancer
    >>> from sklearn.pipeline import make_pipeline
    >>> from sklearn.preprocessing import StandardScaler
    >>> X, y = load_breast_cancer(return_X_y=True)
    >>> model = make_pipeline(StandardScaler(), MLPClassifier((20,), random_state=0))
    >>> model.fit(X[:200], y[:200]).score(X[200:], y[200:]) > 0.93
    True
    """

    def __init__(
        self,
        hidden_layer_sizes: Any = (100,),
        activation: str = "relu",
        *,
        solver: str = "adam",
        alpha: float = 0.0001,
        batch_size: Any = "auto",
        learning_rate: str = "constant",
        learning_rate_init: float = 0.001,
        power_t: float = 0.5,
        max_iter: int = 1000,
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
        class_weight: Any = None,
    ) -> None:
        self._remember(locals())


class MLPRegressor(_Regressor, _Hidden):
    """A neural network for numbers, called as scikit-learn's `MLPRegressor`.

    See `MLPClassifier` for arguments and attributes; the loss is the mean squared error. Scale
    targets that are far from 1, as for scikit-learn's.

    >>> from sklearn.compose import TransformedTargetRegressor
    >>> from sklearn.datasets import load_diabetes
    >>> from sklearn.preprocessing import StandardScaler
    >>> X, y = load_diabetes(return_X_y=True, scaled=True)
    >>> network = MLPRegressor((20,), random_state=0)
    >>> model = TransformedTargetRegressor(network, transformer=StandardScaler())
    >>> model.fit(20 * X[:300], y[:300]).score(20 * X[300:], y[300:]) > 0.4
    True
    """

    def __init__(
        self,
        hidden_layer_sizes: Any = (100,),
        activation: str = "relu",
        *,
        solver: str = "adam",
        alpha: float = 0.0001,
        batch_size: Any = "auto",
        learning_rate: str = "constant",
        learning_rate_init: float = 0.001,
        power_t: float = 0.5,
        max_iter: int = 1000,
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
    ) -> None:
        self._remember(locals())


class LogisticRegression(_Classifier, _Linear):
    """Linear classification that is regularised by stopping, not by a penalty.

    Inputs are standardised inside for training, so that their units do not matter; `coef_` and
    `intercept_` are for the inputs as given. For other arguments and attributes see
    `MLPClassifier`.

    Args:
        fit_intercept: whether there is one.

    Attributes:
        coef_: (1, features) for two classes, else (classes, features).
        intercept_: (1,) or (classes,).

    >>> from sklearn.datasets import load_breast_cancer
    >>> X, y = load_breast_cancer(return_X_y=True)
    >>> model = LogisticRegression(random_state=0).fit(X[:200], y[:200])
    >>> model.coef_.shape
    (1, 30)
    >>> model.score(X[200:], y[200:]) > 0.93
    True
    """

    def __init__(
        self,
        *,
        fit_intercept: bool = True,
        solver: str = "adam",
        alpha: float = 0.0,
        batch_size: Any = "auto",
        learning_rate: str = "constant",
        learning_rate_init: float = 0.01,
        power_t: float = 0.5,
        max_iter: int = 1000,
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
        class_weight: Any = None,
    ) -> None:
        self._remember(locals())

    def decision_function(self, X: Any) -> Any:
        """(n,) for two classes, else (n, classes): the logarithms of odds."""
        outputs = self._outputs(X)
        return outputs[:, 0] if self.n_outputs_ == 1 else outputs


class LinearRegression(_Regressor, _Linear):
    """Least squares that is regularised by stopping on the way to the solution.

    Inputs are standardised inside for training, and Adam's steps are in units of the targets'
    spread, so that no units matter; `coef_` and `intercept_` are for the inputs as given. For other
    arguments and attributes see `MLPClassifier`; the loss is the mean squared error.

    Args:
        fit_intercept: whether there is one.

    Attributes:
        coef_: (features,), or (outputs, features) for targets with two dimensions.
        intercept_: a number, or (outputs,).

    >>> from sklearn.datasets import load_diabetes
    >>> X, y = load_diabetes(return_X_y=True)
    >>> model = LinearRegression(random_state=0).fit(X[:300], y[:300])
    >>> model.score(X[300:], y[300:]) > 0.45
    True
    """

    def __init__(
        self,
        *,
        fit_intercept: bool = True,
        solver: str = "adam",
        alpha: float = 0.0,
        batch_size: Any = "auto",
        learning_rate: str = "constant",
        learning_rate_init: float = 0.01,
        power_t: float = 0.5,
        max_iter: int = 1000,
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
    ) -> None:
        self._remember(locals())

    def _begin(self, model: nn.Sequential, pace: Pace, y: Any, weights: Any) -> Pace:
        middle = np.average(y, axis=0, weights=weights)
        if self.fit_intercept:
            (layer,) = model
            with torch.no_grad():
                layer.bias.copy_(torch.from_numpy(middle))
        centre = middle if self.fit_intercept else 0.0
        spread = float(np.sqrt(np.average((y - centre) ** 2, axis=0, weights=weights).mean()))
        if self.solver != "adam" or spread == 0.0:
            return pace
        return replace(pace, learning_rate_init=self.learning_rate_init * spread)

    def _keep_layers(self, layers: Layers) -> None:
        super()._keep_layers(layers)
        if self._one_dimensional:
            self.coef_, self.intercept_ = self.coef_[0], self.intercept_[0]
