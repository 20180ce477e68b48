"""What tests read or set behind the public interface: here, and nowhere else."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from heldin.capture.collector import Collector


def collector(observed: Any) -> Collector:
    """Return what observes for an `Observation`, or for a rule by evidence."""
    found: Collector = observed._collector
    return found


def block(observed: Any, name: str) -> tuple[Any, float]:
    """Return the block of a parameter that is looked at, and the weight of its coordinates."""
    sampler = collector(observed).sampler
    return ((), 1.0) if sampler is None else sampler._blocks.get(name, (None, 1.0))


def turn(observed: Any, everything: Collection[str]) -> set[str]:
    """Return the parameters that are looked at in this turn."""
    return set(collector(observed).turn() or everything)


def waiting(stopping: Any) -> list[Any]:
    """Return the batches that were given to a rule since the last step."""
    return [batch for batch, _, _ in stopping._announced]


def check_at(stopping: Any, steps: Collection[int]) -> None:
    """Let a rule check after these steps, and after no other."""
    stopping._due = lambda: stopping.state_dict()["step"] in steps
