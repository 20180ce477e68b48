"""Base class of the estimators: arrays to a trained network, and its outputs."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
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
from sklearn.model_selection import PredefinedSplit, check_cv, train_test_split
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

from heldin import crossval
from heldin.crossval import Metric, RunRecord, resolve_metrics, statistic_interval
from heldin.errors import HeldinError, HeldinWarning, more
from heldin.rules.options import Auto, Evidence, Folds, Rule
from heldin.shadows.labels import (
    fold_labels,
    keep_first_folds,
    numbered,
    split_labels,
    time_labels,
    visible,
)
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

try:
    from sklearn.callback import CallbackSupportMixin, with_callbacks
except ImportError:  # scikit-learn before 1.9
    CallbackSupportMixin = object

    def with_callbacks(fit: Any) -> Any:
        """Return the method as it is."""
        return fit


__all__ = ["Estimator", "Layers"]

MEMORY = 2**30  # bytes of the network and its shadows in training
TENSORS = 4  # of the size of the weights per network: weights, gradients, two moments
FOLDS, FEW_ROWS, FOLDS_OF_FEW = 5, 100, 10  # up to this number of rows, ten folds
MANY_ROWS = 10_000  # rows from which intervals of scores have fewer resamplings
TANH_ROWS = 300  # classes are learnt with tanh up to this number of rows
UNSCALED = 10.0  # root mean square of an input above which scaling is recommended
ONE_SHADOW_ROWS = 1000  # rows in time from which one shadow is tested, on the last block
DENSE = 2**28  # bytes up to which sparse inputs are made dense at once
DECAY = 0.3  # default weight decay
CLIP = 4.0  # standard deviations beyond which an input is cut off
CALLER = 3 if CallbackSupportMixin is object else 4  # levels from a warning to the call of fit
SIDE = 1.96  # standard errors on each side of an estimate
WHOLE_EPOCHS = Evidence(window="epoch", estimator="exact")

Score = Callable[[Any, Any, Any], float]  # of predictions, targets and weights
Layers = list[tuple[Any, Any]]  # weights (inputs, outputs) and biases (outputs,)


class Estimator(CallbackSupportMixin, BaseEstimator):  # type: ignore[misc]
    """A network with a parameter list; subclasses define targets and predictions."""

    _parameter_constraints: Mapping[str, Any] = {
        **neural_network.MLPClassifier._parameter_constraints,
        "activation": [StrOptions({"auto", *ACTIVATIONS})],
        "solver": [StrOptions({"adam", "sgd"})],
        "weight_decay": [None, Interval(Real, 0, None, closed="left")],
        "verbose": ["verbose", callable],
        "early_stopping": [StrOptions(set(RULE_NAMES)), "boolean", Rule],
        "standardize": ["boolean"],
        "cv": ["cv_object"],
        "class_weight": [dict, StrOptions({"balanced"}), None],
        "metrics": "no_validation",
        "monitor": [str],
    }
    early_stopping: Any
    cv: Any
    metrics: Any
    monitor: str
    _categories: Any
    _imputer: SimpleImputer
    _scaler: Scaler | None
    _optimizer_state: Any
    _evaluated: Any  # out-of-fold predictions of different rows, and these without inputs
    _intervals: dict[str, crossval.Interval] | None
    _loss_interval: Any
    _root: Any = None  # of scikit-learn's callbacks, while they are called
    oof_predictions_: Any
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

    def _truth(self, y: Any) -> Any:
        """Return the targets in the shape of predictions: class numbers, or numbers."""
        raise NotImplementedError

    def _scores(self) -> Mapping[str, Score]:
        """Return functions of predictions, targets and weights, by name."""
        raise NotImplementedError

    def _row_losses(self, predicted: Any, y: Any) -> Any:
        """Return the (n,) losses of predictions."""
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

    def _chosen(self) -> Rule | None:
        """Return the rule that is not one of the usual ones."""
        chosen = Folds(shadows=1) if self.early_stopping == "shadow" else self.early_stopping
        return chosen if isinstance(chosen, Rule) else None

    def _cv(self) -> Any:
        """Return the folds that the user asked for: a number, a splitter, splits or None."""
        if not isinstance(self.early_stopping, Folds):
            return self.cv
        folds = self.early_stopping.folds
        given = isinstance(folds, Integral) or isinstance(folds[0], (tuple, list))
        return folds if given else PredefinedSplit(np.asarray(folds))

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
        chosen, rule = self._chosen(), "none" if self.early_stopping is False else "auto"
        if chosen is not None:
            rule = chosen.name
            self._check_rule(chosen)
        elif isinstance(self.early_stopping, str):
            rule = self.early_stopping
        adaptive = parameters["learning_rate"] == "adaptive" and parameters["solver"] == "sgd"
        if adaptive and rule != "none":
            raise self._refuse(
                "learning_rate='adaptive' waits until the training loss no longer falls, which a "
                "stopping rule is to prevent; use early_stopping=False or another learning_rate"
            )
        cv = self._cv()
        needs_folds = {
            f"cv={cv!r} needs": cv is not None,
            "metrics need": bool(self._metrics()),
            f"monitor={self.monitor!r} needs": self.monitor != "loss",
            "groups need": groups is not None,
            "time needs": time is not None,
        }
        for name, is_set in needs_folds.items():
            if is_set and rule not in ("auto", "folds"):
                raise self._refuse(
                    f"{name} folds, and early_stopping={self.early_stopping!r} has none; use "
                    "early_stopping='auto'"
                )
        is_number = cv is None or isinstance(cv, Integral)
        if time is not None and (groups is not None or not is_number):
            raise self._refuse(
                "with time, shadows are tested on the rows after those they see; leave groups out, "
                "cv a number or None"
            )
        return rule

    def _check_rule(self, rule: Rule) -> None:
        """Refuse rules, and options of rules, that the estimators do not have."""
        problem = ""
        if not isinstance(rule, (Auto, Folds, Evidence)):
            problem = "estimators take Auto, Folds and Evidence, or one of the names"
        elif isinstance(rule, Auto) and rule.budget is not None:
            problem = "estimators train in one stack and have no budget; use Folds(folds=...)"
        elif isinstance(rule, Folds) and rule.rows != "all":
            problem = "light shadows are not trained in one stack; leave rows out"
        elif rule is self.early_stopping and isinstance(rule, Folds) and self.cv is not None:
            problem = "the rule has folds, and so has cv; leave one of them out"
        if problem:
            raise self._refuse(f"early_stopping={rule!r}: {problem}")

    def _metrics(self) -> dict[str, Metric]:
        """Return the metrics by their names."""
        try:
            if self.monitor != "loss":
                resolve_metrics([self.monitor])
            return resolve_metrics(self.metrics, probabilities=is_classifier(self))
        except HeldinError as error:
            raise self._refuse(str(error)) from error

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
        splits, cv = None, self._cv()
        times = numbered(type(self).__name__, "time", time, len(weights), in_order=True)
        if cv is not None and not isinstance(cv, Integral):
            splitter = check_cv(cv, y, classifier=is_classifier(self))
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

    @with_callbacks  # type: ignore[untyped-decorator]
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
        report = self._report(X, y)
        if plan is not None:
            trainer.run_folds(plan, report)
        elif rule in ("validation", "none"):
            trainer.run(rule, self._held_out_rows(held_out, targets, trainer), report)
        else:
            chosen = self._chosen()
            evidence = chosen if isinstance(chosen, Evidence) else WHOLE_EPOCHS
            trainer.run(evidence, report=report)
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
        if self._root is not None:
            self._root.call_on_fit_task_end(
                estimator=self, X=X, y=y, reconstruction_attributes=lambda: vars(self)
            )
            self._root = None
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
        usual, cv, chosen = FOLDS_OF_FEW if n <= FEW_ROWS else FOLDS, self._cv(), self._chosen()
        folds = usual if cv is None or data.splits is not None else int(cv)
        asked = chosen if isinstance(chosen, Folds) else Folds()
        codes = torch.as_tensor(data.y.ravel().astype(np.int64)) if targets.single else None
        groups = torch.arange(n) if data.groups is None else torch.as_tensor(data.groups)
        if data.times is not None:
            times = torch.as_tensor(data.times)
            shadows = asked.shadows or (1 if n >= ONE_SHADOW_ROWS and cv is None else folds)
            labels = time_labels(name, times, folds, shadows)
            numbers = torch.arange(shadows).unsqueeze(1)
            sees = visible(labels, numbers, in_time=True)
            plan = FoldPlan(replace(asked, folds=folds, shadows=shadows), labels, sees, None, times)
        elif data.splits is not None:
            masks = zip(*data.split_masks(), strict=True)
            pairs = [(np.flatnonzero(train), np.flatnonzero(test)) for train, test in masks]
            pairs = pairs[: asked.shadows]
            try:
                labels, sees = split_labels(f"{name}: cv={cv!r}", pairs, n)
            except HeldinError as error:
                raise InvalidParameter(str(error)) from error
            plan = FoldPlan(replace(asked, folds=pairs, shadows=None), labels, sees, groups)
        else:
            folds = min(folds, len(groups.unique()))
            every = fold_labels(n, folds, seed, None if data.groups is None else groups, codes)
            shadows = min(asked.shadows or folds, folds)
            labels = keep_first_folds(every, shadows)
            sees = visible(labels, torch.arange(shadows).unsqueeze(1), in_time=False)
            plan = FoldPlan(replace(asked, folds=every, shadows=shadows), labels, sees, groups)
        plan = replace(plan, monitor=self.monitor)
        networks = len(plan.sees) + 1
        parameters = sum(p.numel() for p in trainer.model.parameters())
        needed = networks * TENSORS * parameters * _dtype(trainer.model).itemsize
        size = f"{n} rows and {parameters} parameters"
        memory = chosen.memory if isinstance(chosen, Auto) else MEMORY
        if needed > memory:
            problem = f"{networks} networks would take {needed:,} bytes to train"
            needs_folds = (cv, data.groups, data.times, self.metrics or None)
            if rule != "auto" or any(argument is not None for argument in needs_folds):
                raise self._refuse(f"with {size}, {problem}; use early_stopping='evidence'")
            trainer.outcome.chosen = f"{size}: {problem}, more than {memory:,}"
            return None
        if codes is not None and any(len(codes[seen].unique()) < 2 for seen in plan.sees):
            raise self._refuse(
                "the rows that one fold leaves for training are all of one class (copies of a row "
                "count once); each class needs rows in two folds, or take the rule 'evidence', "
                "which has no folds"
            )
        trainer.outcome.chosen = (
            f"{size}: one network, trained together with {networks - 1} shadows"
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
        self.temperature_, self.run_ = outcome.temperature, outcome.run
        self._facts = trainer.facts.rows()
        self._run_network = trainer.model  # in the units of training, for `run_`
        self.estimate_curve_ = self.estimate_ = self.estimate_error_ = self._loss_interval = None
        if isinstance(outcome.history, EstimateHistory):
            self.history_ = in_units(outcome.history, unit)
            self.estimate_curve_ = [record.estimate for record in self.history_]
            said = outcome.estimate
            assert said is not None
            self._loss_interval = crossval.Interval(
                said.value * unit, said.low * unit, said.high * unit, said.coverage
            )
            self.estimate_ = self._loss_interval.value
            self.estimate_error_ = (said.high - said.low) / (2 * SIDE) * unit
        self._optimizer_state = None

    def _assess(self, out_of_fold: Any, data: Data) -> None:
        """Keep what follows from out-of-fold predictions, None for rules without."""
        self._evaluated = self._intervals = self.oof_predictions_ = None
        if out_of_fold is not None:
            self._evaluated = out_of_fold, replace(data, X=None)
            self.oof_predictions_ = given_rows(out_of_fold, data)

    def _given(self) -> tuple[Any, Any, Any]:
        """Return predictions and targets of the rows given, and which of them have both."""
        _, data = self._evaluated
        predicted = self.oof_predictions_
        tested = np.flatnonzero(np.isfinite(predicted.reshape(len(predicted), -1)).all(1))
        return predicted[tested], self._truth(data.y)[data.row_of[tested]], tested

    def _groups(self, tested: Any) -> Any:
        """Return the groups of the rows given; a row and its copies are one."""
        _, data = self._evaluated
        rows = data.row_of[tested]
        return rows if data.groups is None else data.groups[rows]

    @property
    def estimates_(self) -> dict[str, crossval.Interval] | None:
        """The loss and the scores on new rows, with 95 % intervals; None without folds."""
        check_is_fitted(self, "n_iter_")
        if self._evaluated is not None and self._intervals is None:
            self._intervals = self._bootstrapped()
        return self._intervals

    def _bootstrapped(self) -> dict[str, crossval.Interval]:
        predicted, data = self._evaluated
        used = np.isfinite(predicted).all(1)
        predicted, y, weights = predicted[used], self._truth(data.y)[used], data.counts[used]
        groups, rows = None if data.groups is None else data.groups[used], torch.arange(len(y))
        intervals = {"loss": self._loss_interval}
        for name, score in self._scores().items():

            def of_rows(index: Tensor, _: Any, score: Score = score) -> float:
                return score(predicted[index], y[index], weights[index])

            draws = 499 if len(rows) < MANY_ROWS else 199
            interval = statistic_interval(of_rows, rows, rows, groups, resamplings=draws)
            if math.isfinite(interval.value):
                intervals[name] = interval
        if "auc" in intervals and self.temperature_ == math.inf:  # constants differ between folds
            intervals["auc"] = crossval.Interval(0.5, math.nan, math.nan)
        outputs, targets, tested = map(torch.as_tensor, self._given())
        for name, metric in self._metrics().items():
            groups = self._groups(tested.numpy())
            intervals[name] = statistic_interval(metric, outputs, targets, groups)
        return intervals

    def _bands(self) -> list[tuple[float, float]]:
        """Return the ends of the intervals of all checks."""
        rule: Any = None if self.run_ is None else self.run_._followed()
        count = 0 if rule is None else len(rule.history)
        intervals = (rule.loss_interval(number) for number in range(count))
        return [(each.low * self._unit, each.high * self._unit) for each in intervals]

    def record(self) -> RunRecord:
        """Return the out-of-fold losses and predictions of the rows, for `heldin.compare`."""
        if getattr(self, "_evaluated", None) is None:
            raise self._refuse("record: there are no out-of-fold predictions; fit with folds")
        predicted, targets, tested = self._given()
        losses = self._row_losses(predicted, targets)
        weights = self._evaluated[1].counts[self._evaluated[1].row_of[tested]]
        if not self.n_copies_ and len(np.unique(weights)) > 1:
            losses = losses * weights / weights.mean()
        shadows: Any = self._shadow_of
        parts = map(torch.as_tensor, (losses, predicted, targets, tested, shadows[tested]))
        losses, predicted, targets, rows, folds = parts
        metrics, groups = self._metrics(), self._groups(tested)
        return RunRecord(losses, predicted, targets, rows, folds, metrics, groups)

    def __getstate__(self) -> dict[str, Any]:
        state = dict(super().__getstate__())
        if "run_" in state:  # it holds the data and every shadow
            state |= {"run_": None, "_run_network": None}
        return state

    def _warn(self, outcome: Outcome, X: Any) -> None:
        name, scaling = type(self).__name__, ""
        if not self.standardize:
            column, size = largest_input(X)
            if size > UNSCALED:
                scaling = (
                    f" The inputs are not scaled (numbers of about {size:.3g} in column {column}): "
                    "standardize=True scales them."
                )
        if outcome.temperature == math.inf and self.estimate_:  # a loss of 0 cannot be improved
            warnings.warn(
                f"{name}: on rows that were not trained on, the network was no better than a "
                "constant, which is predicted now. Do the inputs tell anything about the targets, "
                f"are there enough rows, do groups of rows belong together?{scaling} "
                + more("no-better-than-a-constant"),
                HeldinWarning,
                stacklevel=CALLER,
            )
        elif not outcome.converged:
            warnings.warn(
                f"{name}: max_iter={self.max_iter} epochs were over before "
                f"early_stopping={self.early_stopping!r} asked to stop ({outcome.reason}); raise "
                f"max_iter or learning_rate_init.{scaling} {more('epochs-were-over')}",
                ConvergenceWarning,
                stacklevel=CALLER,
            )

    def _report(self, X: Any, y: Any) -> Report:
        """Return the function to call after each epoch, for `verbose` and callbacks."""
        unit, root = self._unit, None
        if getattr(self, "_skl_callbacks", None):
            root = self._init_callback_context(task_name="fit", max_subtasks=self.max_iter)
            root.call_on_fit_task_begin(estimator=self, X=X, y=y)
        self._root = root

        def report(epoch: int, loss: float, status: str) -> bool:
            if callable(self.verbose):
                self.verbose(epoch, loss * unit, status)
            elif self.verbose:
                print(f"Iteration {epoch}, loss = {loss * unit:.8f} ({status})")
            if root is None:
                return False
            task = root.subcontext(task_name="epoch")
            task.call_on_fit_task_begin(estimator=self, X=X, y=y)
            return bool(task.call_on_fit_task_end(estimator=self, X=X, y=y))

        return report

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


def given_rows(values: Any, data: Data) -> Any:
    """Return the values of the rows as the user gave them; nan for rows of weight 0.

    >>> data = Data(None, None, None, None, np.array([0, 0, -1]))
    >>> given_rows(np.array([[1.0], [3.0]]), data).ravel()
    array([ 1.,  1., nan])
    """
    return np.vstack([values, np.full((1, values.shape[1]), np.nan)])[data.row_of]
