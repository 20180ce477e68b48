"""Training of one network until a rule asks to stop."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from heldin.crossval import Interval
from heldin.early_stopping import EarlyStopping
from heldin.errors import HeldinError, HeldinWarning
from heldin.rules.arguments import evidence_arguments
from heldin.rules.evidence import EvidenceStopping
from heldin.rules.options import Evidence, Folds
from heldin.rules.path import PathStopping
from heldin.rules.reporting import RunFacts
from heldin.rules.validation import ValidationStopping
from heldin.shadows.losses import LossFunction, PerRowLoss
from heldin.state.estimates import Estimate, EstimateHistory
from heldin.state.history import History

from .mlp import Inputs, constant_outputs, network_outputs, start_at

__all__ = [
    "RULE_NAMES",
    "FoldPlan",
    "Outcome",
    "Report",
    "Trainer",
    "TrainingConfig",
    "in_units",
]

RULE_NAMES = ("auto", "folds", "shadow", "evidence", "validation")  # besides "none"
SHOWN_ROWS = 2048  # rows whose training loss is computed after an epoch
PASSED = 3  # checks after the lowest estimate from which the minimum counts as passed
ROUNDING = 1e-6  # relative difference of mean losses in single precision

Report = Callable[[int, float, str], Any]  # epoch, loss, status of the rule; True: stop


@dataclass(frozen=True)
class TrainingConfig:
    """Options of training; names and meanings are those of scikit-learn's MLPClassifier."""

    solver: str = "adam"
    alpha: float = 0.0
    weight_decay: float = 0.0
    batch_size: int | Literal["auto"] = "auto"
    learning_rate: str = "constant"
    learning_rate_init: float = 1e-3
    power_t: float = 0.5
    max_iter: int = 2000
    shuffle: bool = True
    tol: float = 1e-4
    momentum: float = 0.9
    nesterovs_momentum: bool = True
    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-8
    n_iter_no_change: int = 10

    def batch_rows(self, n: int) -> int:
        """Return the number of rows in a minibatch of a table of n rows."""
        return min(200 if self.batch_size == "auto" else self.batch_size, n)

    def optimizer(self, model: nn.Module, batch_rows: int) -> Optimizer:
        """Return an optimiser that shrinks weights, not biases.

        Weights have the penalty alpha / batch_rows of scikit-learn, or the decoupled weight decay
        of AdamW.
        """
        named = list(model.named_parameters())
        parts = {end: [p for n, p in named if n.endswith(end)] for end in ("weight", "bias")}
        decay = self.weight_decay or self.alpha / batch_rows
        groups: list[dict[str, Any]] = [
            {"params": parts["weight"], "weight_decay": decay},
            {"params": parts["bias"], "weight_decay": 0.0},
        ]
        if self.solver == "sgd":
            nesterov = self.nesterovs_momentum and self.momentum > 0
            return torch.optim.SGD(
                groups, self.learning_rate_init, momentum=self.momentum, nesterov=nesterov
            )
        kind = torch.optim.AdamW if self.weight_decay else torch.optim.Adam
        return kind(
            groups,
            self.learning_rate_init,
            betas=(self.beta_1, self.beta_2),
            eps=self.epsilon,
            fused=True,
        )


@dataclass(frozen=True, eq=False)
class FoldPlan:
    """Which rows each shadow does not see.

    Attributes:
        rule: the folds, as `heldin.EarlyStopping` takes them.
        labels: (n,) number of the shadow that is tested on each row; -1: none.
        sees: (shadows, n) booleans: the rows that each shadow is trained on.
        groups: (n,) whole numbers; losses within a group are dependent. None with `time`.
        time: (n,) whole numbers in the order of time, or None.
        monitor: what the weights are chosen by, "loss" or the name of a scorer.
    """

    rule: Folds
    labels: Tensor
    sees: Tensor
    groups: Tensor | None
    time: Tensor | None = None
    monitor: str = "loss"


@dataclass
class Outcome:
    """The course of a training run.

    Attributes:
        rule: the rule that stopped it ("auto" has become another one).
        chosen: why this rule was chosen.
        stopped: whether the rule asked to stop before `max_iter`.
        converged: whether it stopped, or the lowest estimate was passed.
        reason: last status of the rule.
        epochs, steps: length of the run.
        best_step: the step whose weights were kept, or the centre of their average.
        losses: training loss after each epoch.
        loss: training loss of the weights that were kept.
        evidence: criterion after each epoch, for "evidence".
        estimate: of the test loss, for "folds".
        temperature: of the logits; inf if a constant is predicted ("folds").
        shadows: the networks that were not trained on some rows ("folds").
        run: the object that followed the run ("folds").
        history: record of the rule.
    """

    rule: str
    chosen: str = ""
    stopped: bool = False
    converged: bool = False
    reason: str = ""
    epochs: int = 0
    steps: int = 0
    best_step: int = 0
    losses: list[float] = field(default_factory=list)
    loss: float = math.nan
    evidence: list[float] | None = None
    estimate: Interval | None = None
    temperature: float | None = None
    shadows: list[nn.Sequential] = field(default_factory=list)
    run: EarlyStopping | None = None
    history: History | EstimateHistory | None = None


