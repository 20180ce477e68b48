"""A check for runs that the rule by evidence will probably never stop."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping

import torch

from heldin.capture.moments import Moments
from heldin.errors import HeldinWarning, more

__all__ = ["MANY_EPOCHS", "VanishedGradientCheck", "warn_of_many_epochs"]

INSTEAD = "use rule='auto', which estimates the test loss, in its place"
MANY_EPOCHS = 100  # without a stop; in our study few runs were stopped after so many
FIRST = 64  # number of checks at the first test; the number doubles for each later test
VANISHED = 1e-6  # share of the initial mean squared per-sample gradient


class VanishedGradientCheck:
    """A check that per-sample gradients have vanished while the rule did not stop.

    This happens when the training loss is close to zero: on tables with few rows or many columns,
    or with models that fit every row. It is tested when the number of checks is a power of two, and
    must hold in two consecutive tests.
    """

    def __init__(self) -> None:
        self._checks = 0
        self._first: dict[str, float] = {}  # mean squared gradient of a sample, by parameter
        self._times = 0

    def update(self, seen: Mapping[str, Moments], count: int) -> bool:
        """Add a check; return True if it is time to warn."""
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
        """Warn that the rule will probably not stop, and name an alternative."""
        unarmed = "" if armed else ", which has never left zero (arming)"
        warnings.warn(
            f"heldin.EarlyStopping: after {step} steps the gradients of single samples are below a "
            f"thousandth of what they were, so the training loss is near zero, and the criterion "
            f"is {criterion:.3g}{unarmed}. Evidence will hardly stop this run: the model fits "
            f"every row; {INSTEAD} {more('evidence-will-hardly-stop')}",
            HeldinWarning,
            stacklevel=6,
        )


def warn_of_many_epochs(owner: str, criterion: float) -> None:
    """Warn that evidence has not stopped a run in many epochs."""
    warnings.warn(
        f"{owner}: {MANY_EPOCHS} epochs have passed and the criterion is {criterion:.3g}. If the "
        "training loss does not fall any more, evidence will hardly stop this run, as on texts, "
        "and on tables with rare classes or many columns. End it by hand, smooth more "
        f"(rules.Evidence(smoothing=0.95)), or {INSTEAD} {more('evidence-will-hardly-stop')}",
        HeldinWarning,
        stacklevel=4,
    )


def _sizes(seen: Mapping[str, Moments], count: int) -> dict[str, float]:
    """Return the mean squared per-sample gradient by parameter; synchronises once."""
    sums = [each.squares.sum() for each in seen.values()]
    values = torch.stack([each.to(sums[0].device) for each in sums]).tolist() if sums else []
    pairs = zip(seen.items(), values, strict=True)
    return {n: v * m.weight * count for (n, m), v in pairs if math.isfinite(v)}
