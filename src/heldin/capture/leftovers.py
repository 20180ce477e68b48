"""Gradients that passes have left behind, and which of them were thrown away since.

A pass whose gradients are set to None or zero before the next one, and before an optimiser has
stepped with them, is no part of the step: the generator's pass through the discriminator, the first
pass of SAM, one that only probes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from heldin._private_torch import version_of

__all__ = ["Leftovers", "tell_of_steps"]


class Leftovers:
    """The gradients of parameters as the last pass left them."""

    def __init__(self) -> None:
        self._left: dict[str, tuple[Tensor, int, int]] = {}

    def note(self, leaves: Mapping[str, Tensor]) -> None:
        """Remember the gradients that a pass has left in `.grad`."""
        for name, leaf in leaves.items():
            grad = leaf.grad
            if grad is not None:
                self._left[name] = leaf, version_of(grad), _address(grad)

    def used(self, parameters: Iterable[Tensor]) -> None:
        """An optimiser has stepped with the gradients of these: they are not thrown away."""
        if self._left:
            ids = {id(p) for p in parameters}
            self._left = {n: left for n, left in self._left.items() if id(left[0]) not in ids}

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
    if version_of(grad) == version and _address(grad) == address:  # nobody has touched it
        return False
    return grad.numel() > 0 and not bool((grad.to_dense() if grad.is_sparse else grad).any())


class _Holder(Protocol):
    leftovers: Leftovers


def tell_of_steps(holder: _Holder) -> Any:
    """Let the leftovers know of the steps of all optimisers, until the handle is removed."""
    alive = weakref.ref(holder)  # a hook keeps nobody alive

    def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
        found = alive()
        if found is not None:
            found.leftovers.used(p for g in optimizer.param_groups for p in g["params"])

    return register_optimizer_step_post_hook(stepped)
