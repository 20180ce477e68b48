"""One training run, logged so that every rule can be replayed on it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from heldin.state.files import replacing
from heldin_lab.rules import Folds, FoldStopping, LeaveOneOut, best_check, follow, next_check

from .data import Problem, Table
from .spec import Spec, minibatches, optimizer_of, rate, sharpness
from .witnesses import Epochs, GradientSums, Splits, Values, row_loss, test_values

__all__ = ["FOLDS", "Clock", "log", "save", "steps_of"]

FOLDS = 5
PROBES = 64  # rows that leave-one-out follows, beside all of them
FINE = 1.03  # ratio of the steps at which the test loss is logged


@dataclass
class Clock:
    """Processor time, by what it was spent on."""

    spent: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def on(self, name: str) -> Iterator[None]:
        """Count what is done inside."""
        start = time.process_time()
        yield
        self.spent[name] = self.spent.get(name, 0.0) + time.process_time() - start


def steps_of(spec: Spec, ratio: float) -> list[int]:
    """Steps from 0 to the last, on a grid of that ratio."""
    found = [0]
    while found[-1] < spec.steps:
        found.append(min(spec.steps, next_check(found[-1], ratio)))
    return found


def log(spec: Spec, table: Table) -> dict[str, Any]:
    """Train once and write down what all rules could have seen.

    Returns:
        Arrays. Rows of `tested` and `split_tested` are `test_values` at the steps `steps`;
        `*_curves` are (rows, checks).
    """
    problem = table.problem(spec)
    model = table.model(spec, problem)
    loss = row_loss(problem, model)
    lr = rate(spec, sharpness(model, loss, problem.x, problem.y))
    optimizer = optimizer_of(spec, model, lr)
    data = (problem.x, problem.y)
    clock = Clock()
    parts: Any = (model, optimizer, problem.loss_fn, data)
    options: Any = {"patience": None, "seed": spec.seed}
    folds = follow(Folds(folds=FOLDS, average="best"), *parts, **options)
    loo, probes = (follow(LeaveOneOut(probes=n), *parts, **options) for n in (None, PROBES))
    splits = Splits(spec, problem, model, optimizer)
    epochs = Epochs(spec, problem, model, optimizer)
    window = max(1, spec.n // spec.batch)
    seen = GradientSums(model, window)

    wanted = set(steps_of(spec, FINE))
    logged: list[int] = []
    tested: list[Values] = []
    split_tested: list[list[Values]] = []
    weights: dict[int, Tensor] = {}
    shadow_outputs: list[Tensor] = []
    epoch_steps: list[int] = []
    epoch_values: list[tuple[float, float, float]] = []
    split_values: list[tuple[list[float], list[float], list[float]]] = []

    def check(step: int) -> None:
        fold_check, loo_check = (rule.history[-1].step == step for rule in (folds, loo))
        if not (fold_check or loo_check or step in wanted):
            return
        logged.append(step)
        with torch.no_grad():
            tested.append(test_values(problem, model(problem.x_test)))
        split_tested.append(splits.test())
        if fold_check or loo_check:
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
        with clock.on("probe"):
            probes.step()
        with clock.on("splits"):
            splits.step()
        if step % window == 0 or step == spec.steps:
            epoch_steps.append(step)
            with clock.on("splits"):
                split_values.append(splits.losses())
            with clock.on("epochs"):
                epoch_values.append(epochs.look())
        if step == spec.steps:  # the last weights are a candidate of every rule
            for rule in (folds, loo, probes):
                if rule.history[-1].step < step:
                    rule._check()
        check(step)
    seen.close()
    folds.close()
    loo.close()
    probes.close()
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
        "fold_label": folds.fold_of_row.numpy(),
        "fold_steps": np.array(folds.history.columns()["step"]),
        "fold_curves": torch.stack(folds._curves, dim=1).numpy(),
        "loo_steps": np.array(loo.history.columns()["step"]),
        "loo_curves": torch.stack(loo._curves, dim=1).numpy(),
        "training_loss": np.array(folds.history.columns()["training_loss"]),
        "probe_curves": torch.stack(probes._curves, dim=1).numpy(),
        "evidence": np.array(seen.value),
        "evidence_tensors": np.array(seen.tensors),
        "pooled": np.array(seen.pooled),
        "epoch_evidence": np.array(seen.epochs),
        "epoch_evidence_tensors": np.array(seen.epoch_tensors),
        "epoch_steps": np.array(epoch_steps),
        "epoch_values": np.array(epoch_values),
        "split_values": np.array(split_values),
        "committee": np.array(committee),
        **{f"seconds_{key}": np.array(value) for key, value in clock.spent.items()},
    }


def _committee(problem: Problem, folds: FoldStopping, outputs: list[Tensor]) -> Values:
    """The shadows' mean prediction, each at the minimum of its own fold's curve."""
    curves = torch.stack(folds._curves, dim=1)
    chosen = [best_check(curves[folds.fold_of_row == k].mean(0)) for k in range(FOLDS)]
    members = torch.stack([outputs[check][k] for k, check in enumerate(chosen)])
    if problem.loss_fn is torch.nn.functional.mse_loss:
        return test_values(problem, members.mean(0))
    if problem.outputs == 1:
        share = members.sigmoid().mean(0).clamp(1e-7, 1 - 1e-7)
        return test_values(problem, share.logit())
    return test_values(problem, members.softmax(-1).mean(0).clamp(min=1e-12).log())


def save(path: Path, arrays: dict[str, Any]) -> None:
    """Write a log in one piece: an interrupted run leaves no half of one behind."""
    with replacing(path) as part, open(part, "wb") as file:
        np.savez_compressed(file, **arrays)
