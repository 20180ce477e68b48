"""Base class of the estimators: arrays to a trained network, and its outputs."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
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
from sklearn.utils import check_array, check_consistent_length, check_random_state, check_X_y
from sklearn.utils._param_validation import Interval, InvalidParameterError, StrOptions
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor, nn

from heldin import crossval
from heldin.crossval import Metric, RunRecord, resolve_metrics, statistic_interval
from heldin.errors import HeldinError, HeldinWarning, more
from heldin.rules.options import Auto, Evidence, Folds, Rule
from heldin.shadows.labels import fold_labels, numbered
from heldin.state.estimates import Estimate, EstimateHistory

from .data import (
    Categories,
    Data,
    InvalidParameter,
    Scaler,
    Targets,
    as_rows,
    has_categories,
    largest_input,
    missing_labels,
)
from .training import (
    ACTIVATIONS,
    Trainer,
    build_network,
    constant_outputs,
    in_units,
    linear_layers,
    network_outputs,
    out_of_units,
    start_at,
)

try:
    from sklearn.callback import CallbackSupportMixin, with_callbacks
except ImportError:  # scikit-learn before 1.9
    CallbackSupportMixin = object

    def with_callbacks(fit: Any) -> Any:
        """Return the method as it is."""
        return fit


__all__ = ["Estimator", "Score"]

MEMORY = 2**30  # bytes of the network and its shadows in training
TENSORS = 4  # of the size of the weights per network: weights, gradients, two moments
FOLDS, FEW_ROWS, FOLDS_OF_FEW = 5, 100, 10  # up to this number of rows, ten folds
MANY_ROWS = 10_000  # rows from which intervals of scores have fewer resamplings
TANH_ROWS = 300  # classes are learnt with tanh up to this number of rows
UNSCALED = 10.0  # root mean square of an input above which scaling is recommended
ONE_SHADOW_ROWS = 1000  # rows in time from which one shadow is tested, on the last block
DENSE = 2**28  # bytes up to which sparse inputs are made dense at once
CLIP = 4.0  # standard deviations beyond which an input is cut off
CALLER = 3 if CallbackSupportMixin is object else 4  # levels from a warning to the call of fit
SIDE = 1.96  # standard errors on each side of an estimate
WHOLE_EPOCHS = Evidence(window="epoch", estimator="exact")
RULES: Mapping[Any, Callable[[], Any]] = {  # by the values of early_stopping
    "auto": lambda: Auto(memory=MEMORY),
    True: lambda: Auto(memory=MEMORY),
    "folds": Folds,
    "shadow": lambda: Folds(shadows=1),
    "evidence": lambda: WHOLE_EPOCHS,
    "validation": lambda: "validation",
    False: lambda: "none",
}

Score = Callable[[Any, Any, Any], float]  # of predictions, targets and weights


class Estimator(CallbackSupportMixin, BaseEstimator):  # type: ignore[misc]
    """A network with the parameters of scikit-learn's.

    Subclasses define `_targets` (labels or numbers as a network learns them), `_truth` (targets in
    the shape of predictions), `_scores` (`Score` functions by name) and `_row_losses` ((n,) losses
    of predictions), and override the other methods at the beginning as they need.
    """

    _parameter_constraints: Mapping[str, Any] = {
        **neural_network.MLPClassifier._parameter_constraints,
        "activation": [StrOptions({"auto", *ACTIVATIONS})],
        "solver": [StrOptions({"adam", "sgd"})],
        "weight_decay": [None, Interval(Real, 0, None, closed="left")],
        "verbose": ["verbose", callable],
        "early_stopping": [
            StrOptions({name for name in RULES if isinstance(name, str)}),
            "boolean",
            Rule,
        ],
        "standardize": ["boolean"],
        "cv": ["cv_object"],
        "class_weight": [dict, StrOptions({"balanced"}), None],
        "metrics": "no_validation",
        "monitor": [str],
    }
    _categories: Any
    _record: Any  # of the rows out of fold, as they were given
    _weights: Any  # of these rows, without weights of classes
    _intervals: Any
    _optimizer_state: Any
    oof_predictions_: Any
    history_: Any
    _centre: Any  # of the targets, one for each output
    _spread: float  # of the targets
    _scaler: Any  # None: inputs are taken as they are
    _network: nn.Sequential  # in the units of the targets and the precision of the inputs
    _shadows: list[nn.Sequential]  # the same
    _root: Any = None  # of scikit-learn's callbacks, while they are called

    def _weigh(self, targets: Targets, weights: Any) -> Any:
        """Multiply sample weights by class weights."""
        return weights

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
        tags.input_tags.sparse = tags.input_tags.allow_nan = True
        return tags

    def _refuse(self, message: str) -> InvalidParameter:
        return InvalidParameter(f"{type(self).__name__}: {message}")

    def _cv(self) -> Any:
        """Return the folds that the user asked for: a number, a splitter, splits or None."""
        if not isinstance(self.early_stopping, Folds):
            return self.cv
        folds = self.early_stopping.folds
        given = isinstance(folds, Integral) or isinstance(folds[0], (tuple, list))
        return folds if given else PredefinedSplit(np.asarray(folds))

    def _rule(self, groups: Any = None, time: Any = None) -> Any:
        """Check the parameters; return a rule of `heldin.rules`, "validation" or "none"."""
        if self.solver == "lbfgs":
            raise self._refuse("solver='lbfgs' has no steps to stop at; use 'adam' or 'sgd'")
        try:
            self._validate_params()
        except InvalidParameterError as error:
            raise InvalidParameter(str(error)) from error
        asked, cv, alpha, decay = self.early_stopping, self._cv(), self.alpha, self.weight_decay
        rule: Any = asked if isinstance(asked, Rule) else RULES[asked]()
        folds, needs_folds = isinstance(rule, Folds), self._needs_folds(groups, time)
        sizes = np.atleast_1d(np.asarray(self.hidden_layer_sizes))
        known = isinstance(rule, (str, Auto, Folds, Evidence))
        budget = isinstance(rule, Auto) and rule.budget is not None
        adaptive = self.learning_rate == "adaptive" and self.solver == "sgd" and rule != "none"
        in_vain = needs_folds and not isinstance(rule, (Auto, Folds))
        splits = groups is not None or not (cv is None or isinstance(cv, Integral))
        problems = {
            "hidden_layer_sizes must be whole numbers above 0": any(sizes < 1),
            f"early_stopping={asked!r}: estimators take Auto, Folds and Evidence": not known,
            "estimators train in one stack and have no budget; use Folds(folds=...)": budget,
            "light shadows are not trained in one stack; leave rows out of Folds": (
                folds and rule.rows != "all"
            ),
            "the rule has folds, and so has cv; leave one of them out": (
                folds and rule is asked and self.cv is not None
            ),
            "learning_rate='adaptive' waits until the training loss no longer falls; with it, use "
            "early_stopping=False": adaptive,
            f"{needs_folds} folds, and early_stopping={asked!r} has none; use 'auto'": in_vain,
            "with time, shadows are tested on the rows after those they see; leave groups out, cv "
            "a number or None": time is not None and splits,
            f"alpha={alpha} and weight_decay={decay} are two ways to keep weights small; give one "
            "of them": alpha and decay,
        }
        for problem, is_there in problems.items():
            if is_there:
                raise self._refuse(problem)
        return rule

    def _needs_folds(self, groups: Any, time: Any) -> str:
        """Return what only a rule with folds can give; empty if nothing of that is asked for."""
        asked = {
            f"cv={self._cv()!r} needs": self._cv() is not None,
            "metrics need": bool(self._metrics()),
            f"monitor={self.monitor!r} needs": self.monitor != "loss",
            "groups need": groups is not None,
            "time needs": time is not None,
        }
        return next((name for name, is_set in asked.items() if is_set), "")

    def _metrics(self) -> dict[str, Metric]:
        """Return the metrics by their names."""
        try:
            if self.monitor != "loss":
                resolve_metrics([self.monitor])
            return resolve_metrics(self.metrics, probabilities=is_classifier(self))
        except HeldinError as error:
            raise self._refuse(str(error)) from error

    # -- data

    def _check_inputs(self, X: Any, y: Any, first: bool) -> tuple[Any, Any]:
        """Return arrays without missing values; y as it is if it is None."""
        options: dict[str, Any] = {"accept_sparse": "csr", "dtype": (np.float64, np.float32)}
        options["ensure_all_finite"] = "allow-nan"
        if y is not None:
            options |= {"multi_output": True, "y_numeric": is_regressor(self)}
        if has_categories(X) if first else self._categories is not None:
            if not hasattr(X, "columns"):
                raise self._refuse("it was fitted on a DataFrame with categories; give one")
            for name in X.columns[X.columns.duplicated()]:
                raise self._refuse(f"several columns are named {name!r}; rename them")
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
        gaps = missing_labels(y)
        if len(gaps):
            raise self._refuse(
                f"y has no label in {len(gaps)} rows (the first is row {gaps[0]}); leave them out"
            )
        X, y = self._check_inputs(X, y, first)
        weights = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
        if groups is not None:
            check_consistent_length(X, groups)
            groups = np.unique(np.asarray(groups), return_inverse=True)[1]
        splits, cv = None, self._cv()
        times = numbered(type(self).__name__, "time", time, len(weights), in_order=True)
        if cv is not None and not isinstance(cv, Integral):
            splitter = check_cv(cv, y, classifier=is_classifier(self))
            pairs = list(splitter.split(X, y, groups))
            splits = np.zeros((len(weights), 2 * len(pairs)), bool)
            for number, (train, test) in enumerate(pairs):
                splits[train, number] = splits[test, len(pairs) + number] = True
        used = np.flatnonzero(weights > 0)
        if groups is not None and groups.max() < 1:
            raise self._refuse("groups: all rows are in one group; there must be at least two")
        if self.metrics and len(np.unique(weights[used])) > 1:
            raise self._refuse(
                "metrics count every row once, and sample_weight does not; compute the score from "
                "oof_predictions_"
            )
        if not len(used):
            raise self._refuse("all sample weights are zero; at least some rows must count")
        in_time = None if times is None else times.numpy()
        data = Data(X, y, weights, groups, np.arange(len(weights)), splits, in_time)
        return data if len(used) == len(weights) else data.take(used)

    def _split(self, data: Data, single: bool, seed: int) -> tuple[Data, Data]:
        """Return the rows to train on and to hold out; copies share a part."""
        n, share = len(data.y), self.validation_fraction
        if round(n * share) < 2:
            raise self._refuse(
                f"validation_fraction={share} of {n} rows is not two; raise it, or use a rule that "
                "holds nothing out"
            )
        groups = np.arange(n) if data.groups is None else data.groups
        _, first, which = np.unique(groups, return_index=True, return_inverse=True)
        labels = data.y.ravel()[first] if single else None
        if labels is not None and np.unique(labels, return_counts=True)[1].min() < 2:
            labels = None
        numbers = np.arange(len(first))
        try:
            test = train_test_split(numbers, test_size=share, random_state=seed, stratify=labels)[1]
        except ValueError as error:
            raise self._refuse(f"early_stopping='validation': {error}") from error
        held_out = np.isin(which, test)
        parts = (data.take(np.flatnonzero(part)) for part in (~held_out, held_out))
        used, rest = (replace(part, weights=part.weights / part.weights.mean()) for part in parts)
        return used, rest

    def _scaled(self, X: Any) -> Any:
        """Return standardised inputs, or the inputs as they are."""
        return X if self._scaler is None else self._scaler(X)

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
        thin, folds = sparse.issparse(data.X), isinstance(rule, (Auto, Folds))
        if len(data.weights) < 2:
            raise self._refuse("there is only one sample (n_samples=1), too few to learn from")
        if thin and folds and (isinstance(rule, Folds) or self._needs_folds(groups, time)):
            raise self._refuse(
                f"early_stopping={self.early_stopping!r} needs dense rows, and {data.X.shape[0]} x "
                f"{data.X.shape[1]} of them are too many; use early_stopping='evidence'"
            )
        targets = self._targets(data.y, first)
        data = replace(data, y=targets.y)
        data = data if thin else data.without_copies(self.shuffle)
        self.n_copies_ = data.copies
        # a power of two, so that the division is exact
        counts = data.weights / np.exp2(np.floor(np.log2(data.weights.max())))
        weights = self._weigh(targets._replace(y=data.y), counts)
        data = replace(data, weights=weights / weights.mean(), counts=counts)
        seed = int(check_random_state(self.random_state).randint(2**31))
        used, held_out = data, None
        if rule == "validation":
            used, held_out = self._split(data, targets.single, seed)
        if first:
            self._choose_activation(targets, few=len(used.y) <= TANH_ROWS)
        trainer = self._trainer(used, targets, seed, first)
        plan = self._plan(trainer, used, targets, rule) if folds and not thin else None
        if plan is not None and not first:
            raise self._refuse(
                "warm_start goes on with a network that has seen every row, and no fold is new to "
                "it; set warm_start=False, or use early_stopping='evidence' or False"
            )
        report = self._report(X, y)
        if plan is not None:
            trainer.run_folds(*plan, report)
            numbers, given = np.unique(data.row_of, return_index=True)
            trainer.renumber(torch.from_numpy(given[numbers >= 0]))
        else:
            parts = None if held_out is None else self._rows(held_out)
            trainer.run(WHOLE_EPOCHS if folds else rule, parts, report)
        self._keep(trainer, used.X.dtype)
        self._assess(trainer.shadow_of, used)
        self._warn(trainer, used.X)
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
        if not first:
            trainer.rows_seen, trainer.epochs, trainer.steps = self.t_, self.n_iter_, self.n_steps_
            trainer.losses = [loss / self._spread**2 for loss in self.loss_curve_]
            if self._optimizer_state is not None:
                trainer.optimizer.load_state_dict(self._optimizer_state)
        trainer.train_epoch()
        trainer.best_step, trainer.loss = trainer.steps, trainer.losses[-1]
        self._keep(trainer, data.X.dtype)
        self._assess(None, data)
        self._optimizer_state = trainer.optimizer.state_dict()
        return self

    def _choose_activation(self, targets: Targets, few: bool) -> None:
        automatic = "tanh" if few and not isinstance(targets.loss, nn.MSELoss) else "relu"
        self.activation_ = automatic if self.activation == "auto" else self.activation

    def _rows(self, data: Data) -> tuple[Any, Tensor, Tensor]:
        """Return inputs, targets and weights in the units and the precision of training."""
        X, y = self._scaled(data.X), data.y
        if self._scaler is not None:
            X = X.astype(np.float32, copy=False)
        if y.dtype.kind == "f":  # numbers, no classes
            y = ((y - self._centre) / self._spread).astype(X.dtype, copy=False)
        return as_rows(X), torch.from_numpy(np.ascontiguousarray(y)), torch.from_numpy(data.weights)

    def _trainer(self, data: Data, targets: Targets, seed: int, first: bool) -> Trainer:
        """Return the trainer of the network that sees every row."""
        if first:
            self._scaler = Scaler(CLIP, data.X, data.weights) if self.standardize else None
            self._centre, self._spread = 0.0, 1.0
            if self.standardize and isinstance(targets.loss, nn.MSELoss):
                self._centre = np.average(data.y, axis=0, weights=data.weights)
                squares = np.average((data.y - self._centre) ** 2, axis=0, weights=data.weights)
                self._spread = float(np.sqrt(squares.mean())) or 1.0
        x, y, row_weights = self._rows(data)
        dtype = x[:1].dtype
        weights = None if (row_weights == 1).all() else row_weights.to(dtype)
        hidden = np.atleast_1d(np.asarray(self.hidden_layer_sizes, int)).tolist()
        sizes = [data.X.shape[1], *hidden, self.n_outputs_]
        if first:
            generator = torch.Generator().manual_seed(seed)
            model = build_network(sizes, self.activation_, dtype=dtype, generator=generator)
            start_at(model, constant_outputs(targets.loss, y, self.n_outputs_, weights))
        else:
            if sizes != [len(self.coefs_[0]), *map(len, self.intercepts_)]:
                raise self._refuse(
                    "to go on from the fit before, the inputs, the layers and the classes must be "
                    "the same; set warm_start=False"
                )
            model = out_of_units(self._network, self._centre, self._spread, dtype)
        return Trainer(model, targets.loss, x, y, weights, self, seed)

    def _plan(
        self, trainer: Trainer, data: Data, targets: Targets, rule: Auto | Folds
    ) -> tuple[Folds, Any, Any, Any] | None:
        """Return folds, groups, times and classes of the rows; None if the memory is too small."""
        n, cv = len(data.y), self._cv()
        folds = FOLDS_OF_FEW if n <= FEW_ROWS else FOLDS
        folds = int(cv) if isinstance(cv, Integral) else folds
        every: Any = folds
        asked = rule if isinstance(rule, Folds) else Folds()
        codes = torch.as_tensor(data.y.ravel().astype(np.int64)) if targets.single else None
        labels = (data.groups, data.times)
        groups, times = (None if each is None else torch.as_tensor(each) for each in labels)
        if times is not None:
            shadows = asked.shadows or (1 if n >= ONE_SHADOW_ROWS and cv is None else folds)
        elif data.splits is not None:
            masks = zip(*np.split(data.splits.T, 2), strict=True)
            every = [(np.flatnonzero(train), np.flatnonzero(test)) for train, test in masks]
            every = every[: asked.shadows]
            shadows = len(every)
        else:
            folds = min(folds, n if groups is None else len(groups.unique()))
            every = fold_labels(n, folds, trainer.seed, groups, codes)
            shadows = min(asked.shadows or folds, folds)
        parameters = sum(p.numel() for p in trainer.model.parameters())
        needed = (shadows + 1) * TENSORS * parameters * trainer.dtype.itemsize
        memory = rule.memory if isinstance(rule, Auto) else MEMORY
        size = f"{n} rows and {parameters} parameters"
        trainer.chosen = f"{size}: one network, trained together with {shadows} shadows"
        if needed > memory:
            problem = f"{shadows + 1} networks would take {needed:,} bytes to train"
            if isinstance(rule, Folds) or self._needs_folds(data.groups, data.times):
                raise self._refuse(f"with {size}, {problem}; use early_stopping='evidence'")
            trainer.chosen = f"{size}: {problem}, more than {memory:,}"
            return None
        if times is None and groups is None:
            groups = torch.arange(n)  # losses of rows are independent
        asked = replace(asked, folds=every, shadows=None if isinstance(every, list) else shadows)
        return asked, groups, times, codes

    # -- results

    def _keep(self, trainer: Trainer, precision: Any) -> None:
        """Set the fitted attributes that are the same for all targets."""
        if not all(p.isfinite().all() for p in trainer.model.parameters()):
            raise self._refuse(
                "training ended in weights that are not finite; scale the inputs, or lower "
                "learning_rate_init"
            )
        dtype = torch.from_numpy(np.empty(0, precision)).dtype
        networks = (trainer.model, *trainer.shadows)
        scaled = [in_units(each, self._centre, self._spread, dtype) for each in networks]
        self._network, self._shadows = scaled[0], scaled[1:]
        self.n_layers_ = len(self.coefs_) + 1
        self.n_iter_, self.n_steps_, self.t_ = trainer.epochs, trainer.steps, trainer.rows_seen
        self.best_step_, unit = trainer.best_step, self._spread**2
        self.loss_, self.loss_curve_ = trainer.loss * unit, [x * unit for x in trainer.losses]
        self.stopping_rule_, self.stopping_choice_ = trainer.rule, trainer.chosen
        self.stopping_reason_, self.stopped_ = trainer.reason, trainer.stopped
        self.evidence_curve_, self.history_ = trainer.evidence, trainer.history
        self.temperature_, self.run_ = trainer.temperature, trainer.stopping
        self._facts = trainer.facts.rows()
        self._run_network = trainer.model  # in the units of training, for `run_`
        self._optimizer_state = None
        self.estimate_curve_ = self.estimate_ = self.estimate_error_ = None
        history, said = trainer.history, trainer.estimate
        if isinstance(history, EstimateHistory) and said is not None:
            value, low, high = (end * unit for end in said)
            self._loss_interval = crossval.Interval(value, low, high, said.coverage)
            self.estimate_, self.estimate_error_ = value, (said.high - said.low) / (2 * SIDE) * unit
            self.history_ = EstimateHistory(history.rule)
            for r in history:
                losses = (r.estimate, r.standard_error, r.training_loss)
                self.history_.append(Estimate(r.step, *(loss * unit for loss in losses)))
            self.history_.best_step = trainer.best_step
            self.history_.stopped_step = history.stopped_step
            self.estimate_curve_ = self.history_.columns()["estimate"]

    def _assess(self, labels: Tensor | None, data: Data) -> None:
        """Keep out-of-fold predictions by (n,) numbers of shadows, -1 for none; None: no folds."""
        self._record = self._weights = self._intervals = self.oof_predictions_ = None
        if labels is None:
            return
        predicted = self._out_of_fold(data.X, labels.numpy())
        # by rows as they were given; those of weight 0 have none
        folds: Any = np.append(labels, -1)[data.row_of]
        none = np.full((1, *predicted.shape[1:]), np.nan)
        self.oof_predictions_ = np.concatenate([predicted, none])[data.row_of]
        tested: Any = np.flatnonzero(folds >= 0)
        rows = data.row_of[tested]  # a row and its copies are one group
        outputs, targets = predicted[rows], self._truth(data.y)[rows]
        weights = (data.counts / np.bincount(data.row_of + 1)[1:])[rows]
        losses = self._row_losses(outputs, targets)
        if len(np.unique(weights)) > 1:
            losses = losses * weights / weights.mean()
        groups = rows if data.groups is None else data.groups[rows]
        arrays = losses, outputs, targets, tested, folds[tested], weights
        losses, outputs, targets, tested, folds, self._weights = map(torch.as_tensor, arrays)
        self._record = RunRecord(losses, outputs, targets, tested, folds, self._metrics(), groups)

    @property
    def estimates_(self) -> dict[str, crossval.Interval] | None:
        """The loss and the scores on new rows, with 95 % intervals; None without folds."""
        check_is_fitted(self, "n_iter_")
        if self._record is not None and self._intervals is None:
            self._intervals = self._bootstrapped()
        intervals: dict[str, crossval.Interval] | None = self._intervals
        return intervals

    def _bootstrapped(self) -> dict[str, crossval.Interval]:
        record = self._record
        order = np.argsort(record.groups, kind="stable")  # whatever the order of the rows
        outputs, targets, groups = (
            record.outputs[order],
            record.targets[order],
            record.groups[order],
        )
        arrays, weights = outputs.numpy(), self._weights[order].numpy()
        rows = torch.arange(len(order))
        intervals, draws = {"loss": self._loss_interval}, 499 if len(order) < MANY_ROWS else 199
        for name, score in self._scores().items():

            def of_rows(index: Tensor, truth: Tensor, score: Score = score) -> float:
                return score(arrays[index], truth.numpy(), weights[index])

            interval = statistic_interval(of_rows, rows, targets, groups, resamplings=draws)
            if math.isfinite(interval.value):
                intervals[name] = interval
        if "auc" in intervals and self.temperature_ == math.inf:  # constants differ between folds
            intervals["auc"] = crossval.Interval(0.5, math.nan, math.nan)
        for name, metric in record.metrics.items():
            intervals[name] = statistic_interval(metric, outputs, targets, groups)
        return intervals

    def _bands(self) -> list[tuple[float, float]]:
        """Return the ends of the intervals of all checks."""
        if self.run_ is None:
            return []
        rule = self.run_._followed()
        intervals = [rule.loss_interval(number) for number in range(len(rule.history))]
        unit = self._spread**2
        return [(each.low * unit, each.high * unit) for each in intervals]

    def record(self) -> RunRecord:
        """Return the out-of-fold losses and predictions of the rows, for `heldin.compare`."""
        if getattr(self, "_record", None) is None:
            raise self._refuse("record: there are no out-of-fold predictions; fit with folds")
        record: RunRecord = self._record
        return record

    def __getstate__(self) -> dict[str, Any]:
        state = dict(super().__getstate__())
        if "run_" in state:  # it holds the data and every shadow
            state |= {"run_": None, "_run_network": None}
        return state

    def _warn(self, trainer: Trainer, X: Any) -> None:
        name, scaling = type(self).__name__, ""
        column, size = (0, 0.0) if self.standardize else largest_input(X)
        if size > UNSCALED:
            scaling = (
                f" The inputs are not scaled (numbers of about {size:.3g} in column {column}): "
                "standardize=True scales them."
            )
        if trainer.temperature == math.inf and self.estimate_:  # a loss of 0 cannot be improved
            warnings.warn(
                f"{name}: on rows that were not trained on, the network was no better than a "
                "constant, which is predicted now. Do the inputs tell anything about the targets, "
                f"are there enough rows, do groups of rows belong together?{scaling} "
                + more("no-better-than-a-constant"),
                HeldinWarning,
                stacklevel=CALLER,
            )
        elif not trainer.converged:
            warnings.warn(
                f"{name}: max_iter={self.max_iter} epochs were over before "
                f"early_stopping={self.early_stopping!r} asked to stop ({trainer.reason}); raise "
                f"max_iter or learning_rate_init.{scaling} {more('epochs-were-over')}",
                ConvergenceWarning,
                stacklevel=CALLER,
            )

    def _report(self, X: Any, y: Any) -> Callable[[int, float, str], bool]:
        """Return the function to call after each epoch, for `verbose` and callbacks."""
        unit, self._root = self._spread**2, None
        if getattr(self, "_skl_callbacks", None):
            self._root = self._init_callback_context(task_name="fit", max_subtasks=self.max_iter)
            self._root.call_on_fit_task_begin(estimator=self, X=X, y=y)

        def report(epoch: int, loss: float, status: str) -> bool:
            if callable(self.verbose):
                self.verbose(epoch, loss * unit, status)
            elif self.verbose:
                print(f"Iteration {epoch}, loss = {loss * unit:.8f} ({status})")
            if self._root is None:
                return False
            task = self._root.subcontext(task_name="epoch")
            task.call_on_fit_task_begin(estimator=self, X=X, y=y)
            return bool(task.call_on_fit_task_end(estimator=self, X=X, y=y))

        return report

    @property
    def coefs_(self) -> list[Any]:
        """The (inputs, outputs) weights of the layers."""
        return [layer.weight.detach().T.numpy() for layer in linear_layers(self._network)]

    @property
    def intercepts_(self) -> list[Any]:
        """The (outputs,) biases of the layers."""
        return [layer.bias.detach().numpy() for layer in linear_layers(self._network)]

    def _outputs(self, X: Any) -> Any:
        """Return the (n, outputs) outputs of the network."""
        check_is_fitted(self)
        return self._outputs_of(self._network, self._check_inputs(X, None, first=False)[0])

    def _outputs_of(self, network: nn.Sequential, X: Any) -> Any:
        """Return the (n, outputs) outputs of a network on rows without missing values."""
        rows = as_rows(self._scaled(X).astype(self.coefs_[0].dtype, copy=False))
        return network_outputs(network, rows).numpy()

    def _out_of_fold(self, X: Any, shadow_of: Any) -> Any:
        """Return predictions of each row by the shadow that it is new to; nan for -1."""
        outputs = np.full((len(X), self.n_outputs_), np.nan, X.dtype)
        for number, network in enumerate(self._shadows):
            rows = shadow_of == number
            if rows.any():
                outputs[rows] = self._outputs_of(network, X[rows])
        return self._predictions(outputs)
