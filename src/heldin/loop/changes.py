"""Numbers by which a change of tensors is seen without a copy of them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from heldin._private_torch import norms, versions_of

__all__ = ["checksums", "marks_of"]

SUMMED = (torch.float32, torch.float64)  # types whose tensors have one sum, on the CPU


def marks_of(values: Sequence[Any]) -> tuple[Any, ...]:
    """Return what changes if a value is replaced, or a tensor changed in place.

    PyTorch counts writes into a tensor, but not those through its `.data`: see `checksums`.
    """
    tensors = [value for value in values if isinstance(value, Tensor)]
    others = (
        [v for v in values if isinstance(v, (int, float))] if len(tensors) < len(values) else ()
    )
    return [*map(id, tensors)], versions_of(tensors), others


def checksums(tensors: Sequence[Tensor]) -> Tensor:
    """Return numbers that change with the contents of tensors."""
    if not tensors:
        return torch.zeros(0)
    kind = tensors[0].dtype
    if kind in SUMMED and all(t.dtype == kind and t.is_cpu for t in tensors):
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        return flat.dot(_ramp(len(flat), kind)).nan_to_num(nan=-1.0)
    sums = norms(list(tensors), 1)
    if len({(each.dtype, each.device) for each in sums}) > 1:
        sums = tuple(each.double().cpu() for each in sums)
    return torch.stack(sums).nan_to_num(nan=-1.0)


@functools.lru_cache(maxsize=8)
def _ramp(count: int, dtype: torch.dtype) -> Tensor:
    """Return numbers from 1 to 2, by which a sum depends on places and signs."""
    places = torch.arange(count, dtype=torch.float64)
    return (1 + (places * 0.6180339887).frac()).to(dtype)
