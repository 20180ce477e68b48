"""The gradients that backward passes have left in `.grad`, and which were zeroed since.

A pass does not count towards the step if its gradients are set to None or zero before an optimiser
has used them: the generator's pass through the discriminator, the first pass of SAM, or a probe.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from heldin._private_torch import version_of
from heldin.pause import is_paused

__all__ = ["GradientLedger", "is_zeroed", "register_step_hook"]


class GradientLedger:
    """Version and address of `.grad` of each parameter after the last backward pass."""

    def __init__(self) -> None:
        self._left: dict[str, tuple[Tensor, tuple[int, int]]] = {}

    def record(self, leaves: Mapping[str, Tensor], *others: GradientLedger) -> None:
        """Record the gradients in `.grad`, except those that the given ledgers already hold."""
        for name, leaf in leaves.items():
            if leaf.grad is not None:
                state = _state_of(leaf.grad)
                if not any(ledger._left.get(name, (leaf, None))[1] == state for ledger in others):
                    self._left[name] = leaf, state

    def mark_used(self, parameters: Iterable[Tensor]) -> None:
        """Drop the records of parameters that an optimiser has stepped with."""
        if self._left:
            ids = {id(p) for p in parameters}
            self._left = {n: left for n, left in self._left.items() if id(left[0]) not in ids}

    def __bool__(self) -> bool:
        return bool(self._left)

    @property
    def names(self) -> list[str]:
        return list(self._left)

    def find_replaced(self) -> str | None:
        """Return a parameter whose `.grad` is now a different tensor; None if there is none."""
        for name, (leaf, (_, address)) in self._left.items():
            if leaf.grad is not None and _state_of(leaf.grad)[1] != address:
                return name
        return None

    def pop_zeroed(self) -> set[str]:
        """Return the parameters whose gradient was set to None or zero, and drop their records."""
        gone = set()
        for name, (leaf, state) in list(self._left.items()):
            unchanged = leaf.grad is not None and _state_of(leaf.grad) == state
            if not unchanged and is_zeroed(leaf.grad):
                gone.add(name)
                del self._left[name]
        return gone


def _state_of(grad: Tensor) -> tuple[int, int]:
    """Return version and address of a gradient."""
    return version_of(grad), 0 if grad.is_sparse else grad.data_ptr()


def is_zeroed(grad: Tensor | None) -> bool:
    """Return whether a gradient was thrown away: it is None, or zero."""
    if grad is None:
        return True
    return grad.numel() > 0 and not bool((grad.to_dense() if grad.is_sparse else grad).any())


def register_step_hook(method: Callable[[list[Tensor]], None]) -> Any:
    """Call a method with the parameters of each optimiser step, until the handle is removed."""
    alive = weakref.WeakMethod(method)  # the global hook must not keep its object alive

    def on_optimizer_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        target = alive()
        if target is not None and not is_paused():
            target([p for g in optimizer.param_groups for p in g["params"]])

    return register_optimizer_step_post_hook(on_optimizer_step)
