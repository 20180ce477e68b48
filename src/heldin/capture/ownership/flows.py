"""How ownership passes through each ATen op: one small function per family of ops.

A function takes the tracker, the op's arguments by name and its outputs, and returns the planes of
each output (see `_owners`). Whatever it returns must name at least the samples on which the output
really depends. Ops that are not here are taken apart by PyTorch's own decompositions, and if there
is none, every output element is said to depend on everything the op has read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from heldin.capture.ownership.tracker import (
    Op,
    Tracker,
    align,
    canonical,
    is_mixed,
    merge,
    nobody,
    reshape,
    tensors_in,
)

__all__ = ["Call", "flow", "flows"]

Owners = Sequence[Tensor | None]  # the planes of each output; None: holds no data


@dataclass(frozen=True)
class Call:
    """One op that has read owned data: its arguments by name, and what it returned."""

    tracker: Tracker
    func: Any
    op: Op
    args: dict[str, Any]
    outs: Sequence[Tensor]
    given: tuple[Sequence[Any], dict[str, Any]]  # the arguments as they were given

    @property
    def out(self) -> Tensor:
        return self.outs[0]

    def __getitem__(self, name: str) -> Any:
        return self.args[name]

    def owners(self, value: Any) -> Tensor | None:
        return self.tracker.owners(value) if isinstance(value, Tensor) else None

    def owned(self, *values: Any) -> list[Tensor]:
        """The planes of all owned tensors among the values (by default: all arguments)."""
        found = tensors_in(values or list(self.args.values()))
        return [p for t in found if (p := self.tracker.owners(t)) is not None]

    def place(self) -> str:
        return self.tracker.place(self.op.name)

    def moved_by(self, *index: Any) -> None:
        """Rows were moved between owners: not to be relied on if the index may change."""
        if self.tracker.volatile is None:
            if any(self.tracker.is_fickle(t) for t in tensors_in(index)):
                self.tracker.volatile = self.place()


DEBUG = False  # tests set it: a function that fails is an error then, not a reason to be careful
Flow = Callable[[Call], Owners]
_FLOWS: dict[str, Flow] = {}


def flows(*names: str) -> Callable[[Flow], Flow]:
    """Register a function for the ATen ops with these names (in-place variants included)."""

    def register(function: Flow) -> Flow:
        _FLOWS.update(dict.fromkeys(names, function))
        return function

    return register


def flow(call: Call) -> Owners:
    """Planes of the outputs of one op that has read owned data."""
    tracker, op = call.tracker, call.op
    function = _FLOWS.get(op.base)
    if function is None and op.pointwise:
        function = pointwise
    if function is None and op.base.startswith(_SHAPE_ONLY):
        return [None] * len(call.outs)
    results = None
    try:
        results = function(call) if function else _decomposed(call)
    except Exception:  # an unforeseen form of the op: fall back on what is always right
        if DEBUG:
            raise
    if results is None:
        results = everything(call)
    if tracker.first_mixed is None:
        if results[0] is not None and bool(is_mixed(results[0]).any()):
            tracker.first_mixed = call.place()
    return results


_SHAPE_ONLY = ("empty", "zeros", "ones", "full", "rand", "new_", "zero", "fill", "sym_", "arange")


def _decomposed(call: Call) -> Owners | None:
    """Run PyTorch's own decomposition of an op on the same inputs, only for its owners."""
    if call.op.written or call.op.random:
        return None
    from torch._decomp import decomposition_table

    decomposition = decomposition_table.get(call.func)
    if decomposition is None:
        return None
    try:
        with call.tracker:
            again = tensors_in(decomposition(*call.given[0], **call.given[1]))
    except Exception:  # a decomposition that does not fit is no decomposition
        return None
    if [t.shape for t in again] != [t.shape for t in call.outs]:
        return None
    return [call.owners(t) for t in again]


