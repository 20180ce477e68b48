"""A run that was logged, what a rule would have kept of it, and how good that is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from heldin_lab.rules import Auto, FoldStopping, follow

from .data import Problem, Table
from .networks import NetworkTask
from .run import FOLDS
from .spec import Spec, optimizer_of
from .witnesses import Values, test_values

__all__ = ["Choice", "LoggedRun", "Outcome", "Task", "moving"]

Task = Table | NetworkTask


def moving(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What training changes: trainable parameters, and buffers with a fraction."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield name, parameter.detach()
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point():
            yield name, buffer


def _batch_loss(problem: Problem) -> Callable[[nn.Module, Any], Tensor]:
    """Return the loss of a batch of the problem, as `batch_loss=` takes it."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return problem.loss_fn(model(x), y)

    return loss


@dataclass(frozen=True)
class Choice:
    """What a rule would have kept.

    Attributes:
        shares: steps whose weights are kept, with their shares in the average.
        spent: optimiser steps of all models that it trained, up to its end.
        fired: whether it ended training, or chose something before the end.
        split: number of the split whose model is kept; None: the model trained on all rows.
        estimate: its estimate of the test loss, and the standard error.
        committee: whether the mean prediction of the shadows is used.
        parts: which logged times it needs.
    """

    shares: Mapping[int, float]
    spent: float
    fired: bool
    split: int | None = None
    estimate: tuple[float, float] = (math.nan, math.nan)
    committee: bool = False
    parts: Sequence[str] = ()
    progress: float = 1.0  # share of the run after which it ends


@dataclass(frozen=True)
class Outcome:
    """One row of the results."""

    rule: str
    stop_step: int
    steps_spent: int
    test_loss: float
    best_test_loss: float
    regret: float
    test_accuracy: float
    fired: bool
    seconds: float
    clean_loss: float = math.nan
    best_clean_loss: float = math.nan
    estimate: float = math.nan
    standard_error: float = math.nan
    test_error: float = math.nan  # standard error of test_loss
    cost: float = math.nan  # optimiser steps of all its models, in runs of one to the last step


@dataclass(eq=False)
class LoggedRun:
    """A log, with ways to look things up in it."""

    spec: Spec
    task: Task
    log: Mapping[str, Any]
    _problem: list[Problem] = field(default_factory=list)

    def __getitem__(self, key: str) -> Any:
        return self.log[key]

    @property
    def last(self) -> int:
        """The last step of the run."""
        return self.spec.steps

    def tested(self, step: int, split: int | None) -> Any:
        """See `test_values`; at the logged step nearest in ratio."""
        steps = self["steps"]
        near = int(np.argmin(np.abs(np.log1p(steps) - math.log1p(step))))
        return self["tested"][near] if split is None else self["split_tested"][near, split]

    @property
    def problem(self) -> Problem:
        """Its training and test rows."""
        if not self._problem:
            self._problem.append(self.task.problem(self.spec))
        return self._problem[0]

    def chosen(self) -> tuple[str, int]:
        """Return the name of the rule that "auto" takes for it, and its number of shadows."""
        problem = self.problem
        model = self.task.model(self.spec, problem)
        data = (problem.x, problem.y)
        if isinstance(self.task, NetworkTask):
            optimizer, _ = self.task.optimizer(self.spec, model)
            rule = follow(Auto(), model, optimizer, data=data, batch_loss=_batch_loss(problem))
        else:
            optimizer = optimizer_of(self.spec, model, float(self["rate"]))
            rule = follow(Auto(), model, optimizer, problem.loss_fn, data)
        rule.close()
        if not isinstance(rule, FoldStopping):
            return rule.name, 0
        shadows = rule.rule.shadows or FOLDS
        return "shadow" if shadows == 1 else rule.name, shadows

    def averaged(self, shares: Mapping[int, float]) -> Values:
        """The same for weights averaged over checks."""
        problem = self.problem
        model = self.task.model(self.spec, problem).eval()
        places = {int(step): i for i, step in enumerate(self["weight_steps"])}
        flat = sum(share * self["weights"][places[step]] for step, share in shares.items())
        tensors = dict(moving(model))
        parts = torch.tensor(flat).split([t.numel() for t in tensors.values()])
        state = {
            name: part.view_as(t).to(t.dtype)
            for (name, t), part in zip(tensors.items(), parts, strict=True)
        }
        with torch.no_grad():
            return test_values(problem, functional_call(model, state, (problem.x_test,)))
