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
    """A call of the model with gradients enabled.

    Attributes:
        tensors: all tensors among its arguments.
        versions: the version counters of these tensors, to see later changes in place.
        modes: `training` of every module of the model.
        autocast: the mixed precision of the call.
        random_state: states of the random generators before the call, at steps that are checked.
    """

    tensors: tuple[Tensor, ...]
    versions: tuple[int, ...]
    modes: tuple[bool, ...]
    autocast: Autocast
    random_state: Any = None

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
    """A batch that the model is trained on.

    Attributes:
        rows: (b,) numbers of its rows in the dataset.
        batch: the batch as the loader returned it.
        items: the samples that the collate function made it from, where they are at hand.
        random_state: right after the loader returned it, at steps that are checked.
        prepared: the batch as the model saw it, where a framework changes it on the way.
    """

    rows: Tensor
    batch: Any
    items: tuple[Any, ...] | None = None
    random_state: RandomState | None = None
    prepared: Any = None


@dataclass(frozen=True, eq=False)
class OptimizerStep:
    """One step of the user's optimiser.

    Attributes:
        number: 1 for the first step that is observed.
        calls: the calls of the model whose gradients are in the step.
        settings: the settings of every parameter group (rates and so on) before the step.
        with_closure: whether the step was given a closure.
        first_pass: number, from 1 on, of the first backward pass whose gradients are in the step;
            the loop threw those of earlier passes away.
        zeroed: numbers (`id`) of parameters that had a gradient before the first backward pass: the
            loop sets gradients to zero, not to None.
    """

    number: int
    calls: tuple[ModelCall, ...]
    settings: tuple[Mapping[str, Any], ...]
    with_closure: bool = False
    first_pass: int = 1
    zeroed: frozenset[int] = frozenset()

    def changed_storages(self) -> set[int]:
        """Return the addresses of tensors that were changed in place after a call with them."""
        return set().union(*(call.changed_storages() for call in self.calls))
