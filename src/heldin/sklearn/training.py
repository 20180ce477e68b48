"""Networks of the estimators, and their training until a rule asks to stop."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from heldin.crossval import Interval
from heldin.early_stopping import EarlyStopping
from heldin.errors import HeldinError, HeldinWarning
from heldin.rules.evidence import EvidenceStopping
from heldin.rules.folds import FoldStopping
from heldin.rules.options import Evidence, Folds
from heldin.rules.reporting import RunFacts
from heldin.rules.validation import ValidationStopping
from heldin.shadows.losses import PerRowLoss
from heldin.state.estimates import EstimateHistory
from heldin.state.history import History

__all__ = ["Trainer"]

CHUNK = 4096  # rows per evaluation call
SHOWN_ROWS = 2048  # rows whose training loss is computed after an epoch
PASSED = 3  # checks after the lowest estimate from which the minimum counts as passed
ROUNDING = 1e-6  # relative difference of mean losses in single precision
DECAY = 0.3  # default weight decay
SMALLEST_RATE = 1e-6  # below which adaptive rates are not divided again
ACTIVATIONS: dict[str, type[nn.Module]] = {
    "identity": nn.Identity,
    "logistic": nn.Sigmoid,
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
}

Report = Callable[[int, float, str], Any]  # epoch, loss, status of the rule; True: stop


def build_network(
    sizes: Sequence[int],
    activation: str,
    *,
    dtype: torch.dtype = torch.float64,
    generator: torch.Generator | None = None,
) -> nn.Sequential:
    """Return linear layers with activations: zeros, or with a generator Glorot's weights."""
    layers: list[nn.Module] = []
    for above, below in pairwise(sizes):
        layers += [ACTIVATIONS[activation]()] if layers else []
        linear = nn.utils.skip_init(nn.Linear, above, below, dtype=dtype)
        bound = math.sqrt((2.0 if activation == "logistic" else 6.0) / (above + below))
        with torch.no_grad():
            for p in linear.parameters():
                p.zero_() if generator is None else p.uniform_(-bound, bound, generator=generator)
        layers.append(linear)
    return nn.Sequential(*layers)


def linear_layers(network: nn.Sequential) -> list[nn.Linear]:
    """Return the layers with weights."""
    return [layer for layer in network if isinstance(layer, nn.Linear)]


def constant_outputs(loss_fn: Any, y: Tensor, outputs: int, weights: Tensor | None) -> Tensor:
    """Return the (outputs,) of the best constant prediction: class frequencies, or means.

    A class that is missing counts as half a row.
    """
    weights = torch.ones(len(y), dtype=torch.float64) if weights is None else weights.double()
    if isinstance(loss_fn, nn.CrossEntropyLoss):
        counts = torch.zeros(outputs, dtype=torch.float64).index_add_(0, y, weights)
        counts = torch.where(counts > 0, counts, 0.5)
        return (counts / counts.sum()).log()
    means = (y.double() * weights.unsqueeze(1)).sum(0) / weights.sum()
    if isinstance(loss_fn, nn.BCEWithLogitsLoss):
        half = 0.5 / (len(y) + 1)
        return torch.where(means <= 0, half, torch.where(means >= 1, 1 - half, means)).logit()
    return means


@torch.no_grad()
def start_at(model: nn.Sequential, outputs: Tensor) -> None:
    """Make a new network give the same outputs for all inputs."""
    weight, bias = linear_layers(model)[-1].parameters()
    weight.zero_()
    bias.copy_(outputs)


@torch.no_grad()
def in_units(model: nn.Sequential, centre: Any, spread: float, dtype: torch.dtype) -> nn.Sequential:
    """Return a copy in another precision that gives `spread` times the outputs, plus `centre`."""
    network = copy.deepcopy(model).to(dtype)
    weight, bias = linear_layers(network)[-1].parameters()
    weight.mul_(spread)
    bias.mul_(spread).add_(torch.as_tensor(centre))
    return network


