"""Looking up and writing by index."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from heldin.capture.ownership.flow import OpCall, Owners, everything, flows, joined
from heldin.capture.ownership.planes import (
    align,
    canonical,
    is_mixed,
    is_ownerless,
    merge,
    ownerless,
)


def _arranged(planes: Tensor | None) -> Tensor | None:
    """Return the owners of an index into owned rows; None if they can be ignored.

    An index that depends on many samples (an order of lengths, a choice of experts) only moves
    rows: it has no gradient, and the rows keep their owners.
    """
    return None if planes is None or bool(is_mixed(planes).any()) else planes


def _along(line: Tensor, dim: int, ndim: int) -> Tensor:
    """Return the planes of a vector as those of a tensor that varies along one dimension."""
    return line.reshape(len(line), *[-1 if d == dim else 1 for d in range(ndim)])


@flows("embedding")
def _embedding(call: OpCall) -> Owners:
    index, table = call.owners(call["indices"]), call.owners(call["weight"])
    if table is not None:
        return everything(call)
    return [None if index is None else index.unsqueeze(-1)]


@flows("embedding_renorm")
def _renorm(call: OpCall) -> Owners:
    """Handle `max_norm`: data select the rows to rescale, without a gradient."""
    return [None]


@flows("_embedding_bag", "_embedding_bag_forward_only")
def _embedding_bag(call: OpCall) -> Owners:
    index, offsets, count = call["indices"], call["offsets"].cpu(), call.out.shape[0]
    planes, starts = call.owners(index), call.owners(call["offsets"])
    weights = call.owners(call.args.get("per_sample_weights"))
    if planes is None and starts is not None and call.owners(call["weight"]) is None:
        call.moved_by(call["offsets"])  # each bag belongs to the sample that its offset is from
        if len(offsets) == count and weights is None:
            return [starts.unsqueeze(-1), *everything(call)[1:]]
    if planes is None or call.owners(call["weight"]) is not None or len(offsets) == 0:
        return everything(call)
    call.moved_by(call["offsets"])
    bags = torch.bucketize(torch.arange(index.shape[0]), offsets, right=True) - 1
    where = bags.clamp(0, count - 1).expand(len(planes), -1)
    result = ownerless((count,), planes, call.tracker.m).contiguous()
    for owners in (planes, weights):
        if owners is not None:
            full = owners.expand(-1, index.shape[0])
            result = result.scatter_reduce(1, where, full, "amax")
    return [canonical(result.unsqueeze(-1)), *everything(call)[1:]]


@flows("index_select")
def _index_select(call: OpCall) -> Owners:
    source, index = call["self"], call["index"]
    planes, chosen = call.owners(source), call.owners(index)
    dim = call["dim"] % source.dim()
    parts = []
    if planes is not None:
        if planes.shape[dim + 1] > 1:
            call.moved_by(index)
            planes = planes.index_select(dim + 1, index.cpu())
            chosen = _arranged(chosen)
        parts.append(planes)
    if chosen is not None:
        parts.append(_along(chosen, dim, source.dim()))
    return [joined(parts, source.dim())]


@flows("index", "_unsafe_index")
def _index(call: OpCall) -> Owners:
    source, indices, out = call["self"], list(call["indices"]), call.out
    planes, axis = call.owners(source), 0
    for entry in indices:
        is_mask = entry is not None and entry.dtype in (torch.bool, torch.uint8)
        width = entry.dim() if is_mask else 1  # dimensions of the source that it indexes
        moves_rows = planes is not None and any(s > 1 for s in planes.shape[axis + 1 :][:width])
        if entry is not None and (is_mask or moves_rows):
            call.moved_by(entry)
        axis += width
    parts = []
    if planes is not None:
        at = [None if entry is None else entry.cpu() for entry in indices]
        full = planes.expand(-1, *source.shape)
        parts.append(torch.stack([torch.ops.aten.index.Tensor(plane, at) for plane in full]))
    if call.owned(indices):
        picked = _index_owners(call, indices, out, source)
        if planes is None or _arranged(picked) is not None:
            parts.append(picked)
    return [joined(parts, out.dim())]


def _index_owners(call: OpCall, indices: list[Any], out: Tensor, source: Tensor) -> Tensor:
    """Return the owners of the positions, in the shape of the result."""
    indexed_dims = [i for i, entry in enumerate(indices) if entry is not None]
    entries = [indices[i] for i in indexed_dims]
    if any(e.dtype in (torch.bool, torch.uint8) for e in entries):
        if len(entries) == 1:  # one mask: its true entries, in order, lead the result
            mask, planes = entries[0], call.owners(entries[0])
            assert planes is not None
            chosen = planes.expand(-1, *mask.shape)[:, mask.cpu().bool()]
            after = source.dim() - indexed_dims[0] - mask.dim()
            return _along(chosen, indexed_dims[0], indexed_dims[0] + 1 + after)
        flat = merge([p.reshape(len(p), -1).amax(1) for p in call.owned(entries)])
        return flat.reshape(-1, *[1] * out.dim())
    rank = max(e.dim() for e in entries)
    joined = merge([align(p, rank) for p in call.owned(entries)])
    adjacent = indexed_dims == list(range(indexed_dims[0], indexed_dims[0] + len(indexed_dims)))
    before = indexed_dims[0] if adjacent else 0
    after = out.dim() - before - rank
    return joined.reshape(len(joined), *[1] * before, *joined.shape[1:], *[1] * after)


@flows("gather")
def _gather(call: OpCall) -> Owners:
    source, index = call["self"], call["index"]
    planes, chosen = call.owners(source), call.owners(index)
    dim = call["dim"] % max(source.dim(), 1)
    if planes is not None and planes.shape[dim + 1] > 1:
        call.moved_by(index)
        chosen = _arranged(chosen)
    parts = [] if chosen is None else [chosen]
    if planes is not None:
        full = planes.expand(-1, *source.shape)
        parts.append(torch.stack([plane.gather(dim, index.cpu()) for plane in full]))
    return [joined(parts, call.out.dim())]


@flows("masked_select", "nonzero", "take")
def _selected(call: OpCall) -> Owners:
    call.mark_volatile()
    source, planes = call["self"], call.needed("self")
    if call.op.base == "take":
        return everything(call)
    mask = source != 0 if call.op.base == "nonzero" else call["mask"]
    shape = torch.broadcast_shapes(source.shape, mask.shape)
    both = [planes, *call.owned([mask])]
    owners = merge([align(p, len(shape)) for p in both]).expand(-1, *shape)
    chosen = owners[:, mask.cpu().expand(shape)]
    return [chosen if call.op.base == "masked_select" else chosen.unsqueeze(-1)]


@flows("scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy", "index_reduce")
def _scatter(call: OpCall) -> Owners:
    target, index = call["self"], call["index"]
    source = call.args.get("src", call.args.get("source"))
    dim = call["dim"] % max(target.dim(), 1)
    old, by_index, new = (call.owners(t) for t in (target, index, source))
    if new is not None:
        by_index = _arranged(by_index)
    like = next(p for p in (old, by_index, new) if p is not None)
    base, where = call.full(target, like), index.cpu()
    if call.op.base.startswith("index"):
        assert isinstance(source, Tensor)
        landed = source.shape
        if by_index is not None:
            by_index = _along(by_index, dim, target.dim())
        where = _along(where[None], dim, target.dim())[0].expand(landed)
    else:
        landed = index.shape
        for d, size in enumerate(landed if new is not None else ()):
            assert new is not None
            if new.shape[d + 1] > size:
                new = new.narrow(d + 1, 0, size)
    put = [p for p in (by_index, new) if p is not None]
    coming = merge(put) if put else ownerless(landed, like, call.tracker.m)
    if any(p.shape[dim + 1] > 1 for p in (*put, coming if old is None else base)):
        call.moved_by(index)
    pairs = zip(base, coming.expand(-1, *landed), strict=True)
    planes = torch.stack([one.scatter_reduce(dim, where, other, "amax") for one, other in pairs])
    if target.dim() and old is None:
        for rows in call.tracker.rows.get(target.shape[dim], ()):
            row_owner = _along(rows, dim, target.dim())
            empty = is_ownerless(planes).repeat_interleave(2, 0)
            if bool((empty | (planes == row_owner)).all()):  # empty rows: nodes without edges, say
                planes = torch.where(empty, row_owner, planes)
                break
    return [canonical(planes)]


@flows("index_put", "_index_put_impl", "_unsafe_index_put")
def _index_put(call: OpCall) -> Owners:
    target, indices, values = call["self"], list(call["indices"]), call["values"]
    at = tuple([slice(None) if entry is None else entry.cpu() for entry in indices])
    places = torch.arange(target.numel()).reshape(target.shape)[at]
    old, new = call.owners(target), call.owners(values)
    parts = [align(new, places.dim())] if new is not None else []
    if call.owned(indices):
        where = _index_owners(call, indices, places, target)
        if not parts or _arranged(where) is not None:
            parts.append(where)
    if not parts:
        return [old]
    coming = merge(parts)
    if old is not None or any(size > 1 for size in coming.shape[1:]):
        call.moved_by([entry for entry in indices if entry is not None])
    flat = call.full(target, coming).reshape(len(coming), -1)
    where = places.reshape(1, -1).expand(len(coming), -1)
    put = coming.expand(-1, *places.shape).reshape(len(coming), -1)
    planes = flat.scatter_reduce(1, where, put, "amax")
    return [canonical(planes.reshape(len(coming), *target.shape))]


@flows("masked_scatter")
def _masked_scatter(call: OpCall) -> Owners:
    """Handle entries of a source that go, in order, where a mask is true."""
    target, mask, source = call["self"], call["mask"], call["source"]
    like = call.owned([target, mask, source])[0]
    call.moved_by(mask)
    shape = call.out.shape
    base, where = (
        align(call.full(tensor, like), len(shape)).expand(-1, *shape) for tensor in (target, mask)
    )
    result = merge([base, where]).clone()
    chosen = mask.cpu().expand(shape)
    put = call.full(source, like).reshape(len(like), -1)[:, : int(chosen.sum())]
    result[:, chosen] = torch.maximum(put, where[:, chosen])
    return [canonical(result)]


@flows("_pack_padded_sequence")
def _pack(call: OpCall) -> Owners:
    lengths, full = call["lengths"], call.needed("input").expand(-1, *call["input"].shape)
    call.mark_volatile()
    packed = [call.func(plane.contiguous(), lengths, call["batch_first"])[0] for plane in full]
    return [canonical(torch.stack(packed)), None]


@flows("_pad_packed_sequence")
def _pad(call: OpCall) -> Owners:
    full = call.needed("data").expand(-1, *call["data"].shape)
    rest = {k: v for k, v in call.args.items() if k not in ("data", "padding_value")}
    empty = (-1.0, -float(call.tracker.m))
    padded = [
        call.func(plane.contiguous(), padding_value=empty[i % 2], **rest)[0]
        for i, plane in enumerate(full)
    ]
    return [canonical(torch.stack(padded)), None]
