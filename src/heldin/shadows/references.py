"""Find the objects that a user's function refers to, and see whether calls change them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from heldin.errors import HeldinError

from .exchange import Exchange

__all__ = ["UnchangedObjects"]


class UnchangedObjects:
    """Refuses a function whose replays change an object that was not given as `state`."""

    def __init__(self, function: Callable[[Any], Any], exchange: Exchange) -> None:
        known = {id(each) for each in (*exchange.modules, *exchange.objects, exchange.optimizer)}
        known |= {id(t) for t in exchange.tensors}
        self._objects = {
            name: value
            for name, value in _referred(function).items()
            if id(value) not in known and _fingerprint(value) is not None
        }
        self._before = {name: _fingerprint(value) for name, value in self._objects.items()}

    def check(self) -> None:
        """Raise HeldinError if an object has changed."""
        for name, value in self._objects.items():
            if _fingerprint(value) != self._before[name]:
                raise HeldinError(
                    f"train_step: it changes {name!r} (a {type(value).__name__}), which all "
                    "shadows share with the model, so that both would be wrong; pass it: "
                    f"state=[{name}], or leave it out of train_step"
                )


def _referred(function: Any) -> dict[str, Any]:
    """Return the objects that a function refers to, by name."""
    objects: dict[str, Any] = {}
    inner = getattr(function, "__func__", function)
    if not isinstance(inner, FunctionType):
        objects |= vars(function) if hasattr(function, "__dict__") else {}
        inner = type(function).__call__
    owner = getattr(function, "__self__", None)
    objects |= vars(owner) if hasattr(owner, "__dict__") else {}
    if isinstance(inner, FunctionType):
        variables = inspect.getclosurevars(inner)
        objects |= {**variables.globals, **variables.nonlocals}
        for value in list(objects.values()):
            if isinstance(value, FunctionType) and value.__module__ == inner.__module__:
                nested = inspect.getclosurevars(value)
                objects |= {**nested.globals, **nested.nonlocals} | objects
    return objects


def _fingerprint(value: Any) -> Any:
    """Return a summary of the contents of an object that training may change; None: not such."""
    if isinstance(value, nn.Module):
        tensors = [*value.parameters(), *value.buffers()]
        return [float(t.detach().double().abs().sum()) for t in tensors if not t.is_complex()]
    if isinstance(value, Tensor) and not value.is_complex():
        return float(value.detach().double().abs().sum()) if value.numel() else 0.0
    if callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    ):
        try:
            return repr(value.state_dict())
        except Exception:  # an object that has no state at this moment
            return None
    return None
