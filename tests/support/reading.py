"""What tests read of a run, from its saved state."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def rule_state(stopping: Any) -> dict[str, Any]:
    """Return the saved state of what follows a run, of `heldin.EarlyStopping` too."""
    state: dict[str, Any] = stopping.state_dict()
    rule: dict[str, Any] = state["rule"]
    return rule if state["heldin"] == "EarlyStopping" else state


def step_of(stopping: Any) -> int:
    """Return the number of steps that were taken."""
    step: int = stopping.state_dict()["step"]
    return step


def curves(stopping: Any) -> list[Tensor]:
    """Return the held-out losses of the rows, one (rows,) for each check."""
    return list(rule_state(stopping)["curves"].unbind(1))


def missing_share(fold_of_row: Tensor) -> float:
    """Return the share of the rows that shadows miss: one less the harmonic mean of what they see.

    Args:
        fold_of_row: (rows,) the shadow that is tested on a row and sees all others; -1: none.
    """
    seen = [int((fold_of_row != k).sum()) for k in fold_of_row[fold_of_row >= 0].tolist()]
    per_row = sum(1 / rows for rows in seen) / len(seen)
    return 1 - 1 / (per_row * len(fold_of_row))


def held_per_trained(fold_of_row: Tensor) -> float:
    """Return the rows that are held out, over those that each shadow sees."""
    trained = len(fold_of_row) * (1 - missing_share(fold_of_row))
    return int((fold_of_row >= 0).sum()) / trained


def averages(optimizer: Any) -> dict[str, Tensor]:
    """Return the smoothed evidence of every weight, of `heldin.ElementwiseStopping`."""
    found: dict[str, Tensor] = optimizer.state_dict()["heldin"]["averages"]
    return found


def updates(optimizer: Any) -> int:
    """Return how often `heldin.ElementwiseStopping` has updated its averages."""
    count: int = optimizer.state_dict()["heldin"]["updates"]
    return count
