"""Random numbers and precision of the shadows, apart from those of the user's own training."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Autocast", "own_random_stream"]


@contextmanager
def own_random_stream(seed: int, number: int, device: torch.device) -> Iterator[None]:
    """Random numbers of a stream of one's own, which depend on seed and number only.

    Afterwards torch, `random` and numpy go on as if nothing had been drawn.

    Args:
        seed: of the stream.
        number: of the place in it (a step, for instance). No state has to be saved.
        device: whose generator is seeded, beside that of the processor.

    >>> _ = torch.manual_seed(0)
    >>> with own_random_stream(1, 2, torch.device("cpu")):
    ...     first = torch.rand(1)
    >>> after = torch.rand(1)
    >>> with own_random_stream(1, 2, torch.device("cpu")):
    ...     assert torch.equal(torch.rand(1), first)
    >>> _ = torch.manual_seed(0)
    >>> torch.equal(torch.rand(1), after)
    True
    """
    mixed = (seed * 0x9E3779B97F4A7C15 + number * 0xBF58476D1CE4E5B9 + 1) % 2**63
    numpy: Any = sys.modules.get("numpy")
    python_state = random.getstate()
    numpy_state = numpy.random.get_state() if numpy is not None else None
    torch_state = torch.default_generator.get_state()
    other: Any = torch.get_device_module(device) if device.type not in ("cpu", "meta") else None
    other_state = other.get_rng_state(device) if other is not None else None
    try:
        torch.default_generator.manual_seed(mixed)
        if other is not None:
            other.manual_seed(mixed)
        random.seed(mixed)
        if numpy is not None:
            numpy.random.seed(mixed % 2**32)
        yield
    finally:
        torch.default_generator.set_state(torch_state)
        if other is not None:
            other.set_rng_state(other_state, device)
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)


@dataclass(frozen=True)
class Autocast:
    """Mixed precision as it is set at some moment.

    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     there = Autocast.now("cpu")
    >>> with there.again():
    ...     (torch.ones(1, 1) @ torch.ones(1, 1)).dtype
    torch.bfloat16
    """

    device: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def now(cls, device: str) -> Autocast:
        """What is set just now."""
        return cls(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))

    def again(self) -> torch.autocast:
        """A context in which it is set again."""
        return torch.autocast(self.device, self.dtype, enabled=self.enabled)