def _over(planes: Tensor | None, dims: Sequence[int], keep: bool = True) -> Tensor | None:
    """Owners after everything along some dimensions has been brought together."""
    if planes is None:
        return None
    ndim = planes.dim() - 1
    where = sorted({d % ndim + 1 for d in dims}) if ndim else []
    return planes.amax(where, keepdim=keep) if where else planes


def _joined(parts: Sequence[Tensor | None], ndim: int) -> Tensor | None:
    real = [align(p, ndim) for p in parts if p is not None]
    return canonical(merge(real)) if real else None


# --- whole families --------------------------------------------------------------------------


@flows(
    "native_dropout",
    "bernoulli",
    "masked_fill",
    "where",
    "clone",
    "_prelu_kernel",
    "rrelu_with_noise",
    "tril",
    "triu",
    "lerp",
)
def pointwise(call: Call) -> Owners:
    tensors = [t for t in tensors_in(list(call.args.values())) if call.owners(t) is not None]
    parts = [align(p, call.out.dim()) for p in call.owned(tensors)]
    return [_join_rows(call, parts, [t.requires_grad for t in tensors])] * len(call.outs)


def _join_rows(call: Call, parts: Sequence[Tensor], differentiable: Sequence[bool]) -> Tensor:
    """Merge; but rows keep their owners beside what is mixed and shared by all rows (a statistic of
    the batch, which is reported) and beside what is mixed and carries no gradient (a mask)."""
    first = parts[0]
    if all(p is first or (p.shape == first.shape and torch.equal(p, first)) for p in parts[1:]):
        return first
    merged = merge(parts)
    mixed = [bool(is_mixed(p).any()) for p in parts]
    if any(mixed) and not all(mixed):
        rows = merge([p for p, bad in zip(parts, mixed, strict=True) if not bad])
        varying = [d for d in range(1, rows.dim()) if rows.shape[d] > 1]
        beside = [(p, d) for p, d, bad in zip(parts, differentiable, mixed, strict=True) if bad]
        shared = all(not d or all(p.shape[v] == 1 for v in varying) for p, d in beside)
        if varying and shared and not bool(is_mixed(rows).any()):
            if any(d for _, d in beside):
                call.tracker.mixers.setdefault(call.place(), "statistics of the batch")
            return canonical(rows)
    return canonical(merged)


def everything(call: Call) -> Owners:
    """The last resort: all that was read flows into all that was written."""
    flat = [p.reshape(p.shape[0], -1).amax(1) for p in call.owned()]
    union = merge(flat)
    return [union.reshape(-1, *[1] * out.dim()) for out in call.outs]


@flows("view", "_unsafe_view", "reshape", "_reshape_alias", "flatten", "unflatten", "view_as")
def _reshape(call: Call) -> Owners:
    source = call["self"]
    planes = call.owners(source)
    if planes is None or source.numel() != call.out.numel():  # view(dtype)
        return everything(call)
    return [reshape(planes, source.shape, call.out.shape)]


@flows(
    "permute", "transpose", "t", "numpy_T", "unsqueeze", "squeeze", "expand", "slice", "select",
    "narrow", "split", "split_with_sizes", "unsafe_split", "unsafe_chunk", "chunk", "unbind",
    "tensor_split", "diagonal", "unsafe_split_with_sizes", "unfold", "alias", "detach", "flip",
    "roll", "repeat", "repeat_interleave", "rot90", "pixel_shuffle", "pixel_unshuffle",
    "channel_shuffle", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d",
    "replication_pad1d", "replication_pad2d", "replication_pad3d",
    "constant_pad_nd", "lift_fresh", "as_strided", "movedim", "swapaxes", "squeeze_copy",
)  # fmt: skip
def _move(call: Call) -> Owners:
    """Ops that only move elements of one tensor: move its owners in the same way."""
    source = call["self"]
    planes = call.owners(source)
    if planes is None or call.op.name == "as_strided":
        return everything(call)
    rest = {k: v for k, v in call.args.items() if k != "self"}
    if any(isinstance(v, Tensor) for v in rest.values()):
        return everything(call)
    if call.op.name == "roll" and call.tracker.volatile is None:
        over = rest["dims"] or range(source.dim())
        if any(planes.shape[d % source.dim() + 1] > 1 for d in over):
            call.tracker.volatile = call.place()  # by how much may differ the next time
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


