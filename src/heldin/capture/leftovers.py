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
from heldin.errors import more

__all__ = ["Leftovers", "still_there", "tell_of_steps"]


class Leftovers:
    """The gradients of parameters as the last pass left them."""

    def __init__(self) -> None:
        self._left: dict[str, tuple[Tensor, int, int]] = {}

    def note(self, leaves: Mapping[str, Tensor], *known: Leftovers) -> None:
        """Remember the gradients that a pass has left in `.grad`, but for those that are known."""
        for name, leaf in leaves.items():
            grad = leaf.grad
            if grad is not None:
                left = leaf, version_of(grad), _address(grad)
                if not any(each._left.get(name, left[:1])[1:] == left[1:] for each in known):
                    self._left[name] = left

    def used(self, parameters: Iterable[Tensor]) -> None:
        """An optimiser has stepped with the gradients of these: they are not thrown away."""
        if self._left:
            ids = {id(p) for p in parameters}
            self._left = {n: left for n, left in self._left.items() if id(left[0]) not in ids}

    def __bool__(self) -> bool:
        return bool(self._left)

    @property
    def names(self) -> list[str]:
        """The parameters whose gradients are remembered."""
        return list(self._left)

    def replaced(self) -> str | None:
        """A parameter whose gradient is another tensor by now than the one that was left."""
        found = (
            name
            for name, (leaf, _, address) in self._left.items()
            if leaf.grad is not None and _address(leaf.grad) != address
        )
        return next(found, None)

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


def still_there(name: str) -> str:
    """Of a pass that was broken off, for a warning."""
    return (
        f"a backward pass has failed, and what it has added to the gradient of {name!r} is still "
        "there: it is a part of this step that is not observed. Call zero_grad() after such an "
        "error " + more("calls-that-are-not-observed")
    )


class _Holder(Protocol):
    def stepped(self, parameters: list[Tensor]) -> None:
        """An optimiser has stepped with the gradients of these."""


def tell_of_steps(holder: _Holder) -> Any:
    """Let the holder know of the steps of all optimisers, until the handle is removed."""
    alive = weakref.ref(holder)  # a hook keeps nobody alive

    def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
        found = alive()
        if found is not None:
            found.stepped([p for g in optimizer.param_groups for p in g["params"]])

    return register_optimizer_step_post_hook(stepped)
