"""Notices a run that evidence will hardly stop any more."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping

import torch

from heldin.capture.moments import Moments
from heldin.errors import HeldinWarning, more

__all__ = ["INSTEAD", "Outlook"]

INSTEAD = "Use heldin.stopping('auto', ...), which estimates the test loss, in its place"
FIRST = 64  # check at which it looks for the first time; then at twice as many, and so on
VANISHED = 1e-6  # of the mean squared gradient of a sample at the first check


class Outlook:
    """Warns, once, if the gradients of single samples have vanished and the rule did not stop.

    That is so where the training loss has come near zero: on tables with few rows or many columns,
    or with models that can learn every row. Looked at when the number of checks is a power of two;
    it must be so at two of them.
    """

    def __init__(self) -> None:
        self._checks = 0
        self._first: dict[str, float] = {}  # mean squared gradient of a sample, by parameter
        self._times = 0

    def look(self, seen: Mapping[str, Moments], count: int) -> bool:
        """Take in a check; True if it is time to warn."""
        self._checks += 1
        due = self._checks >= FIRST and self._checks & (self._checks - 1) == 0
        if count < 2 or self._times > 1 or not (due or not self._first):
            return False
        sizes = _sizes(seen, count)
        if not self._first:
            self._first = {name: size for name, size in sizes.items() if 0 < size < math.inf}
            return False
        shares = [size / self._first[n] for n, size in sizes.items() if n in self._first]
        self._times = self._times + 1 if shares and max(shares) < VANISHED else 0
        return self._times == 2

    def warn(self, step: int, criterion: float, armed: bool) -> None:
        """Say so, and what to do."""
        unarmed = "" if armed else ", which has never left zero (arming)"
        warnings.warn(
            f"EvidenceStopping: after {step} steps the gradients of single samples are below a "
            f"thousandth of what they were, so the training loss is near zero, and the criterion "
            f"is {criterion:.3g}{unarmed}. Evidence will hardly stop this run: the model fits "
            f"every row. {INSTEAD} {more('evidence-will-hardly-stop')}",
            HeldinWarning,
            stacklevel=6,
        )


def _sizes(seen: Mapping[str, Moments], count: int) -> dict[str, float]:
    """The mean squared gradient of a sample, by parameter; waits for the device once."""
    sums = [each.squares.sum() for each in seen.values()]
    values = torch.stack([each.to(sums[0].device) for each in sums]).tolist() if sums else []
    pairs = zip(seen.items(), values, strict=True)
    return {n: v * m.weight * count for (n, m), v in pairs if math.isfinite(v)}
