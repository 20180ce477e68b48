"""Flat batches: the rows of all samples are concatenated, and an index gives the owner of each row.

This is how graphs are batched: `x` has a row per node, `batch` the number of the graph of each
node, `edge_index` two node numbers per edge. An argument called `batch` may be such an index. An
argument that `batch_dim={name: "owner"}` names is one, and so is an entry `batch` beside edges in a
dataclass or a mapping. Batches of torch_geometric store where each graph's part of every tensor
begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from heldin.errors import NotObservable

from .ownership.planes import fields_of

__all__ = [
    "INDEX", "index_of", "is_flat_batch", "is_packed", "owners_from_index", "owners_in",
    "owners_in_fields",
]  # fmt: skip

INDEX = "batch"  # the usual name of an index of owners


def index_of(tensor: Any, name: str, declared: bool) -> Tensor | None:
    """Return an argument that is an index of owners, on the CPU; None if it is not one.

    Args:
        tensor: the argument.
        name: its name.
        declared: whether the user has declared it to be an index, so that a wrong one is an error.
    """
    if not isinstance(tensor, Tensor) or not (declared or name == INDEX):
        return None
    numbers = not tensor.is_floating_point() and not tensor.is_complex()
    fits = numbers and tensor.dim() == 1 and tensor.dtype is not torch.bool and len(tensor) > 0
    index = tensor.detach().cpu() if fits else None
    if index is not None and int(index.min()) == 0:
        if declared or bool((index.diff() >= 0).all()):  # unsorted numbers mean something else
            return index
    if declared:
        raise NotObservable(
            f'heldin.observe: batch_dim says that argument {name!r} holds the "owner" of each row, '
            "so it must be a vector of whole numbers from 0 on, one for each row"
        )
    return None


def owners_from_index(index: Tensor, tensors: Sequence[tuple[str, Tensor]]) -> list[Tensor | None]:
    """Return the owners of named tensors that come with an index: of rows, edges or samples.

    Each is broadcastable to its tensor; None: all samples share the tensor.
    """
    rows, m = len(index), int(index.max()) + 1
    edges: Tensor | None = None
    owners: list[Tensor | None] = [None] * len(tensors)
    for i, (name, tensor) in enumerate(tensors):
        edge_owners = _edge_owners(index, tensor, name)
        if edge_owners is not None:
            edges, owners[i] = edge_owners, edge_owners[None]
    for i, (name, tensor) in enumerate(tensors):
        if owners[i] is not None or not tensor.dim():
            continue
        size = tensor.shape[0]
        if edges is not None and size == len(edges) and (size != rows or _is_edge_name(name)):
            owners[i] = _along(edges, tensor, 0)
        elif size == rows:
            owners[i] = _along(index, tensor, 0)
        elif size == m:
            owners[i] = _along(torch.arange(m), tensor, 0)
    return owners


def _edge_owners(index: Tensor, tensor: Tensor, name: str) -> Tensor | None:
    """Return the owners of edges (pairs of row numbers); None if an edge joins two samples."""
    numbers = not tensor.is_floating_point() and tensor.dtype is not torch.bool
    if not _is_edge_name(name) or not numbers or tensor.dim() != 2 or len(tensor) != 2:
        return None
    ends = tensor.detach().cpu().long()
    if not ends.numel() or int(ends.min()) < 0 or int(ends.max()) >= len(index):
        return None
    owner, other_owner = index[ends]
    return owner if torch.equal(owner, other_owner) else None


def _is_edge_name(name: str) -> bool:
    return "edge" in name or name == "E"


def _along(owner: Tensor, tensor: Tensor, dim: int) -> Tensor:
    return owner.reshape([-1 if d == dim else 1 for d in range(tensor.dim())])


def is_packed(positions: Any) -> bool:
    """Return whether positions restart within a row, so that the row holds several samples."""
    if not isinstance(positions, Tensor) or positions.dim() != 2 or positions.shape[1] < 2:
        return False
    return bool(((positions[:, 1:] == 0) & (positions[:, :-1] > 0)).any())


def is_flat_batch(value: Any) -> bool:
    """Return whether a value is a batch of torch_geometric, or has the same attributes."""
    parts = ("_slice_dict", "num_graphs", "stores", "__cat_dim__")
    return all(hasattr(value, part) for part in parts)


def owners_in(batch: Any) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield the tensors of a torch_geometric batch with their owners (None: shared by all).

    A batch stores where each sample's part of a tensor began when it was collated. Tensors that
    were changed since then (dropped or reordered edges, self-loops, new tensors) get their owners
    from the index of nodes.
    """
    for store in batch.stores:
        key = getattr(store, "_key", None)
        slices = batch._slice_dict if key is None else batch._slice_dict.get(key, {})
        tensors = {name: value for name, value in store.items() if isinstance(value, Tensor)}
        owners = {n: _cut(batch, store, n, t, slices.get(n)) for n, t in tensors.items()}
        index = tensors.get(INDEX)
        if index is not None and len(index):
            index = index.detach().cpu()
            named = [pair for pair in tensors.items() if not pair[0].endswith(("ptr", "_batch"))]
            beside = zip(named, owners_from_index(index, named), strict=True)
            by_index = {name: owner for (name, _), owner in beside if owner is not None}
            is_as_collated = _is_as_collated(index, tensors, slices, owners, by_index)
            for name, owner in by_index.items():
                if owners[name] is None or not is_as_collated:
                    owners[name] = owner
            owners[INDEX] = index
        for name, tensor in tensors.items():
            if not _fits(owners[name], tensor):
                raise NotObservable(
                    f"heldin.observe: {name!r} of the batch was changed after it was put together, "
                    "so that the samples of its rows are unknown; change it before batching, or in "
                    "forward()"
                )
            yield tensor, owners[name]


