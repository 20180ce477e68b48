"""Eager execution of compiled models while they are observed: a compiled graph hides samples."""

from __future__ import annotations

import sys
import threading
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from heldin._private_torch import compiled_parts, compiled_whole, set_compiled_whole

__all__ = ["EagerExecution"]

_lock = threading.Lock()
_inside = 0  # calls in progress in all threads, which share PyTorch's setting
_setting = ExitStack()


class EagerExecution:
    """A switch that makes the calls of one model run eagerly if parts of it are compiled.

    Functions that are compiled outside the model's modules are not detected here. The backward
    pass refuses them.
    """

    def __init__(self) -> None:
        self._parts = False
        self._inside = False
        self._whole: Any = None  # the result of `model.compile()`, which has compiled our hooks

    def attach(self, model: nn.Module) -> None:
        """Detect the compiled parts of a model, and disable `model.compile()`."""
        if "torch._dynamo" in sys.modules:  # otherwise nothing is compiled
            self._whole = compiled_whole(model)
            if self._whole is not None:
                set_compiled_whole(model, None)
            self._parts = compiled_parts(model)

    def detach(self, model: nn.Module) -> None:
        """Restore the model's compiled call."""
        self.leave()
        whole, self._whole = self._whole, None
        if whole is not None:
            set_compiled_whole(model, whole)

    def enter(self) -> None:
        """Force eager execution at the beginning of a call."""
        global _inside
        if self._parts and not self._inside:
            self._inside = True
            with _lock:
                if _inside == 0:
                    _setting.enter_context(torch.compiler.set_stance("force_eager"))
                _inside += 1

    def leave(self) -> None:
        """Allow compiled execution again at the end of a call."""
        global _inside
        if self._inside:
            self._inside = False
            with _lock:
                _inside -= 1
                if _inside == 0:
                    _setting.close()
