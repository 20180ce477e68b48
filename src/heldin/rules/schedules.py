"""Learning-rate schedules that have a fixed end."""

from __future__ import annotations

import gc
import warnings
from typing import Any

from torch.optim import Optimizer, lr_scheduler

from heldin.errors import HeldinWarning, more

__all__ = ["fixed_schedule", "warn_of_schedule"]

# Attributes that hold the end of a schedule, in steps of the scheduler.
ENDS: dict[type[Any], str] = {
    lr_scheduler.CosineAnnealingLR: "T_max",
    lr_scheduler.OneCycleLR: "total_steps",
    lr_scheduler.PolynomialLR: "total_iters",
    lr_scheduler.LinearLR: "total_iters",
}


def fixed_schedule(optimizer: Optimizer) -> str | None:
    """Return the scheduler of an optimiser that has a fixed end, in words; None: there is none."""
    if "initial_lr" not in optimizer.param_groups[0]:  # which every scheduler sets
        return None
    kinds = (*ENDS, lr_scheduler.LambdaLR)
    schedulers = [each for each in gc.get_objects() if issubclass(type(each), kinds)]
    mine = [
        each
        for each in schedulers
        if optimizer in (each.optimizer, getattr(each.optimizer, "optimizer", None))
    ]
    return next((text for text in map(_described, mine) if text), None)


def _described(scheduler: Any) -> str | None:
    """Return the scheduler and its end in words; None if it has no end."""
    if isinstance(scheduler, lr_scheduler.LambdaLR):  # get_linear_schedule_with_warmup and others
        options = getattr(scheduler.lr_lambdas[0], "keywords", {})
        steps = options.get("num_training_steps")
        return None if steps is None else f"a schedule of num_training_steps={steps}"
    if isinstance(scheduler, lr_scheduler.LinearLR):
        if scheduler.end_factor >= scheduler.start_factor:
            return None  # a warm-up
    end = next(end for kind, end in ENDS.items() if isinstance(scheduler, kind))
    return f"{type(scheduler).__name__}({end}={getattr(scheduler, end)})"


def warn_of_schedule(owner: str, schedule: str | None) -> None:
    """Warn of a schedule with a fixed end, from before which weights are going to be chosen.

    schedule: in words, see `fixed_schedule`.
    """
    if schedule is None:
        return
    warnings.warn(
        f"{owner}: {schedule} lowers the learning rate until a fixed end. Weights from the middle "
        "of such a run, at a high rate, are often worse than those of a shorter run to its end. "
        "finish=True trains to the end, keeps the weights and the estimate of the end, and "
        "best_step is advice for the length of the next run; finish=False chooses weights as ever "
        + more("a-schedule-with-an-end"),
        HeldinWarning,
        stacklevel=5,
    )
