"""One training run, logged so that every rule can be replayed on it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from heldin.capture.moments import Moments
from heldin.capture.observation import observe
from heldin.criterion.evidence import evidence
from heldin.rules.estimated.curves import best_check, next_check
from heldin.rules.estimated.folds import FoldStopping
from heldin.rules.estimated.jacobians import mapped
from heldin.rules.estimated.leave_one_out import LeaveOneOutStopping
from heldin.rules.estimated.losses import RowLoss
from heldin.rules.estimated.stack import Stack, hyperparameters

from .data import Problem, Table, classes_of
from .rivals import alignment, disparity, pooled_evidence

__all__ = ["FOLDS", "MODELS", "NOISE", "OPTIMIZERS", "SPLITS", "Spec", "log", "network"]

MODELS = ("linear", "degree2", "hidden1", "hidden2")
OPTIMIZERS = ("gd", "sgd", "adam")
NOISE = (0.0, 0.1, 0.2, 0.4)
SPLITS = (0.1, 0.2, 0.3)
FOLDS = 5
WIDTH = 32  # of a hidden layer
FINE = 1.03  # ratio of the steps at which the test loss is logged
DISPARITY_BATCHES = 5


@dataclass(frozen=True)
class Spec:
    """What is trained on what."""

    dataset: str
    n: int
    noise: float
    model: str
    optimizer: str
    seed: int
    steps: int = 2500

    @property
    def key(self) -> str:
        """A name for files."""
        noise = round(100 * self.noise)
        return (
            f"{self.dataset}-n{self.n}-noise{noise}-{self.model}-{self.optimizer}-"
            f"seed{self.seed}-steps{self.steps}"
        )

    @property
    def batch(self) -> int:
        """Rows in a minibatch: all of them for gradient descent."""
        return self.n if self.optimizer == "gd" else min(32, self.n // 4)


def network(spec: Spec, features: int, outputs: int) -> nn.Sequential:
    """The model of a run, with weights drawn from its seed."""
    hidden = {"hidden1": 1, "hidden2": 2}.get(spec.model, 0)
    sizes = [features, *[WIDTH] * hidden]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        layers: list[nn.Module] = []
        for before in sizes[:-1]:
            layers += [nn.Linear(before, WIDTH), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(sizes[-1], outputs))


def rate(spec: Spec, curvature: float) -> float:
    """The learning rate: within what is stable, and different in every run.

    Args:
        spec: of the run; its seed draws a factor between 0.2 and 1.
        curvature: largest eigenvalue of the Gauss-Newton matrix at the start.
    """
    factor = 10 ** np.random.default_rng([spec.seed, 1]).uniform(math.log10(0.2), 0.0)
    if spec.optimizer == "adam":
        return float(0.003 * factor)
    share, most = (1.0, 0.3) if spec.optimizer == "gd" else (0.3, 0.1)
    return float(factor * min(share / curvature, most))


def sharpness(model: nn.Module, loss: RowLoss, x: Tensor, y: Tensor) -> float:
    """Largest eigenvalue of the Gauss-Newton matrix, by power iteration on some rows."""
    x, y = x[:200], y[:200]
    with torch.no_grad():
        outputs = model(x)
    with torch.enable_grad():
        free = outputs.requires_grad_()
        (slope,) = torch.autograd.grad(loss.apart(free, y).sum(), free, create_graph=True)
        bends = [
            torch.autograd.grad(slope[:, c].sum(), free, retain_graph=True)[0]
            for c in range(outputs.shape[1])
        ]
    basis = torch.eye(outputs.shape[1]).expand(len(x), -1, -1)
    found = mapped(model, [name for name, _ in model.named_parameters()], [x], basis)
    jacobian = torch.cat([part.flatten(2) for part in found.values()], dim=2)
    bend = torch.stack(bends, dim=1)  # (rows, outputs, outputs)
    vector = torch.ones(jacobian.shape[2])
    for _ in range(30):
        vector = vector / vector.norm()
        along = torch.einsum("qcw,w->qc", jacobian, vector)
        along = torch.einsum("qcd,qd->qc", bend, along)
        vector = torch.einsum("qcw,qc->w", jacobian, along) / len(x)
    return float(vector.norm())


def optimizer_of(spec: Spec, model: nn.Module, lr: float) -> Optimizer:
    """GD and SGD are plain; Adam has its defaults."""
    if spec.optimizer == "adam":
        return torch.optim.Adam(model.parameters(), lr=lr)
    return torch.optim.SGD(model.parameters(), lr=lr)


def minibatches(rows: Tensor, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Row numbers for ever, in whole minibatches of a new order each epoch."""
    while True:
        order = torch.randperm(len(rows), generator=generator)
        if size >= len(rows):
            order = torch.arange(len(rows))
        for start in range(0, len(rows) - size + 1, size):
            yield rows[order[start : start + size]]