def owners_in_fields(value: Any) -> list[tuple[Tensor, Tensor | None]]:
    """Return the tensors of a graph batch with their owners; an empty list for other values.

    A graph batch is a dataclass or a mapping with an index of owners called `batch`, and with edges
    both of whose ends have the same owner.
    """
    entries = value if isinstance(value, Mapping) else fields_of(value)
    index = index_of(entries.get(INDEX), INDEX, False)
    if index is None:
        return []
    tensors = {str(name): entry for name, entry in entries.items() if isinstance(entry, Tensor)}
    pairs = {n: t for n, t in tensors.items() if _is_edge_name(n) and t.dim() == 2 and len(t) == 2}
    if all(pair.numel() and _edge_owners(index, pair, n) is None for n, pair in pairs.items()):
        return []
    owners = owners_from_index(index, list(tensors.items()))
    return list(zip(tensors.values(), owners, strict=True))


def _cut(batch: Any, store: Any, name: str, tensor: Tensor, starts: Tensor | None) -> Tensor | None:
    """Return the owners of a collated tensor, from where each sample's part starts."""
    if starts is None or not tensor.dim():
        return None
    dim = batch.__cat_dim__(name, tensor, store)
    sizes = starts.diff() if dim is not None else torch.ones(len(tensor)).long()
    owner = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    return _along(owner, tensor, (dim or 0) % tensor.dim())


def _is_as_collated(
    index: Tensor,
    tensors: Mapping[str, Tensor],
    slices: Mapping[str, Tensor],
    cut: Mapping[str, Tensor | None],
    indexed_owners: Mapping[str, Tensor],
) -> bool:
    """Return whether a batch is as collated: the same nodes per sample in order, and edges."""
    counts = torch.bincount(index)
    starts = [s for s in (tensors.get("ptr"), *slices.values()) if isinstance(s, Tensor)]
    in_place = bool((index.diff() >= 0).all()) and any(
        torch.equal(s.diff()[: len(counts)].cpu(), counts) for s in starts
    )
    for name, tensor in tensors.items():
        collated, indexed = cut[name], indexed_owners.get(name)
        if not _fits(collated, tensor):
            return False
        if collated is not None and indexed is not None and indexed.dim() == 2 and len(tensor) == 2:
            if indexed.shape[0] == 1 and not torch.equal(collated.flatten(), indexed.flatten()):
                return False  # pairs of nodes
    return in_place


def _fits(owner: Tensor | None, tensor: Tensor) -> bool:
    if owner is None:
        return True
    return all(a in (1, b) for a, b in zip(owner.shape, tensor.shape, strict=True))
