"""What a training loop does, as frozen records that the observer emits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from heldin._private_torch import version_of

from .batches import addresses
from .randomness import Autocast, RandomState

__all__ = ["LoaderBatch", "ModelCall", "OptimizerStep"]


@dataclass(frozen=True, eq=False)
class ModelCall:
    """A call of the model with gradients enabled."""

    tensors: tuple[Tensor, ...]  # all among its arguments
    versions: tuple[int, ...]  # counters of these tensors, to see later changes in place
    modes: tuple[bool, ...]  # `training` of every module of the model
    autocast: Autocast
    random_state: Any = None  # of the random generators before it, at steps that are checked

    def changed_storages(self) -> set[int]:
        """Return the addresses of arguments that were changed in place since the call."""
        return {
            address
            for tensor, version in zip(self.tensors, self.versions, strict=False)
            if version_of(tensor) != version
            for address in addresses(tensor)
        }


@dataclass(frozen=True, eq=False)
class LoaderBatch:
    """A batch that the model is trained on."""

    rows: Tensor  # (b,) numbers of its rows in the dataset
    batch: Any  # as the loader returned it
    items: tuple[Any, ...] | None = None  # from which it was collated, where they are at hand
    random_state: RandomState | None = None  # right after it was returned, at checked steps
    prepared: Any = None  # as the model saw it, where a framework changes it on the way


@dataclass(frozen=True, eq=False)
class OptimizerStep:
    """One step of the user's optimiser."""

    number: int  # 1 for the first step that is observed
    calls: tuple[ModelCall, ...]  # whose gradients are in the step
    settings: tuple[Mapping[str, Any], ...]  # of every parameter group (rates and so on) before it
    with_closure: bool = False
    # number, from 1 on, of the first backward pass whose gradients are in the step; the loop threw
    # those of earlier passes away
    first_pass: int = 1
    # numbers (`id`) of parameters that had a gradient before the first backward pass: the loop sets
    # gradients to zero, not to None
    zeroed: frozenset[int] = frozenset()

    def changed_storages(self) -> set[int]:
        """Return the addresses of tensors that were changed in place after a call with them."""
        return set().union(*(call.changed_storages() for call in self.calls))
