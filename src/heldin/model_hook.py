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
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        """Call the hook."""
        return self._function(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")  # takes any arguments and returns None
