"""Make heldin's hooks ignore what heldin computes on the user's objects."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["is_paused", "paused"]

_depth = 0  # nested contexts


def is_paused() -> bool:
    """Return whether heldin itself is running the user's model or optimiser."""
    return _depth > 0


@contextmanager
def paused() -> Iterator[None]:
    """Make every hook of heldin ignore calls and steps inside the context."""
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1
