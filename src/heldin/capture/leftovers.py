"""Gradients that passes have left behind, and which of them were thrown away since.

A pass whose gradients are set to None or zero before the next one is no part of the step: the
generator's pass through the discriminator, the first pass of SAM, one that only probes.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

__all__ = ["Leftovers"]


class Leftovers:
    """The gradients of parameters as the last pass left them."""

    def __init__(self) -> None:
        self._left: dict[str, tuple[Tensor, int, int]] = {}

    def note(self, leaves: Mapping[str, Tensor]) -> None:
        """Remember the gradients that a pass has left in `.grad`."""
        for name, leaf in leaves.items():
            grad = leaf.grad
            if grad is not None:
                self._left[name] = leaf, grad._version, _address(grad)

    def thrown_away(self) -> set[str]:
        """The parameters whose gradient was set to None or zero since then, each named once."""
        gone = {name for name, left in self._left.items() if _is_gone(*left)}
        for name in gone:
            del self._left[name]
        return gone


def _address(grad: Tensor) -> int:
    return 0 if grad.is_sparse else grad.data_ptr()


def _is_gone(leaf: Tensor, version: int, address: int) -> bool:
    grad = leaf.grad
    if grad is None:
        return True
    if grad._version == version and _address(grad) == address:  # nobody has touched it
        return False
    return grad.numel() > 0 and not bool((grad.to_dense() if grad.is_sparse else grad).any())
