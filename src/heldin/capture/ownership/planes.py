"""The owner of each element of a tensor, and how owners merge.

The owner of an element is the one sample of the batch on which its value depends. Owners are kept
as *planes*: a float tensor of shape (2 R, ...) with, for each of R hypotheses on the inputs, the
largest owner and minus the smallest one. Merging two dependencies is then an elementwise maximum,
and a reduction is `amax`. An element without an owner (it holds no data) has the planes (-1, -m);
an element that depends on several samples has planes that do not cancel.

Planes have the rank of their tensor, and size 1 along each dimension where the owner does not
change, so that they stay tiny: (m, 1, 1) for an activation of shape (m, T, d).

Every step is an over-approximation: the recorded dependency may name more samples than the true
one, never fewer. So a clean result is a proof, whatever was guessed on the way to it. In particular
an element that holds no data may be given any owner (`canonical` gives it that of its neighbours):
if the guess is wrong, another sample's data meets it further down, and the result is not clean.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import reduce
from math import prod
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "Key", "align", "canonical", "fields_of", "is_mixed", "is_ownerless", "merge", "ownerless",
    "reshape", "tensors_in",
]  # fmt: skip

Key = tuple[Any, int]  # an autograd node and the number of one of its outputs


def is_mixed(planes: Tensor) -> Tensor:
    """Return which elements depend on more than one sample, per hypothesis."""
    hi, lo = planes[0::2], -planes[1::2]
    return hi > lo


def is_ownerless(planes: Tensor) -> Tensor:
    return planes[0::2] < 0


def ownerless(shape: Sequence[int], like: Tensor, m: int) -> Tensor:
    """Return the planes of a tensor that holds no data."""
    column = torch.tensor([-1.0, -float(m)], dtype=like.dtype).repeat(like.shape[0] // 2)
    return column.reshape(-1, *[1] * len(shape)).expand(-1, *shape)


def align(planes: Tensor, ndim: int) -> Tensor:
    """Return the planes for a tensor of a higher rank, aligned as in broadcasting."""
    missing = ndim - (planes.dim() - 1)
    return planes.reshape(planes.shape[0], *[1] * missing, *planes.shape[1:]) if missing else planes


def merge(parts: Iterable[Tensor]) -> Tensor:
    """Return the planes of a tensor that depends on all parts (planes of the same rank)."""
    return reduce(torch.maximum, parts)


def canonical(planes: Tensor) -> Tensor:
    """Return the smallest equal planes; ownerless elements take the owner of their slice."""
    for dim in range(1, planes.dim()):
        if planes.shape[dim] > 1:
            first = planes.narrow(dim, 0, 1)
            if planes.stride(dim) == 0 or torch.equal(planes, first.expand_as(planes)):
                planes = first
    varying = [d for d in range(1, planes.dim()) if planes.shape[d] > 1]
    if varying and bool(is_ownerless(planes).any()):
        for dim in varying:
            other_dims = [d for d in varying if d != dim]
            filled = planes.amax(other_dims, keepdim=True) if other_dims else planes
            if other_dims and not bool(is_mixed(filled).any()):
                return canonical(filled)
    return planes


def reshape(planes: Tensor, old: Sequence[int], new: Sequence[int]) -> Tensor:
    """Return the planes after a row-major reshape from `old` to `new`, expanded only if needed."""
    count, sizes = planes.shape[0], planes.shape[1:]
    varying = [d for d, size in enumerate(sizes) if size > 1]
    if not varying or 0 in new:
        return planes.reshape(count, -1)[:, :1].reshape(count, *[1] * len(new))
    last = varying[-1] + 1
    inner = prod(old[last:])  # consecutive elements with the same owner
    head = planes.expand(count, *old[:last], *[1] * (len(old) - last))
    flat = head.reshape(count, prod(old[:last]))
    leading, tail = len(new), 1
    while leading and inner % (tail * new[leading - 1]) == 0:
        leading -= 1
        tail *= new[leading]
    flat = flat.repeat_interleave(inner // tail, dim=1)
    return canonical(flat.reshape(count, *new[:leading], *[1] * (len(new) - leading)))


def tensors_in(value: Any) -> list[Tensor]:
    """List all tensors in nested tuples, lists, dicts and dataclasses, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [t for v in value.values() for t in tensors_in(v)]
    if isinstance(value, (tuple, list)):
        return [t for v in value for t in tensors_in(v)]
    return [t for v in fields_of(value).values() for t in tensors_in(v)]


def fields_of(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that are set, by name; an empty dict for other values."""
    if isinstance(value, type) or not is_dataclass(value):
        return {}
    names = [field.name for field in fields(value)]  # __dataclass_fields__ also lists InitVars
    return {name: getattr(value, name) for name in names if hasattr(value, name)}