@flows("copy", "_to_copy", "to", "to_dense", "_to_dense", "contiguous", "detach_copy", "to_sparse",
       "_to_sparse", "_to_sparse_csr", "to_sparse_csr", "_coalesce")  # fmt: skip
def _copy(call: Call) -> Owners:
    source = call["src"] if call.op.base == "copy" else call["self"]
    planes = call.owners(source)
    return [None if planes is None else align(planes, call.out.dim())]


@flows("cat", "concat", "concatenate")
def _cat(call: Call) -> Owners:
    tensors = [t for t in call["tensors"] if t.dim() == call.out.dim()]
    known = [call.owners(t) for t in tensors]
    like = next(p for p in known if p is not None)
    dim = call.args.get("dim", 0) % call.out.dim() + 1
    sizes = [max(p.shape[d] for p in known if p is not None) for d in range(1, like.dim())]
    parts = []
    for tensor, planes in zip(tensors, known, strict=True):
        shape = list(sizes)
        shape[dim - 1] = tensor.shape[dim - 1]
        full = nobody(shape, like, call.tracker.m) if planes is None else planes
        parts.append(full.expand(-1, *shape))
    return [canonical(torch.cat(parts, dim))]


@flows("stack")
def _stack(call: Call) -> Owners:
    tensors = call["tensors"]
    known = [call.owners(t) for t in tensors]
    like = next(p for p in known if p is not None)
    dim = call.args.get("dim", 0) % call.out.dim() + 1
    parts = [
        (nobody(t.shape, like, call.tracker.m) if p is None else p).expand(-1, *t.shape)
        for t, p in zip(tensors, known, strict=True)
    ]
    return [canonical(torch.stack(parts, dim))]


# --- reductions and ops along a dimension ----------------------------------------------------


@flows(
    "sum", "mean", "amax", "amin", "max", "min", "var", "std", "var_mean", "std_mean", "logsumexp",
    "norm", "linalg_vector_norm", "prod", "any", "all", "argmax", "argmin", "nansum", "median",
    "nanmedian", "mode", "count_nonzero", "aminmax", "kthvalue", "nanmean",
)  # fmt: skip
def _reduce(call: Call) -> Owners:
    source = call["self"]
    if isinstance(call.args.get("other"), Tensor):  # max(self, other)
        return pointwise(call)
    planes = call.owners(source)
    dims = call.args.get("dim")
    if planes is None:
        return everything(call)
    if dims is None or dims == []:
        dims = list(range(source.dim()))
    dims = [dims] if isinstance(dims, int) else dims
    keep = bool(call.args.get("keepdim", False))
    result = _over(planes, dims, keep)
    assert result is not None
    if any(result.dim() - 1 != out.dim() for out in call.outs):
        return everything(call)
    return [result] * len(call.outs)


@flows(
    "_softmax", "_log_softmax", "softmax", "log_softmax", "cumsum", "cumprod", "cummax", "cummin",
    "logcumsumexp", "sort", "argsort", "topk", "_fft_r2c", "_fft_c2r", "_fft_c2c", "glu",
    "_safe_softmax",
)  # fmt: skip
def _along(call: Call) -> Owners:
    dims = call["dim"] if "dim" in call.args else -1
    result = _over(call.owners(call["self"]), [dims] if isinstance(dims, int) else dims)
    return [result] * len(call.outs)


@flows("native_layer_norm", "_fused_rms_norm", "rms_norm")
def _norm_last(call: Call) -> Owners:
    source = call["input"]
    planes = call.owners(source)
    if planes is None:
        return everything(call)
    last = range(source.dim() - len(call["normalized_shape"]), source.dim())
    weights = call.owned([call.args.get("weight"), call.args.get("bias")])
    result = _joined([_over(planes, list(last)), *weights], source.dim())
    return [result, *[result] * (len(call.outs) - 1)]  # mean and rstd keep the rank


