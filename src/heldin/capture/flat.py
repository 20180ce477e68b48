"""Flat batches: the rows of all samples one after the other, and who owns each of them.

So graphs are batched: `x` has a row for each node, `batch` the number of the graph that each node
is of, `edge_index` two numbers of nodes for each edge. An argument called `batch` may be such an
index, one that `batch_dim={name: "owner"}` names surely is, and so is an entry `batch` beside edges
in a dataclass or a mapping. Batches of torch_geometric know where each graph's part of every tensor
begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from heldin.errors import NotObservable, more

from .ownership.planes import fields_of

__all__ = [
    "INDEX",
    "index_of",
    "is_flat_batch",
    "is_packed",
    "owners_beside",
    "owners_in",
    "owners_in_fields",
    "packed",
]

INDEX = "batch"  # what an index of owners is called


def index_of(tensor: Any, name: str, told: bool) -> Tensor | None:
    """The owners that an argument tells, as numbers from 0; None: it is no such index."""
    if not isinstance(tensor, Tensor) or not (told or name == INDEX):
        return None
    numbers = not tensor.is_floating_point() and not tensor.is_complex()
    fits = numbers and tensor.dim() == 1 and tensor.dtype is not torch.bool and len(tensor) > 0
    index = tensor.detach().cpu() if fits else None
    if index is not None and int(index.min()) == 0:
        if told or bool((index.diff() >= 0).all()):  # numbers of something else are in no order
            return index
    if told:
        raise NotObservable(
            f'heldin.observe: batch_dim says that argument {name!r} holds the "owner" of each row, '
            "so it has to be a vector of whole numbers from 0 on, one for each row"
        )
    return None


def owners_beside(
    index: Tensor, tensors: Sequence[Tensor], names: Sequence[str]
) -> list[Tensor | None]:
    """The owners of tensors beside an index: of rows, of columns of edges, of samples.

    Each is broadcastable to its tensor; None: it is shared by all.
    """
    rows, m = len(index), int(index.max()) + 1
    edges: Tensor | None = None
    found: list[Tensor | None] = [None] * len(tensors)
    for i, tensor in enumerate(tensors):
        own = _of_edges(index, tensor, names[i])
        if own is not None:
            edges, found[i] = own, own[None]
    for i, tensor in enumerate(tensors):
        if found[i] is not None or not tensor.dim():
            continue
        size = tensor.shape[0]
        if edges is not None and size == len(edges) and (size != rows or _is_of_edges(names[i])):
            found[i] = _along(edges, tensor, 0)
        elif size == rows:
            found[i] = _along(index, tensor, 0)
        elif size == m:
            found[i] = _along(torch.arange(m), tensor, 0)
    return found


def _of_edges(index: Tensor, tensor: Tensor, name: str) -> Tensor | None:
    """The owners of edges: pairs of row numbers, of which both are of one sample."""
    numbers = not tensor.is_floating_point() and tensor.dtype is not torch.bool
    if not _is_of_edges(name) or not numbers or tensor.dim() != 2 or len(tensor) != 2:
        return None
    ends = tensor.detach().cpu().long()
    if not ends.numel() or int(ends.min()) < 0 or int(ends.max()) >= len(index):
        return None
    own, other = index[ends]
    return own if torch.equal(own, other) else None


def _is_of_edges(name: str) -> bool:
    return "edge" in name or name == "E"


def _along(owner: Tensor, tensor: Tensor, dim: int) -> Tensor:
    return owner.reshape([-1 if d == dim else 1 for d in range(tensor.dim())])


def is_packed(positions: Any) -> bool:
    """Whether positions begin anew within a row: several samples lie in it."""
    if not isinstance(positions, Tensor) or positions.dim() != 2 or positions.shape[1] < 2:
        return False
    return bool(((positions[:, 1:] == 0) & (positions[:, :-1] > 0)).any())


def packed() -> str:
    """Of such rows, for a warning."""
    return (
        "the argument 'position_ids' begins anew within a row: several samples lie in one row, as "
        "packing=True and padding_free=True put them there, and each row counts as one sample. For "
        "evidence of single samples, let each have a row of its own "
        + more("calls-that-are-not-observed")
    )


def is_flat_batch(value: Any) -> bool:
    """Whether this is a batch of torch_geometric, or something that has the same parts."""
    parts = ("_slice_dict", "num_graphs", "stores", "__cat_dim__")
    return all(hasattr(value, part) for part in parts)


def owners_in(batch: Any) -> Iterator[tuple[Tensor, Tensor | None]]:
    """The tensors of such a batch with their owners; None: it is shared by all.

    A batch knows where each sample's part of a tensor began when it was put together. What was
    changed since (edges that were dropped or put in another order, loops, new tensors) has the
    owners that the index of its nodes tells.
    """
    for store in batch.stores:
        key = getattr(store, "_key", None)
        slices = batch._slice_dict if key is None else batch._slice_dict.get(key, {})
        tensors = {name: value for name, value in store.items() if isinstance(value, Tensor)}
        found = {n: _cut(batch, store, n, t, slices.get(n)) for n, t in tensors.items()}
        index = tensors.get(INDEX)
        if index is not None and len(index):
            index = index.detach().cpu()
            named = {n: t for n, t in tensors.items() if not n.endswith(("ptr", "_batch"))}
            beside = owners_beside(index, [*named.values()], [*named])
            told = {n: own for n, own in zip(named, beside, strict=True) if own is not None}
            fresh = _is_fresh(index, tensors, slices, found, told)
            for name, own in told.items():
                if found[name] is None or not fresh:
                    found[name] = own
            found[INDEX] = index
        for name, tensor in tensors.items():
            if not _fits(found[name], tensor):
                raise NotObservable(
                    f"heldin.observe: {name!r} of the batch was changed after it was put together, "
                    "and whose each of its rows is cannot be told any more; change it before that, "
                    "or in forward()"
                )
            yield tensor, found[name]


def owners_in_fields(value: Any) -> list[tuple[Tensor, Tensor | None]]:
    """Return the tensors of a graph batch with their owners; nothing if the value is none.

    A graph batch is a dataclass or a mapping with an index of owners called `batch`, and with edges
    both of whose ends have the same owner.
    """
    entries = value if isinstance(value, Mapping) else fields_of(value)
    index = index_of(entries.get(INDEX), INDEX, False)
    if index is None:
        return []
    tensors = {str(name): entry for name, entry in entries.items() if isinstance(entry, Tensor)}
    pairs = {n: t for n, t in tensors.items() if _is_of_edges(n) and t.dim() == 2 and len(t) == 2}
    if all(_of_edges(index, pair, name) is None and pair.numel() for name, pair in pairs.items()):
        return []
    owners = owners_beside(index, [*tensors.values()], [*tensors])
    return list(zip(tensors.values(), owners, strict=True))


def _cut(batch: Any, store: Any, name: str, tensor: Tensor, starts: Tensor | None) -> Tensor | None:
    """The owners of a tensor that was put together of parts."""
    if starts is None or not tensor.dim():
        return None
    dim = batch.__cat_dim__(name, tensor, store)
    sizes = starts.diff() if dim is not None else torch.ones(len(tensor)).long()
    owner = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    return _along(owner, tensor, (dim or 0) % tensor.dim())


def _is_fresh(
    index: Tensor,
    tensors: Mapping[str, Tensor],
    slices: Mapping[str, Tensor],
    cut: Mapping[str, Tensor | None],
    told: Mapping[str, Tensor],
) -> bool:
    """Whether parts are still where they were: as many nodes of each, in order, and the edges."""
    counts = torch.bincount(index)
    starts = [s for s in (tensors.get("ptr"), *slices.values()) if isinstance(s, Tensor)]
    in_place = bool((index.diff() >= 0).all()) and any(
        torch.equal(s.diff()[: len(counts)].cpu(), counts) for s in starts
    )
    for name, tensor in tensors.items():
        own, other = cut[name], told.get(name)
        if not _fits(own, tensor):
            return False
        if own is not None and other is not None and other.dim() == 2 and len(tensor) == 2:
            if other.shape[0] == 1 and not torch.equal(own.flatten(), other.flatten()):
                return False  # pairs of nodes
    return in_place


def _fits(owner: Tensor | None, tensor: Tensor) -> bool:
    if owner is None:
        return True
    return all(a in (1, b) for a, b in zip(owner.shape, tensor.shape, strict=True))
