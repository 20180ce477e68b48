"""Models with compiled parts run eagerly while observed: a compiled graph hides its samples."""

from __future__ import annotations

import sys
import threading
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from heldin._private_torch import compiled_parts, compiled_whole, set_compiled_whole

__all__ = ["Eagerly"]

_lock = threading.Lock()
_inside = 0  # calls under way, of all threads, which share PyTorch's setting
_setting = ExitStack()


def _enter() -> None:
    global _inside
    with _lock:
        if _inside == 0:
            _setting.enter_context(torch.compiler.set_stance("force_eager"))
        _inside += 1


def _leave() -> None:
    global _inside
    with _lock:
        _inside -= 1
        if _inside == 0:
            _setting.close()


class Eagerly:
    """Makes the calls of one model run eagerly, if something in it is compiled.

    What is compiled elsewhere (a function of a library that forward calls) is not found, and
    refused in the backward pass.
    """

    def __init__(self) -> None:
        self._parts = False
        self._inside = False
        self._whole: Any = None  # what `model.compile()` made, whose graph holds our hooks

    def attach(self, model: nn.Module) -> None:
        """Look what is compiled in a model."""
        if "torch._dynamo" in sys.modules:  # otherwise there is nothing
            self._whole = compiled_whole(model)
            if self._whole is not None:
                set_compiled_whole(model, None)
            self._parts = compiled_parts(model)

    def detach(self, model: nn.Module) -> None:
        """Leave the model as it was."""
        self.leave()
        whole, self._whole = self._whole, None
        if whole is not None:
            set_compiled_whole(model, whole)

    def enter(self) -> None:
        """A call begins."""
        if self._parts and not self._inside:
            _enter()
            self._inside = True

    def leave(self) -> None:
        """It has ended."""
        if self._inside:
            self._inside = False
            _leave()
