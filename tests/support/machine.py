"""What this machine's PyTorch can do without us: the rest is skipped by name, and never failed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def supported(plain: Callable[[], object]) -> Iterator[None]:
    """Skip what fails in the block if the same fails in PyTorch alone.

    Args:
        plain: does the same without heldin. It is called only if the block has failed.
    """
    try:
        yield
    except (NotImplementedError, RuntimeError):
        reason = missing(plain)
        if reason is None:
            raise
        pytest.skip(f"PyTorch alone cannot do this here: {reason}")


def missing(plain: Callable[[], object]) -> str | None:
    """Why PyTorch cannot do something here, or None if it can."""
    try:
        plain()
    except (NotImplementedError, RuntimeError) as error:
        return str(error).partition("\n")[0].partition(". ")[0]
    return None
