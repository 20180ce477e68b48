"""How often the test loss lies within the standard errors of the estimates: docs/study/errors.csv.

    python -m heldin_lab.figures.errors --data DIR --seed 77 --runs 120 --out out/errors.csv

Folds and leave-one-out on the study's tables for confirmation (those with 1,000 rows or more, so
that the test loss is known well) and on fresh draws of rows, without the rivals of the study: a run
takes seconds. One shadow is the first of the five folds. Runs that are in the file already are not
trained again. `--role development` is what the constants of the formula were chosen on.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from heldin_lab.rules import (
    Folds,
    LeaveOneOut,
    PathStopping,
    Patience,
    best_check,
    follow,
    mean_and_error,
)
from heldin_lab.study.data import Problem, Table, role, tables
from heldin_lab.study.quality import plan
from heldin_lab.study.rules import FOLD_PATIENCE, LOO_PATIENCE, _ended
from heldin_lab.study.run import FOLDS
from heldin_lab.study.spec import Spec, minibatches, optimizer_of, rate, sharpness
from heldin_lab.study.tables import read, write
from heldin_lab.study.witnesses import row_loss, test_values

MEMORY = 2**33  # bytes of snapshots
COLUMNS = (
    *("dataset", "n", "noise", "model", "optimizer", "seed", "rule"),
    *("estimate", "standard_error", "test_loss", "test_error"),
)
LEAST = 1000  # rows of a table


def found(
    problem: Problem, model: nn.Module, rule: PathStopping, own: Tensor, patience: Patience,
    trained: float,
) -> dict[str, float]:  # fmt: skip
    """Estimate and test loss at the best check before patience ended the run."""
    steps = rule.history.columns()["step"]
    curves = torch.stack(rule._curves, dim=1)[own]
    means = curves.mean(0)
    best = best_check(means[: _ended(steps, means, patience)])
    seen = rule.history.columns()["training_loss"][best]
    missing = 1 - trained / len(problem.x)
    estimate, error = mean_and_error(curves[:, best], len(curves) / trained, missing, seen)
    with torch.no_grad():
        outputs = functional_call(model, rule._kept[best], (problem.x_test,))
    loss, _, _, test_error = test_values(problem, outputs)
    names = ("estimate", "standard_error", "test_loss", "test_error")
    return dict(zip(names, (estimate, error, loss, test_error), strict=True))


def one_run(spec: Spec, table: Table, known: set[str]) -> Iterator[dict[str, Any]]:
    """Rows of the file, without those of known rules."""
    problem = table.problem(spec)
    model = table.model(spec, problem)
    lr = rate(spec, sharpness(model, row_loss(problem, model), problem.x, problem.y))
    data, n = (problem.x, problem.y), spec.n
    seed: dict[str, Any] = {"seed": spec.seed}
    same = {key: getattr(spec, key) for key in COLUMNS[:6]}

    if not {"folds", "shadow"} <= known:
        optimizer = optimizer_of(spec, model, lr)
        rule = Folds(snapshot_memory=MEMORY)
        with follow(rule, model, optimizer, problem.loss_fn, data, patience=None, **seed) as folds:
            generator = torch.Generator().manual_seed(1000 * spec.seed)
            size = None if spec.optimizer == "gd" else spec.batch
            folds.train(size, max_steps=spec.steps, generator=generator)
            label = folds.fold_of_row
        for name, own in (("folds", label >= 0), ("shadow", label == 0)):
            row = found(problem, model, folds, own, FOLD_PATIENCE, n * (1 - 1 / FOLDS))
            yield {**same, "rule": name, **row}
    if "leave-one-out" in known:
        return
    model = table.model(spec, problem)
    optimizer = optimizer_of(spec, model, lr)
    generator = torch.Generator().manual_seed(1000 * spec.seed)
    stream = minibatches(torch.arange(n), spec.batch, generator)
    parts = (model, optimizer, problem.loss_fn, data)
    with follow(LeaveOneOut(snapshot_memory=MEMORY), *parts, **seed) as loo:
        for _ in range(spec.steps):
            index = next(stream)
            problem.loss_fn(model(problem.x[index]), problem.y[index]).backward()
            optimizer.step()
            optimizer.zero_grad()
            if loo.step():
                break
    everything = torch.ones(len(loo._curves[0]), dtype=torch.bool)
    row = found(problem, model, loo, everything, LOO_PATIENCE, n - 1)
    yield {**same, "rule": "leave-one-out", **row}


def main() -> None:
    """Train what is missing, and say what was covered."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="as for `heldin-lab study quality`")
    parser.add_argument("--n", default="50,100,200,500")
    parser.add_argument("--runs", type=int, default=120)
    parser.add_argument("--seed", type=int, default=77)
    parser.add_argument("--role", default="confirmation")
    parser.add_argument("--out", default="out/errors.csv")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    path = Path(options.out)
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = read(path) if path.exists() else []
    known: dict[int, set[str]] = {}
    for row in rows:
        known.setdefault(row["seed"], set()).add(row["rule"])
    suited = {t.name: t for t in tables(options.data) if t.rows >= LEAST}
    chosen = [t for t in suited.values() if role(t.name) == options.role]
    sizes = [int(n) for n in options.n.split(",")]
    for spec in plan(chosen, sizes, options.runs, options.seed):
        rows += one_run(spec, suited[spec.dataset], known.get(spec.seed, set()))
        write(path, rows, COLUMNS)


if __name__ == "__main__":
    main()