@flows("native_group_norm")
def _group_norm(call: Call) -> Owners:
    source = call["input"]
    planes = call.owners(source)
    if planes is None:
        return everything(call)
    whole = _over(planes, range(1, source.dim()))
    assert whole is not None
    return [whole, *[whole.reshape(*whole.shape[:2], 1)] * 2]


@flows(
    "native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm", "miopen_batch_norm",
    "_native_batch_norm_legit_no_training", "batch_norm", "_batch_norm_no_update",
    "_native_batch_norm_legit_functional", "_batch_norm_with_update_functional",
    "_batch_norm_with_update",
)  # fmt: skip
def _batch_norm(call: Call) -> Owners:
    """In training mode the rows of a channel share statistics: they are mixed, yet stay rows."""
    planes = call.owners(call["input"])
    if planes is None:
        return everything(call)
    training = call.args.get("training", "no_" not in call.op.name)
    others = [d for d in range(call["input"].dim()) if d != 1]
    if training and any(planes.shape[d + 1] > 1 for d in others):
        call.tracker.mixers.setdefault(call.tracker.place("batch normalisation"), "training mode")
    return [planes, *everything(call)[1:]]


# --- products --------------------------------------------------------------------------------


@flows("mm", "bmm", "matmul", "addmm", "baddbmm", "mv", "addmv", "dot", "vdot", "linear",
       "_scaled_mm", "_addmm_activation", "_sparse_addmm")  # fmt: skip
def _product(call: Call) -> Owners:
    tensors = [v for v in call.args.values() if isinstance(v, Tensor)]
    if call.op.base == "linear" or any(t.dim() == 1 for t in tensors[-2:]):
        return _by_vectors(call)
    rest = []
    if call.op.base in ("addmm", "baddbmm", "_addmm_activation", "_sparse_addmm"):
        rest, tensors = tensors[:1], tensors[1:]
    left, right = (call.owners(t) for t in tensors[:2])
    parts = [_over(left, [-1]), _over(right, [-2]), *call.owned(rest)]
    return [_joined(parts, call.out.dim())]


def _by_vectors(call: Call) -> Owners:
    """Matrix-vector products, and linear layers where they are one call.op."""
    tensors = [v for v in call.args.values() if isinstance(v, Tensor)]
    if call.op.base == "linear":
        parts = [_over(call.owners(tensors[0]), [-1]), *call.owned(tensors[1:])]
        if len(parts) == 1:
            return [_joined(parts, call.out.dim())]
    if call.op.base == "mv":
        right = call.owners(tensors[1])
        left = _over(call.owners(tensors[0]), [-1], keep=False)
        return [_joined([left, _over(right, [0])], 1)]
    return everything(call)


@flows("_trilinear")
def _trilinear(call: Call) -> Owners:
    """Three tensors, unsqueezed to one rank, multiplied and summed (bilinear layers)."""
    parts = []
    for name, places in (("i1", "expand1"), ("i2", "expand2"), ("i3", "expand3")):
        planes = call.owners(call[name])
        if planes is not None:
            for dim in sorted(call[places]):
                planes = planes.unsqueeze(dim + 1)
            parts.append(planes)
    return [_over(merge(parts), call["sumdim"], keep=False)]


