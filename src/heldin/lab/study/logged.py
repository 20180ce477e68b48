"""A run that was logged, what a rule would have kept of it, and how good that is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.func import functional_call

from .data import Problem, Table
from .spec import Spec, network

__all__ = ["Choice", "LoggedRun", "Outcome"]


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


@dataclass(eq=False)
class LoggedRun:
    """A log, with ways to look things up in it."""

    spec: Spec
    table: Table
    log: Mapping[str, Any]
    _problem: list[Problem] = field(default_factory=list)

    def __getitem__(self, key: str) -> Any:
        return self.log[key]

    @property
    def last(self) -> int:
        """The last step of the run."""
        return self.spec.steps

    def tested(self, step: int, split: int | None) -> Any:
        """Test loss, accuracy and clean loss at the logged step nearest in ratio."""
        steps = self["steps"]
        near = int(np.argmin(np.abs(np.log1p(steps) - math.log1p(step))))
        return self["tested"][near] if split is None else self["split_tested"][near, split]

    def averaged(self, shares: Mapping[int, float]) -> tuple[float, float, float]:
        """The same for weights averaged over checks."""
        if not self._problem:
            degree = 2 if self.spec.model == "degree2" else 1
            spec = self.spec
            self._problem.append(Problem.cut(self.table, spec.n, spec.noise, degree, spec.seed))
        problem = self._problem[0]
        model = network(self.spec, problem.x.shape[1], problem.outputs)
        places = {int(step): i for i, step in enumerate(self["weight_steps"])}
        flat = sum(share * self["weights"][places[step]] for step, share in shares.items())
        params = dict(model.named_parameters())
        parts = torch.tensor(flat).split([p.numel() for p in params.values()])
        state = {
            name: part.view_as(p).float()
            for (name, p), part in zip(params.items(), parts, strict=True)
        }
        with torch.no_grad():
            outputs = functional_call(model, state, (problem.x_test,))
            return (
                float(problem.loss_fn(outputs, problem.y_test)),
                problem.accuracy(outputs),
                float(problem.loss_fn(outputs, problem.y_clean)),
            )
