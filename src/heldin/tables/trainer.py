"""Training of plain networks until a rule asks to stop.

What the scikit-learn estimators and `heldin fit` have in common.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from heldin.errors import HeldinError, HeldinWarning
from heldin.rules.estimated.choose import ESTIMATED_RULES, stopping
from heldin.rules.estimated.folds import FoldStopping, ShadowStopping
from heldin.rules.estimated.losses import LossFunction, RowLoss
from heldin.rules.evidence import EvidenceStopping
from heldin.rules.validation import ValidationStopping
from heldin.state.estimates import Estimate, EstimateHistory
from heldin.state.history import History

from .mlp import Inputs, ManualBackprop, network_outputs

__all__ = ["RULE_NAMES", "Outcome", "Report", "Trainer", "TrainingConfig", "in_units"]

RULE_NAMES = ("auto", *ESTIMATED_RULES, "evidence", "validation")  # beside "none"
TURNED = 3  # checks after the lowest estimate, for it to count as passed

Report = Callable[[int, float, str], None]  # epoch, training loss, what the rule says


@dataclass(frozen=True)
class TrainingConfig:
    """How to train; names and meanings are those of scikit-learn's MLPClassifier."""

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

    def rows(self, n: int) -> int:
        """Rows in a minibatch, of n."""
        return min(200 if self.batch_size == "auto" else self.batch_size, n)

    def optimizer(self, model: nn.Module, rows: int) -> Optimizer:
        """Over the weights, which decay by alpha / rows as in scikit-learn, and the biases.

        Or by `weight_decay` of the rate in each step, whatever the gradients (AdamW).
        """
        named = list(model.named_parameters())
        parts = {end: [p for n, p in named if n.endswith(end)] for end in ("weight", "bias")}
        groups: list[dict[str, Any]] = [
            {"params": parts["weight"], "weight_decay": self.weight_decay or self.alpha / rows}
        ]
        if parts["bias"]:
            groups.append({"params": parts["bias"], "weight_decay": 0.0})
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


