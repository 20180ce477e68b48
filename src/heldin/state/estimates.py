"""The estimated test loss along a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from heldin.errors import HeldinError

from .history import Records, axes

__all__ = [
    "COVERAGE",
    "COVERAGE_ROWS",
    "INTERVAL_COVERAGE",
    "STATE_SCHEMA",
    "Estimate",
    "EstimateHistory",
    "interval_coverage",
]

# Schema of a saved state.
STATE_SCHEMA = {"records": Tensor, "best_step": (int, None), "stopped_step": (int, None)}

# Share of runs whose test loss at the stop lay within 2 or 3 standard errors of the estimate,
# measured on data sets that were not used for tuning. A test compares with docs/which-rule.md.
# Leave-one-out was measured with an older, smaller standard error.
COVERAGE: Mapping[str, Mapping[int, float]] = {
    "folds": {2: 0.96, 3: 0.97},
    "shadow": {2: 0.83, 3: 0.9},
    "leave-one-out": {2: 0.73, 3: 0.82},
}

# Share of 95 % intervals that held the measured test loss, by the number of shadows of five folds
# and whether they are light; up to 100 rows, up to 300, and beyond: the lower one of the share in
# all runs and in those with as many rows. A test compares with the study; others: not measured.
INTERVAL_COVERAGE: Mapping[tuple[int, bool], tuple[float, float, float]] = {
    (5, False): (0.98, 0.98, 0.96),
    (4, False): (0.99, 0.96, 0.99),
    (3, False): (0.98, 0.97, 0.98),
    (2, False): (0.97, 0.93, 0.97),
    (1, False): (0.94, 0.92, 0.94),
    (3, True): (0.99, 0.99, 0.99),
}
COVERAGE_ROWS = (100, 300)


def interval_coverage(shadows: int, light: bool, rows: int) -> float | None:
    """Return the measured coverage of the 95 % interval of shadows of five folds."""
    shares = INTERVAL_COVERAGE.get((shadows, light))
    return None if shares is None else shares[sum(rows > most for most in COVERAGE_ROWS)]


@dataclass(frozen=True)
class Estimate:
    """One check.

    Attributes:
        step: number of optimiser steps taken.
        estimate: estimated test loss.
        standard_error: standard error of the estimate, over the rows that it averages.
        training_loss: loss of the model over all training rows.

    >>> import heldin
    >>> heldin.state.Estimate(step=8, estimate=0.7, standard_error=0.1, training_loss=0.6)
    Estimate(step=8, estimate=0.7, standard_error=0.1, training_loss=0.6)
    """

    step: int
    estimate: float
    standard_error: float
    training_loss: float


class EstimateHistory(Records[Estimate]):
    """The checks of a run, oldest first.

    Attributes:
        rule: name of the rule that made the estimates.
        best_step: the step with the lowest estimate.
        stopped_step: the step at which training was stopped, if it was.

    >>> history = EstimateHistory()
    >>> history.append(Estimate(step=1, estimate=0.7, standard_error=0.1, training_loss=0.6))
    >>> history.columns()["estimate"]
    [0.7]
    """

    def __init__(self, rule: str = "folds") -> None:
        super().__init__()
        self.rule = rule
        self.best_step: int | None = None
        self.stopped_step: int | None = None

    def append(self, record: Estimate) -> None:
        """Add a check."""
        self._records.append(record)

    def __repr__(self) -> str:
        return f"<heldin.EstimateHistory: {len(self)} checks>"

    def columns(self) -> dict[str, list[Any]]:
        """Return the records as columns: step, estimate, standard_error, training_loss."""
        return {f.name: [getattr(r, f.name) for r in self._records] for f in fields(Estimate)}

    def plot(self, ax: Any = None, *, errors: int = 2) -> Any:
        """Draw the training loss, the estimated test loss with its band, and the chosen step.

        Args:
            ax: where to draw (default: a new figure).
            errors: half-width of the band, in standard errors (2 or 3). Its label gives the
                coverage measured in heldin's study, which is below that of a normal distribution.

        Returns:
            The matplotlib axes.
        """
        if errors not in (2, 3):
            raise HeldinError(f"history.plot: errors must be 2 or 3, got {errors!r}")
        coverage = COVERAGE.get(self.rule, {}).get(errors)
        covered = "" if coverage is None else f" (covered {coverage:.0%} in our study)"
        ax = axes(ax, (6, 3.5))
        table = self.columns()
        steps, middle = table["step"], table["estimate"]
        pairs = list(zip(middle, table["standard_error"], strict=True))
        ax.fill_between(
            steps,
            [m - errors * e for m, e in pairs],
            [m + errors * e for m, e in pairs],
            color="tab:orange",
            alpha=0.2,
            linewidth=0,
            label=f"±{errors} standard errors{covered}",
        )
        ax.plot(steps, table["training_loss"], color="0.4", label="training loss")
        ax.plot(steps, middle, color="tab:orange", label="estimated test loss")
        if self.best_step is not None:
            ax.axvline(self.best_step, color="tab:blue", alpha=0.6, label="chosen step")
        if self.stopped_step is not None:
            ax.axvline(self.stopped_step, color="0.6", linestyle=":", label="training stopped")
        ax.set_xscale("symlog", linthresh=1)
        ax.set_xlim(left=0)
        ax.set_xlabel("step")
        ax.set_ylabel("loss")
        ax.legend(fontsize="small")
        return ax

    def state_dict(self) -> dict[str, Any]:
        """Return the state as tensors and numbers."""
        rows = [astuple(r) for r in self._records]
        return {
            "records": torch.tensor(rows, dtype=torch.float64).reshape(-1, len(fields(Estimate))),
            "best_step": self.best_step,
            "stopped_step": self.stopped_step,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state from `state_dict`."""
        rows = state["records"].tolist()
        records = [Estimate(int(step), *values) for step, *values in rows]
        if state["best_step"] not in [None, *(r.step for r in records)]:
            raise ValueError(f"no check at the best step, {state['best_step']}")
        self._records = records
        self.best_step, self.stopped_step = state["best_step"], state["stopped_step"]

    def last(self) -> Estimate:
        """Return the latest check; its values are nan if there was none."""
        if self._records:
            return self._records[-1]
        return Estimate(0, math.nan, math.nan, math.nan)
