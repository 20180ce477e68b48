"""What the scikit-learn estimators share: from arrays to trained networks and back."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from scipy import sparse
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn

from heldin.errors import HeldinWarning, more
from heldin.rules.estimated.choose import ESTIMATED_RULES
from heldin.state.estimates import EstimateHistory
from heldin.tables.assess import Assessment
from heldin.tables.committee import Folds, drawn_folds, train_committee, usual_folds
from heldin.tables.mlp import (
    build_network,
    constant_outputs,
    network_of,
    network_outputs,
    set_weights,
    start_at,
)
from heldin.tables.trainer import Outcome, Report, Trainer, in_units

from .data import Checked, Data, Targets
from .inputs import as_rows, largest_input, observations

__all__ = ["Estimator", "Layers"]

MEMORY = 2**30  # bytes that the members may take while they train
TENSORS = 4  # of the size of the weights, for each member: weights, gradients, two moments
FEW = 300  # rows up to which units that cannot grow without bound are better for classes
LARGE = 10.0  # inputs that are better scaled; scaled ones are of size 1
MANY = 1000  # rows from which one network is stopped by one shadow, not by five

Layers = list[tuple[Any, Any]]  # weights (inputs, outputs) and biases (outputs,) or None


class Estimator(Checked):
    """Fits networks; a subclass says what the targets are and where the weights are kept."""

    hidden_layer_sizes: Any = ()
    fit_intercept: bool = True
    committee: Any = 1
    max_iter: int
    shuffle: bool
    random_state: Any
    warm_start: bool
    verbose: Any
    _optimizer_state: Any
    _unit: float = 1.0  # times a loss in training is one of the targets as given

    # -- what a subclass brings

    def _targets(self, y: Any, first: bool) -> Targets:
        raise NotImplementedError

    def _all_layers(self) -> list[Layers]:
        raise NotImplementedError

    def _keep_layers(self, members: list[Layers]) -> None:
        raise NotImplementedError

    def _weigh(self, targets: Targets, weights: Any) -> Any:
        """Put the weights of classes in."""
        return weights

    def _scale(self, X: Any, weights: Any, first: bool) -> Any:
        """Inputs as the network is trained on them."""
        return X

    def _between(self) -> str:
        """The activation between layers."""
        return "identity"

    def _settle(self, targets: Targets, few: bool) -> None:
        """Choose what was left open, in a first fit of few rows or many."""

    def _precision(self, X: Any) -> Any:
        """Of the numbers in training; the layers that are kept have that of the inputs."""
        return X.dtype

    def _prepared(self, X: Any) -> Any:
        """Inputs as the layers that were kept take them."""
        return X

    def _scaled(self, layers: Layers, back: bool) -> Layers:
        """Layers that were kept -> layers in training, or back."""
        return layers

    def _scale_targets(self, targets: Targets, weights: Any, first: bool) -> Targets:
        return targets

    def _assessed(self, found: Assessment | None, data: Data, targets: Targets) -> None:
        """Keep what rows that were not seen say."""
        raise NotImplementedError

    # -- fitting

    def _fit(self, X: Any, y: Any, sample_weight: Any = None, groups: Any = None) -> Any:
        rule = self._rule(groups)
        first = not (self.warm_start and hasattr(self, "n_iter_"))
        data = self._checked(X, y, sample_weight, groups, first)
        if len(data.weights) < 2:
            raise self._refuse("there is only one sample (n_samples=1), too few to learn from")
        if sparse.issparse(data.X) and (rule == "auto" or rule in ESTIMATED_RULES):
            if rule != "auto" or groups is not None:
                raise self._refuse(
                    f"early_stopping={self.early_stopping!r} needs dense rows, and "
                    f"{data.X.shape[0]} x {data.X.shape[1]} of them are too many; use "
                    "early_stopping='evidence'"
                )
            rule = "evidence"
        targets = self._targets(data.y, first)
        data = replace(data, y=targets.y)
        if self.shuffle and not sparse.issparse(data.X):
            index, weights = observations(data.X, data.y, data.weights)
            if len(index) > 1:  # a rule needs two rows
                data = data.take(index, weights)
        weights = self._weigh(replace(targets, y=data.y), data.weights)
        data = replace(data, weights=weights / weights.mean())
        seed = int(check_random_state(self.random_state).randint(2**31))
        held_out, used = None, data
        if rule == "validation":
            train, test = self._split(replace(targets, y=data.y), seed)
            used, held_out = (data.take(part, data.weights[part]) for part in (train, test))
            used = replace(used, weights=used.weights / used.weights.mean())
        if first:
            self._settle(targets, few=len(used.y) <= FEW)
        trainer = self._trainer(used, targets, seed, first)
        members, found = [trainer.model], None
        if rule in ("auto", "folds"):
            members, folds = self._members(trainer, used, targets, rule, first)
            if folds is None:
                rule = "evidence"
            else:
                found = train_committee(
                    trainer,
                    members,
                    folds,
                    together=self.committee != 1,
                    first=first,
                    report=self._report(),
                )
                members = members[-1:] if self.committee == 1 else members
        if found is None:
            trainer.run(rule, self._held_out(held_out, targets, trainer), self._report())
        self._keep(trainer, members, used.X.dtype)
        self._assessed(found, used, targets)
        self._warn(trainer.outcome, found, used.X)
        return self

    def _folds(self, n: int, splits: Any) -> tuple[int, int]:
        """Number of folds, and of networks that miss one of them."""
        given = usual_folds(n) if self.cv is None else self.cv
        folds = int(given) if splits is None else len(splits)
        if self.committee == "auto":
            return folds, folds
        if self.committee == 1:
            return folds, 1 if n >= MANY and self.cv is None else folds
        shadows = int(self.committee) - 1
        # every row is to be new to one of them
        return folds if self.cv is not None else min(folds, shadows), shadows

    def _members(
        self, trainer: Trainer, data: Data, targets: Targets, rule: str, first: bool
    ) -> tuple[list[nn.Sequential], Folds | None]:
        """Networks to train in lock-step, and who sees what; None if they do not fit."""
        n, model, seed, splits = len(data.y), trainer.model, trainer.seed, data.splits
        folds, shadows = self._folds(n, splits)
        together = self.committee != 1
        each = TENSORS * sum(p.numel() * p.element_size() for p in model.parameters())
        size = f"{n} rows and {sum(p.numel() for p in model.parameters())} parameters"
        if (shadows + 1) * each > MEMORY:
            said = f"{shadows + 1} networks would take {(shadows + 1) * each:,} bytes to train"
            if rule != "auto" or self.cv is not None or data.groups is not None:
                raise self._refuse(f"with {size}, {said}; use early_stopping='evidence'")
            trainer.outcome.chosen = f"{size}: {said}, more than {MEMORY:,}"
            return [model], None
        what = "a committee" if together else "one network, beside shadows"
        trainer.outcome.chosen = f"{size}: {what}; {shadows + 1} trained in lock-step"
        if splits is not None:
            parts = [(torch.as_tensor(a), torch.as_tensor(b)) for a, b in splits]
            drawn = Folds.of(parts, data.given, shadows + 1).rows(torch.as_tensor(data.index))
            if not bool(drawn.judges.any(1)[:-1].all() and drawn.sees.any(1).all()):
                raise self._refuse(
                    f"cv={self.cv!r}: a split has no row to train on or to judge; rows of weight 0 "
                    "do not count"
                )
        else:
            codes = torch.as_tensor(data.y.ravel().astype(np.int64)) if targets.single else None
            groups = None if data.groups is None else torch.as_tensor(data.groups)
            drawn = drawn_folds(n, shadows + 1, seed, groups, codes, folds)
        previous = None if first else self._all_layers()
        return self._starts(model, shadows, seed, previous, together), drawn

    def _starts(
        self,
        model: nn.Sequential,
        shadows: int,
        seed: int,
        previous: list[Layers] | None,
        apart: bool,
    ) -> list[nn.Sequential]:
        """Each with a start of its own, or all with that of the model, which is the last."""
        starts = []
        for number in range(shadows):
            copied = copy.deepcopy(model)
            if previous is not None and len(previous) == shadows + 1:
                set_weights(copied, self._scaled(previous[number], back=False))
            elif apart and previous is None:
                generator = torch.Generator().manual_seed(seed + 1 + number)
                copied = self._network(model, generator)
            starts.append(copied)
        return [*starts, model]

    def _network(self, like: nn.Sequential, generator: torch.Generator) -> nn.Sequential:
        linear = [layer for layer in like if isinstance(layer, nn.Linear)]
        sizes = [linear[0].in_features, *(layer.out_features for layer in linear)]
        has_bias = linear[0].bias is not None
        return build_network(
            sizes, self._between(), bias=has_bias, dtype=_dtype(like), generator=generator
        )

    def _held_out(self, data: Data | None, targets: Targets, trainer: Trainer) -> Any:
        if data is None:
            return None
        scaled = self._scale_targets(replace(targets, y=data.y), None, first=False)
        X = self._scale(data.X, None, first=False)
        return (
            as_rows(X.astype(self._precision(X), copy=False)),
            _tensor(scaled.y, trainer.model),
            torch.from_numpy(data.weights / data.weights.mean()),
        )

    def _partial_fit(self, X: Any, y: Any, sample_weight: Any) -> Any:
        self._rule()
        first = not hasattr(self, "n_iter_")
        data = self._checked(X, y, sample_weight, None, first)
        targets = self._targets(data.y, first=False)  # partial_fit is told the classes
        data = replace(data, y=targets.y, weights=self._weigh(targets, data.weights))
        seed = int(check_random_state(self.random_state).randint(2**31))
        if first:
            self._settle(targets, few=False)  # who knows what comes
        trainer = self._trainer(data, targets, seed, first)
        outcome = trainer.outcome
        if not first:
            trainer.seen, outcome.epochs = self.t_, self.n_iter_
            outcome.steps = self.n_steps_
            outcome.losses = [loss / self._unit for loss in self.loss_curve_]
            if self._optimizer_state is not None:
                trainer.optimizer.load_state_dict(self._optimizer_state)
        for _ in trainer.steps():
            pass
        outcome.best_step, outcome.loss = outcome.steps, outcome.losses[-1]
        self._keep(trainer, [trainer.model], data.X.dtype)
        self._assessed(None, data, targets)
        self._optimizer_state = trainer.optimizer.state_dict()
        return self

    def _trainer(self, data: Data, targets: Targets, seed: int, first: bool) -> Trainer:
        """Of the network that sees every row."""
        hidden = np.atleast_1d(np.asarray(self.hidden_layer_sizes, int)).tolist()
        X, weights = self._scale(data.X, data.weights, first), data.weights
        X = X.astype(self._precision(X), copy=False)
        targets = self._scale_targets(replace(targets, y=data.y), weights, first)
        model = build_network(
            [X.shape[1], *hidden, targets.outputs],
            self._between(),
            bias=self.fit_intercept,
            dtype=torch.float32 if X.dtype == np.float32 else torch.float64,
            generator=torch.Generator().manual_seed(seed) if hidden else None,
        )
        y = _tensor(targets.y, model)
        equal = bool((weights == 1.0).all())
        some = None if equal else torch.from_numpy(weights).to(_dtype(model))
        if first:
            start_at(model, constant_outputs(targets.loss, y, targets.outputs, some))
        elif not set_weights(model, self._scaled(self._all_layers()[-1], back=False)):
            raise self._refuse(
                "to go on from the fit before, the inputs, the layers and the classes must be the "
                "same; set warm_start=False"
            )
        return Trainer(model, targets.loss, as_rows(X), y, some, self._config(), seed)

    def _keep(self, trainer: Trainer, members: list[nn.Sequential], precision: Any) -> None:
        kept = [layers_of(model, precision) for model in members]
        parts = (part for layers in kept for layer in layers for part in layer)
        if not all(np.isfinite(part).all() for part in parts if part is not None):
            raise self._refuse(
                "training ended in weights that are not finite; scale the inputs, or lower "
                "learning_rate_init"
            )
        self._keep_layers([self._scaled(layers, back=True) for layers in kept])
        outcome, unit = trainer.outcome, self._unit
        self.n_iter_, self.n_steps_, self.t_ = outcome.epochs, outcome.steps, trainer.seen
        self.best_step_ = outcome.best_step
        self.loss_, self.loss_curve_ = outcome.loss * unit, [x * unit for x in outcome.losses]
        self.stopping_rule_, self.stopping_choice_ = outcome.rule, outcome.chosen
        self.stopping_reason_, self.stopped_ = outcome.reason, outcome.stopped
        self.evidence_curve_ = outcome.evidence
        history = outcome.history
        self.estimate_curve_ = self.estimate_ = self.estimate_error_ = None
        if isinstance(history, EstimateHistory):
            history = in_units(history, unit)
            self.estimate_curve_ = [record.estimate for record in history]
            assert outcome.estimate is not None
            assert outcome.standard_error is not None
            self.estimate_ = outcome.estimate * unit
            self.estimate_error_ = outcome.standard_error * unit
        self.history_ = history
        self._optimizer_state = None

    def _warn(self, outcome: Outcome, found: Assessment | None, X: Any) -> None:
        name, scaling = type(self).__name__, ""
        if not getattr(self, "standardize", True):
            column, size = largest_input(X)
            if size > LARGE:
                scaling = (
                    f" The inputs are not scaled (numbers of about {size:.3g} in column {column}): "
                    "standardize=True scales them."
                )
        if found is not None and found.share == 0 and found.constant > 0:
            warnings.warn(
                f"{name}: on rows that were not trained on, the network was no better than a "
                "constant, which is predicted now. Do the inputs tell anything about the targets, "
                f"are there enough rows, do groups of rows belong together?{scaling} "
                + more("no-better-than-a-constant"),
                HeldinWarning,
                stacklevel=4,
            )
        elif not outcome.converged:
            warnings.warn(
                f"{name}: max_iter={self.max_iter} epochs were over before "
                f"early_stopping={self.early_stopping!r} asked to stop ({outcome.reason}); raise "
                f"max_iter or learning_rate_init.{scaling} {more('epochs-were-over')}",
                ConvergenceWarning,
                stacklevel=4,
            )

    def _report(self) -> Report | None:
        """What is told about each epoch: nothing, a line, or whatever the user's function does."""
        if not self.verbose:
            return None
        unit = self._unit
        if callable(self.verbose):
            found: Report = self.verbose
            return lambda epoch, loss, status: found(epoch, loss * unit, status)
        return lambda epoch, loss, status: print(
            f"Iteration {epoch}, loss = {loss * unit:.8f} ({status})"
        )

    # -- predicting

    def _outputs(self, X: Any) -> Any:
        """(members, n, outputs) of the networks."""
        check_is_fitted(self)
        X, _ = self._numbers(X, None, first=False)
        X = self._prepared(X)
        found = []
        for layers in self._all_layers():
            kind = layers[0][0].dtype
            model = network_of(layers, self._between())
            found.append(network_outputs(model, as_rows(X.astype(kind, copy=False))).numpy())
        return np.stack(found)


def layers_of(model: nn.Sequential, precision: Any) -> Layers:
    """Weights and biases as arrays."""
    return [
        (
            layer.weight.detach().T.contiguous().numpy().astype(precision),
            None if layer.bias is None else layer.bias.detach().numpy().astype(precision),
        )
        for layer in model
        if isinstance(layer, nn.Linear)
    ]


def _dtype(model: nn.Sequential) -> torch.dtype:
    return next(model.parameters()).dtype


def _tensor(y: Any, model: nn.Sequential) -> Tensor:
    found = torch.from_numpy(np.ascontiguousarray(y))
    return found if found.dtype == torch.int64 else found.to(_dtype(model))