@torch.no_grad()
def out_of_units(
    network: nn.Sequential, centre: Any, spread: float, dtype: torch.dtype
) -> nn.Sequential:
    """Return the model, in another precision, of which `in_units` made a network."""
    model = copy.deepcopy(network)
    weight, bias = linear_layers(model)[-1].parameters()
    weight.div_(spread)
    bias.sub_(torch.as_tensor(centre)).div_(spread)
    return model.to(dtype)


@torch.no_grad()
def network_outputs(model: nn.Module, x: Any) -> Tensor:
    """Return the (n, outputs) outputs, computed in chunks."""
    pieces = [x[slice(i, i + CHUNK)] for i in range(0, len(x), CHUNK)]
    return torch.cat([model(piece) for piece in pieces])


def make_optimizer(model: nn.Module, estimator: Any, batch_rows: int) -> Optimizer:
    """Return an optimiser that shrinks weights, not biases.

    Weights have the penalty alpha / batch_rows of scikit-learn, or AdamW's decoupled decay.
    """
    alpha, rate, decay = estimator.alpha, estimator.learning_rate_init, estimator.weight_decay
    decay = (0.0 if alpha else DECAY) if decay is None else decay
    named = list(model.named_parameters())
    weights, biases = ([p for n, p in named if n.endswith(e)] for e in ("weight", "bias"))
    groups: list[dict[str, Any]] = [
        {"params": weights, "weight_decay": decay or alpha / batch_rows},
        {"params": biases, "weight_decay": 0.0},
    ]
    if estimator.solver == "sgd":
        nesterov = estimator.nesterovs_momentum and estimator.momentum > 0
        return torch.optim.SGD(groups, rate, momentum=estimator.momentum, nesterov=nesterov)
    kind = torch.optim.AdamW if decay else torch.optim.Adam
    betas = estimator.beta_1, estimator.beta_2
    return kind(groups, rate, betas=betas, eps=estimator.epsilon, fused=True)


