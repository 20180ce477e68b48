"""The rules that people use beside heldin's, on fresh runs, in the units that people report.

    heldin-lab study rivals --task tables --data DIR

Each run draws training and test rows of a dataset, trains one network by every rule, and appends
one line to a file of JSON lines. Lines that are in the file already are not computed again.

All constants of the rivals are below or in `heldin_lab.study.rivals`; they were fixed before the
first run on a dataset for confirmation. heldin's rules have the defaults of the library.
"""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.optim import Optimizer

import heldin
from heldin.crossval import mean_interval
from heldin.crossval.temperature import fit_temperature
from heldin_lab.rules import bootstrap_shares

from .data import Problem, Role, Table, role, tables
from .logged import Task
from .more_networks import MORE, more_task
from .networks import KINDS, Kind, network_task
from .quality import plan
from .rivals import (
    Stop,
    credibility,
    generalisation_loss,
    patience,
    successive_rises,
    task_vector_growth,
)
from .run import steps_of
from .spec import Spec, Ways, optimizer_of, rate, sharpness
from .witnesses import row_loss

__all__ = ["UNITS", "WAYS", "contest", "one_run", "read_lines"]

PATIENCE = 20  # epochs without a lower validation loss
GL_ALPHA, UP_STRIPS, UP_LENGTH = 5.0, 3, 5
EMA_DECAY, SWA_SHARE = 0.999, 0.25
FOLDS, SPLITS, BAGS = 5, 3, 8  # AutoGluon bags eight models
DECAYS = (0.0, 1e-4, 1e-3, 1e-2, 1e-1)  # weight decays that a split chooses among
RATIO = 1.05  # of the steps at which the test loss of the path is measured
BINS = 15  # of the calibration error
LONG_TAIL = 0.05  # share of the test rows whose share of the loss is stored
LIGHT = 0.25
LIGHT_UP_TO = 200  # rows up to which networks that are not tables get light shadows
CHUNK = 500  # rows in one evaluation

EVIDENCE_EPOCHS = 100  # cap of the variant of evidence

UNITS = ("loss", "accuracy", "auc", "ece", "steps", "seconds")
NOISE = (0.0, 0.2, 0.4)
WAYS: dict[str, Ways] = {
    "tables": Ways(("hidden1", "hidden2"), ("sgd", "adam"), NOISE, (50, 100, 200, 500), 1500),
    "images": Ways(("cnn",), ("sgd", "adam"), NOISE, (100, 300, 1000), 600),
    "texts": Ways(("transformer",), ("adam",), (0.0, 0.1), (100, 300, 1000), 300),
    "tuning": Ways(KINDS["tuning"].models, ("adam",), NOISE, (50, 150, 500), 600),
    **MORE,
}

Line = dict[str, Any]


# -- training


