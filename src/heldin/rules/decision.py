"""The decision to stop, from values of the criterion: smoothing, arming, warm-up, patience."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from heldin.criterion.average import STATE_SCHEMA as AVERAGE
from heldin.criterion.average import Average
from heldin.errors import HeldinError

__all__ = ["STATE_SCHEMA", "Decision", "check_arming"]

STATE_SCHEMA = {"armed": bool, "streak": int, "average": AVERAGE, "recent": AVERAGE}
RECENT = 0.9  # decay of the average that arms the rule: about ten checks


def check_arming(owner: str, arming: float | None) -> None:
    """Refuse a threshold that is negative or not a number."""
    if arming is not None and not arming >= 0:
        raise HeldinError(f"{owner}: arming must be a number >= 0 or None, got {arming!r}")


class Decision:
    """The smoothed criterion, and the decision to stop.

    Args:
        smoothing, start, arming, warmup, patience: see `heldin.rules.Evidence`.

    >>> decision = Decision(smoothing=0.0, start=None, arming=None, warmup=0, patience=2)
    >>> decision.add(1, -0.5)
    (False, 'criterion -0.5, not above 0')
    >>> decision.add(2, 0.1), decision.add(3, 0.2)
    ((False, 'criterion 0.1 > 0, check 1 of 2'), (True, 'criterion 0.2 > 0, check 2 of 2'))
    """

    def __init__(
        self,
        smoothing: float,
        start: float | None,
        arming: float | None,
        warmup: int,
        patience: int,
    ) -> None:
        self.arming, self.warmup, self.patience = arming, warmup, patience
        self.armed = arming is None
        self._average = Average(smoothing, start)
        self._recent = Average(RECENT, start=0.0)
        self._streak = 0

    @property
    def value(self) -> float:
        """The smoothed criterion; nan before the first value."""
        return self._average.value if self._average.count else math.nan

    def add(self, step: int, raw: float, weight: float = 1.0) -> tuple[bool, str]:
        """Add the criterion of a step; return whether to stop, and the reason in words."""
        value, recent = self._average.add(raw, weight), self._recent.add(raw)
        if self.arming is not None and abs(recent) > self.arming:
            self.armed = True
        text = f"criterion {value:.4g}"
        if not value > 0:
            self._streak = 0
            return False, f"{text}, not above 0"
        if not self.armed:
            return False, f"{text} > 0, but it has not left zero yet (arming={self.arming})"
        if step <= self.warmup:
            return False, f"{text} > 0, but in the warm-up of {self.warmup} steps"
        self._streak += 1
        return (
            self._streak >= self.patience,
            f"{text} > 0, check {self._streak} of {self.patience}",
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state as numbers."""
        return {
            "armed": self.armed,
            "streak": self._streak,
            "average": self._average.state_dict(),
            "recent": self._recent.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state from `state_dict`."""
        self.armed, self._streak = state["armed"], state["streak"]
        self._average.load_state_dict(state["average"])
        self._recent.load_state_dict(state["recent"])
