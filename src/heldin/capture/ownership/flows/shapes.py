"""Ops that move, copy and join elements."""

from __future__ import annotations

import torch
from torch import Tensor

from heldin.capture.ownership.flow import OpCall, Owners, everything, flows
from heldin.capture.ownership.planes import align, canonical, ownerless, reshape, tensors_in


@flows("view", "_unsafe_view", "reshape", "_reshape_alias", "flatten", "unflatten", "view_as")
def _reshape(call: OpCall) -> Owners:
    source, planes = call["self"], call.needed("self")
    if source.numel() != call.out.numel():  # view(dtype)
        return everything(call)
    return [reshape(planes, source.shape, call.out.shape)]


@flows(
    "permute", "transpose", "t", "numpy_T", "unsqueeze", "squeeze", "expand", "slice", "select",
    "narrow", "split", "split_with_sizes", "unsafe_split", "unsafe_chunk", "chunk", "unbind",
    "tensor_split", "diagonal", "unsafe_split_with_sizes", "unfold", "alias", "detach", "flip",
    "roll", "repeat", "repeat_interleave", "rot90", "pixel_shuffle", "pixel_unshuffle",
    "channel_shuffle", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d",
    "replication_pad1d", "replication_pad2d", "replication_pad3d",
    "constant_pad_nd", "lift_fresh", "movedim", "swapaxes", "squeeze_copy",
)  # fmt: skip
def _move(call: OpCall) -> Owners:
    """Move the owners as the op moves the elements of one tensor."""
    if "self" not in call.args:  # repeat_interleave(repeats): as many indices i as repeats[i] says
        repeats = call["repeats"]
        call.moved_by(repeats)
        planes = call.needed("repeats")
        return [planes.expand(-1, *repeats.shape).repeat_interleave(repeats.cpu(), dim=1)]
    source, planes = call["self"], call.needed("self")
    rest = {name: value for name, value in call.args.items() if name != "self"}
    if any(isinstance(v, Tensor) for v in rest.values()):
        return everything(call)
    if call.op.name == "roll":
        over = rest["dims"] or range(source.dim())
        if any(planes.shape[d % source.dim() + 1] > 1 for d in over):
            call.mark_volatile()  # the shift may differ in the next call
    moved: list[list[Tensor]] = []
    for i, plane in enumerate(planes.expand(-1, *source.shape)):
        if call.op.name == "constant_pad_nd":
            rest["value"] = -1.0 if i % 2 == 0 else -float(call.tracker.m)
        moved.append([_thin(t) for t in tensors_in(call.func(plane, **rest))])
    return [canonical(torch.stack(list(same))) for same in zip(*moved, strict=True)]


def _thin(plane: Tensor) -> Tensor:
    for dim in range(plane.dim()):
        if plane.stride(dim) == 0 and plane.shape[dim] > 1:
            plane = plane.narrow(dim, 0, 1)
    return plane


@flows("as_strided")
def _strided(call: OpCall) -> Owners:
    """Handle strided access to a storage; elements outside the tensor may have any owner."""
    source, out, planes = call["self"], call.out, call.needed("self")
    sizes = zip(source.shape, source.stride(), strict=True)
    if any(size > 1 and stride == 0 for size, stride in sizes):
        return everything(call)  # several elements may share one memory location
    elements = source.untyped_storage().nbytes() // source.element_size()
    anybody = torch.tensor([call.tracker.m - 1.0, 0.0], dtype=planes.dtype)
    memory = anybody.repeat(len(planes) // 2)[:, None].repeat(1, elements)

    def part(tensor: Tensor) -> Tensor:
        strides = (elements, *tensor.stride())
        return memory.as_strided((len(planes), *tensor.shape), strides, tensor.storage_offset())

    part(source).copy_(planes.expand(-1, *source.shape))
    return [canonical(part(out))]


@flows("view_as_real", "view_as_complex")
def _pairs(call: OpCall) -> Owners:
    planes = call.needed("self")
    return [planes.unsqueeze(-1) if call.out.is_floating_point() else planes.amax(-1)]


@flows("copy", "_to_copy", "to", "to_dense", "_to_dense", "contiguous", "detach_copy", "to_sparse",
       "_to_sparse", "_to_sparse_csr", "to_sparse_csr", "_coalesce")  # fmt: skip
def _copy(call: OpCall) -> Owners:
    source = call["src"] if call.op.base == "copy" else call["self"]
    planes = call.owners(source)
    return [None if planes is None else align(planes, call.out.dim())]


@flows("cat", "concat", "concatenate")
def _cat(call: OpCall) -> Owners:
    tensors = [t for t in call["tensors"] if t.dim() == call.out.dim()]
    owned = call.owned(tensors)
    like, dim = owned[0], call.args.get("dim", 0) % call.out.dim()
    sizes = [max(planes.shape[d] for planes in owned) for d in range(1, like.dim())]
    parts = []
    for tensor in tensors:
        shape = [*sizes[:dim], tensor.shape[dim], *sizes[dim + 1 :]]
        planes = call.owners(tensor)
        full = ownerless(shape, like, call.tracker.m) if planes is None else planes
        parts.append(full.expand(-1, *shape))
    return [canonical(torch.cat(parts, dim + 1))]


@flows("stack")
def _stack(call: OpCall) -> Owners:
    like = call.owned(call["tensors"])[0]
    dim = call.args.get("dim", 0) % call.out.dim() + 1
    return [canonical(torch.stack([call.full(t, like) for t in call["tensors"]], dim))]
