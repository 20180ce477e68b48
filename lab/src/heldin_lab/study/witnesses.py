"""What is computed beside a run, for rules that look at it: splits, epochs, gradients."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from heldin.capture.moments import Moments
from heldin.capture.observation import observe
from heldin.criterion.evidence import Evidence, evidence
from heldin_lab.rules import PerRowLoss, Stack, group_settings

from .data import Problem, classes_of
from .rivals import alignment, disparity, pooled_evidence
from .spec import Spec, minibatches

__all__ = ["SPLITS", "Epochs", "GradientSums", "Splits", "Values", "row_loss", "test_values"]

SPLITS = (0.1, 0.2, 0.3)
DISPARITY_BATCHES = 5
KEYS = ("total", "squares")
Values = tuple[float, float, float, float]


def row_loss(problem: Problem, model: nn.Module) -> PerRowLoss:
    """The loss of the problem, row by row."""
    with torch.no_grad():
        return PerRowLoss.of(problem.loss_fn, model(problem.x), problem.y)


def test_values(problem: Problem, outputs: Tensor) -> Values:
    """Test loss, accuracy, loss on clean targets, and the standard error of the first."""
    rows = problem.loss_fn(outputs, problem.y_test, reduction="none")  # type: ignore[call-arg]
    rows = rows.double().reshape(len(rows), -1).mean(1)
    return (
        float(rows.mean()),
        problem.accuracy(outputs),
        float(problem.loss_fn(outputs, problem.y_clean)),
        float(rows.std() / len(rows) ** 0.5),
    )


class Splits:
    """Models trained on 90, 80 and 70 % of the rows, each with its own minibatches."""

    def __init__(
        self, spec: Spec, problem: Problem, model: nn.Module, optimizer: Optimizer
    ) -> None:
        n = spec.n
        self.problem, self.loss = problem, row_loss(problem, model)
        self.targets = self.loss.prepare(problem.y)
        self.stack = Stack(model, optimizer, len(SPLITS), [problem.x])
        self.settings = group_settings(optimizer)
        self.held, streams = [], []
        self.full = spec.optimizer == "gd"
        for number, share in enumerate(SPLITS):
            generator = torch.Generator().manual_seed(1000 * spec.seed + number + 1)
            order = torch.randperm(n, generator=generator)
            count = max(1, round(share * n))
            self.held.append(order[:count])
            kept = order[count:]
            size = len(kept) if self.full else min(spec.batch, len(kept))
            streams.append(minibatches(kept, size, generator))
        self.streams = streams
        self.kept = torch.stack(
            [torch.ones(n, dtype=torch.bool).index_fill(0, held, False) for held in self.held]
        )

    def step(self) -> None:
        """One optimiser step of each split's model."""
        if self.full:
            inputs, targets, keep = self.problem.x, self.targets, self.kept
        else:
            parts = [next(stream) for stream in self.streams]
            index = torch.cat(parts)
            owner = torch.cat([torch.full_like(part, i) for i, part in enumerate(parts)])
            inputs, targets = self.problem.x[index], self.targets[index]
            keep = owner == torch.arange(len(parts)).unsqueeze(1)
        self.stack.advance([inputs], targets, keep, self.loss, self.settings)

    def losses(self) -> tuple[list[float], list[float], list[float]]:
        """Validation loss with its standard error, and training loss, of each split."""
        x, y = self.problem.x, self.problem.y
        k = len(SPLITS)
        outputs = self.stack.evaluate([x.expand(k, *x.shape)])
        rows = self.loss.rows(outputs, y.expand(k, *y.shape)).double()
        valid, errors, train = [], [], []
        for number, held in enumerate(self.held):
            own = rows[number, held]
            valid.append(float(own.mean()))
            errors.append(float(own.std() / len(own) ** 0.5) if len(own) > 1 else math.nan)
            train.append(float(rows[number, self.kept[number]].mean()))
        return valid, errors, train

    def test(self) -> list[Values]:
        """See `test_values`, for each split."""
        x = self.problem.x_test
        outputs = self.stack.evaluate([x.expand(len(SPLITS), *x.shape)])
        return [test_values(self.problem, out) for out in outputs]


