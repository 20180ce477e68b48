"""Copy objects of the user so that reading them leaves their own random generators alone."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import Tensor, nn

from .generators import generators_in, left_alone

__all__ = ["copied", "copy_sharing_data"]

T = TypeVar("T")
DEPTH = 6  # nested objects that are searched for data to share


def copy_sharing_data(value: T) -> T:
    """Return a deep copy that shares tensors, arrays, frames and modules with the original.

    What cannot be copied (an open file, say) is shared, too.
    """
    memo: dict[int, Any] = {id(data): data for data in _data_in(value, DEPTH, set())}
    duplicate: T = _copy(value, memo)
    return duplicate


@contextmanager
def copied(value: T) -> Iterator[T]:
    """Give a copy as `copy_sharing_data` does, and restore the generators that it shares.

    Functions are not copied, nor are the generators in their closures and globals.
    """
    with left_alone(generators_in(value)):
        yield copy_sharing_data(value)


def _copy(value: Any, memo: dict[int, Any]) -> Any:
    """Copy deeply, or, where a part cannot be copied, everything but that part."""
    try:
        return copy.deepcopy(value, dict(memo))
    except Exception:  # open files, locks, lambdas of other libraries
        pass
    if type(value) is tuple:
        return tuple(_copy(part, memo) for part in value)
    try:
        duplicate = copy.copy(value)
    except Exception:
        return value
    for name, part in list(getattr(duplicate, "__dict__", {}).items()):
        vars(duplicate)[name] = _copy(part, memo)
    return duplicate


def _data_in(value: Any, depth: int, seen: set[int]) -> Iterator[Any]:
    """Yield what is large and is only read."""
    if depth == 0 or id(value) in seen or value is None:
        return
    seen.add(id(value))
    if isinstance(value, (Tensor, nn.Module, bytes)) or hasattr(value, "__array__"):
        yield value
    elif isinstance(value, Mapping):
        for part in list(value.values()):
            yield from _data_in(part, depth - 1, seen)
    elif isinstance(value, (list, tuple)):
        if len(value) > 64 and isinstance(value, list) and _is_data(value[0]):
            yield value  # a list of rows
            return
        for part in value:
            yield from _data_in(part, depth - 1, seen)
    elif not isinstance(value, (type, str, int, float, complex)):
        if hasattr(value, "__self__"):  # a method
            yield from _data_in(value.__self__, depth - 1, seen)
        for part in list(getattr(value, "__dict__", {}).values()):
            yield from _data_in(part, depth - 1, seen)


def _is_data(value: Any) -> bool:
    plain = (Tensor, str, bytes, int, float, dict, tuple)
    return isinstance(value, plain) or hasattr(value, "__array__")