class Trainer:
    """Trains a network made by `build_network`.

    Args:
        model: the network.
        loss_fn: cross-entropy, its binary kind or the squared error.
        x: (n, inputs).
        y: (n,) class numbers or (n, outputs).
        weights: (n,) with mean 1, or None.
        config: options of training.
        seed: of the order of rows.
    """

    def __init__(
        self,
        model: nn.Sequential,
        loss_fn: LossFunction,
        x: Inputs,
        y: Tensor,
        weights: Tensor | None,
        config: TrainingConfig,
        seed: int,
    ) -> None:
        self.model, self.loss_fn, self.x, self.y = model, loss_fn, x, y
        self.weights, self.config, self.seed = weights, config, seed
        self.batch_rows = config.batch_rows(len(y))
        self.optimizer = config.optimizer(model, self.batch_rows)
        self.loss = PerRowLoss.of(loss_fn, network_outputs(model, x[slice(0, 256)]), y[:256])
        self.generator = torch.Generator().manual_seed(seed)
        self.rows_seen = 0  # in all epochs
        self.facts = RunFacts()
        self.facts.describe(model, self.optimizer)
        self.facts.note_step()
        self.outcome = Outcome("none")

    def batches(self) -> Sequence[Tensor]:
        """Return the row numbers of each minibatch of an epoch."""
        n = len(self.y)
        order = (
            torch.randperm(n, generator=self.generator) if self.config.shuffle else torch.arange(n)
        )
        batches: Sequence[Tensor] = order.split(self.batch_rows)
        return batches

    def train_epoch(self, before_step: Callable[[], Any] | None = None) -> None:
        """Take the optimiser steps of an epoch."""
        total = 0.0
        for index in self.batches():
            self.optimizer.zero_grad()
            losses = self.loss.per_row(self.model(self.x[index]), self.y[index])
            if self.weights is not None:
                losses = losses * self.weights[index]
            losses.mean().backward()
            total += float(losses.detach().sum())
            if before_step is not None:
                before_step()
            self.optimizer.step()
            self.outcome.steps += 1
        self.end_epoch(total / len(self.y))

    def end_epoch(self, loss: float) -> None:
        """Record the training loss, and set the rate of the next epoch."""
        self.outcome.epochs += 1
        self.outcome.losses.append(loss)
        self.facts.note_step()
        self.rows_seen += len(self.y)
        if self.config.solver == "sgd" and self.config.learning_rate == "invscaling":
            rate = self.config.learning_rate_init / (self.rows_seen + 1) ** self.config.power_t
            for group in self.optimizer.param_groups:
                group["lr"] = rate

    def mean_loss(self, x: Inputs, y: Tensor, weights: Tensor | None) -> float:
        """Return the loss of the network as it is."""
        losses = self.loss.per_row(network_outputs(self.model, x), y).double()
        return float((losses if weights is None else losses * weights).mean())

    def run(
        self, rule: str | Evidence, held_out: Any = None, report: Report | None = None
    ) -> Outcome:
        """Train until the rule asks to stop; the weights that it keeps are in the model.

        Args:
            rule: evidence, "validation", or "none" for the training loss, as in scikit-learn.
            held_out: inputs, targets and weights, for "validation".
            report: called after every epoch.
        """
        out = self.outcome
        out.rule = rule if isinstance(rule, str) else "evidence"
        if isinstance(rule, Evidence):
            steps = -(-len(self.y) // self.batch_rows)
            arguments = evidence_arguments(rule, steps if rule.window == "epoch" else rule.window)
            out.evidence = []
            with EvidenceStopping(self.model, **arguments) as evidence:

                def follow() -> bool:
                    self.train_epoch(evidence.step)
                    assert out.evidence is not None
                    out.evidence.append(evidence.criterion)
                    out.reason = evidence.reason
                    return evidence.should_stop

                self._epochs(follow, report)
            out.history, out.best_step = evidence.history, out.steps
        elif rule == "validation":
            self._run_validation(held_out, report)
        else:
            self._run_until_flat(report)
        out.converged = out.stopped
        out.loss = self.mean_loss(self.x, self.y, self.weights)
        return out

    def run_folds(self, plan: FoldPlan, report: Report | None = None) -> Outcome:
        """Train by `heldin.EarlyStopping` in one stack with shadows, until it asks to stop.

        If the estimate is never below that of the first weights, which predict a constant, the
        constant is restored.
        """
        assert isinstance(self.x, Tensor)
        out, config = self.outcome, self.config
        stopping = EarlyStopping(
            self.model,
            self.optimizer,
            self.loss_fn,
            (self.x, self.y),
            plan.rule,
            groups=plan.groups,
            time=plan.time,
            sample_weight=self.weights,
            seed=self.seed,
            metrics=None if plan.monitor == "loss" else [plan.monitor],
            monitor=plan.monitor,
        )
        constants = [self._constant(sees) for sees in plan.sees]
        *_, bias = dict(self.model.named_parameters())
        stopping._start_shadows([{bias: constant} for constant in constants])
        rows = slice(None, None, -(-len(self.y) // SHOWN_ROWS))
        shown = self.x[rows], self.y[rows], None if self.weights is None else self.weights[rows]

        inner = stopping._followed()
        assert isinstance(inner, PathStopping)

        def end_epoch(stopping: EarlyStopping) -> None:
            out.reason = stopping.reason
            self.end_epoch(self.mean_loss(*shown))
            asked = report is not None and report(out.epochs, out.losses[-1], out.reason)
            if asked and not inner.should_stop:
                inner.should_stop, inner.stopped_step = True, inner.history.last().step

        with warnings.catch_warnings():  # estimators have a warning of their own
            said = ".*(never fell below|has learnt nothing)"
            warnings.filterwarnings("ignore", said, HeldinWarning)
            stopping.fit(
                self.batch_rows,
                config.max_iter,
                generator=self.generator if config.shuffle else None,
                shuffle=config.shuffle,
                on_epoch=end_epoch,
            )
        if isinstance(plan.rule.folds, Tensor):  # too long for a repr
            stopping.rule = replace(plan.rule, folds=int(plan.rule.folds.max()) + 1)
        history = inner.history
        out.rule, out.stopped, out.history, out.run = "folds", inner.should_stop, history, stopping
        out.steps = history.last().step
        out.shadows = list(stopping.committee().members[1:])  # type: ignore[arg-type]
        number, out.temperature = inner.best_number, inner.temperature
        if history[number].estimate >= history[0].estimate * (1 - ROUNDING):
            number, out.temperature = 0, math.inf
            constants.append(self._constant(torch.ones_like(plan.sees[0])))
            for network, constant in zip([*out.shadows, self.model], constants, strict=True):
                start_at(network, constant)
        history.best_step = out.best_step = history[number].step
        later = sum(check.step > out.best_step for check in history)
        out.converged = out.stopped or later >= PASSED
        out.estimate = inner.loss_interval(number)
        out.loss = self.mean_loss(self.x, self.y, self.weights)
        return out

    def _constant(self, sees: Tensor) -> Tensor:
        """Return the outputs of the best constant of some rows."""
        weights = None if self.weights is None else self.weights[sees]
        outputs = network_outputs(self.model, self.x[:1]).shape[1]
        return constant_outputs(self.loss_fn, self.y[sees], outputs, weights)

    def _epochs(self, train_epoch: Callable[[], bool], report: Report | None) -> None:
        """Repeat an epoch, which returns whether to stop."""
        out = self.outcome
        while out.epochs < self.config.max_iter and not out.stopped:
            out.stopped = train_epoch()
            if report is not None and report(out.epochs, out.losses[-1], out.reason):
                break

    def _run_until_flat(self, report: Report | None) -> None:
        """Train until the training loss has not improved for a number of epochs."""
        out, config = self.outcome, self.config
        best, since = math.inf, 0

        def follow() -> bool:
            nonlocal best, since
            self.train_epoch()
            since = since + 1 if out.losses[-1] > best - config.tol else 0
            best = min(best, out.losses[-1])
            out.reason = (
                f"training loss not {config.tol:g} lower for {since} epochs"
                if since
                else "the training loss still falls"
            )
            if since <= config.n_iter_no_change:
                return False
            adaptive = config.solver == "sgd" and config.learning_rate == "adaptive"
            if not adaptive or self.optimizer.param_groups[0]["lr"] <= 1e-6:
                return True
            since = 0
            for group in self.optimizer.param_groups:
                group["lr"] /= 5
            return False

        self._epochs(follow, report)
        out.best_step = out.steps

    def _run_validation(self, held_out: Any, report: Report | None) -> None:
        """Train until the loss on held-out rows has not improved for a number of epochs."""
        out, config = self.outcome, self.config
        with ValidationStopping(
            self.model,
            lambda: self.mean_loss(*held_out),
            patience=config.n_iter_no_change,
            improvement=config.tol,
        ) as rule:

            def follow() -> bool:
                self.train_epoch()
                stop = rule.step()
                out.reason = rule.reason.replace("step", "epoch")
                return stop

            self._epochs(follow, report)
            if rule.best_step is None:
                raise HeldinError("the validation loss was never finite; scale the inputs")
            rule.restore()
        out.history = rule.history
        out.best_step = rule.best_step * (out.steps // out.epochs)


def in_units(history: EstimateHistory, unit: float) -> EstimateHistory:
    """Return the history with all losses multiplied by `unit`."""
    scaled = EstimateHistory(history.rule)
    for r in history:
        error = r.standard_error * unit
        scaled.append(Estimate(r.step, r.estimate * unit, error, r.training_loss * unit))
    scaled.best_step, scaled.stopped_step = history.best_step, history.stopped_step
    return scaled
