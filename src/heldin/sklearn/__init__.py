"""Neural networks and linear models for scikit-learn that train on every row.

They are called as scikit-learn's own. Where those hold rows out to know when to stop, these stop
without: change the import, keep the rows.

>>> from heldin.sklearn import LinearRegression
>>> from sklearn.datasets import load_diabetes
>>> model = LinearRegression(random_state=0).fit(*load_diabetes(return_X_y=True))
>>> model.stopping_rule_
'folds'
>>> 2500 < model.estimate_ < 3500            # of the loss on new rows, without a held-out row
True
"""

from __future__ import annotations

from typing import Any

try:
    import sklearn as _sklearn  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"heldin.sklearn: {error.name} is not installed; pip install 'heldin[sklearn]'"
    ) from error

from .base import Layers
from .kinds import Classifier, Hidden, Linear, Regressor

__all__ = ["LinearRegression", "LogisticRegression", "MLPClassifier", "MLPRegressor"]


class MLPClassifier(Classifier, Hidden):
    """Neural networks for classes, called as scikit-learn's `MLPClassifier`.

    A committee of six networks trains in lock-step: one sees every row, each of the others misses a
    fifth of them, so that every row is new to one. (Up to 100 rows there are eleven, and each
    misses a tenth.) What they say of rows that are new to them tells when to stop, how far to
    shrink towards the classes' shares, and how good the committee will be; its prediction is the
    mean of their probabilities and costs six times that of one network. Where the networks are no
    better than the shares, a warning says so, and these are predicted.

    Which rule stops it is `early_stopping`:

    - "auto", or True: as above. Where six networks do not fit into 1 GB, one, by "evidence".
    - "folds": the same, or an error.
    - "shadow", "leave-one-out": one network by that rule, see `heldin.ShadowStopping`,
      `heldin.LeaveOneOutStopping`.
    - "evidence": `heldin.EvidenceStopping` over whole epochs. The fastest.
    - "validation": holds `validation_fraction` of the rows out and watches the loss there, with
      `n_iter_no_change` and `tol`.
    - False: until the training loss has not improved by `tol` for `n_iter_no_change` epochs.

    Equal rows are separate observations, and a row of weight 2 is two of them, where all weights
    are whole numbers (not with shuffle=False, and not in sparse inputs too large to be made dense).

    Args:
        hidden_layer_sizes, solver, alpha, batch_size, learning_rate,
            learning_rate_init, power_t, max_iter, shuffle, random_state, tol, verbose, warm_start,
            momentum, nesterovs_momentum, validation_fraction, beta_1, beta_2, epsilon,
            n_iter_no_change: as in scikit-learn, but for solver="lbfgs", which is refused, and
            max_iter, a limit that the rule should not reach. verbose may also be a function of the
            epoch, the training loss and what the rule says.
        activation: as in scikit-learn, or "auto": "tanh" for classes of up to 300 rows, else
            "relu" (and in `partial_fit`).
        weight_decay: share of the weights, times the rate, by which they shrink in each step (as in
            AdamW); None: 0.3, or 0 if there is a penalty alpha.
        early_stopping: the rule.
        committee: how many networks predict; "auto": six, up to 100 rows eleven. With 1, one that
            has seen every row, beside a shadow with the same start for each fold (for two of them,
            from 1,000 rows on; one, from 10,000). Where there are more networks than folds, these
            are drawn again.
        standardize: whether inputs are brought to mean 0 and standard deviation 1 and cut off at 4.
            Networks are then trained in single precision.
        cv: the folds: None (five, up to 100 rows ten, at random), their number, a splitter of
            scikit-learn, such as `TimeSeriesSplit` for rows in the order of time, or a list of
            splits. "auto" is then one network for each fold, and one more.
        class_weight: None, "balanced" or a mapping from labels to weights.

    Attributes:
        classes_, coefs_, intercepts_, n_iter_, loss_, loss_curve_, t_, n_layers_, n_outputs_,
            out_activation_, n_features_in_, feature_names_in_: as in scikit-learn. Losses are
            without the penalty.
        activation_: the one between the layers.
        members_: of each network, the weights and biases of its layers, for standardised inputs;
            `coefs_` and `intercepts_` are those of the one that has seen every row.
        oof_predictions_: (n, classes) predictions of each row by the network that it is new to (nan
            for rows of weight 0), or None with rules without folds.
        estimates_: by name ("accuracy", "auc") an estimate for new rows, with the ends of its
            95 % interval. From single networks: the committee is rather a bit better.
        calibration_curve_: predicted probabilities and how often they came true, out of fold.
        shrinkage_: how far the outputs were moved to those of the constant, 0 to 1.
        stopping_rule_, stopping_choice_, stopping_reason_: the rule, why it was this one, and what
            it said at the end.
        stopped_: whether the rule asked to stop, before `max_iter` epochs were over.
        n_steps_, best_step_: optimiser steps taken, and the one whose weights were kept.
        evidence_curve_: the criterion after each epoch (early_stopping="evidence"), or None.
        estimate_, estimate_error_: estimated loss on new rows (of the committee) and its standard
            error, for the rules that have one, or None.
        estimate_curve_: that of a single network at every check.
        history_: the rule's own record, with `plot()`.

    >>> from sklearn.datasets import load_breast_cancer
    >>> X, y = load_breast_cancer(return_X_y=True)
    >>> model = MLPClassifier((10,), learning_rate_init=0.02, random_state=0)
    >>> model.fit(X[:200], y[:200]).score(X[200:], y[200:]) > 0.93
    True
    >>> value, low, high = model.estimates_["accuracy"]
    >>> 0.9 < low < value < high
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
        committee: Any = "auto",
        standardize: bool = True,
        cv: Any = None,
        class_weight: Any = None,
    ) -> None:
        self._remember(locals())


class MLPRegressor(Regressor, Hidden):
    """Neural networks for numbers, called as scikit-learn's `MLPRegressor`.

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
        committee: Any = "auto",
        standardize: bool = True,
        cv: Any = None,
    ) -> None:
        self._remember(locals())


class LogisticRegression(Classifier, Linear):
    """Linear classification that is regularised by stopping, not by a penalty.

    Inputs are standardised inside for training, so that their units do not matter; `coef_` and
    `intercept_` are for the inputs as given. Training starts at the classes' shares, and is stopped
    and shrunk by five shadows that miss a fifth of the rows each (ten that miss a tenth, up to 100
    rows; two, from 1,000 rows on, and one from 10,000); there is no committee.

    For other arguments and attributes see `MLPClassifier`.

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
        cv: Any = None,
        class_weight: Any = None,
    ) -> None:
        self._remember(locals())

    def decision_function(self, X: Any) -> Any:
        """(n,) for two classes, else (n, classes): the logarithms of odds."""
        outputs = self._outputs(X)[-1]
        return outputs[:, 0] if self.n_outputs_ == 1 else outputs


class LinearRegression(Regressor, Linear):
    """Least squares that is regularised by stopping on the way to the solution.

    Inputs and targets are standardised inside for training, so that no units matter; `coef_` and
    `intercept_` are for both as given. See `LogisticRegression` for how it is stopped; for other
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
        cv: Any = None,
    ) -> None:
        self._remember(locals())

    def _keep_layers(self, members: list[Layers]) -> None:
        super()._keep_layers(members)
        if self._one_dimensional:
            self.coef_, self.intercept_ = self.coef_[0], self.intercept_[0]
