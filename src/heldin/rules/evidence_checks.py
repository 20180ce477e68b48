"""Checks of a run by evidence: of the order of calls, of gradients, and of a stop to come."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from heldin.capture.collector import Collector
from heldin.capture.graph import Backward
from heldin.capture.moments import Moments
from heldin.errors import HeldinWarning, more
from heldin.loop.hooks import call_at_steps

__all__ = [
    "MANY_EPOCHS", "StepOrderCheck", "VanishedGradientCheck", "has_closure", "warn_of_many_epochs",
]  # fmt: skip

INSTEAD = "use rule='auto', which estimates the test loss, in its place"
MANY_EPOCHS = 100  # epochs without a stop; few runs of our study stopped later
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


def has_closure(args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Return whether an optimiser's step has these arguments, its hook's, and a closure."""
    return any(value is not None for value in (*args[1:], kwargs.get("closure")))


class StepOrderCheck:
    """Warns once if the optimiser stepped before `EvidenceStopping.step`.

    There are no false alarms: an optimiser with parameters of the model has stepped, without a
    closure, and no backward pass came after it. A second warning is given if passes were zeroed and
    another gradient was put in their place.
    """

    def __init__(self, model: nn.Module, seen: Collector) -> None:
        self._seen = seen
        seen.before_backward.append(self._begins)
        self._stepped_after = 0  # number of backward passes before the optimiser's step
        self._warned_of_order = self._warned_of_gradient = False
        self._parameter_ids = {id(p) for p in model.parameters()}
        self._steps_model: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        self.close = call_at_steps(self._stepped, after=True)

    def _begins(self, backward: Backward) -> None:
        self._stepped_after = 0

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self._seen.passes or self._warned_of_order:
            return
        if has_closure(args, kwargs):
            return  # it runs its backward passes inside the step
        if optimizer not in self._steps_model:
            params = (p for group in optimizer.param_groups for p in group["params"])
            self._steps_model[optimizer] = any(id(p) in self._parameter_ids for p in params)
        if self._steps_model[optimizer]:
            self._stepped_after = self._seen.passes

    def closing(self) -> None:
        """Warn if the optimiser has stepped already, or if a gradient was set from outside."""
        late = self._stepped_after and self._stepped_after == self._seen.passes
        self._stepped_after = 0
        if late and not self._warned_of_order:
            self._warned_of_order = True
            warnings.warn(
                "EarlyStopping.step: called after optimizer.step(), which has overwritten the "
                "weights that a stop should keep. Call it between loss.backward() and "
                "optimizer.step() " + more("step-after-the-optimiser"),
                HeldinWarning,
                stacklevel=5,
            )
        by_hand = None if self._warned_of_gradient else self._seen.externally_set_gradient()
        if by_hand is not None:
            self._warned_of_gradient = True
            warnings.warn(
                "EarlyStopping.step: gradients of backward passes were set to None or zero, so "
                f"that these passes do not count, but {by_hand!r} has a gradient that no pass has "
                "left. If the loop combines gradients outside of .grad, the observed step is "
                "incomplete. Let backward() accumulate them in .grad "
                + more("step-after-the-optimiser"),
                HeldinWarning,
                stacklevel=5,
            )
