"""A check of the order of calls in the user's loop, and of gradients set from outside."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping
from typing import Any

from torch import nn

from heldin.capture.collector import Collector
from heldin.capture.graph import Backward
from heldin.errors import HeldinWarning, more
from heldin.loop.hooks import call_at_steps

__all__ = ["StepOrderCheck", "has_closure"]


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