class Trainer:
    """A network, its training by the parameters of an estimator, and the course of that.

    Inputs are a tensor or rows that are made dense on access; weights have mean 1.
    """

    def __init__(
        self,
        model: nn.Sequential,
        loss_fn: nn.Module,
        x: Any,
        y: Tensor,
        weights: Tensor | None,
        estimator: Any,
        seed: int,
    ) -> None:
        self.model, self.loss_fn, self.x, self.y = model, loss_fn, x, y
        self.weights, self.estimator, self.seed = weights, estimator, seed
        self.dtype = next(model.parameters()).dtype
        size = estimator.batch_size
        self.batch_rows = min(200 if size == "auto" else size, len(y))
        self.optimizer = make_optimizer(model, estimator, self.batch_rows)
        self.row_losses = PerRowLoss.of(loss_fn, network_outputs(model, x[:256]), y[:256]).per_row
        self.generator = torch.Generator().manual_seed(seed)
        self.facts = RunFacts()
        self.facts.describe(model, self.optimizer)
        self.facts.note_step()
        self.epochs = self.steps = self.rows_seen = 0
        self.best_step = 0  # whose weights were kept, or the centre of their average
        self.losses: list[float] = []  # training loss after each epoch
        self.loss = math.nan  # training loss of the weights that were kept
        self.rule, self.chosen, self.reason = "none", "", ""  # chosen: why this rule
        self.stopped = False  # whether the rule asked to stop before max_iter
        self.converged = False  # whether it did, or the lowest estimate was passed
        self.history: History | EstimateHistory | None = None
        self.evidence: list[float] | None = None  # criterion after each epoch
        # of runs with folds:
        self.stopping: EarlyStopping | None = None
        self.shadow_of: Tensor | None = None  # (n,) number of the shadow that is tested on a row
        self.shadows: list[nn.Sequential] = []
        self.estimate: Interval | None = None
        self.temperature: float | None = None  # of the logits; inf if a constant is predicted

    def train_epoch(self, before_step: Callable[[], Any] | None = None) -> None:
        """Take the optimiser steps of an epoch."""
        n, total = len(self.y), 0.0
        shuffle = self.estimator.shuffle
        order = torch.randperm(n, generator=self.generator) if shuffle else torch.arange(n)
        for index in order.split(self.batch_rows):
            self.optimizer.zero_grad()
            losses = self.row_losses(self.model(self.x[index]), self.y[index])
            if self.weights is not None:
                losses = losses * self.weights[index]
            losses.mean().backward()
            total += float(losses.detach().sum())
            if before_step is not None:
                before_step()
            self.optimizer.step()
            self.steps += 1
        self.end_epoch(total / n)

    def end_epoch(self, loss: float) -> None:
        """Record the training loss, and set the rate of the next epoch."""
        self.epochs += 1
        self.losses.append(loss)
        self.facts.note_step()
        self.rows_seen += len(self.y)
        estimator = self.estimator
        if estimator.solver == "sgd" and estimator.learning_rate == "invscaling":
            rate = estimator.learning_rate_init / (self.rows_seen + 1) ** estimator.power_t
            for group in self.optimizer.param_groups:
                group["lr"] = rate

    def mean_loss(self, x: Any, y: Tensor, weights: Tensor | None) -> float:
        """Return the loss of the network as it is."""
        losses = self.row_losses(network_outputs(self.model, x), y).double()
        return float((losses if weights is None else losses * weights).mean())

    def run(self, rule: str | Evidence, held_out: Any = None, report: Report | None = None) -> None:
        """Train until the rule asks to stop; the weights that it keeps are in the model.

        Args:
            rule: evidence, "validation", or "none" for the training loss, as in scikit-learn.
            held_out: inputs, targets and weights, for "validation".
            report: called after every epoch.
        """
        self.rule, estimator = rule if isinstance(rule, str) else "evidence", self.estimator
        follows: AbstractContextManager[Any] = nullcontext()
        if isinstance(rule, Evidence):
            window = -(-len(self.y) // self.batch_rows) if rule.window == "epoch" else rule.window
            follows = EvidenceStopping(self.model, replace(rule, window=window))
            self.evidence = []
        elif rule == "validation":
            follows = ValidationStopping(
                self.model,
                lambda: self.mean_loss(*held_out),
                patience=estimator.n_iter_no_change,
                improvement=estimator.tol,
            )
        adaptive = estimator.solver == "sgd" and estimator.learning_rate == "adaptive"
        best, since = math.inf, 0
        with follows as stopping:
            while self.epochs < estimator.max_iter and not self.stopped:
                self.train_epoch(stopping.step if self.evidence is not None else None)
                if stopping is None:
                    since = since + 1 if self.losses[-1] > best - estimator.tol else 0
                    best = min(best, self.losses[-1])
                    self.stopped = since > estimator.n_iter_no_change
                    flat = f"training loss not {estimator.tol:g} lower for {since} epochs"
                    self.reason = flat if since else "the training loss still falls"
                    rates = self.optimizer.param_groups
                    if self.stopped and adaptive and rates[0]["lr"] > SMALLEST_RATE:
                        for group in rates:
                            group["lr"] /= 5
                        self.stopped, since = False, 0
                elif self.evidence is not None:
                    self.evidence.append(stopping.criterion)
                    self.stopped, self.reason = stopping.should_stop, stopping.reason
                else:
                    self.stopped = stopping.step()
                    self.reason = stopping.reason.replace("step", "epoch")
                if report is not None and report(self.epochs, self.losses[-1], self.reason):
                    break
            self.best_step = self.steps
            if stopping is not None:
                self.history = stopping.history
            if rule == "validation":
                if stopping.best_step is None:
                    raise HeldinError("the validation loss was never finite; scale the inputs")
                stopping.restore()
                self.best_step = stopping.best_step * (self.steps // self.epochs)
        self.converged = self.stopped
        self.loss = self.mean_loss(self.x, self.y, self.weights)

    def run_folds(
        self, rule: Folds, groups: Any, time: Any, classes: Tensor | None, report: Report
    ) -> None:
        """Train by `heldin.EarlyStopping` in one stack with shadows, until it asks to stop.

        If the estimate is never below that of the first weights, which predict a constant, the
        constant is restored.

        Args:
            rule, groups, time: as `heldin.EarlyStopping` takes them.
            classes: (n,) of the rows, if each has one; every shadow must see two of them.
            report: called after every epoch.
        """
        monitor, shuffle = self.estimator.monitor, self.estimator.shuffle
        stopping = EarlyStopping(
            self.model,
            self.optimizer,
            self.loss_fn,
            (self.x, self.y),
            rule,
            groups=groups,
            time=time,
            sample_weight=self.weights,
            seed=self.seed,
            metrics=None if monitor == "loss" else [monitor],
            monitor=monitor,
        )
        inner = stopping._followed()
        assert isinstance(inner, FoldStopping)
        self.shadow_of = inner.fold_of_row
        sees = [inner._sees_rows(self.shadow_of, k) for k in range(int(self.shadow_of.max()) + 1)]
        if classes is not None and any(len(classes[rows].unique()) < 2 for rows in sees):
            raise self.estimator._refuse(
                "the rows that one fold leaves for training are all of one class (copies of a row "
                "count once); each class needs rows in two folds, or take the rule 'evidence', "
                "which has no folds"
            )
        constants = [self._constant(rows) for rows in sees]
        *_, bias = dict(self.model.named_parameters())
        stopping._start_shadows([{bias: constant} for constant in constants])
        some = slice(None, None, -(-len(self.y) // SHOWN_ROWS))
        shown = self.x[some], self.y[some], None if self.weights is None else self.weights[some]

        def end_epoch(stopping: EarlyStopping) -> None:
            self.reason = stopping.reason
            self.end_epoch(self.mean_loss(*shown))
            asked = report(self.epochs, self.losses[-1], self.reason)
            if asked and not inner.should_stop:
                inner.should_stop, inner.stopped_step = True, inner.history.last().step

        with warnings.catch_warnings():  # estimators have a warning of their own
            said = ".*(never fell below|has learnt nothing)"
            warnings.filterwarnings("ignore", said, HeldinWarning)
            stopping.fit(
                self.batch_rows,
                self.estimator.max_iter,
                generator=self.generator if shuffle else None,
                shuffle=shuffle,
                on_epoch=end_epoch,
            )
        if isinstance(rule.folds, Tensor):  # too long for a repr
            stopping.rule = replace(rule, folds=int(rule.folds.max()) + 1)
        history = inner.history
        self.rule, self.stopped, self.history = "folds", inner.should_stop, history
        self.stopping, self.steps = stopping, history.last().step
        self.shadows = list(stopping.committee().members[1:])  # type: ignore[arg-type]
        number, self.temperature = inner.best_number, inner.temperature
        if history[number].estimate >= history[0].estimate * (1 - ROUNDING):
            number, self.temperature = 0, math.inf
            constants.append(self._constant(slice(None)))
            for network, constant in zip([*self.shadows, self.model], constants, strict=True):
                start_at(network, constant)
        history.best_step = self.best_step = history[number].step
        later = sum(check.step > self.best_step for check in history)
        self.converged = self.stopped or later >= PASSED
        self.estimate = inner.loss_interval(number)
        self.loss = self.mean_loss(self.x, self.y, self.weights)

    def renumber(self, numbers: Tensor) -> None:
        """Give the rows of the run the numbers that they have among the rows given."""
        assert self.stopping is not None
        self.stopping._followed().renumber(numbers)

    def _constant(self, rows: Any) -> Tensor:
        """Return the outputs of the best constant of some rows."""
        weights = None if self.weights is None else self.weights[rows]
        outputs = network_outputs(self.model, self.x[:1]).shape[1]
        return constant_outputs(self.loss_fn, self.y[rows], outputs, weights)