@dataclass
class Outcome:
    """How a training run went.

    Attributes:
        rule: the rule in charge ("auto" has become another one).
        chosen: why it was this one.
        stopped: whether it asked to stop before `max_iter`.
        converged: the same, or that the lowest estimate was well before.
        reason: what it said last.
        epochs, steps: how long training took.
        best_step: the step whose weights were kept, or those around it.
        losses: training loss after each epoch.
        loss: training loss of the weights that were kept.
        evidence: criterion after each epoch, for "evidence".
        estimate, standard_error: of the test loss, where the rule has it.
        history: the rule's own record.
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
    estimate: float | None = None
    standard_error: float | None = None
    history: History | EstimateHistory | None = None


class Trainer:
    """Trains a network that `build_network` made.

    Args:
        model: the network.
        loss_fn: (outputs, targets) -> mean over rows; cross-entropy, its binary kind or the squared
            error.
        x: (n, inputs).
        y: (n,) class numbers or (n, outputs).
        weights: (n,) with mean 1, or None.
        config: how to train.
        seed: of the order of rows and the rule's draws.
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
        self.rows = config.rows(len(y))
        self.optimizer = config.optimizer(model, self.rows)
        self.passes = ManualBackprop(model)
        self.loss = RowLoss.of(loss_fn, network_outputs(model, x[slice(0, 256)]), y[:256])
        self.ready = self.loss.ready(y)
        self.generator = torch.Generator().manual_seed(seed)
        self.seen = 0  # rows that have gone by
        self.outcome = Outcome("none")

    # -- one epoch

    def _order(self) -> Tensor:
        n = len(self.y)
        return (
            torch.randperm(n, generator=self.generator) if self.config.shuffle else torch.arange(n)
        )

    def batches(self) -> Sequence[Tensor]:
        """Row numbers of the minibatches of an epoch."""
        found: Sequence[Tensor] = self._order().split(self.rows)
        return found

    def steps(self) -> Iterator[Tensor]:
        """Take the optimiser steps of an epoch; what is given are the row numbers of each."""
        assert self.loss.row_gradient is not None
        summed, weights = torch.zeros((), dtype=torch.float64), self.weights
        for index in self.batches():
            outputs = self.passes.forward(self.x[index])
            losses = self.loss.per_row(outputs, self.y[index])
            slope = self.loss.row_gradient(outputs, self.ready[index])
            if weights is not None:
                some = weights[index]
                losses, slope = losses * some, slope.mul_(some.unsqueeze(1))
            summed += losses.sum()
            self.passes.backward(slope)
            self.optimizer.step()
            self.outcome.steps += 1
            yield index
        self.end_epoch(float(summed) / len(self.y))

    def end_epoch(self, loss: float) -> None:
        """Take notice of the training loss, and lower the rate if it is to be."""
        self.outcome.epochs += 1
        self.outcome.losses.append(loss)
        self.seen += len(self.y)
        if self.config.solver == "sgd" and self.config.learning_rate == "invscaling":
            rate = self.config.learning_rate_init / (self.seen + 1) ** self.config.power_t
            for group in self.optimizer.param_groups:
                group["lr"] = rate

    def mean_loss(self, x: Inputs, y: Tensor, weights: Tensor | None) -> float:
        """Of the network as it is."""
        losses = self.loss.per_row(network_outputs(self.model, x), y).double()
        return float((losses if weights is None else losses * weights).mean())

    # -- until a rule asks to stop

    def run(self, rule: str, held_out: Any = None, report: Report | None = None) -> Outcome:
        """Train; the rule's weights are in the model at the end.

        Args:
            rule: which one; "none" watches the training loss as scikit-learn does.
            held_out: inputs, targets and weights, for "validation".
            report: called after every epoch.
        """
        tell = report or (lambda epoch, loss, status: None)
        self.outcome.rule = rule
        if rule == "evidence":
            self._by_evidence(tell)
        elif rule == "validation":
            self._by_validation(held_out, tell)
        elif rule == "none":
            self._by_loss(tell)
        else:
            self._by_estimate(rule, tell)
        self.outcome.converged = self.outcome.converged or self.outcome.stopped
        self.outcome.loss = self.mean_loss(self.x, self.y, self.weights)
        return self.outcome

    def _by_loss(self, tell: Report) -> None:
        """Until the training loss has not improved for a while."""
        best, since, out, config = math.inf, 0, self.outcome, self.config
        while out.epochs < config.max_iter and not out.stopped:
            for _ in self.steps():
                pass
            loss = out.losses[-1]
            since = since + 1 if loss > best - config.tol else 0
            best = min(best, loss)
            out.reason = (
                f"training loss not {config.tol:g} lower for {since} epochs"
                if since
                else "the training loss still falls"
            )
            if since > config.n_iter_no_change:
                rates = [group["lr"] for group in self.optimizer.param_groups]
                slower = config.solver == "sgd" and config.learning_rate == "adaptive"
                if slower and rates[0] > 1e-6:
                    since = 0
                    for group in self.optimizer.param_groups:
                        group["lr"] /= 5
                else:
                    out.stopped = True
            tell(out.epochs, loss, out.reason)
        out.best_step = out.steps

    def _by_evidence(self, tell: Report) -> None:
        """Until the gradients of a whole epoch are as small as their error."""
        out = self.outcome
        out.evidence, self.passes.observe = [], True
        with EvidenceStopping(self.model, estimator="exact") as rule:
            while out.epochs < self.config.max_iter and not out.stopped:
                before = out.steps
                for _ in self.steps():
                    pass
                out.stopped = rule.take(self.passes.moments(), out.steps - before)
                out.evidence.append(rule.criterion)
                out.reason = rule.reason
                tell(out.epochs, out.losses[-1], rule.reason)
        out.history, out.best_step = rule.history, out.steps

    def _by_validation(self, held_out: Any, tell: Report) -> None:
        """Until the loss on rows that were held out has not improved for a while."""
        out, config = self.outcome, self.config
        with ValidationStopping(
            self.model,
            lambda: self.mean_loss(*held_out),
            patience=config.n_iter_no_change,
            improvement=config.tol,
        ) as rule:
            while out.epochs < config.max_iter and not out.stopped:
                for _ in self.steps():
                    pass
                out.stopped = rule.step()
                out.reason = rule.reason.replace("step", "epoch")
                tell(out.epochs, out.losses[-1], out.reason)
            if rule.best_step is None:
                raise HeldinError("the validation loss was never finite; scale the inputs")
            rule.restore()
        out.history = rule.history
        out.best_step = rule.best_step * (out.steps // out.epochs)

    def _by_estimate(self, wanted: str, tell: Report) -> None:
        """Until the estimated test loss has passed its lowest value.

        For several networks, and for what the estimators do with folds, see
        `heldin.tables.committee`.
        """
        out = self.outcome
        options: dict[str, Any] = {"sample_weight": self.weights, "seed": self.seed % 2**31}
        options["process_group"] = None  # each process fits its own
        name: Any = wanted
        data = (self.x, self.y)
        with (
            warnings.catch_warnings()
        ):  # whole weights make copies, and equal rows are separate here
            warnings.filterwarnings("ignore", ".*have an exact copy", HeldinWarning)
            rule = stopping(name, self.model, self.optimizer, self.loss_fn, data, **options)
        out.rule, out.chosen = rule.name, rule.reason_chosen
        follow = self._inside if isinstance(rule, (FoldStopping, ShadowStopping)) else self._beside
        with rule:
            while out.epochs < self.config.max_iter and not rule.should_stop:
                follow(rule)
                tell(out.epochs, out.losses[-1], rule.reason)
        out.stopped, out.reason = rule.should_stop, rule.reason
        out.converged = sum(record.step > rule.best_step for record in rule.history) >= TURNED
        out.best_step, out.history = rule.best_step, rule.history
        out.estimate, out.standard_error = rule.estimate, rule.standard_error

    def _inside(self, rule: Any) -> None:
        """An epoch in which the model is trained in one stack with its shadows."""
        rule.train(
            self.rows,
            max_steps=self.outcome.steps + -(-len(self.y) // self.rows),
            shuffle=self.config.shuffle,
            generator=self.generator,
        )
        self.outcome.steps = rule._step
        self.end_epoch(self.mean_loss(self.x, self.y, self.weights))

    def _beside(self, rule: Any) -> None:
        """An epoch that the rule only looks at."""
        for index in self.steps():
            if rule.step(indices=index):
                self.end_epoch(self.mean_loss(self.x, self.y, self.weights))
                return


def in_units(history: EstimateHistory, unit: float) -> EstimateHistory:
    """The same history, of losses that are so many times as large."""
    found = EstimateHistory(history.rule)
    for r in history:
        error = r.standard_error * unit
        found.append(Estimate(r.step, r.estimate * unit, error, r.training_loss * unit))
    found.best_step, found.stopped_step = history.best_step, history.stopped_step
    return found
