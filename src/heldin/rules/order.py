"""Notices a rule that is asked after the optimiser has stepped, or about gradients put by hand."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from heldin.capture.collector import Collector
from heldin.capture.graph import Backward
from heldin.errors import HeldinWarning, more

__all__ = ["CallOrder"]


class CallOrder:
    """Warns, once, if an optimiser stepped between the backward passes of a step and its close.

    The weights that ask for a stop are gone then. The sign is sure: an optimiser with parameters of
    the model has stepped, without a closure, and no backward pass was seen since. It also warns if
    passes were thrown away and another gradient was put in their place.
    """

    def __init__(self, model: nn.Module, seen: Collector) -> None:
        self._seen = seen
        seen.before_backward.append(self._begins)
        self._stepped_after = 0  # backward passes of this step
        self._told = self._told_of_hand = False
        self._own = {id(p) for p in model.parameters()}
        self._known: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        respond = weakref.WeakMethod(self._stepped)  # the hook must not keep a lost rule alive

        def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
            alive = respond()
            if alive is not None:
                alive(optimizer, args, kwargs)

        self.close = weakref.finalize(self, register_optimizer_step_post_hook(stepped).remove)

    def _begins(self, backward: Backward) -> None:
        self._stepped_after = 0

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self._seen.passes or self._told:
            return
        if any(each is not None for each in (*args[1:], kwargs.get("closure"))):
            return  # a closure has its backward passes inside
        if optimizer not in self._known:
            params = (p for group in optimizer.param_groups for p in group["params"])
            self._known[optimizer] = any(id(p) in self._own for p in params)
        if self._known[optimizer]:
            self._stepped_after = self._seen.passes

    def closing(self) -> None:
        """The step is about to be closed."""
        late = self._stepped_after and self._stepped_after == self._seen.passes
        self._stepped_after = 0
        if late and not self._told:
            self._told = True
            warnings.warn(
                "EvidenceStopping.step: called after optimizer.step(), so the weights that ask for "
                "a stop are not kept. Call it between loss.backward() and optimizer.step() "
                + more("step-after-the-optimiser"),
                HeldinWarning,
                stacklevel=5,
            )
        by_hand = None if self._told_of_hand else self._seen.put_by_hand()
        if by_hand is not None:
            self._told_of_hand = True
            warnings.warn(
                "EvidenceStopping.step: gradients of backward passes were set to None or zero, so "
                f"that these passes do not count, and now {by_hand!r} has a gradient that no pass "
                "has left. If gradients are added up or combined elsewhere, the step is not what "
                "was seen. Let backward() add them up in .grad " + more("step-after-the-optimiser"),
                HeldinWarning,
                stacklevel=5,
            )
