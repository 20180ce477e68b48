"""Weighted exponential averages."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from heldin.criterion.evidence import Correction

__all__ = ["STATE_SCHEMA", "Average", "weight"]

STATE_SCHEMA = {"value": float, "count": int, "total": float}  # of a saved state


@lru_cache(64)
def weight(count: int, correction: Correction) -> float:
    """Return the weight of a batch of `count` samples in an average of criterion values.

    It is the number of samples m times the inverse of the variance of f under pure noise,
    2 (m-1)^2 (m-2) / ((m-3)^2 (m-5)). The variance is infinite up to m = 5, so a last batch of
    three samples has no weight beside full ones. (q, which "symmetric" uses, has a bounded
    variance, so its weight is m.)

    >>> round(weight(64, None) / weight(128, None), 3)
    0.472
    >>> weight(3, None) / weight(128, None) < 1e-9
    True
    """
    m = count
    if correction == "symmetric":
        return float(m)
    precision = (m - 3) ** 2 * (m - 5) / ((m - 1) ** 2 * (m - 2)) if m > 5 else 0.0
    return m * max(precision, 1e-12)


class Average:
    """A weighted exponential average.

    With `start=None` it is bias-corrected, sum(b^age w x) / sum(b^age w); with a number it is the
    plain recursion c = b c + (1-b) x from there, without weights.

    >>> average = Average(0.5)
    >>> average.add(2.0), average.add(4.0)         # 2, then (0.5 * 2 + 4) / 1.5
    (2.0, 3.333...)
    >>> average = Average(0.5, start=0.0)
    >>> average.add(2.0), average.add(4.0)
    (1.0, 2.5)
    """

    def __init__(self, smoothing: float, start: float | None = None) -> None:
        self.smoothing = smoothing
        self.start = start
        self.value = math.nan if start is None else start
        self.count = 0
        self._total = 0.0

    def add(self, value: float, weight: float = 1.0) -> float:
        """Add a value and return the new average."""
        b = self.smoothing
        self.count += 1
        if self.start is not None:
            self.value = b * self.value + (1.0 - b) * value
            return self.value
        self._total = b * self._total + weight
        gain = weight / self._total
        # Without rounding for the first value, and for every value without smoothing.
        self.value = value if gain == 1.0 else self.value + gain * (value - self.value)
        return self.value

    def state_dict(self) -> dict[str, Any]:
        """Return the state as numbers."""
        return {"value": self.value, "count": self.count, "total": self._total}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state from `state_dict`."""
        self.value, self.count, self._total = state["value"], state["count"], state["total"]