@dataclass
class _Clock:
    spent: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def on(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.spent[name] = self.spent.get(name, 0.0) + time.perf_counter() - start


class _Splits:
    """Models trained on 90, 80 and 70 % of the rows, each with its own minibatches."""

    def __init__(
        self, spec: Spec, problem: Problem, model: nn.Module, optimizer: Optimizer
    ) -> None:
        n = spec.n
        self.problem, self.loss = problem, _row_loss(problem, model)
        self.targets = self.loss.ready(problem.y)
        self.stack = Stack(model, optimizer, len(SPLITS), [problem.x])
        self.settings = hyperparameters(optimizer)
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

    def test(self) -> list[tuple[float, float, float]]:
        x = self.problem.x_test
        outputs = self.stack.evaluate([x.expand(len(SPLITS), *x.shape)])
        return [_tested(self.problem, out) for out in outputs]


class _Epochs:
    """What the rules look at once in an epoch."""

    def __init__(
        self, spec: Spec, problem: Problem, model: nn.Sequential, optimizer: Optimizer
    ) -> None:
        self.problem, self.model, self.loss = problem, model, _row_loss(problem, model)
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
            slopes = self.loss.gradient(outputs[None], self.loss.ready(self.problem.y), everything)[
                0
            ]
            aligned = alignment(slopes, features, last.weight.detach())
        return self._disparity(), changed, aligned

    def _disparity(self) -> float:
        """Batches of the training set, each loss divided by its spread over its batch."""
        params = dict(self.model.named_parameters())
        for name, block in self.stack.blocks.items():
            block.detach().copy_(params[name].detach().expand_as(block))
        order = torch.randperm(len(self.problem.x), generator=self.generator)
        index = order[: DISPARITY_BATCHES * self.size].view(DISPARITY_BATCHES, self.size)
        outputs = self.stack.forward([self.problem.x[index]], None, train=True)
        free = outputs.detach().requires_grad_()
        rows = self.loss.rows(free, self.problem.y[index])
        spread = rows.detach().std(1, keepdim=True).clamp(min=1e-12)
        (slopes,) = torch.autograd.grad((rows / spread / self.size).sum(), free)
        self.stack.forward.backward(slopes)
        return disparity(torch.cat([g.flatten(1) for g in self.stack.grads.values()], dim=1))


class _Evidence:
    """The samples' gradients: per step, and added up over epochs."""

    def __init__(self, model: nn.Module, window: int) -> None:
        self.window, self.steps = window, 0
        self.sums: dict[str, tuple[Tensor, Tensor, int]] = {}
        self.seen = observe(model)
        self.seen.__enter__()
        self.value: list[float] = []
        self.pooled: list[float] = []
        self.epochs: list[float] = []

    def step(self) -> None:
        seen = self.seen
        self.value.append(evidence(seen).criterion)
        flat = [torch.cat([getattr(m, key).flatten() for m in seen.values()]) for key in KEYS]
        self.pooled.append(pooled_evidence(flat[0], flat[1], seen.count))
        for name, m in seen.items():
            total, squares, count = self.sums.get(name, (0.0, 0.0, 0))
            self.sums[name] = (total + m.total, squares + m.squares, count + m.count)
        seen.clear()
        self.steps += 1
        if self.steps % self.window == 0:
            whole = {name: Moments(*sums) for name, sums in self.sums.items()}
            self.epochs.append(evidence(whole).criterion)
            self.sums = {}

    def close(self) -> None:
        self.seen.__exit__(None, None, None)


KEYS = ("total", "squares")


def _row_loss(problem: Problem, model: nn.Module) -> RowLoss:
    with torch.no_grad():
        return RowLoss.of(problem.loss_fn, model(problem.x), problem.y)


def _tested(problem: Problem, outputs: Tensor) -> tuple[float, float, float]:
    """Test loss, accuracy and loss on clean targets."""
    clean = problem.y_clean
    return (
        float(problem.loss_fn(outputs, problem.y_test)),
        problem.accuracy(outputs),
        float(problem.loss_fn(outputs, clean)),
    )


def _steps(spec: Spec, ratio: float) -> list[int]:
    found = [0]
    while found[-1] < spec.steps:
        found.append(min(spec.steps, next_check(found[-1], ratio)))
    return found


def log(spec: Spec, table: Table) -> dict[str, Any]:
    """Train once and write down what all rules could have seen.

    Returns:
        Arrays. Rows of `tested` and `split_tested` are (test loss, accuracy, clean test loss) at
        the steps `steps`; `*_curves` are (rows, checks).
    """
    problem = Problem.cut(table, spec.n, spec.noise, 2 if spec.model == "degree2" else 1, spec.seed)
    model = network(spec, problem.x.shape[1], problem.outputs)
    loss = _row_loss(problem, model)
    lr = rate(spec, sharpness(model, loss, problem.x, problem.y))
    optimizer = optimizer_of(spec, model, lr)
    data = (problem.x, problem.y)
    clock = _Clock()
    folds = FoldStopping(
        model,
        optimizer,
        problem.loss_fn,
        data,
        FOLDS,
        patience=None,
        average="best",
        seed=spec.seed,
    )
    loo = LeaveOneOutStopping(
        model, optimizer, problem.loss_fn, data, patience=None, seed=spec.seed
    )
    splits = _Splits(spec, problem, model, optimizer)
    epochs = _Epochs(spec, problem, model, optimizer)
    window = max(1, spec.n // spec.batch)
    seen = _Evidence(model, window)

    logged = sorted({*_steps(spec, FINE), *_steps(spec, folds.grid), *_steps(spec, loo.grid)})
    wanted = set(logged)
    tested: list[tuple[float, float, float]] = []
    split_tested: list[list[tuple[float, float, float]]] = []
    weights: dict[int, Tensor] = {}
    shadow_outputs: list[Tensor] = []
    epoch_steps: list[int] = []
    epoch_values: list[tuple[float, float, float]] = []
    split_values: list[tuple[list[float], list[float], list[float]]] = []

    def check(step: int) -> None:
        with torch.no_grad():
            tested.append(_tested(problem, model(problem.x_test)))
        split_tested.append(splits.test())
        fold_check = folds.history[-1].step == step
        if fold_check or loo.history[-1].step == step:
            weights[step] = torch.cat([p.detach().flatten() for p in model.parameters()])
        if fold_check:
            x = problem.x_test
            shadow_outputs.append(
                folds._stacked("evaluate").stack.evaluate([x.expand(FOLDS, *x.shape)])
            )

    check(0)
    split_values.append(splits.losses())
    epoch_steps.append(0)
    epoch_values.append(epochs.look())
    stream = minibatches(
        torch.arange(spec.n), spec.batch, torch.Generator().manual_seed(1000 * spec.seed)
    )
    for step in range(1, spec.steps + 1):
        index = next(stream)
        with clock.on("train"):
            problem.loss_fn(model(problem.x[index]), problem.y[index]).backward()
        with clock.on("evidence"):
            seen.step()
        with clock.on("train"):
            optimizer.step()
            optimizer.zero_grad()
        with clock.on("folds"):
            folds.step(indices=index)
        with clock.on("loo"):
            loo.step()
        with clock.on("splits"):
            splits.step()
        if step % window == 0 or step == spec.steps:
            epoch_steps.append(step)
            with clock.on("splits"):
                split_values.append(splits.losses())
            with clock.on("epochs"):
                epoch_values.append(epochs.look())
        if step == spec.steps:  # the last weights are a candidate of every rule
            for rule in (folds, loo):
                if rule.history[-1].step < step:
                    rule._check()
        if step in wanted:
            check(step)
    seen.close()
    folds.remove()
    loo.remove()
    committee = _committee(problem, folds, shadow_outputs)
    return {
        **{f"spec_{key}": np.array(value) for key, value in asdict(spec).items()},
        "rate": np.array(lr),
        "window": np.array(window),
        "steps": np.array(logged),
        "tested": np.array(tested),
        "split_tested": np.array(split_tested),
        "weight_steps": np.array(sorted(weights)),
        "weights": torch.stack([weights[s] for s in sorted(weights)]).numpy(),
        "fold_label": folds._label.numpy(),
        "fold_steps": np.array(folds.history.columns()["step"]),
        "fold_curves": torch.stack(folds._curves, dim=1).numpy(),
        "loo_steps": np.array(loo.history.columns()["step"]),
        "loo_curves": torch.stack(loo._curves, dim=1).numpy(),
        "training_loss": np.array(folds.history.columns()["training_loss"]),
        "evidence": np.array(seen.value),
        "pooled": np.array(seen.pooled),
        "epoch_evidence": np.array(seen.epochs),
        "epoch_steps": np.array(epoch_steps),
        "epoch_values": np.array(epoch_values),
        "split_values": np.array(split_values),
        "committee": np.array(committee),
        **{f"seconds_{key}": np.array(value) for key, value in clock.spent.items()},
    }


def _committee(
    problem: Problem, folds: FoldStopping, outputs: list[Tensor]
) -> tuple[float, float, float]:
    """The shadows' mean prediction, each at the minimum of its own fold's curve."""
    curves = torch.stack(folds._curves, dim=1)
    chosen = [best_check(curves[folds._label == k].mean(0)) for k in range(FOLDS)]
    members = torch.stack([outputs[check][k] for k, check in enumerate(chosen)])
    if problem.loss_fn is torch.nn.functional.mse_loss:
        return _tested(problem, members.mean(0))
    if problem.outputs == 1:
        share = members.sigmoid().mean(0).clamp(1e-7, 1 - 1e-7)
        return _tested(problem, share.logit())
    return _tested(problem, members.softmax(-1).mean(0).clamp(min=1e-12).log())


def save(path: Path, arrays: dict[str, Any]) -> None:
    """Write a log in one piece: an interrupted run leaves no half of one behind."""
    part = path.with_suffix(".part.npz")
    np.savez_compressed(part, **arrays)
    part.replace(path)