class Setting:
    """A run's rows, network and optimiser.

    Attributes:
        epochs: largest number of epochs, for every rule.
        epoch_steps: steps of an epoch with all rows.
    """

    def __init__(self, spec: Spec, task: Task) -> None:
        self.spec, self.task, self.problem = spec, task, task.problem(spec)
        self.epoch_steps = -(-spec.n // spec.batch)
        self.epochs = spec.steps // self.epoch_steps
        self._rate: float | None = None

    @property
    def classes(self) -> bool:
        """Whether the targets are classes."""
        return self.problem.loss_fn is not F.mse_loss

    def new(self) -> tuple[nn.Module, Optimizer]:
        """Return the network before training, and its optimiser."""
        model = self.task.model(self.spec, self.problem)
        if not isinstance(self.task, Table):
            return model, self.task.optimizer(self.spec, model)[0]
        if self._rate is None:
            loss = row_loss(self.problem, model)
            self._rate = rate(self.spec, sharpness(model, loss, self.problem.x, self.problem.y))
        return model, optimizer_of(self.spec, model, self._rate)

    def order(self) -> torch.Generator:
        """Return the generator of the order of the rows."""
        return torch.Generator().manual_seed(1000 * self.spec.seed)

    def outputs(self, model: nn.Module, x: Tensor) -> Tensor:
        """Return the outputs of rows in evaluation mode."""
        was = model.training
        model.eval()
        with torch.no_grad():
            outputs = torch.cat([model(part) for part in x.split(CHUNK)])
        model.train(was)
        return outputs

    def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the losses of rows."""
        rows = self.problem.loss_fn(outputs, y, reduction="none")  # type: ignore[call-arg]
        return rows.double().reshape(len(rows), -1).mean(1)

    def values(self, outputs: Tensor) -> Line:
        """Return what is measured on the test rows.

        The loss and the calibration error are those on targets with the noise of the training rows,
        the rest is measured on clean targets.
        """
        problem = self.problem
        losses = self.losses(outputs, problem.y_test)
        line = {"loss": float(losses.mean()), "accuracy": problem.accuracy(outputs)}
        line["auc"] = area_under_curve(outputs, problem.y_clean) if self.classes else math.nan
        line["ece"] = calibration_error(outputs, problem.y_test) if self.classes else math.nan
        return line


def floats(model: nn.Module) -> list[Tensor]:
    """Return trained weights and statistics."""
    trained = [p.detach() for p in model.parameters() if p.requires_grad]
    return trained + [b for b in model.buffers() if b.is_floating_point()]


def snapshot(model: nn.Module) -> Tensor:
    """Return weights and statistics as one vector."""
    return torch.cat([tensor.flatten() for tensor in floats(model)])


def load(model: nn.Module, state: Tensor) -> None:
    """Put such a vector into the model."""
    with torch.no_grad():
        for tensor, part in zip(
            floats(model), state.split([t.numel() for t in floats(model)]), strict=True
        ):
            tensor.copy_(part.view_as(tensor))


def steps(
    setting: Setting, model: nn.Module, optimizer: Optimizer, rows: Tensor, order: torch.Generator
) -> Iterator[bool]:
    """Take steps for ever; yield whether the epoch is over."""
    problem, size = setting.problem, setting.spec.batch
    while True:
        parts = rows[torch.randperm(len(rows), generator=order)].split(size)
        for number, index in enumerate(parts, 1):
            optimizer.zero_grad()
            problem.loss_fn(model(problem.x[index]), problem.y[index]).backward()
            optimizer.step()
            yield number == len(parts)


class HeldOut:
    """A model trained without some rows, and their outputs after every epoch."""

    def __init__(self, setting: Setting, held: Tensor, seed: int, decay: float = 0.0) -> None:
        n = setting.spec.n
        self.setting, self.held = setting, held
        kept = torch.ones(n, dtype=torch.bool).index_fill(0, held, False).nonzero()[:, 0]
        self.epoch_steps = -(-len(kept) // setting.spec.batch)
        self.model, optimizer = decayed(*setting.new(), decay)
        order = torch.Generator().manual_seed(seed)
        self._steps = steps(setting, self.model, optimizer, kept, order)
        self.states: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self.losses: list[Tensor] = []
        self._look()

    def _look(self) -> None:
        problem = self.setting.problem
        self.states.append(snapshot(self.model))
        self.outputs.append(self.setting.outputs(self.model, problem.x[self.held]))
        self.losses.append(self.setting.losses(self.outputs[-1], problem.y[self.held]))

    def epoch(self) -> None:
        """Train for an epoch."""
        while not next(self._steps):
            pass
        self._look()

    @property
    def curve(self) -> list[float]:
        """The validation loss after every epoch."""
        return [float(losses.mean()) for losses in self.losses]

    def until(self, rule: Callable[[list[float]], Stop | None]) -> Stop:
        """Train on until a rule ends the run, or the epochs are over."""
        while (stop := rule(self.curve)) is None and len(self.states) <= self.setting.epochs:
            self.epoch()
        return stop or Stop(int(np.argmin(self.curve)), len(self.states) - 1)

    def test(self, state: Tensor) -> Tensor:
        """Return the test outputs with these weights."""
        load(self.model, state)
        return self.setting.outputs(self.model, self.setting.problem.x_test)


def decayed(model: nn.Module, optimizer: Optimizer, decay: float) -> tuple[nn.Module, Optimizer]:
    """Set the weight decay of an optimiser, decoupled from the gradient as in AdamW."""
    for group in optimizer.param_groups:
        group["weight_decay"] = decay
        if isinstance(optimizer, torch.optim.Adam):
            group["decoupled_weight_decay"] = True
    return model, optimizer


def refined(setting: Setting, outputs: Tensor, y: Tensor, losses: Tensor) -> tuple[float, Tensor]:
    """Return the temperature of held-out rows, and their losses with it."""
    if not setting.classes or not bool(outputs.isfinite().all()):
        return 1.0, losses
    temperature = fit_temperature(outputs, y)
    return temperature, setting.losses(outputs / temperature, y)


def wait(curve: Sequence[float]) -> Stop | None:
    """Return the stop of the usual patience."""
    return patience(curve, PATIENCE)


# -- what is measured


def calibration_error(outputs: Tensor, y: Tensor) -> float:
    """Return the expected calibration error: |confidence - accuracy| over 15 bins, by their rows.

    >>> round(calibration_error(torch.tensor([[2.0, 0.0]] * 4), torch.tensor([0, 0, 0, 1])), 3)
    0.131
    """
    if outputs.shape[1] == 1:
        positive = outputs[:, 0].double().sigmoid()
        confidence, right = (
            torch.maximum(positive, 1 - positive),
            (positive > 0.5) == y[:, 0].bool(),
        )
    else:
        confidence, predicted = outputs.double().softmax(1).max(1)
        confidence, right = confidence.flatten(), (predicted == y).flatten()
    place = (confidence * BINS).long().clamp(max=BINS - 1)
    gaps = torch.zeros(BINS, dtype=torch.float64)
    gaps.index_add_(0, place, confidence - right.double())
    return float(gaps.abs().sum() / len(confidence))


def area_under_curve(outputs: Tensor, y: Tensor) -> float:
    """Return the area under the ROC curve, of several classes the mean of one against the rest.

    nan for sequences, and where the test rows have a single class.

    >>> scores = torch.tensor([[0.1], [0.9], [0.8], [0.3]])
    >>> area_under_curve(scores, torch.tensor([[0], [1], [0], [1]]))
    0.75
    """
    from scipy.stats import rankdata

    if outputs.dim() > 2 or not bool(outputs.isfinite().all()):
        return math.nan
    scores = outputs if outputs.shape[1] == 1 else outputs.double().softmax(1)
    areas = []
    for number in range(scores.shape[1]):
        inside = (y[:, 0] == 1) if outputs.shape[1] == 1 else y == number
        many, rest = int(inside.sum()), int((~inside).sum())
        if many and rest:
            ranks = rankdata(scores[:, number].numpy())[inside.numpy()].sum()
            areas.append((ranks - many * (many + 1) / 2) / (many * rest))
    return float(np.mean(areas)) if areas else math.nan


# -- the rules


class Run:
    """All rules on one run; `lines` collects what they keep."""

    def __init__(self, spec: Spec, task: Task) -> None:
        self.setting = Setting(spec, task)
        self.lines: dict[str, Line] = {}
        self.said: dict[str, list[float]] = {}
        self.chosen: dict[str, str] = {}  # number and kind of the shadows, by the name of the rule

    def add(self, name: str, outputs: Tensor, cost: float, seconds: float | None = None) -> None:
        """Measure what a rule keeps; without seconds, those of so many plain steps."""
        values = self.setting.values(outputs)
        spent = cost * self.step_seconds if seconds is None else seconds
        self.lines[name] = values | {"steps": cost, "seconds": spent}

    def say(self, name: str, interval: Any, outputs: Tensor) -> None:
        """Keep what a rule says about the loss, with the measured one and its standard error."""
        losses = self.setting.losses(outputs, self.setting.problem.y_test)
        error = float(losses.std() / len(losses) ** 0.5)
        tail = losses.sort(descending=True).values[: max(1, round(LONG_TAIL * len(losses)))].sum()
        share = float(tail / losses.sum())
        ends = [interval.value, interval.low, interval.high]
        self.said[name] = [*ends, float(losses.mean()), error, share]

    # without a rule

    def path(self) -> None:
        """Train on all rows to the end; the other rules take weights from this path."""
        setting = self.setting
        self.model, optimizer = setting.new()
        self.states = [snapshot(self.model)]
        torch.manual_seed(setting.spec.seed)
        self.total = total = setting.epochs * setting.epoch_steps
        rows, spent = torch.arange(setting.spec.n), 0.0
        stream = steps(setting, self.model, optimizer, rows, setting.order())
        for _ in range(total):
            start = time.process_time()
            next(stream)
            spent += time.process_time() - start
            self.states.append(snapshot(self.model))
        self.step_seconds = spent / total
        grid = [s for s in steps_of(setting.spec, RATIO) if s < total] + [total]
        losses = [self.setting.values(self.at(step))["loss"] for step in grid]
        best = grid[int(np.nanargmin(losses))]
        self.add("best on the path", self.at(best), best)
        self.add("no stopping", self.at(total), total)

    def at(self, step: float) -> Tensor:
        """Return the test outputs of the model trained on all rows, at a step."""
        return self.test(self.states[min(self.total, round(step))])

    def test(self, state: Tensor) -> Tensor:
        """Return the test outputs with these weights."""
        load(self.model, state)
        return self.setting.outputs(self.model, self.setting.problem.x_test)

    def averages(self) -> None:
        """Train on all rows with a cosine schedule to the end, and average the weights."""
        setting = self.setting
        self.model, optimizer = setting.new()
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.total)
        torch.manual_seed(setting.spec.seed)
        rows = torch.arange(setting.spec.n)
        stream = steps(setting, self.model, optimizer, rows, setting.order())
        moving, late = snapshot(self.model), []
        for step in range(1, self.total + 1):
            next(stream)
            schedule.step()
            state = snapshot(self.model)
            decay = min(EMA_DECAY, (1 + step) / (10 + step))
            moving.lerp_(state, 1 - decay)
            if step > (1 - SWA_SHARE) * self.total:
                late.append(state)
        self.add("cosine schedule to the end", self.test(state), self.total)
        self.add("cosine schedule, EMA", self.test(moving), self.total)
        self.add("cosine schedule, SWA", self.test(torch.stack(late).mean(0)), self.total)

    def decays(self) -> None:
        """Let a split choose the weight decay of runs to the end; train on all rows with it."""
        setting, spec = self.setting, self.setting.spec
        order = torch.randperm(spec.n, generator=torch.Generator().manual_seed(spec.seed))
        held, losses, spent = order[: max(1, round(spec.n / FOLDS))], [], 0
        for decay in DECAYS:
            split = HeldOut(setting, held, 7000 + spec.seed, decay)
            split.until(lambda curve: None)
            losses.append(split.curve[-1])
            spent += setting.epochs * split.epoch_steps
        self.model, optimizer = decayed(*setting.new(), DECAYS[int(np.argmin(losses))])
        torch.manual_seed(spec.seed)
        rows = torch.arange(spec.n)
        stream = steps(setting, self.model, optimizer, rows, setting.order())
        for _ in range(self.total):
            next(stream)
        state = snapshot(self.model)
        self.add("weight decay by a split, to the end", self.test(state), spent + self.total)

    # splits

    def splits(self) -> None:
        """Hold out 20 %, three times; all rules with a split but the last use the first one."""
        setting, spec = self.setting, self.setting.spec
        models, kept, ends = [], [], []
        for number in range(SPLITS):
            order = torch.randperm(
                spec.n, generator=torch.Generator().manual_seed(spec.seed + number)
            )
            split = HeldOut(
                setting, order[: max(1, round(spec.n / FOLDS))], 7000 + spec.seed + number
            )
            stop = split.until(wait)
            models.append(split)
            kept.append(stop.keep)
            ends.append(stop.end * split.epoch_steps)
        self._first_split(models[0])
        epochs = sum(kept) / SPLITS
        step = epochs * setting.epoch_steps
        self.add("three splits, refit", self.at(step), sum(ends) + step)

    def _first_split(self, split: HeldOut) -> None:
        setting, per_epoch = self.setting, split.epoch_steps
        y = setting.problem.y[split.held]
        stop = split.until(wait)
        outputs = split.test(split.states[stop.keep])
        self.add("split", outputs, stop.end * per_epoch)
        self.say("split", mean_interval(split.losses[stop.keep]), outputs)
        self.bagged("split, bagged", split, split.losses[: stop.end + 1], 1.0, stop)
        step = stop.keep * setting.epoch_steps
        self.add("split, refit", self.at(step), stop.end * per_epoch + step)

        if setting.classes:
            scaled: list[tuple[float, Tensor]] = []

            def calm(_: list[float]) -> Stop | None:
                for number in range(len(scaled), len(split.states)):
                    scaled.append(refined(setting, split.outputs[number], y, split.losses[number]))
                return wait([float(losses.mean()) for _, losses in scaled])

            split.until(calm)
            curve = [float(losses.mean()) for _, losses in scaled]
            stop = wait(curve) or Stop(int(np.argmin(curve)), len(curve) - 1)
            temperature, spent = scaled[stop.keep][0], stop.end * per_epoch
            outputs = split.test(split.states[stop.keep]) / temperature
            self.add("split, calibrated", outputs, spent)
            rows = [losses for _, losses in scaled[: stop.end + 1]]
            self.bagged("split, bagged, calibrated", split, rows, temperature, stop)
            step = stop.keep * setting.epoch_steps
            self.add("split, calibrated, refit", self.at(step) / temperature, spent + step)
        for name, rule in (
            ("Prechelt GL", lambda curve: generalisation_loss(curve, GL_ALPHA)),
            ("Prechelt UP", lambda curve: successive_rises(curve, UP_STRIPS, UP_LENGTH)),
        ):
            stop = split.until(rule)
            self.add(name, split.test(split.states[stop.keep]), stop.end * per_epoch)

    def bagged(
        self, name: str, split: HeldOut, losses: list[Tensor], temperature: float, stop: Stop
    ) -> None:
        """Average a split's weights by how often each epoch would have been chosen."""
        shares = bootstrap_shares(torch.stack(losses, 1)).to(split.states[0].dtype)
        state = shares @ torch.stack(split.states[: len(losses)])
        self.add(name, split.test(state) / temperature, stop.end * split.epoch_steps)

    # five folds and a refit

    def folds(self) -> None:
        """Train five models, each without a fold, then again on all rows."""
        setting, spec = self.setting, self.setting.spec
        order = torch.randperm(spec.n, generator=torch.Generator().manual_seed(spec.seed + 99))
        models = [
            HeldOut(setting, held, 8000 + spec.seed + number)
            for number, held in enumerate(order.tensor_split(FOLDS))
        ]
        stops = [model.until(wait) for model in models]
        y = setting.problem.y[torch.cat([model.held for model in models])]
        spent = sum(stop.end * m.epoch_steps for stop, m in zip(stops, models, strict=True))
        step = sum(s.keep * m.epoch_steps for s, m in zip(stops, models, strict=True)) / FOLDS
        name = "five folds, refit at the mean step"
        self.add(name, self.at(step), spent + step)
        step = setting.epoch_steps * sum(stop.keep for stop in stops) / FOLDS
        self.add("five folds, refit at the mean epoch", self.at(step), spent + step)
        members = [m.test(m.states[s.keep]) for s, m in zip(stops, models, strict=True)]
        self.add("five folds, committee", averaged(setting.problem, members), spent)

        joint: list[Tensor] = []  # losses of all rows after every epoch
        scaled: list[tuple[float, Tensor]] = []

        def look() -> None:
            while len(joint) < min(len(m.states) for m in models):
                number = len(joint)
                joint.append(torch.cat([m.losses[number] for m in models]))
                outputs = torch.cat([m.outputs[number] for m in models])
                scaled.append(refined(setting, outputs, y, joint[-1]))

        def curve(losses: Sequence[Tensor]) -> list[float]:
            return [float(rows.mean()) for rows in losses]

        def over() -> bool:
            return None not in (wait(curve(joint)), wait(curve([rows for _, rows in scaled])))

        look()
        while not over() and len(joint) <= setting.epochs:
            for m in models:
                if len(m.states) == len(joint):
                    m.epoch()
            look()
        for name, rows in (
            ("five folds, refit", joint),
            ("five folds, calibrated, refit", [rows for _, rows in scaled]),
        ):
            if name != "five folds, refit" and not setting.classes:
                continue
            means = curve(rows)
            stop = wait(means) or Stop(int(np.argmin(means)), len(means) - 1)
            temperature = scaled[stop.keep][0] if name != "five folds, refit" else 1.0
            step = stop.keep * setting.epoch_steps
            outputs = self.at(step) / temperature
            spent = stop.end * sum(m.epoch_steps for m in models)
            self.add(name, outputs, spent + step)
            self.say(name, mean_interval(rows[stop.keep]), outputs)

    # rivals of other programs

    def more(self) -> None:
        """Follow bagging as AutoGluon's, GradStop and the growth of the task vector."""
        self.bags()
        self.growth()
        self.draw()

    def bags(self) -> None:
        """Train eight models, each without an eighth of the rows, and average their predictions.

        Each keeps the epoch with the lowest loss on the rows that it does not see; nothing is
        trained again. The temperature is that of all predictions for unseen rows.
        """
        setting, spec = self.setting, self.setting.spec
        order = torch.randperm(spec.n, generator=torch.Generator().manual_seed(spec.seed + 199))
        models = [
            HeldOut(setting, held, 9000 + spec.seed + number)
            for number, held in enumerate(order.tensor_split(BAGS))
        ]
        stops = [model.until(wait) for model in models]
        spent = sum(stop.end * m.epoch_steps for stop, m in zip(stops, models, strict=True))
        members = [m.test(m.states[s.keep]) for s, m in zip(stops, models, strict=True)]
        outputs = averaged(setting.problem, members)
        self.add("eight bagged folds", outputs, spent)
        if setting.classes:
            unseen = torch.cat([m.outputs[s.keep] for s, m in zip(stops, models, strict=True)])
            y = setting.problem.y[torch.cat([model.held for model in models])]
            temperature, _ = refined(setting, unseen, y, setting.losses(unseen, y))
            self.add("eight bagged folds, calibrated", outputs / temperature, spent)

    def growth(self) -> None:
        """Stop on the path when the distance from the first weights hardly grows."""
        model = self.setting.new()[0]
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        states = [state[:trained] for state in self.states[:: self.setting.epoch_steps]]
        stop = task_vector_growth([float((state - states[0]).norm()) for state in states])
        step = self.total if stop is None else stop.keep * self.setting.epoch_steps
        self.add("task-vector growth", self.at(step), step)

    def draw(self) -> None:
        """Stop on the path by GradStop, looked at after every epoch.

        The gradients of all rows are taken in evaluation mode, and are not counted as steps.
        """
        drawn = float(np.random.default_rng([self.setting.spec.seed, 2]).random())
        step, start = 0, time.process_time()
        while step < self.total and self.credible(step) < drawn:
            step = min(self.total, step + self.setting.epoch_steps)
        seconds = time.process_time() - start + step * self.step_seconds
        self.add("GradStop", self.at(step), step, seconds)

    def credible(self, step: int) -> float:
        """Return the credibility of the weights at a step of the path."""
        problem = self.setting.problem
        model = self.setting.new()[0].eval()
        load(model, self.states[step])
        trained = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}

        def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return problem.loss_fn(functional_call(model, weights, (x[None],)), y[None])

        total, squares = torch.zeros(()), torch.zeros(())
        for part in torch.arange(self.setting.spec.n).split(CHUNK // 10):
            slopes = vmap(grad(loss), (None, 0, 0))(trained, problem.x[part], problem.y[part])
            rows = torch.cat([slope.flatten(1) for slope in slopes.values()], 1)
            total, squares = total + rows.sum(0), squares + rows.square().sum(0)
        return credibility(total, squares, self.setting.spec.n)

    # heldin

    def evidence(self, name: str = "evidence", **options: Any) -> tuple[Tensor, int]:
        """Stop by the evidence of an epoch, median over tensors; return test outputs and steps."""
        setting, problem = self.setting, self.setting.problem
        model, optimizer = setting.new()
        torch.manual_seed(setting.spec.seed)
        epochs = min(setting.epochs, options.pop("epochs", setting.epochs))
        rule = heldin.rules.Evidence(window=setting.epoch_steps, **options)
        rows, order, taken = torch.arange(setting.spec.n), setting.order(), 0
        start = time.process_time()
        stopping = heldin.EarlyStopping(model, optimizer, rule=rule)
        stream = steps(setting, model, optimizer, rows, order)
        for _ in stopping.epochs(epochs):
            for over in stream:
                taken += 1
                if over:
                    break
        seconds = time.process_time() - start
        outputs = setting.outputs(model, problem.x_test)
        self.add(name, outputs, taken, seconds)
        return outputs, taken

    def evidences(self) -> None:
        """Follow evidence: as it is, smoother with a cap, and with a temperature.

        The temperature is that of a second model, trained without a fifth of the rows for as many
        epochs; its steps count.
        """
        setting, spec = self.setting, self.setting.spec
        outputs, taken = self.evidence()
        self.evidence("evidence, smoothing 0.95", smoothing=0.95, epochs=EVIDENCE_EPOCHS)
        if not setting.classes:
            return
        order = torch.randperm(spec.n, generator=torch.Generator().manual_seed(spec.seed))
        held = order[: max(1, round(spec.n / FOLDS))]
        split = HeldOut(setting, held, 7000 + spec.seed)
        for _ in range(round(taken / setting.epoch_steps)):
            split.epoch()
        y, losses = setting.problem.y[held], split.losses[-1]
        temperature, _ = refined(setting, split.outputs[-1], y, losses)
        cost = taken + (len(split.states) - 1) * split.epoch_steps
        line = self.lines["evidence"]
        seconds = line["seconds"] + (cost - taken) * self.step_seconds
        self.add("evidence, temperature", outputs / temperature, cost, seconds)

    def heldin(self, name: str, rule: Any, temperature: bool | str = "auto") -> None:
        """Train by `heldin.EarlyStopping.fit`."""
        setting, problem = self.setting, self.setting.problem
        model, optimizer = setting.new()
        data = (problem.x, problem.y)
        torch.manual_seed(setting.spec.seed)
        start = time.process_time()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            stopping = heldin.EarlyStopping(
                model,
                optimizer,
                problem.loss_fn,
                data,
                rule,
                temperature=temperature,
                seed=setting.spec.seed,
            )
            stopping.fit(setting.spec.batch, max_epochs=setting.epochs, generator=setting.order())
        # a user who is told so divides the outputs by the temperature
        divided = any("divide its outputs" in str(each.message) for each in told)
        seconds = time.process_time() - start
        shadows, light = shadows_of(stopping)
        taken = stopping.stopped_step if stopping.should_stop else self.total
        assert taken is not None
        cost = taken * (1 + shadows * (LIGHT if light else 1 - 1 / FOLDS))
        outputs = setting.outputs(model, problem.x_test)
        if divided:
            outputs = outputs / stopping.temperature
        self.add(name, outputs, cost, seconds)
        self.say(name, stopping.estimates["loss"], outputs)
        self.chosen[name] = f"{shadows} light" if light else f"{shadows}"
        if shadows > 1 and not divided and name in ("heldin", "heldin, five folds"):
            committee = stopping.committee(model)
            voted = setting.outputs(committee, problem.x_test)
            self.add(f"{name}, committee", voted, cost, seconds)

    def all(self, only: Collection[str] = ()) -> None:
        """Follow every rule, or the splits, heldin's default and some of its rules."""
        self.path()
        self.splits()
        if not only:
            self.folds()
            self.averages()
            self.decays()
            self.more()
        self.ours(only)

    def ours(self, only: Collection[str] = ()) -> None:
        """Follow heldin's rules, or the default and some of them."""

        def is_wanted(name: str) -> bool:
            return not only or name in only

        if is_wanted("evidence"):
            self.evidences()
        self.heldin("heldin", "auto")
        few = isinstance(self.setting.task, Table) or self.setting.spec.n <= LIGHT_UP_TO
        for name, rule in OURS.items():
            if is_wanted(name) and (rule.rows == "all" or few):
                light = "" if rule.rows == "all" else " light"
                self._once(name, rule, f"{rule.shadows or FOLDS}{light}")
        if is_wanted("heldin, budget 6"):
            self.heldin_of_budget()
        if self.setting.classes and is_wanted("heldin, without temperature"):
            self.heldin("heldin, without temperature", "auto", temperature=False)

    def heldin_of_budget(self) -> None:
        """Follow the default with a budget of 6, which may be the same rule."""
        name, setting = "heldin, budget 6", self.setting
        model, optimizer = setting.new()
        data = (setting.problem.x, setting.problem.y)
        rule = heldin.rules.Auto(budget=6.0)
        stopping = heldin.EarlyStopping(model, optimizer, setting.problem.loss_fn, data, rule)
        shadows, light = shadows_of(stopping)
        stopping.close()
        self._once(name, rule, f"{shadows} light" if light else f"{shadows}")

    def _once(self, name: str, rule: Any, shadows: str) -> None:
        """Follow a rule, unless the default had the same shadows."""
        if shadows == self.chosen["heldin"]:
            self.lines[name], self.said[name] = self.lines["heldin"], self.said["heldin"]
        else:
            self.heldin(name, rule)


OURS = {
    "heldin, five folds": heldin.rules.Folds(),
    "heldin, four shadows": heldin.rules.Folds(shadows=4),
    "heldin, three shadows": heldin.rules.Folds(shadows=3),
    "heldin, two shadows": heldin.rules.Folds(shadows=2),
    "heldin, one shadow": heldin.rules.Folds(shadows=1),
    "heldin, three light shadows": heldin.rules.Folds(shadows=3, rows=LIGHT),
}


def shadows_of(stopping: Any) -> tuple[int, bool]:
    """Return the number of shadows, and whether they are light."""
    return stopping._inner._backend.copies, stopping._inner.rule.rows != "all"


def averaged(problem: Problem, members: list[Tensor]) -> Tensor:
    """Return outputs that stand for the mean prediction of several models."""
    outputs = torch.stack(members).double()
    if problem.loss_fn is F.mse_loss:
        return outputs.mean(0).float()
    if problem.outputs == 1:
        return outputs.sigmoid().mean(0).clamp(1e-7, 1 - 1e-7).logit().float()
    return outputs.softmax(2).mean(0).clamp(min=1e-12).log().float()


def one_run(spec: Spec, task: Task, only: Collection[str] = ()) -> Line:
    """Return the results of a run as numbers and lists."""
    torch.set_num_threads(1)
    run = Run(spec, task)
    with torch.random.fork_rng(devices=[]):
        run.all(only)
    return _line(run)


def renewed(line: Line, task: Task, only: Collection[str] = ()) -> Line:
    """Return a stored line with heldin's rules as they are now; all others stay as they were.

    Args:
        line: of a run.
        task: that the run belongs to.
        only: rules to follow again beside the default; none: all of heldin's.
    """
    run = _again(line, task)
    with torch.random.fork_rng(devices=[]):
        if "weight decay by a split, to the end" not in line["rules"]:
            run.decays()
        run.ours(only)
    _rescale(run, line)
    now = _line(run)
    old = [name for name in line["rules"] if bool(only) or not is_ours(name)]
    kept = {name: line["rules"][name] for name in old if name not in now["rules"]}
    said = {name: line["said"][name] for name in old if name in line["said"]}
    said = {name: values for name, values in said.items() if name not in now["said"]}
    return now | {"rules": now["rules"] | kept, "said": now["said"] | said}


def extended(line: Line, task: Task) -> Line:
    """Return a stored line with the rivals of other programs, see `Run.more`."""
    run = _again(line, task)
    with torch.random.fork_rng(devices=[]):
        run.more()
    _rescale(run, line)
    return line | {"rules": _short_lines(run) | line["rules"]}


def _again(line: Line, task: Task) -> Run:
    """Return a stored run with its path trained again."""
    torch.set_num_threads(1)
    run = Run(Spec(**line["spec"]), task)
    with torch.random.fork_rng(devices=[]):
        run.path()
    return run


def _rescale(run: Run, line: Line) -> None:
    """Give seconds of a run as they would be on the machine of the stored one."""
    before = line["rules"]["no stopping"][UNITS.index("seconds")]
    scale = before / run.lines["no stopping"]["seconds"]
    run.lines = {
        name: each | {"seconds": scale * each["seconds"]} for name, each in run.lines.items()
    }


def is_ours(name: str) -> bool:
    """Return whether a rule is one of heldin's."""
    return name.startswith(("heldin", "evidence"))


def _line(run: Run) -> Line:
    """Return the results of a run as numbers and lists."""
    rules = _short_lines(run)
    said = {name: [_short(value) for value in values] for name, values in run.said.items()}
    facts: Line = {"classes": run.setting.problem.outputs if run.setting.classes else 0}
    facts["majority"] = _short(majority(run.setting))
    facts |= {"total": run.total, "auto": run.chosen["heldin"]}
    return {"spec": asdict(run.setting.spec), **facts, "rules": rules, "said": said}


def _short_lines(run: Run) -> dict[str, list[float | None]]:
    return {name: [_short(line[unit]) for unit in UNITS] for name, line in run.lines.items()}


def majority(setting: Setting) -> float:
    """Return the share of the most frequent class among the training targets."""
    if not setting.classes:
        return math.nan
    counts = setting.problem.y.flatten().long().bincount()
    return float(counts.max() / counts.sum())


def _short(value: float) -> float | None:
    """Return five digits; None for what does not exist."""
    return float(f"{value:.5g}") if math.isfinite(value) else None


def contest(
    kind: str,
    data: str | Path | None,
    folder: Path,
    *,
    runs: int,
    seed: int,
    datasets: Role = "confirmation",
    sizes: Sequence[int] | None = None,
    steps: int | None = None,
    renew: bool = False,
    more: bool = False,
    only: Collection[str] = (),
    progress: Callable[[str], None] = print,
) -> Path:
    """Compute the runs of a plan that the file KIND.jsonl does not have, one line for each.

    Args:
        kind: of the task, see `WAYS`.
        data: folder of data sets.
        folder: of the results.
        runs: number of runs.
        seed: of the plan.
        datasets: which tables.
        sizes: numbers of training rows; None: those of the task.
        steps: optimiser steps of a run; None: those of the task.
        renew, more: see below.
        only: heldin's rules that are followed beside the default (and the splits, if the runs
            are not renewed); none: everything.
        progress: is told of every run.

    With `renew`, heldin's rules of the stored runs are computed again into KIND-renewed.jsonl; with
    `more`, the rivals of other programs are added to them in the same file.
    """
    ways, out = WAYS[kind], folder / f"{kind}.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    tasks: Sequence[Any]
    if kind == "tables":
        tasks = [t for t in tables(data) if datasets in ("all", role(t.name))]
    elif kind in MORE:
        tasks = [more_task(kind, folder)]
    else:
        tasks = [network_task(cast("Kind", kind), data, folder)]
    by_name: Mapping[str, Task] = {task.name: task for task in tasks}
    if renew or more:
        fresh = folder / f"{kind}-renewed.jsonl"
        done = {json.dumps(line["spec"]) for line in read_lines(fresh)}
        lines = [line for line in read_lines(out) if json.dumps(line["spec"]) not in done]
        for number, line in enumerate(lines, 1):
            task = by_name[line["spec"]["dataset"]]
            text = json.dumps(extended(line, task) if more else renewed(line, task, only))
            with open(fresh, "a", encoding="utf-8") as file:
                file.write(text + "\n")
            progress(f"{number} of {len(lines)} renewed: {line['spec']['dataset']}")
        return fresh
    stored = {json.dumps(line["spec"]) for line in read_lines(out)}
    specs = plan(tasks, sizes or ways.sizes, runs, seed, steps or ways.steps, ways)
    for number, spec in enumerate(specs):
        if json.dumps(asdict(spec)) in stored:
            continue
        start = time.process_time()
        line = one_run(spec, by_name[spec.dataset], only)
        with open(out, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        progress(f"{number + 1} of {runs}: {spec.key} ({time.process_time() - start:.0f} s)")
    return out


def read_lines(path: Path) -> list[Line]:
    """Return the stored runs; none if there is no file."""
    if not path.exists():
        return []
    return [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
