"""heldin.optuna.pruning in a plain loop, in `fit` and in frameworks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import heldin
from heldin import rules
from tests.support import estimated, plain

optuna = pytest.importorskip("optuna")

from heldin.optuna import pruning
from tests.adapters.test_outputs import CASE, FRAMEWORKS

pytestmark = plain.foreign
optuna.logging.set_verbosity(optuna.logging.WARNING)
FOLDS = rules.Folds(folds=3, average="best")


def study(direction: str = "minimize", **pruner: Any) -> Any:
    """Prunes a trial whose reports are above a threshold."""
    pruner = pruner or {"upper": 1e9}
    return optuna.create_study(direction=direction, pruner=optuna.pruners.ThresholdPruner(**pruner))


def plain_loop(folder: Path, **options: Any) -> heldin.EarlyStopping:
    model, loader = plain.net(), estimated.loader(CASE, shuffle=False)
    optimizer = plain.sgd(model)
    stopping = heldin.EarlyStopping(model, optimizer, F.cross_entropy, loader, **options)
    for _ in stopping.epochs(CASE.epochs):
        for batch in loader:
            optimizer.zero_grad()
            estimated.batch_loss(model, batch).backward()
            optimizer.step()
    return stopping


def fit(folder: Path, **options: Any) -> heldin.EarlyStopping:
    model = plain.net()
    stopping = heldin.EarlyStopping(
        model, plain.sgd(model), F.cross_entropy, plain.data(), **options
    )
    return stopping.fit(batch_size=16, max_epochs=CASE.epochs)


def train_step(folder: Path, **options: Any) -> heldin.EarlyStopping:
    model = plain.net()
    optimizer = plain.sgd(model)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        estimated.batch_loss(model, batch).backward()
        optimizer.step()

    stopping = heldin.EarlyStopping(
        model, optimizer, F.cross_entropy, plain.data(), train_step=step, **options
    )
    return stopping.fit(batch_size=16, max_epochs=CASE.epochs)


def framework(name: str) -> Any:
    return lambda folder, **options: FRAMEWORKS[name](folder, **options).callback


LOOPS: dict[str, Any] = {"plain loop": plain_loop, "fit": fit, "train_step": train_step}
LOOPS |= {name: framework(name) for name in FRAMEWORKS}
loops = pytest.mark.parametrize("name", [*LOOPS])


@loops
def test_every_check_is_reported_and_trials_are_pruned(name: str, tmp_path: Path) -> None:
    found: list[Any] = []

    def objective(trial: Any) -> float:
        run = LOOPS[name](
            tmp_path, rule=FOLDS, patience=None, temperature=False, on_check=pruning(trial)
        )
        found.append(run)
        return run.estimates["loss"].value

    search = study()
    search.optimize(objective, n_trials=1)
    (trial,), (run,) = search.trials, found
    curve = {r.step: r.estimate for r in estimated.followed(run).history}
    last = max(curve)
    assert len(curve) > 5
    reported = trial.intermediate_values
    assert reported == {k: v for k, v in curve.items() if k > 0 and (k < last or k in reported)}
    assert trial.value == min(curve.values())

    high = study(upper=reported[3] + 1e-6)  # step 1 is above
    high.optimize(objective, n_trials=1)
    assert high.trials[0].state == optuna.trial.TrialState.PRUNED
    assert [*high.trials[0].intermediate_values] == [1]
    assert len(found) == 1


@pytest.mark.parametrize("name", ["plain loop", "lightning"])
def test_a_metric_is_reported(name: str, tmp_path: Path) -> None:
    options = {"rule": FOLDS, "patience": None, "metrics": ["accuracy"], "monitor": "accuracy"}

    def objective(trial: Any) -> float:
        run = LOOPS[name](tmp_path, on_check=pruning(trial), **options)
        return run.estimates["accuracy"].value

    search = study("maximize")
    search.optimize(objective, n_trials=1)
    values = list(search.trials[0].intermediate_values.values())
    assert search.best_value == max(values) > min(values)
    with pytest.raises(heldin.HeldinError, match="make it with direction='maximize'"):
        study("minimize").optimize(objective, n_trials=1)


def test_another_direction_is_refused() -> None:
    with pytest.raises(heldin.HeldinError, match="make it with direction='minimize'"):
        study("maximize").optimize(lambda trial: fit(Path(), on_check=pruning(trial)), n_trials=1)


def test_the_function_is_checked() -> None:
    model = plain.net()
    optimizer = plain.sgd(model)
    with pytest.raises(heldin.HeldinError, match="on_check must be a function"):
        heldin.EarlyStopping(model, optimizer, F.cross_entropy, plain.data(), on_check=3)  # type: ignore[arg-type]
    with pytest.raises(heldin.HeldinError, match="on_check has no effect"):
        heldin.EarlyStopping(model, optimizer, rule="evidence", on_check=print)
    with pytest.raises(heldin.HeldinError, match="on_check has no effect"):
        FRAMEWORKS["lightning"](Path(), rule="evidence", on_check=print)


def test_training_is_the_same_with_a_function() -> None:
    steps: list[int] = []
    curves = []
    for on_check in (None, lambda stopping: steps.append(stopping.last_check.step)):
        torch.manual_seed(0)  # the order of the rows
        stopping = fit(Path(), rule=FOLDS, on_check=on_check)
        curves.append(stopping.history.columns())
    assert repr(curves[0]) == repr(curves[1])
    assert steps[0] == 1
    assert {*steps} <= {*curves[0]["step"]}