class Epochs:
    """What the rules look at once in an epoch."""

    def __init__(
        self, spec: Spec, problem: Problem, model: nn.Sequential, optimizer: Optimizer
    ) -> None:
        self.problem, self.model, self.loss = problem, model, row_loss(problem, model)
        self.classes = problem.loss_fn is not torch.nn.functional.mse_loss
        self.size = min(32, spec.n // DISPARITY_BATCHES)
        self.stack = Stack(model, optimizer, DISPARITY_BATCHES, [problem.x])
        self.generator = torch.Generator().manual_seed(7 * spec.seed + 3)
        self.before: Tensor | None = None

    def look(self) -> tuple[float, float, float]:
        """Gradient disparity, changed predictions, gradient-weight alignment."""
        last = self.model[-1]
        assert isinstance(last, nn.Linear)
        with torch.no_grad():
            features = self.model[:-1](self.problem.x)
            outputs = last(features)
        changed = aligned = math.nan
        if self.classes:
            predicted = classes_of(outputs)
            changed = float(len(predicted) if self.before is None else 0)
            if self.before is not None:
                changed = float((predicted != self.before).sum())
            self.before = predicted
            everything = torch.ones(1, len(outputs), dtype=torch.bool)
            slopes = self.loss.gradient(
                outputs[None], self.loss.prepare(self.problem.y), everything
            )[0]
            aligned = alignment(slopes, features, last.weight.detach())
        return self._disparity(), changed, aligned

    def _disparity(self) -> float:
        """Batches of the training set, each loss divided by its spread over its batch."""
        params = dict(self.model.named_parameters())
        for name, block in self.stack.blocks.items():
            block.detach().copy_(params[name].detach().expand_as(block))
        order = torch.randperm(len(self.problem.x), generator=self.generator)
        index = order[: DISPARITY_BATCHES * self.size].view(DISPARITY_BATCHES, self.size)
        outputs = self.stack.forward([self.problem.x[index]], None, shared=False, train=True)
        free = outputs.detach().requires_grad_()
        rows = self.loss.rows(free, self.problem.y[index])
        spread = rows.detach().std(1, keepdim=True).clamp(min=1e-12)
        (slopes,) = torch.autograd.grad((rows / spread / self.size).sum(), free)
        self.stack.forward.backward(slopes)
        return disparity(torch.cat([g.flatten(1) for g in self.stack.grads.values()], dim=1))


class GradientSums:
    """The samples' gradients: per step, and added up over epochs."""

    def __init__(self, model: nn.Module, window: int) -> None:
        self.window, self.steps = window, 0
        self.sums: dict[str, tuple[Tensor, Tensor, int]] = {}
        self.seen = observe(model)
        self.seen.__enter__()
        self.names = [name for name, p in model.named_parameters() if p.requires_grad]
        self.value: list[float] = []
        self.tensors: list[list[float]] = []  # the criterion of each tensor; nan: none
        self.pooled: list[float] = []
        self.epochs: list[float] = []
        self.epoch_tensors: list[list[float]] = []

    def step(self) -> None:
        """Take the evidence of the backward pass just made."""
        seen = self.seen
        found = evidence(seen)
        self.value.append(found.criterion)
        self.tensors.append(self._of_tensors(found))
        flat = [torch.cat([getattr(m, key).flatten() for m in seen.values()]) for key in KEYS]
        self.pooled.append(pooled_evidence(flat[0], flat[1], seen.count))
        for name, m in seen.items():
            total, squares, count = self.sums.get(name, (0.0, 0.0, 0))
            self.sums[name] = (total + m.total, squares + m.squares, count + m.count)
        seen.clear()
        self.steps += 1
        if self.steps % self.window == 0:
            whole = {name: Moments(*sums) for name, sums in self.sums.items()}
            found = evidence(whole)
            self.epochs.append(found.criterion)
            self.epoch_tensors.append(self._of_tensors(found))
            self.sums = {}

    def _of_tensors(self, found: Evidence) -> list[float]:
        return [found.groups.get(name, math.nan) for name in self.names]

    def close(self) -> None:
        """Watch no more."""
        self.seen.__exit__(None, None, None)
