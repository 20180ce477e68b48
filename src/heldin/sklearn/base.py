"""Base class of the estimators: arrays to a trained network, and its outputs."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import fields, replace
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from scipy import sparse
from sklearn import neural_network
from sklearn.base import BaseEstimator, is_classifier, is_regressor
from sklearn.exceptions import ConvergenceWarning
from sklearn.impute import SimpleImputer
from sklearn.model_selection import check_cv, train_test_split
from sklearn.utils import check_array, check_random_state, check_X_y
from sklearn.utils._param_validation import (
    Interval,
    InvalidParameterError,
    StrOptions,
    validate_parameter_constraints,
)
from sklearn.utils.validation import (
    _check_sample_weight,
    check_consistent_length,
    check_is_fitted,
    validate_data,
)
from torch import Tensor, nn

from heldin.crossval import Metric, resolve_metrics, statistic_interval
from heldin.errors import HeldinError, HeldinWarning, more
from heldin.rules.options import Folds
from heldin.shadows.labels import fold_labels, numbered, split_labels, time_labels, visible
from heldin.state.estimates import EstimateHistory
from heldin.tables.mlp import (
    ACTIVATIONS,
    build_network,
    constant_outputs,
    network_of,
    network_outputs,
    set_weights,
    start_at,
)
from heldin.tables.trainer import (
    RULE_NAMES,
    FoldPlan,
    Outcome,
    Report,
    Trainer,
    TrainingConfig,
    in_units,
)

from .data import Data, Targets
from .inputs import (
    Categories,
    InvalidParameter,
    Scaler,
    as_rows,
    has_categories,
    largest_input,
    missing_labels,
)
from .scores import Interval as ScoreInterval

__all__ = ["Estimator", "Layers"]

MEMORY = 2**30  # bytes of the network and its shadows in training
TENSORS = 4  # of the size of the weights per network: weights, gradients, two moments
FOLDS, FEW_ROWS, FOLDS_OF_FEW = 5, 100, 10  # up to this number of rows, ten folds
TANH_ROWS = 300  # classes are learnt with tanh up to this number of rows
UNSCALED = 10.0  # root mean square of an input above which scaling is recommended
ONE_SHADOW_ROWS = 1000  # rows in time from which one shadow is tested, on the last block
DENSE = 2**28  # bytes up to which sparse inputs are made dense at once
DECAY = 0.3  # default weight decay
CLIP = 4.0  # standard deviations beyond which an input is cut off

Layers = list[tuple[Any, Any]]  # weights (inputs, outputs) and biases (outputs,)


class Estimator(BaseEstimator):  # type: ignore[misc]
    """A network with a parameter list; subclasses define targets and predictions."""

    _parameter_constraints: Mapping[str, Any] = {
        **neural_network.MLPClassifier._parameter_constraints,
        "activation": [StrOptions({"auto", *ACTIVATIONS})],
        "solver": [StrOptions({"adam", "sgd"})],
        "weight_decay": [None, Interval(Real, 0, None, closed="left")],
        "verbose": ["verbose", callable],
        "early_stopping": [StrOptions(set(RULE_NAMES)), "boolean"],
        "standardize": ["boolean"],
        "cv": ["cv_object"],
        "class_weight": [dict, StrOptions({"balanced"}), None],
        "metrics": "no_validation",
    }
    early_stopping: Any
    cv: Any
    metrics: Any
    _categories: Any
    _imputer: SimpleImputer
    _scaler: Scaler | None
    _optimizer_state: Any
    estimates_: dict[str, ScoreInterval] | None
    _unit: float = 1.0  # factor from a loss in training to a loss of the targets

    # -- defined by subclasses

    def _targets(self, y: Any, first: bool) -> Targets:
        raise NotImplementedError

    def _weigh(self, targets: Targets, weights: Any) -> Any:
        """Multiply sample weights by class weights."""
        return weights

    def _scale_targets(self, targets: Targets, weights: Any, first: bool) -> Targets:
        return targets

    def _scale_layers(self, layers: Layers, back: bool) -> Layers:
        """Convert layers between the scale of training and that of the targets (`back`)."""
        return layers

    def _assess(self, out_of_fold: Any, data: Data) -> None:
        """Set the attributes that follow from out-of-fold predictions, or set them to None."""
        raise NotImplementedError

    def _predictions(self, outputs: Any) -> Any:
        """Return (n, classes) probabilities, or numbers, from the outputs of a network."""
        return outputs

    # -- parameters

    def _set_parameters(self, arguments: Mapping[str, Any]) -> None:
        for name, value in arguments.items():
            if name not in ("self", "__class__"):
                setattr(self, name, value)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.input_tags.allow_nan = True
        return tags

    def _refuse(self, message: str) -> InvalidParameter:
        return InvalidParameter(f"{type(self).__name__}: {message}")

    def _rule(self, groups: Any = None, time: Any = None) -> str:
        """Check the parameters and return the name of the rule."""
        parameters = self.get_params(deep=False)
        if parameters["solver"] == "lbfgs":
            raise self._refuse("solver='lbfgs' has no steps to stop at; use 'adam' or 'sgd'")
        try:
            validate_parameter_constraints(
                self._parameter_constraints, parameters, caller_name=type(self).__name__
            )
        except InvalidParameterError as error:
            raise InvalidParameter(str(error)) from error
        if any(np.atleast_1d(np.asarray(parameters["hidden_layer_sizes"])) < 1):
            raise self._refuse("hidden_layer_sizes must be whole numbers above 0")
        rule: str = {True: "auto", False: "none"}.get(self.early_stopping, self.early_stopping)
        adaptive = parameters["learning_rate"] == "adaptive" and parameters["solver"] == "sgd"
        if adaptive and rule != "none":
            raise self._refuse(
                "learning_rate='adaptive' waits until the training loss no longer falls, which a "
                "stopping rule is to prevent; use early_stopping=False or another learning_rate"
            )
        needs_folds = {
            f"cv={self.cv!r} needs": self.cv is not None,
            "metrics need": bool(self._metrics()),
            "groups need": groups is not None,
            "time needs": time is not None,
        }
        for name, is_set in needs_folds.items():
            if is_set and rule not in ("auto", "folds"):
                raise self._refuse(
                    f"{name} folds, and early_stopping={self.early_stopping!r} has none; use "
                    "early_stopping='auto'"
                )
        is_number = self.cv is None or isinstance(self.cv, Integral)
        if time is not None and (groups is not None or not is_number):
            raise self._refuse(
                "with time, shadows are tested on the rows after those they see; leave groups out, "
                "cv a number or None"
            )
        return rule

    def _metrics(self) -> dict[str, Metric]:
        """Return the metrics by their names."""
        try:
            return resolve_metrics(self.metrics, probabilities=is_classifier(self))
        except HeldinError as error:
            raise self._refuse(str(error)) from error

    def _add_metrics(self, data: Data, targets: Any, predicted: Any) -> None:
        """Add the metrics of the rows as the user gave them to `estimates_`.

        Args:
            data: rows without copies.
            targets: of these.
            predicted: (n, ...) out of fold, of the user's rows; nan for rows without.
        """
        assert self.estimates_ is not None
        is_predicted = np.isfinite(predicted.reshape(len(predicted), -1)).all(1)
        rows = data.row_of[is_predicted]
        groups = rows if data.groups is None else data.groups[rows]
        outputs, truth = torch.as_tensor(predicted[is_predicted]), torch.as_tensor(targets[rows])
        for name, metric in self._metrics().items():
            interval = statistic_interval(metric, outputs, truth, groups)
            self.estimates_[name] = ScoreInterval(interval.value, interval.low, interval.high)

    def _config(self) -> TrainingConfig:
        parameters = self.get_params(deep=False)
        alpha, decay = parameters["alpha"], parameters["weight_decay"]
        if decay and alpha:
            raise self._refuse(
                f"alpha={alpha} and weight_decay={decay} are two ways to keep weights small; give "
                "one of them"
            )
        options = {field.name: parameters[field.name] for field in fields(TrainingConfig)}
        options["weight_decay"] = (0.0 if alpha else DECAY) if decay is None else decay
        return TrainingConfig(**options)

    # -- data

    def _check_inputs(self, X: Any, y: Any, first: bool) -> tuple[Any, Any]:
        """Return arrays without missing values; y as it is if it is None."""
        options: dict[str, Any] = {
            "accept_sparse": "csr",
            "dtype": (np.float64, np.float32),
            "ensure_all_finite": "allow-nan",
        }
        if y is not None:
            options |= {"multi_output": True, "y_numeric": is_regressor(self)}
        if has_categories(X) if first else self._categories is not None:
            if not hasattr(X, "columns"):
                raise self._refuse("it was fitted on a DataFrame with categories; give one")
            duplicates = X.columns[X.columns.duplicated()]
            if len(duplicates):
                raise self._refuse(f"several columns are named {duplicates[0]!r}; rename them")
            validate_data(self, X, skip_check_array=True, reset=first)
            if first:
                self._categories = Categories(X, type(self).__name__)
            X = self._categories(X)
            checked = check_array(X, **options) if y is None else check_X_y(X, y, **options)
        else:
            if first:
                self._categories = None
            target = "no_validation" if y is None else y
            checked = validate_data(self, X, target, reset=first, **options)
        X, y = (checked, None) if y is None else checked
        if sparse.issparse(X) and math.prod(X.shape) * X.dtype.itemsize <= DENSE:
            X = X.toarray()
        if sparse.issparse(X):
            if np.isnan(X.data).any():
                raise self._refuse("missing values (NaN) are for dense inputs; fill them")
            return X, y
        if first:
            self._imputer = SimpleImputer(add_indicator=True, keep_empty_features=True).fit(X)
        if not (len(self._imputer.indicator_.features_) or np.isnan(X).any()):
            return X, y
        return self._imputer.transform(X), y

    def _check_data(
        self, X: Any, y: Any, sample_weight: Any, groups: Any, time: Any, first: bool
    ) -> Data:
        """Return checked data without the rows whose weight is zero."""
        if y is None:
            raise self._refuse("requires y to be passed, but the target y is None")
        unlabelled = missing_labels(y)
        if len(unlabelled):
            raise self._refuse(
                f"y has no label in {len(unlabelled)} rows (the first is row {unlabelled[0]}); "
                "leave them out"
            )
        X, y = self._check_inputs(X, y, first)
        weights = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
        if groups is not None:
            check_consistent_length(X, groups)
            groups = np.unique(np.asarray(groups), return_inverse=True)[1]
            if groups.max() < 1:
                raise self._refuse("groups: all rows are in one group; there must be at least two")
        splits = None
        times = numbered(type(self).__name__, "time", time, len(weights), in_order=True)
        if self.cv is not None and not isinstance(self.cv, Integral):
            splitter = check_cv(self.cv, y, classifier=is_classifier(self))
            pairs = list(splitter.split(X, y, groups))
            splits = np.zeros((len(weights), 2 * len(pairs)), bool)
            for number, (train, test) in enumerate(pairs):
                splits[train, number] = splits[test, len(pairs) + number] = True
        used = np.flatnonzero(weights > 0)
        if self.metrics and len(np.unique(weights[used])) > 1:
            raise self._refuse(
                "metrics count every row once, and sample_weight does not; compute the score from "
                "oof_predictions_"
            )
        if not len(used):
            raise self._refuse("all sample weights are zero; at least some rows must count")
        rows = np.arange(len(weights))
        data = Data(X, y, weights, groups, rows, splits, None if times is None else times.numpy())
        return data if len(used) == len(weights) else data.take(used)

    def _split(self, data: Data, single: bool, seed: int) -> tuple[Any, Any]:
        """Return the numbers of the rows to train on and to hold out; copies share a part."""
        n = len(data.y)
        if round(n * self.validation_fraction) < 2:
            raise self._refuse(
                f"validation_fraction={self.validation_fraction} of {n} rows is not two; raise it, "
                "or use a rule that holds nothing out"
            )
        groups = np.arange(n) if data.groups is None else data.groups
        _, first, which = np.unique(groups, return_index=True, return_inverse=True)
        labels = data.y.ravel()[first] if single else None
        if labels is not None and np.unique(labels, return_counts=True)[1].min() < 2:
            labels = None
        try:
            _, test = train_test_split(
                np.arange(len(first)),
                test_size=self.validation_fraction,
                random_state=seed,
                stratify=labels,
            )
        except ValueError as error:
            raise self._refuse(f"early_stopping='validation': {error}") from error
        held_out = np.isin(which, test)
        return np.flatnonzero(~held_out), np.flatnonzero(held_out)

    def _scale(self, X: Any, weights: Any = None, first: bool = False) -> Any:
        """Return standardised inputs, in single precision, or the inputs as they are."""
        dense = isinstance(X, np.ndarray)
        if first:
            self._scaler = Scaler(CLIP, dense).fit(X, weights) if self.standardize else None
        if self._scaler is None:
            return X
        if self._scaler.standard.with_mean and not dense:
            raise self._refuse("the first rows were dense, so these must be")
        return self._scaler(X)

    # -- fitting

    def fit(
        self, X: Any, y: Any, sample_weight: Any = None, groups: Any = None, time: Any = None
    ) -> Any:
        """Train on all rows until the rule asks to stop.

        Args:
            X: (n, features), dense or sparse numbers, with nan for missing ones; or a DataFrame,
                which may have categories.
            y: (n,) or (n, outputs) targets.
            sample_weight: (n,).
            groups: (n,) names or numbers; rows with the same one (of a patient, say) share a fold.
            time: (n,) numbers or dates: networks see the past and are tested on the block after
                it, as with TimeSeriesSplit; one that saw all rows predicts.

        Returns:
            The estimator.
        """
        rule = self._rule(groups, time)
        first = not (self.warm_start and hasattr(self, "n_iter_"))
        data = self._check_data(X, y, sample_weight, groups, time, first)
        if len(data.weights) < 2:
            raise self._refuse("there is only one sample (n_samples=1), too few to learn from")
        if sparse.issparse(data.X) and rule in ("auto", "folds"):
            if rule == "folds" or data.groups is not None or data.times is not None or self.metrics:
                raise self._refuse(
                    f"early_stopping={self.early_stopping!r} needs dense rows, and "
                    f"{data.X.shape[0]} x {data.X.shape[1]} of them are too many; use "
                    "early_stopping='evidence'"
                )
            rule = "evidence"
        targets = self._targets(data.y, first)
        data = replace(data, y=targets.y)
        if not sparse.issparse(data.X):
            data = data.without_copies(self.shuffle)
        self.n_copies_ = data.copies
        # a power of two, so that the division is exact
        counts = data.weights / np.exp2(np.floor(np.log2(data.weights.max())))
        weights = self._weigh(replace(targets, y=data.y), counts)
        data = replace(data, weights=weights / weights.mean(), counts=counts)
        seed = int(check_random_state(self.random_state).randint(2**31))
        held_out, used = None, data
        if rule == "validation":
            train, test = self._split(data, targets.single, seed)
            used, held_out = data.take(train), data.take(test)
            used = replace(used, weights=used.weights / used.weights.mean())
        if first:
            self._choose_activation(targets, few=len(used.y) <= TANH_ROWS)
        trainer = self._trainer(used, targets, seed, first)
        plan = self._fold_plan(trainer, used, targets, rule) if rule in ("auto", "folds") else None
        if plan is not None and not first:
            raise self._refuse(
                "warm_start goes on with a network that has seen every row, and no fold is new to "
                "it; set warm_start=False, or use early_stopping='evidence' or False"
            )
        if plan is not None:
            trainer.run_folds(plan, self._report())
        else:
            rule = "evidence" if rule in ("auto", "folds") else rule
            trainer.run(rule, self._held_out_rows(held_out, targets, trainer), self._report())
        self._keep(trainer, used.X.dtype)
        self._shadows = [
            self._scale_layers(_layers(shadow, used.X.dtype), back=True)
            for shadow in trainer.outcome.shadows
        ]
        self._shadow_of = None  # (given rows,): number of the shadow that has not seen a row
        out_of_fold = None
        if plan is not None:
            labels = plan.labels.numpy()
            self._shadow_of = np.append(labels, -1)[used.row_of]
            out_of_fold = self._out_of_fold(used.X, labels)
        self._assess(out_of_fold, used)
        self._warn(trainer.outcome, used.X)
        return self

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Any:
        """Train for one pass over the rows given; no rule stops it.

        Args:
            X, y, sample_weight: as in `fit`.

        Returns:
            The estimator.
        """
        self._rule()
        first = not hasattr(self, "n_iter_")
        data = self._check_data(X, y, sample_weight, None, None, first)
        self.n_copies_ = 0
        targets = self._targets(data.y, first=False)  # `classes` were given to partial_fit
        data = replace(data, y=targets.y, weights=self._weigh(targets, data.weights))
        seed = int(check_random_state(self.random_state).randint(2**31))
        if first:
            self._choose_activation(targets, few=False)  # the number of rows is unknown
        trainer = self._trainer(data, targets, seed, first)
        outcome = trainer.outcome
        if not first:
            trainer.rows_seen, outcome.epochs = self.t_, self.n_iter_
            outcome.steps = self.n_steps_
            outcome.losses = [loss / self._unit for loss in self.loss_curve_]
            if self._optimizer_state is not None:
                trainer.optimizer.load_state_dict(self._optimizer_state)
        trainer.train_epoch()
        outcome.best_step, outcome.loss = outcome.steps, outcome.losses[-1]
        self._keep(trainer, data.X.dtype)
        self._assess(None, data)
        self._optimizer_state = trainer.optimizer.state_dict()
        return self

    def _choose_activation(self, targets: Targets, few: bool) -> None:
        automatic = "tanh" if few and not isinstance(targets.loss, nn.MSELoss) else "relu"
        self.activation_ = automatic if self.activation == "auto" else self.activation

    def _trainer(self, data: Data, targets: Targets, seed: int, first: bool) -> Trainer:
        """Return the trainer of the network that sees every row."""
        hidden = np.atleast_1d(np.asarray(self.hidden_layer_sizes, int)).tolist()
        X, weights = self._scale(data.X, data.weights, first), data.weights
        X = X if self._scaler is None else X.astype(np.float32, copy=False)
        targets = self._scale_targets(replace(targets, y=data.y), weights, first)
        model = build_network(
            [X.shape[1], *hidden, targets.outputs],
            self.activation_,
            dtype=torch.float32 if X.dtype == np.float32 else torch.float64,
            generator=torch.Generator().manual_seed(seed),
        )
        y = _tensor(targets.y, model)
        equal = bool((weights == 1.0).all())
        row_weights = None if equal else torch.from_numpy(weights).to(_dtype(model))
        if first:
            start_at(model, constant_outputs(targets.loss, y, targets.outputs, row_weights))
        elif not set_weights(model, self._scale_layers(self._network(), back=False)):
            raise self._refuse(
                "to go on from the fit before, the inputs, the layers and the classes must be the "
                "same; set warm_start=False"
            )
        return Trainer(model, targets.loss, as_rows(X), y, row_weights, self._config(), seed)

    def _fold_plan(
        self, trainer: Trainer, data: Data, targets: Targets, rule: str
    ) -> FoldPlan | None:
        """Return which rows each shadow does not see; None if the memory is too small."""
        n, seed, name = len(data.y), trainer.seed, type(self).__name__
        usual = FOLDS_OF_FEW if n <= FEW_ROWS else FOLDS
        folds = usual if self.cv is None or data.splits is not None else int(self.cv)
        codes = torch.as_tensor(data.y.ravel().astype(np.int64)) if targets.single else None
        groups = torch.arange(n) if data.groups is None else torch.as_tensor(data.groups)
        if data.times is not None:
            times = torch.as_tensor(data.times)
            shadows = 1 if n >= ONE_SHADOW_ROWS and self.cv is None else folds
            labels = time_labels(name, times, folds, shadows)
            numbers = torch.arange(shadows).unsqueeze(1)
            sees = visible(labels, numbers, in_time=True)
            plan = FoldPlan(Folds(folds=folds, shadows=shadows), labels, sees, None, times)
        elif data.splits is not None:
            masks = zip(*data.split_masks(), strict=True)
            pairs = [(np.flatnonzero(train), np.flatnonzero(test)) for train, test in masks]
            try:
                labels, sees = split_labels(f"{name}: cv={self.cv!r}", pairs, n)
            except HeldinError as error:
                raise InvalidParameter(str(error)) from error
            plan = FoldPlan(Folds(folds=pairs), labels, sees, groups)
        else:
            folds = min(folds, len(groups.unique()))
            labels = fold_labels(n, folds, seed, None if data.groups is None else groups, codes)
            sees = visible(labels, torch.arange(folds).unsqueeze(1), in_time=False)
            plan = FoldPlan(Folds(folds=labels), labels, sees, groups)
        networks = len(plan.sees) + 1
        parameters = sum(p.numel() for p in trainer.model.parameters())
        needed = networks * TENSORS * parameters * _dtype(trainer.model).itemsize
        size = f"{n} rows and {parameters} parameters"
        if needed > MEMORY:
            problem = f"{networks} networks would take {needed:,} bytes to train"
            asked = (self.cv, data.groups, data.times, self.metrics or None)
            if rule != "auto" or any(argument is not None for argument in asked):
                raise self._refuse(f"with {size}, {problem}; use early_stopping='evidence'")
            trainer.outcome.chosen = f"{size}: {problem}, more than {MEMORY:,}"
            return None
        if codes is not None and any(len(codes[seen].unique()) < 2 for seen in plan.sees):
            raise self._refuse(
                "the rows that one fold leaves for training are all of one class (copies of a row "
                "count once); each class needs rows in two folds, or take the rule 'evidence', "
                "which has no folds"
            )
        trainer.outcome.chosen = (
            f"{size}: one network, beside shadows; {networks} trained in lock-step"
        )
        return plan

    def _held_out_rows(self, data: Data | None, targets: Targets, trainer: Trainer) -> Any:
        if data is None:
            return None
        scaled = self._scale_targets(replace(targets, y=data.y), None, first=False)
        rows = as_rows(self._scale(data.X).astype(_numpy_dtype(trainer.model), copy=False))
        weights = torch.from_numpy(data.weights / data.weights.mean())
        return rows, _tensor(scaled.y, trainer.model), weights

    # -- results

    def _keep(self, trainer: Trainer, precision: Any) -> None:
        """Set the fitted attributes that are the same for all targets."""
        layers = _layers(trainer.model, precision)
        if not all(np.isfinite(part).all() for layer in layers for part in layer):
            raise self._refuse(
                "training ended in weights that are not finite; scale the inputs, or lower "
                "learning_rate_init"
            )
        layers = self._scale_layers(layers, back=True)
        self.coefs_ = [weight for weight, _ in layers]
        self.intercepts_ = [bias for _, bias in layers]
        self.n_layers_ = len(self.coefs_) + 1
        outcome, unit = trainer.outcome, self._unit
        self.n_iter_, self.n_steps_, self.t_ = outcome.epochs, outcome.steps, trainer.rows_seen
        self.best_step_ = outcome.best_step
        self.loss_, self.loss_curve_ = outcome.loss * unit, [x * unit for x in outcome.losses]
        self.stopping_rule_, self.stopping_choice_ = outcome.rule, outcome.chosen
        self.stopping_reason_, self.stopped_ = outcome.reason, outcome.stopped
        self.evidence_curve_, self.history_ = outcome.evidence, outcome.history
        self.shrinkage_ = outcome.shrinkage
        self.estimate_curve_ = self.estimate_ = self.estimate_error_ = None
        if isinstance(outcome.history, EstimateHistory):
            self.history_ = in_units(outcome.history, unit)
            self.estimate_curve_ = [record.estimate for record in self.history_]
            assert outcome.estimate is not None
            assert outcome.standard_error is not None
            self.estimate_ = outcome.estimate * unit
            self.estimate_error_ = outcome.standard_error * unit
        self._optimizer_state = None

    def _warn(self, outcome: Outcome, X: Any) -> None:
        name, scaling = type(self).__name__, ""
        if not self.standardize:
            column, size = largest_input(X)
            if size > UNSCALED:
                scaling = (
                    f" The inputs are not scaled (numbers of about {size:.3g} in column {column}): "
                    "standardize=True scales them."
                )
        if outcome.shrinkage == 1 and outcome.estimate:  # a loss of 0 cannot be improved
            warnings.warn(
                f"{name}: on rows that were not trained on, the network was no better than a "
                "constant, which is predicted now. Do the inputs tell anything about the targets, "
                f"are there enough rows, do groups of rows belong together?{scaling} "
                + more("no-better-than-a-constant"),
                HeldinWarning,
                stacklevel=3,
            )
        elif not outcome.converged:
            warnings.warn(
                f"{name}: max_iter={self.max_iter} epochs were over before "
                f"early_stopping={self.early_stopping!r} asked to stop ({outcome.reason}); raise "
                f"max_iter or learning_rate_init.{scaling} {more('epochs-were-over')}",
                ConvergenceWarning,
                stacklevel=3,
            )

    def _report(self) -> Report | None:
        """Return the function to call after each epoch, as `verbose` asks for."""
        if not self.verbose:
            return None
        unit = self._unit
        if callable(self.verbose):
            function: Report = self.verbose
            return lambda epoch, loss, status: function(epoch, loss * unit, status)
        return lambda epoch, loss, status: print(
            f"Iteration {epoch}, loss = {loss * unit:.8f} ({status})"
        )

    def _network(self) -> Layers:
        return list(zip(self.coefs_, self.intercepts_, strict=True))

    def _outputs(self, X: Any) -> Any:
        """Return the (n, outputs) outputs of the network."""
        check_is_fitted(self)
        X = self._check_inputs(X, None, first=False)[0]
        return self._outputs_of(self._network(), X)

    def _outputs_of(self, layers: Layers, X: Any) -> Any:
        """Return the (n, outputs) outputs of a network on rows without missing values."""
        rows = as_rows(self._scale(X).astype(layers[0][0].dtype, copy=False))
        return network_outputs(network_of(layers, self.activation_), rows).numpy()

    def _out_of_fold(self, X: Any, shadow_of: Any) -> Any:
        """Return predictions of the shadows, each on rows that it has not seen; else nan.

        Args:
            X: (n, features) without missing values.
            shadow_of: (n,) number of the shadow that predicts a row; -1: none.
        """
        outputs = np.full((len(X), len(self.intercepts_[-1])), np.nan, X.dtype)
        for number, layers in enumerate(self._shadows):
            if (shadow_of == number).any():
                outputs[shadow_of == number] = self._outputs_of(layers, X[shadow_of == number])
        return self._predictions(outputs)


def _layers(model: nn.Sequential, precision: Any) -> Layers:
    """Return weights and biases as arrays."""
    return [
        (
            layer.weight.detach().T.contiguous().numpy().astype(precision),
            layer.bias.detach().numpy().astype(precision),
        )
        for layer in model
        if isinstance(layer, nn.Linear)
    ]


def _dtype(model: nn.Sequential) -> torch.dtype:
    return next(model.parameters()).dtype


def _numpy_dtype(model: nn.Sequential) -> Any:
    return np.float32 if _dtype(model) == torch.float32 else np.float64


def _tensor(y: Any, model: nn.Sequential) -> Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(y))
    return tensor if tensor.dtype == torch.int64 else tensor.to(_dtype(model))
