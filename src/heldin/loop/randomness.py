"""Random numbers and precision of heldin's own computations, separate from the user's."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Autocast", "RandomState", "full_precision", "mixed_seed", "separate_random_stream"]

CPU = torch.device("cpu")


@dataclass(frozen=True)
class RandomState:
    """The states of all global random generators: torch, the device's, Python's and NumPy's."""

    device: torch.device
    torch_state: torch.Tensor
    device_state: torch.Tensor | None
    python_state: Any
    numpy_state: Any

    @classmethod
    def current(cls, device: torch.device = CPU, torch_only: bool = False) -> RandomState:
        """Return the states as they are now.

        torch_only: leave Python and NumPy out, which take a hundred times as long.
        """
        numpy: Any = None if torch_only else sys.modules.get("numpy")
        backend = _backend(device)
        return cls(
            device,
            torch.default_generator.get_state(),
            None if backend is None else backend.get_rng_state(device),
            None if torch_only else random.getstate(),
            None if numpy is None else numpy.random.get_state(),
        )

    def has_moved(self) -> bool:
        """Return whether the generators of the CPU have drawn numbers since."""
        now = RandomState.current()
        same = self.python_state == now.python_state
        same = same and torch.equal(self.torch_state, now.torch_state)
        if self.numpy_state is None or now.numpy_state is None:
            return not same or self.numpy_state is not now.numpy_state
        (_, before, *place), (_, after, *new_place) = self.numpy_state, now.numpy_state
        return not (same and place == new_place and bool((before == after).all()))

    def restore(self) -> None:
        """Set all generators back to these states."""
        torch.default_generator.set_state(self.torch_state)
        backend = _backend(self.device)
        if backend is not None:
            backend.set_rng_state(self.device_state, self.device)
        if self.python_state is not None:
            random.setstate(self.python_state)
        if self.numpy_state is not None:
            sys.modules["numpy"].random.set_state(self.numpy_state)


def _backend(device: torch.device) -> Any:
    return None if device.type in ("cpu", "meta") else torch.get_device_module(device)


def mixed_seed(*numbers: int) -> int:
    """Return a seed that depends on all of several whole numbers."""
    mixed = 1
    for number in numbers:
        mixed = (mixed * 0xBF58476D1CE4E5B9 + (number + 2**40) * 0x9E3779B97F4A7C15) % 2**63
        mixed ^= mixed >> 29
    return mixed


@contextmanager
def separate_random_stream(device: torch.device, *numbers: int) -> Iterator[None]:
    """Draw random numbers that depend on `numbers` only, if there are any (seed, step and so on).

    Afterwards torch, `random` and NumPy continue as if nothing had been drawn. No state has to be
    saved.
    """
    state = RandomState.current(device)
    try:
        if numbers:
            mixed = mixed_seed(*numbers)
            torch.default_generator.manual_seed(mixed)
            backend = _backend(device)
            if backend is not None:
                backend.manual_seed(mixed)
            random.seed(mixed)
            if "numpy" in sys.modules:
                sys.modules["numpy"].random.seed(mixed % 2**32)
        yield
    finally:
        state.restore()


def full_precision(device_type: str) -> AbstractContextManager[Any]:
    """Return a context without the user's mixed precision.

    Outside of mixed precision this is no context of autocast: an outer one would keep the cache of
    casts, which is keyed by Parameter, alive beyond the autocast contexts inside of it.
    """
    nested = torch.autocast_increment_nesting() > 1
    torch.autocast_decrement_nesting()
    if not nested:
        return nullcontext()
    return torch.autocast(device_type, enabled=False, cache_enabled=False)


@dataclass(frozen=True)
class Autocast:
    """The mixed-precision setting of a device type."""

    device_type: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def current(cls, device_type: str) -> Autocast:
        """Return the setting of this moment."""
        enabled = torch.is_autocast_enabled(device_type)
        return cls(device_type, enabled, torch.get_autocast_dtype(device_type))

    def context(self) -> torch.autocast:
        """Return a context with this setting.

        Without the cache of casts, which is keyed by Parameter and would return casts of weights
        that were exchanged since.
        """
        return torch.autocast(self.device_type, self.dtype, self.enabled, cache_enabled=False)