@flows("convolution", "_convolution", "mkldnn_convolution", "convolution_overrideable")
def _convolution(call: Call) -> Owners:
    source, weight = call["input"], call["weight"]
    planes, groups = call.owners(source), call["groups"]
    if planes is None:
        return everything(call)
    n, channels, out = source.shape[0], source.shape[1], call.out
    spatial = [1] * (source.dim() - 2)
    result = _over(planes, range(2, source.dim()))
    assert result is not None
    if result.shape[2] > 1 and groups > 1:  # samples folded into the channels
        grouped = result.expand(-1, -1, channels, *spatial).reshape(
            len(planes), result.shape[1], groups, channels // groups
        )
        result = grouped.amax(3).repeat_interleave(out.shape[1] // groups, dim=2)
        result = result.reshape(len(planes), -1, out.shape[1], *spatial)
    else:
        result = _over(result, [1])
    kernel = call.owners(weight)
    bias = call.owners(call["bias"]) if call.args.get("bias") is not None else None
    if kernel is not None:
        if call["transposed"]:
            return everything(call)
        kernel = _over(kernel, range(1, weight.dim()))
        assert kernel is not None
        kernel = kernel.reshape(len(kernel), 1, -1, *spatial)
    if bias is not None:
        bias = bias.reshape(len(bias), 1, -1, *spatial)
    assert n == out.shape[0]
    return [_joined([result, kernel, bias], out.dim())]


@flows(
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable", "_scaled_dot_product_attention_math",
)  # fmt: skip
def _attention(call: Call) -> Owners:
    mask = call.args.get("attn_mask", call.args.get("attn_bias"))
    parts = [
        _over(call.owners(call["query"]), [-1]),
        _over(call.owners(call["key"]), [-1, -2]),
        _over(call.owners(call["value"]), [-1, -2]),
    ]
    if isinstance(mask, Tensor):
        parts.append(_over(call.owners(mask), [-1]))
    result = _joined(parts, call.out.dim())
    return [result, *everything(call)[1:]]


@flows("mkldnn_rnn_layer")
def _rnn_layer(call: Call) -> Owners:
    """(T, N, d) in, (T, N, h) out: time and features are brought together, samples are not."""
    states = call.owned([call["input"], call["hx_"], call["cx_"]])
    samples = [(_over(p, [0, 2]) if p.dim() == 4 else _over(p, [-1])) for p in states]
    result = _joined(samples, 3)  # (1, N, 1); states may come without the leading dimension
    assert result is not None
    state = result.squeeze(1) if call.outs[1].dim() == 2 else result
    return [result, state, state, None]  # None: the workspace


@flows("_cdist_forward", "_euclidean_dist")
def _pairs(call: Call) -> Owners:
    left, right = (call.owners(call[name]) for name in ("x1", "x2"))
    right = None if right is None else _over(right, [-1])
    return [
        _joined(
            [_over(left, [-1]), None if right is None else right.transpose(-1, -2)], call.out.dim()
        )
    ]


# --- images ----------------------------------------------------------------------------------


def _spatial(count: int) -> Flow:
    """Ops that bring the last dimensions together and leave the others alone."""

    def function(call: Call) -> Owners:
        source = next(v for v in call.args.values() if isinstance(v, Tensor))
        result = _over(call.owners(source), range(-count, 0))
        return [result] * len(call.outs)

    return function


_SPATIAL = (
    "avg_pool{}d", "max_pool{}d", "max_pool{}d_with_indices", "adaptive_avg_pool{}d",
    "_adaptive_avg_pool{}d", "adaptive_max_pool{}d", "upsample_nearest{}d",
    "fractional_max_pool{}d", "_upsample_nearest_exact{}d", "upsample_bilinear{}d",
    "upsample_linear{}d",
    "upsample_trilinear{}d", "upsample_bicubic{}d", "_upsample_bilinear{}d_aa",
    "_upsample_bicubic{}d_aa",
)  # fmt: skip
for _count in (1, 2, 3):
    flows(*(name.format(_count) for name in _SPATIAL))(_spatial(_count))


@flows("im2col", "col2im", "grid_sampler_2d", "grid_sampler_3d", "affine_grid_generator")
def _per_first(call: Call) -> Owners:
    """Ops on (N, ...) that treat the N entries apart."""
    sources = [v for v in call.args.values() if isinstance(v, Tensor)]
    if any(s.dim() < 2 or s.shape[0] != call.out.shape[0] for s in sources):
        return everything(call)
    parts = [p.flatten(2).amax(2) for p in call.owned(sources) if p.dim() > 2]
    joined = canonical(merge(parts))
    return [joined.reshape(*joined.shape, *[1] * (out.dim() - 1)) for out in call.outs]


@flows(
    "linalg_inv_ex", "linalg_cholesky_ex", "linalg_solve_ex", "_linalg_solve_ex", "linalg_qr",
    "_linalg_svd", "_linalg_eigh", "_linalg_det", "linalg_lu_factor_ex", "_linalg_slogdet",
    "linalg_matrix_exp", "triangular_solve", "linalg_solve_triangular",
)  # fmt: skip
def _matrices(call: Call) -> Owners:
    """Batched linear algebra: each matrix on its own."""
    parts = [_over(p, [-1, -2]) for p in call.owned() if p.dim() > 2]
    results: list[Tensor | None] = []
    for out in call.outs:
        same = [p for p in parts if p is not None and p.dim() - 1 >= out.dim()]
        if len(same) != len(parts):
            return everything(call)
        whole = merge(same)
        batch = whole.dim() - 3
        results.append(whole.reshape(*whole.shape[: batch + 1], *[1] * (out.dim() - batch)))
    return results


# --- looking up by index ---------------------------------------------------------------------


@flows("embedding")
def _embedding(call: Call) -> Owners:
    index, table = call.owners(call["indices"]), call.owners(call["weight"])
    if table is not None:
        return everything(call)
    return [None if index is None else index.unsqueeze(-1)]


@flows("_embedding_bag", "_embedding_bag_forward_only")
def _embedding_bag(call: Call) -> Owners:
    index, offsets = call["indices"], call["offsets"].cpu()
    planes = call.owners(index)
    if planes is None or call.owners(call["weight"]) is not None or len(offsets) == 0:
        return everything(call)
    bags = torch.bucketize(torch.arange(index.shape[0]), offsets, right=True) - 1
    count = call.out.shape[0]
    empty = nobody((count,), planes, call.tracker.m).contiguous()
    full = planes.expand(-1, index.shape[0])
    where = bags.clamp(0, count - 1).expand_as(full)
    result = empty.scatter_reduce(1, where, full, "amax")
    weights = call.args.get("per_sample_weights")
    call.moved_by(call["offsets"])
    if isinstance(weights, Tensor) and call.owners(weights) is not None:
        scattered = call.owners(weights)
        assert scattered is not None
        full = scattered.expand(-1, index.shape[0])
        result = result.scatter_reduce(1, where, full, "amax")
    return [canonical(result.unsqueeze(-1)), *everything(call)[1:]]


@flows("index_select")
def _index_select(call: Call) -> Owners:
    source, index = call["self"], call["index"]
    planes, chosen = call.owners(source), call.owners(index)
    dim = call["dim"] % source.dim()
    parts = []
    if planes is not None:
        if planes.shape[dim + 1] > 1:
            call.moved_by(index)
            planes = planes.index_select(dim + 1, index.cpu())
        parts.append(planes)
    if chosen is not None:
        shape = [1] * source.dim()
        shape[dim] = -1
        parts.append(chosen.reshape(len(chosen), *shape))
    return [_joined(parts, source.dim())]


@flows("index", "_unsafe_index")
def _index(call: Call) -> Owners:
    source, indices, out = call["self"], list(call["indices"]), call.out
    planes = call.owners(source)
    at, dims, axis = [], [], 0  # the positions, the dimensions of the source that they index
    for entry in indices:
        if entry is not None and entry.dtype in (torch.bool, torch.uint8):
            if call.tracker.is_fickle(entry) and call.tracker.volatile is None:
                call.tracker.volatile = call.place()
            dims.append(list(range(axis, axis + entry.dim())))
            axis += entry.dim()
        else:
            dims.append([axis])
            axis += 1
        at.append(None if entry is None else entry.cpu())
    parts = []
    if planes is not None:
        for entry, where in zip(indices, dims, strict=True):
            if entry is not None and any(planes.shape[d + 1] > 1 for d in where):
                call.moved_by(entry)
        full = planes.expand(-1, *source.shape)
        moved = torch.stack([torch.ops.aten.index.Tensor(plane, at) for plane in full])
        parts.append(moved)
    if call.owned(indices):
        parts.append(_index_owners(call, indices, out, source))
    return [_joined(parts, out.dim())]


def _index_owners(call: Call, indices: list[Any], out: Tensor, source: Tensor) -> Tensor:
    """Owners of the positions, laid out as the positions are in the result."""
    given = [i for i, entry in enumerate(indices) if entry is not None]
    entries = [indices[i] for i in given]
    if any(e.dtype in (torch.bool, torch.uint8) for e in entries):
        flat = merge([p.reshape(len(p), -1).amax(1) for p in call.owned(entries)])
        if len(entries) == 1:  # one mask: its true entries, in order, lead the result
            mask, planes = entries[0], call.owners(entries[0])
            assert planes is not None
            chosen = planes.expand(-1, *mask.shape)[:, mask.cpu().bool()]
            after = source.dim() - given[0] - mask.dim()
            return chosen.reshape(len(chosen), *[1] * given[0], -1, *[1] * after)
        return flat.reshape(-1, *[1] * out.dim())
    rank = max(e.dim() for e in entries)
    joined = merge([align(p, rank) for p in call.owned(entries)])
    together = given == list(range(given[0], given[0] + len(given)))
    before = given[0] if together else 0
    return joined.reshape(
        len(joined), *[1] * before, *joined.shape[1:], *[1] * (out.dim() - before - rank)
    )


@flows("gather")
def _gather(call: Call) -> Owners:
    source, index = call["self"], call["index"]
    planes, chosen = call.owners(source), call.owners(index)
    dim = call["dim"] % max(source.dim(), 1)
    parts = [] if chosen is None else [chosen]
    if planes is not None:
        if planes.shape[dim + 1] > 1:
            call.moved_by(index)
        full = planes.expand(-1, *source.shape)
        parts.append(torch.stack([plane.gather(dim, index.cpu()) for plane in full]))
    return [_joined(parts, call.out.dim())]


@flows("masked_select", "nonzero", "take")
def _selected(call: Call) -> Owners:
    source = call["self"]
    planes = call.owners(source)
    if call.tracker.volatile is None:
        call.tracker.volatile = call.place()
    if call.op.base == "take" or planes is None:
        return everything(call)
    mask = source != 0 if call.op.base == "nonzero" else call["mask"]
    shape = torch.broadcast_shapes(source.shape, mask.shape)
    where = call.owners(mask)
    both = [planes] if where is None else [planes, where]
    owners = merge([align(p, len(shape)) for p in both]).expand(-1, *shape)
    chosen = owners[:, mask.cpu().expand(shape)]
    return [chosen if call.op.base == "masked_select" else chosen.unsqueeze(-1)]


@flows("scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy", "index_reduce")
def _scatter(call: Call) -> Owners:
    target, index = call["self"], call["index"]
    source = call.args.get("src", call.args.get("source"))
    dim = call["dim"] % max(target.dim(), 1)
    known = [call.owners(t) if isinstance(t, Tensor) else None for t in (target, index, source)]
    like = next(p for p in known if p is not None)
    base = nobody(target.shape, like, call.tracker.m) if known[0] is None else known[0]
    base = base.expand(-1, *target.shape)
    by_row = call.op.base.startswith("index")
    where = index.cpu()
    if by_row:
        assert isinstance(source, Tensor)
        shape = [1] * target.dim()
        shape[dim] = -1
        rows = None if known[1] is None else known[1].reshape(len(like), *shape)
        put = [p for p in (rows, known[2]) if p is not None]
        landed = list(source.shape)
    else:
        put = [p for p in (known[1], known[2]) if p is not None]
        if known[2] is not None:
            narrowed = known[2]
            for d, size in enumerate(index.shape):
                if narrowed.shape[d + 1] > size:
                    narrowed = narrowed.narrow(d + 1, 0, size)
            put[-1] = narrowed
        landed = list(index.shape)
    coming = merge(put) if put else nobody(landed, like, call.tracker.m)
    if any(p.shape[dim + 1] > 1 for p in (*put, base if known[0] is not None else coming)):
        call.moved_by(index)
    if by_row:
        where = where.reshape(shape).expand(landed)
    pairs = zip(base, coming.expand(-1, *landed), strict=True)
    return [
        canonical(torch.stack([old.scatter_reduce(dim, where, new, "amax") for old, new in pairs]))
    ]


@flows("index_put", "_index_put_impl", "_unsafe_index_put")
def _index_put(call: Call) -> Owners:
    target, indices, values = call["self"], list(call["indices"]), call["values"]
    at = [None if entry is None else entry.cpu() for entry in indices]
    places = torch.arange(target.numel()).reshape(target.shape)[
        tuple(slice(None) if entry is None else entry for entry in at)
    ]
    old, new = call.owners(target), call.owners(values)
    parts = [align(new, places.dim())] if new is not None else []
    if call.owned(indices):
        parts.append(_index_owners(call, indices, places, target))
    if not parts:
        return [old]
    coming = merge(parts)
    base = (nobody(target.shape, coming, call.tracker.m) if old is None else old).expand(
        -1, *target.shape
    )
    moves = any(coming.shape[d] > 1 for d in range(1, coming.dim())) or old is not None
    if moves and not all(e is None or not call.tracker.is_fickle(e) for e in indices):
        call.moved_by([e for e in indices if e is not None])
    flat = base.reshape(len(base), -1).scatter_reduce(
        1,
        places.reshape(1, -1).expand(len(base), -1),
        coming.expand(-1, *places.shape).reshape(len(base), -1),
        "amax",
    )
    return [canonical(flat.reshape(len(base), *target.shape))]


@flows("_pack_padded_sequence")
def _pack(call: Call) -> Owners:
    source, lengths = call["input"], call["lengths"]
    planes = call.owners(source)
    if planes is None:
        return everything(call)
    call.tracker.volatile = call.tracker.volatile or call.place()
    full = planes.expand(-1, *source.shape)
    packed = [call.func(plane.contiguous(), lengths, call["batch_first"])[0] for plane in full]
    return [canonical(torch.stack(packed)), None]


@flows("_pad_packed_sequence")
def _pad(call: Call) -> Owners:
    planes = call.owners(call["data"])
    if planes is None:
        return everything(call)
    full = planes.expand(-1, *call["data"].shape)
    rest = {k: v for k, v in call.args.items() if k not in ("data", "padding_value")}
    empty = (-1.0, -float(call.tracker.m))
    padded = [
        call.func(plane.contiguous(), padding_value=empty[i % 2], **rest)[0]
        for i, plane in enumerate(full)
    ]
    return [canonical(torch.stack(padded)), None]


# --- losses ----------------------------------------------------------------------------------


@flows("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "soft_margin_loss",
       "binary_cross_entropy_with_logits")  # fmt: skip
def _elementwise_loss(call: Call) -> Owners:
    if call.args.get("reduction", 1) == 0:
        return pointwise(call)
    return everything(call)


@flows("nll_loss_forward", "nll_loss2d_forward")
def _nll_loss(call: Call) -> Owners:
    if call["reduction"] != 0 or call["self"].dim() == 1:
        return everything(call)
    scores = _over(call.owners(call["self"]), [1], keep=False)
    return [_joined([scores, *call.owned(call["target"])], call.out.dim()), *everything(call)[1:]]


@flows("_ctc_loss")
def _ctc_loss(call: Call) -> Owners:
    planes = call.owners(call["log_probs"])
    if planes is None or planes.dim() != 4:
        return everything(call)
    alone = _over(planes, [0, 2])
    assert alone is not None
    return [alone.reshape(len(alone), -1), alone.reshape(len(alone), -1, 1, 1)]
