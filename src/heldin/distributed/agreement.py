"""A check that all ranks train the same model in the same way."""

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
    """Raise an error on every rank of a group if a rank differs from the first.

    facts: values that must be the same on all ranks, by name; of parameters, sums and norms are
    compared.
    """
    facts_by_rank: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(facts_by_rank, (dict(facts), _weights(parameters)), group)
    first, weights = facts_by_rank[0]
    for rank, (other, other_weights) in enumerate(facts_by_rank):
        for what in {**first, **other}:
            if repr(other.get(what)) != repr(first.get(what)):  # so that nan equals nan
                difference = _short(other.get(what), first.get(what))
                raise HeldinError(
                    f"rank {rank} and rank 0 differ in {what}: {difference}; use the same settings "
                    "and the same checkpoint on every rank"
                )
        differing = next((n for n in weights if not _same(weights[n], other_weights[n])), None)
        if differing is not None:
            raise HeldinError(
                f"rank {rank} and rank 0 train different models: the weights of parameter "
                f"{differing!r} differ, so that their samples cannot be pooled. Pass "
                "process_group=None if the processes train independent models, else wrap the model "
                "in DistributedDataParallel"
            )


def _weights(parameters: Mapping[str, Tensor]) -> dict[str, tuple[float, float]]:
    """Return sum and norm of each parameter that is not sharded."""
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
    """Return whether sums and norms belong to the same weights; inf and nan are not compared."""
    room = CLOSE * max(one[1], other[1], 1e-30)
    sums = abs(one[0] - other[0]) <= room * 100  # wider, because many weights cancel
    return not math.isfinite(room) or (sums and abs(one[1] - other[1]) <= room)


def _short(one: Any, other: Any) -> str:
    if isinstance(one, list) and isinstance(other, list):
        differing = [x for x in one if x not in other] + [x for x in other if x not in one]
        return ", ".join(map(str, differing[:3])) or "their order"
    return f"{one!r} and {other!r}"
