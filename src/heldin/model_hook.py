"""Hooks on the user's model that copies and pickles of the model leave behind."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

__all__ = ["ModelHook"]


class ModelHook:
    """A hook on the user's model that does nothing in copies of the model.

    The loop may copy or pickle the whole model (`copy.deepcopy(model)`, `torch.save(model, file)`).
    A copy then has a function of the standard library in place of the hook, so that it can be
    loaded without heldin.

    Args:
        function: the hook itself.

    >>> import copy, torch
    >>> from torch import nn
    >>> model = nn.Linear(1, 1)
    >>> handle = model.register_forward_pre_hook(ModelHook(lambda module, args: print("called")))
    >>> _ = model(torch.ones(1))
    called
    >>> _ = copy.deepcopy(model)(torch.ones(1))
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        """Call the hook."""
        return self._function(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")  # takes any arguments and returns None
