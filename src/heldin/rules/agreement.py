"""Making sure that all ranks train the same model in the same way."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from heldin.errors import HeldinError

__all__ = ["compare"]

CLOSE = 1e-5  # relative, between the same weights on different machines


def compare(group: Any, facts: Mapping[str, Any], parameters: Mapping[str, Tensor]) -> None:
    """Refuse, on every rank of a group, ranks that differ from the first.

    Args:
        group: the processes.
        facts: what must be the same, by name.
        parameters: those of the model, by name; their sums and norms are compared.
    """
    everyone: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(everyone, (dict(facts), _weights(parameters)), group)
    first, weights = everyone[0]
    for rank, (other, theirs) in enumerate(everyone):
        for what in {**first, **other}:
            if repr(other.get(what)) != repr(first.get(what)):  # nan is like nan
                difference = _short(other.get(what), first.get(what))
                raise HeldinError(
                    f"rank {rank} and rank 0 differ in {what}: {difference}; every rank must "
                    "build, load and call the same"
                )
        odd = next((n for n in weights if not _same(weights[n], theirs[n])), None)
        if odd is not None:
            raise HeldinError(
                f"rank {rank} and rank 0 train different models: the weights of parameter {odd!r} "
                "differ, so their samples cannot be put together. Pass process_group=None if the "
                "processes have nothing to do with each other, else wrap the model in "
                "DistributedDataParallel"
            )


def _weights(parameters: Mapping[str, Tensor]) -> dict[str, tuple[float, float]]:
    """Sum and norm of each parameter that every rank has as a whole."""
    whole = {n: p.detach() for n, p in parameters.items() if not hasattr(p, "to_local")}
    real = {n: torch.view_as_real(p) if p.is_complex() else p for n, p in whole.items()}
    return {
        name: (
            float(p.sum(dtype=torch.float64)),
            float(torch.linalg.vector_norm(p.float() if p.dtype.itemsize < 4 else p)),
        )
        for name, p in real.items()
    }


def _same(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """Whether sums and norms are those of the same weights; broken weights are another's affair."""
    room = CLOSE * max(one[1], other[1], 1e-30)
    sums = abs(one[0] - other[0]) <= room * 100  # of many weights that cancel each other
    return not math.isfinite(room) or (sums and abs(one[1] - other[1]) <= room)


def _short(one: Any, other: Any) -> str:
    if isinstance(one, list) and isinstance(other, list):
        odd = [x for x in one if x not in other] + [x for x in other if x not in one]
        return ", ".join(map(str, odd[:3])) or "their order"
    return f"{one!r} and {other!r}"
