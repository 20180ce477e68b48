"""What the scikit-learn estimators share: from arrays to a trained network and back."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from scipy import sparse
from sklearn.base import BaseEstimator, is_regressor
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import train_test_split
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor, nn

from heldin.rules.estimated.choose import ESTIMATED_RULES
from heldin.state.estimates import EstimateHistory
from heldin.tables.mlp import Inputs, build_network, network_outputs, set_weights
from heldin.tables.trainer import Outcome, Report, Trainer, TrainingConfig

from .parameters import InvalidParameter, check_parameters

__all__ = ["Estimator", "Layers", "Targets"]

MOST_COPIES, MOST_ROWS = 20, 10_000  # up to which a weight is taken for a number of rows
DENSE = 2**28  # bytes up to which sparse inputs are made dense once, not batch by batch

Layers = list[tuple[Any, Any]]  # weights (inputs, outputs) and biases (outputs,) or None


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


class SparseRows:
    """Rows of a sparse matrix, made dense when they are asked for."""

    def __init__(self, matrix: Any) -> None:
        self.matrix = matrix.tocsr()

    def __len__(self) -> int:
        return int(self.matrix.shape[0])

    def __getitem__(self, index: Any, /) -> Tensor:
        rows = index.numpy() if isinstance(index, Tensor) else index
        return torch.from_numpy(self.matrix[rows].toarray())


def _inputs(X: Any) -> Inputs:
    return SparseRows(X) if sparse.issparse(X) else torch.tensor(X)  # a copy of what is read-only


def observations(X: Any, y: Any, weights: Any) -> tuple[Any, Any, Any]:
    """One row for each observation, in an order that depends on contents only.

    A row whose weight is a whole number is so many observations, so that a row given twice is the
    same as a row of weight 2, for every rule. Equal rows stay apart: in a table with few distinct
    rows a fold would else take every copy of one away. Weights are left as they are if one of them
    is not a whole number, or if the rows would become too many.

    >>> X, y, w = observations(np.array([[2.0], [1.0]]), np.array([0, 1]), np.array([2.0, 1.0]))
    >>> sorted(zip(X.ravel().tolist(), y.tolist(), w.tolist()))
    [(1.0, 1, 1.0), (2.0, 0, 1.0), (2.0, 0, 1.0)]
    """
    whole = bool((weights == np.floor(weights)).all())
    if whole and weights.sum() <= max(MOST_COPIES * len(weights), MOST_ROWS):
        each = np.repeat(np.arange(len(weights)), weights.astype(np.int64))
        X, y, weights = X[each], y[each], np.ones(len(each))
    rows = np.column_stack([np.asarray(X, np.float64), y, weights]) + 0.0  # no -0
    keys = np.ascontiguousarray(rows).view(np.dtype((np.void, rows.shape[1] * 8))).ravel()
    order = np.argsort(keys, kind="stable")
    return X[order], y[order], weights[order]


class Estimator(BaseEstimator):  # type: ignore[misc]
    """Fits a network; a subclass says what the targets are and where the weights are kept."""

    early_stopping: Any
    hidden_layer_sizes: Any = ()
    activation: str = "identity"
    fit_intercept: bool = True
    max_iter: int
    validation_fraction: float
    shuffle: bool
    random_state: Any
    warm_start: bool
    verbose: Any
    _optimizer_state: Any

    # -- what a subclass brings

    def _targets(self, y: Any, first: bool) -> Targets:
        raise NotImplementedError

    def _layers(self) -> Layers:
        raise NotImplementedError

    def _keep_layers(self, layers: Layers) -> None:
        raise NotImplementedError

    def _weigh(self, targets: Targets, weights: Any) -> Any:
        """Put the weights of classes in."""
        return weights

    def _scale(self, X: Any, weights: Any, first: bool) -> Any:
        """Change the inputs; `_layers` and `_keep_layers` are about the inputs as given."""
        return X

    def _scaled(self, layers: Layers, back: bool) -> Layers:
        """Layers for inputs as given -> for changed inputs, or back."""
        return layers

    def _begin(
        self, model: nn.Sequential, config: TrainingConfig, y: Any, weights: Any
    ) -> TrainingConfig:
        """Change the first weights and how to train."""
        return config

    # -- parameters

    def _remember(self, given: Mapping[str, Any]) -> None:
        """Arguments of the constructor become attributes, untouched, as scikit-learn wants it."""
        for name, value in given.items():
            if name not in ("self", "__class__"):
                setattr(self, name, value)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def _refuse(self, message: str) -> InvalidParameter:
        return InvalidParameter(f"{type(self).__name__}: {message}")

    def _rule(self) -> Any:
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
        return rule

    def _config(self) -> TrainingConfig:
        given = self.get_params(deep=False)
        return TrainingConfig(**{f.name: given[f.name] for f in fields(TrainingConfig)})

    # -- data

    def _checked(self, X: Any, y: Any, sample_weight: Any, first: bool) -> tuple[Any, Any, Any]:
        """Arrays, without the rows whose weight is zero."""
        X, y = validate_data(
            self,
            X,
            y,
            accept_sparse="csr",
            dtype=(np.float64, np.float32),
            multi_output=True,
            y_numeric=is_regressor(self),
            reset=first,
        )
        weights = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
        used = weights > 0
        if not used.any():
            raise self._refuse("all sample weights are zero; at least some rows must count")
        if not used.all():
            X, y, weights = X[used], y[used], weights[used]
        if sparse.issparse(X) and math.prod(X.shape) * X.dtype.itemsize <= DENSE:
            X = X.toarray()
        return X, y, weights

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

    # -- fitting

    def _fit(self, X: Any, y: Any, sample_weight: Any = None) -> Any:
        rule = self._rule()
        first = not (self.warm_start and hasattr(self, "n_iter_"))
        X, y, weights = self._checked(X, y, sample_weight, first)
        if X.shape[0] < 2:
            raise self._refuse("there is only one sample (n_samples=1), too few to learn from")
        if sparse.issparse(X) and (rule == "auto" or rule in ESTIMATED_RULES):
            if rule != "auto":
                raise self._refuse(
                    f"early_stopping={rule!r} needs dense rows, and {X.shape[0]} x {X.shape[1]} of "
                    "them are too many; use early_stopping='evidence'"
                )
            rule = "evidence"
        targets = self._targets(y, first)
        if self.shuffle and not sparse.issparse(X):
            apart = observations(X, targets.y, weights)
            if len(apart[0]) > 1:  # a rule needs two rows
                X, y, weights = apart
                targets = replace(targets, y=y)
        weights = self._weigh(targets, weights)
        seed = int(check_random_state(self.random_state).randint(2**31))
        held_out = None
        if rule == "validation":
            train, test = self._split(targets, seed)
            held_out = X[test], targets.y[test], weights[test]
            X, targets, weights = X[train], replace(targets, y=targets.y[train]), weights[train]
        trainer = self._trainer(X, targets, weights / weights.mean(), seed, first)
        if held_out is not None:
            X, y, weights = held_out
            held_out = (
                _inputs(self._scale(X, None, first=False)),
                _tensor(y, trainer.model),
                torch.from_numpy(weights / weights.mean()),
            )
        outcome = trainer.run(rule, held_out, self._report())
        self._keep(trainer, outcome)
        if not outcome.converged:
            warnings.warn(
                f"{type(self).__name__}: max_iter={self.max_iter} epochs were over before "
                f"early_stopping={self.early_stopping!r} asked to stop ({outcome.reason}); raise "
                "max_iter or learning_rate_init",
                ConvergenceWarning,
                stacklevel=3,
            )
        return self

    def _partial_fit(self, X: Any, y: Any, sample_weight: Any) -> Any:
        self._rule()
        first = not hasattr(self, "n_iter_")
        X, y, weights = self._checked(X, y, sample_weight, first)
        targets = self._targets(y, first=False)  # partial_fit is told the classes
        weights = self._weigh(targets, weights)
        seed = int(check_random_state(self.random_state).randint(2**31))
        trainer = self._trainer(X, targets, weights, seed, first)
        outcome = trainer.outcome
        if not first:
            trainer.seen, outcome.epochs = self.t_, self.n_iter_
            outcome.steps, outcome.losses = self.n_steps_, list(self.loss_curve_)
            if self._optimizer_state is not None:
                trainer.optimizer.load_state_dict(self._optimizer_state)
        for _ in trainer.steps():
            pass
        outcome.best_step, outcome.loss = outcome.steps, outcome.losses[-1]
        self._keep(trainer, outcome)
        self._optimizer_state = trainer.optimizer.state_dict()
        return self

    def _trainer(self, X: Any, targets: Targets, weights: Any, seed: int, first: bool) -> Trainer:
        hidden = np.atleast_1d(np.asarray(self.hidden_layer_sizes, int)).tolist()
        model = build_network(
            [X.shape[1], *hidden, targets.outputs],
            self.activation,
            bias=self.fit_intercept,
            dtype=torch.float32 if X.dtype == np.float32 else torch.float64,
            generator=torch.Generator().manual_seed(seed) if hidden else None,
        )
        X, config = self._scale(X, weights, first), self._config()
        if first:
            config = self._begin(model, config, targets.y, weights)
        elif not set_weights(model, self._scaled(self._layers(), back=False)):
            raise self._refuse(
                "to go on from the fit before, the inputs, the layers and the classes must be the "
                "same; set warm_start=False"
            )
        equal = bool((weights == 1.0).all())
        return Trainer(
            model,
            targets.loss,
            _inputs(X),
            _tensor(targets.y, model),
            None if equal else torch.from_numpy(weights).to(_dtype(model)),
            config,
            seed,
        )

    def _keep(self, trainer: Trainer, outcome: Outcome) -> None:
        linear = [layer for layer in trainer.model if isinstance(layer, nn.Linear)]
        layers = [
            (
                layer.weight.detach().T.contiguous().numpy(),
                None if layer.bias is None else layer.bias.detach().numpy().copy(),
            )
            for layer in linear
        ]
        if not all(
            np.isfinite(part).all() for layer in layers for part in layer if part is not None
        ):
            raise self._refuse(
                "training ended in weights that are not finite; scale the inputs, or lower "
                "learning_rate_init"
            )
        self._keep_layers(self._scaled(layers, back=True))
        self.n_iter_, self.n_steps_, self.t_ = outcome.epochs, outcome.steps, trainer.seen
        self.best_step_ = outcome.best_step
        self.loss_, self.loss_curve_ = outcome.loss, outcome.losses
        self.stopping_rule_, self.stopping_choice_ = outcome.rule, outcome.chosen
        self.stopping_reason_, self.stopped_ = outcome.reason, outcome.stopped
        self.evidence_curve_ = outcome.evidence
        history = outcome.history
        self.estimate_curve_ = (
            [r.estimate for r in history] if isinstance(history, EstimateHistory) else None
        )
        self.estimate_, self.estimate_error_ = outcome.estimate, outcome.standard_error
        self.history_ = history
        self._optimizer_state = None

    def _report(self) -> Report | None:
        """What is told about each epoch: nothing, a line, or whatever the user's function does."""
        if not self.verbose:
            return None
        if callable(self.verbose):
            found: Report = self.verbose
            return found
        return lambda epoch, loss, status: print(f"Iteration {epoch}, loss = {loss:.8f} ({status})")

    # -- predicting

    def _outputs(self, X: Any) -> Any:
        """(n, outputs) of the network."""
        check_is_fitted(self)
        X = validate_data(self, X, accept_sparse="csr", dtype=(np.float64, np.float32), reset=False)
        layers = self._layers()
        sizes = [layers[0][0].shape[0], *(weight.shape[1] for weight, _ in layers)]
        kind = torch.from_numpy(layers[0][0]).dtype
        model = build_network(sizes, self.activation, bias=layers[0][1] is not None, dtype=kind)
        set_weights(model, layers)
        return network_outputs(model, _inputs(X.astype(layers[0][0].dtype, copy=False))).numpy()


def _dtype(model: nn.Sequential) -> torch.dtype:
    return next(model.parameters()).dtype


def _tensor(y: Any, model: nn.Sequential) -> Tensor:
    found = torch.from_numpy(np.ascontiguousarray(y))
    return found if found.dtype == torch.int64 else found.to(_dtype(model))
