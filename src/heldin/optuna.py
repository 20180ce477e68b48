"""heldin in Optuna: `EarlyStopping(..., on_check=pruning(trial))`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from heldin.rules.results import RunResults

from .errors import HeldinError

try:
    import optuna
except ImportError as error:
    raise ImportError(
        f"heldin.optuna needs Optuna ({error}): pip install optuna", name=error.name
    ) from error

__all__ = ["pruning"]


def pruning(trial: Any) -> Callable[[RunResults], None]:
    """Return a function that reports every check of a run to a trial, and prunes the trial.

    The loss is estimated by all folds at the same time, so that there is one curve from the first
    check on. What is reported is the estimated loss, or the metric given as `monitor=`, by the
    number of optimiser steps; compare trials with the same batch size.

    Args:
        trial: the trial, or a `TorchDistributedTrial` in every process.

    Returns:
        A function for the argument `on_check` of `heldin.EarlyStopping`, or of that of a framework.
        It raises `optuna.TrialPruned`.

    >>> import heldin, optuna, torch
    >>> from heldin.optuna import pruning
    >>> x = torch.randn(40, 5)
    >>> def objective(trial):
    ...     model = torch.nn.Linear(5, 1)
    ...     rate = trial.suggest_float("lr", 1e-3, 1e-1, log=True)
    ...     optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    ...     data = x, x.sum(1, keepdim=True)
    ...     stopping = heldin.EarlyStopping(
    ...         model, optimizer, torch.nn.MSELoss(), data, on_check=pruning(trial)
    ...     )
    ...     stopping.fit(batch_size=20, max_epochs=5)
    ...     return stopping.estimates["loss"].value
    >>> optuna.logging.set_verbosity(optuna.logging.WARNING)
    >>> study = optuna.create_study()
    >>> study.optimize(objective, n_trials=2)
    >>> len(study.trials[0].intermediate_values) > 3
    True
    """

    def report(stopping: RunResults) -> None:
        check = stopping.last_check
        study = getattr(trial, "study", None)
        if study is not None and len(study.directions) > 1:
            raise HeldinError(
                "heldin.optuna.pruning: a study with several objectives cannot prune; leave "
                "on_check out, or make a study with one direction"
            )
        wanted = "MAXIMIZE" if check.larger_is_better else "MINIMIZE"
        if study is not None and study.direction.name != wanted:
            raise HeldinError(
                f"heldin.optuna.pruning: what is monitored is to be {wanted.lower()}d, but the "
                f"study has the direction {study.direction.name.lower()}; make it with "
                f"direction={wanted.lower()!r}"
            )
        trial.report(check.value, check.step)
        if trial.should_prune():
            raise optuna.TrialPruned(f"pruned at step {check.step}: {check.value:.4g}")

    return report
