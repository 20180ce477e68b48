"""What a rule asks of its shadows, however they are trained."""

from __future__ import annotations

__all__ = ["RESULTS", "release"]

RESULTS = ("engine", "copies", "held", "same_loss", "inside", "level_count", "draw", "label")


def release(closed: object, kept: tuple[str, ...] = RESULTS) -> None:
    """Drop all attributes of a closed object but those that results are computed from."""
    for name in [name for name in vars(closed) if name not in kept]:
        del vars(closed)[name]
