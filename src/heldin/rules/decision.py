"""The decision to stop, from values of the criterion: smoothing, arming, warm-up, patience."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from heldin.criterion.average import STATE_SCHEMA as AVERAGE
from heldin.criterion.average import Average

from .options import Evidence

__all__ = ["STATE_SCHEMA", "Decision"]

STATE_SCHEMA = {"armed": bool, "streak": int, "average": AVERAGE, "recent": AVERAGE}
RECENT = 0.9  # decay of the average that arms the rule: about ten checks


class Decision:
    """The smoothed criterion, and the decision to stop.

    During an initial plateau the criterion stays near zero, where it may be positive by chance: the
    rule is armed once an average over the last checks, which starts at zero, has left it.
    """

    def __init__(self, rule: Evidence) -> None:
        self._rule, self.armed = rule, rule.arm_threshold is None
        self._average = Average(rule.smoothing, rule.initial_average)
        self._recent = Average(RECENT, start=0.0)
        self._streak = 0

    @property
    def value(self) -> float:
        """The smoothed criterion; nan before the first value."""
        return self._average.value if self._average.count else math.nan

    def add(self, step: int, raw: float, weight: float = 1.0) -> tuple[bool, str]:
        """Add the criterion of a step; return whether to stop, and the reason in words."""
        rule, value, recent = self._rule, self._average.add(raw, weight), self._recent.add(raw)
        if rule.arm_threshold is not None and abs(recent) > rule.arm_threshold:
            self.armed = True
        text = f"criterion {value:.4g}"
        if not value > 0:
            self._streak = 0
            return False, f"{text}, not above 0"
        if not self.armed:
            return False, f"{text} > 0, but it has not left zero yet (arming={rule.arm_threshold})"
        if step <= rule.warmup:
            return False, f"{text} > 0, but in the warm-up of {rule.warmup} steps"
        self._streak += 1
        reached = f"{text} > 0, check {self._streak} of {rule.checks}"
        return self._streak >= rule.checks, reached

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
