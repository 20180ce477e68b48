"""A training run of a network, logged like those of tables (`run`), with fewer rules beside it.

Five folds, evidence, and a model trained on 80 % of the rows. Batches may be augmented, the network
may have BatchNorm and dropout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from heldin_lab.rules import Folds, PerRowLoss, follow

from .data import Problem
from .logged import moving
from .networks import NetworkTask
from .run import FOLDS, Clock, steps_of
from .spec import Spec, minibatches
from .witnesses import SPLITS, GradientSums, Values, test_values

__all__ = ["log_network"]

RATIO = 1.05  # of the steps at which the test loss is logged
SPLIT = SPLITS.index(0.2)
CHUNK = 500  # rows in one evaluation
Losses = tuple[float, float, float]


def outputs_of(model: nn.Module, x: Tensor) -> Tensor:
    """In evaluation mode."""
    model.eval()
    with torch.no_grad():
        found = torch.cat([model(part) for part in x.split(CHUNK)])
    model.train()
    return found


class _Split:
    """A model trained without 20 % of the rows, on minibatches of its own."""

    def __init__(self, spec: Spec, task: NetworkTask, problem: Problem) -> None:
        self.spec, self.task, self.problem = spec, task, problem
        self.model = task.model(spec, problem)
        self.loss = PerRowLoss.of(problem.loss_fn, outputs_of(self.model, problem.x), problem.y)
        self.optimizer, _ = task.optimizer(spec, self.model)
        self.generator = torch.Generator().manual_seed(1000 * spec.seed + 1)
        order = torch.randperm(spec.n, generator=self.generator)
        count = round(SPLITS[SPLIT] * spec.n)
        self.held, self.kept = order[:count], order[count:]
        self.stream = minibatches(self.kept, min(spec.batch, len(self.kept)), self.generator)

    def step(self) -> None:
        """One optimiser step."""
        index = next(self.stream)
        x = self.task.shown(self.spec, self.problem.x[index], self.generator)
        self.problem.loss_fn(self.model(x), self.problem.y[index]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def losses(self) -> Losses:
        """Validation loss with its standard error, and training loss."""
        rows = self.loss.per_row(outputs_of(self.model, self.problem.x), self.problem.y).double()
        own = rows[self.held]
        return float(own.mean()), float(own.std() / len(own) ** 0.5), float(rows[self.kept].mean())

    def test(self) -> Values:
        """See `test_values`."""
        return test_values(self.problem, outputs_of(self.model, self.problem.x_test))


def log_network(spec: Spec, task: NetworkTask) -> dict[str, Any]:
    """Train once and write down what the rules could have seen; keys as in `run.log`."""
    torch.manual_seed(spec.seed)  # of dropout
    problem = task.problem(spec)
    model = task.model(spec, problem)
    optimizer, rate = task.optimizer(spec, model)
    clock = Clock()
    rule = Folds(folds=FOLDS, average="best")
    parts = (model, optimizer, problem.loss_fn, (problem.x, problem.y))
    folds = follow(rule, *parts, patience=None, seed=spec.seed)
    split = _Split(spec, task, problem)
    window = max(1, spec.n // spec.batch)
    seen = GradientSums(model, window)
    tested: dict[int, Values] = {}
    split_tested: dict[int, Values] = {}
    weights: dict[int, Tensor] = {}
    split_values = {0: split.losses()}
    wanted = set(steps_of(spec, RATIO))

    def check(step: int) -> None:
        tested[step] = test_values(problem, outputs_of(model, problem.x_test))
        split_tested[step] = split.test()
        if folds.history[-1].step == step:
            weights[step] = torch.cat([t.flatten() for _, t in moving(model)])

    check(0)
    for step, index, x in batches_of(spec, task, problem):
        with clock.on("train"):
            problem.loss_fn(model(x), problem.y[index]).backward()
        with clock.on("evidence"):
            seen.step()
        with clock.on("train"):
            optimizer.step()
            optimizer.zero_grad()
        with clock.on("folds"):
            folds.step(indices=index)
        with clock.on("splits"):
            split.step()
            if step % window == 0 or step == spec.steps:
                split_values[step] = split.losses()
        if step == spec.steps and folds.history[-1].step < step:
            folds._check()  # the last weights are a candidate of every rule
        if step in wanted or folds.history[-1].step == step:
            check(step)
    seen.close()
    folds.close()
    return {
        **{f"spec_{key}": np.array(value) for key, value in asdict(spec).items()},
        "rate": np.array(rate),
        "window": np.array(window),
        "steps": np.array(list(tested)),
        "tested": np.array(list(tested.values())),
        "split_tested": np.array([_alone(v) for v in split_tested.values()]),
        "weight_steps": np.array(list(weights)),
        "weights": torch.stack(list(weights.values())).numpy(),
        "fold_label": folds.fold_of_row.numpy(),
        "fold_steps": np.array(folds.history.columns()["step"]),
        "fold_curves": torch.stack(folds._curves, dim=1).numpy(),
        "training_loss": np.array(folds.history.columns()["training_loss"]),
        "evidence": np.array(seen.value),
        "evidence_tensors": np.array(seen.tensors),
        "epoch_evidence": np.array(seen.epochs),
        "epoch_evidence_tensors": np.array(seen.epoch_tensors),
        "epoch_steps": np.array(list(split_values)),
        "split_values": np.array([_alone(v) for v in split_values.values()]).transpose(0, 2, 1),
        **{f"seconds_{key}": np.array(value) for key, value in clock.spent.items()},
    }


def batches_of(
    spec: Spec, task: NetworkTask, problem: Problem
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Step, row numbers and inputs."""
    generator = torch.Generator().manual_seed(1000 * spec.seed)
    stream = minibatches(torch.arange(spec.n), spec.batch, generator)
    for step in range(1, spec.steps + 1):
        index = next(stream)
        yield step, index, task.shown(spec, problem.x[index], generator)


def _alone(values: tuple[float, ...]) -> list[tuple[float, ...]]:
    """In the place of the 20 % split, beside others that were not trained."""
    unknown = (math.nan,) * len(values)
    return [values if number == SPLIT else unknown for number in range(len(SPLITS))]
