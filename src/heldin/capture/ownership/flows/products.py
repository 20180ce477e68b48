"""Products of matrices, convolutions, attention."""

from __future__ import annotations

from torch import Tensor

from heldin.capture.ownership.flow import (
    OpCall,
    Owners,
    everything,
    flows,
    joined,
    over,
)
from heldin.capture.ownership.planes import (
    merge,
)


@flows("mm", "bmm", "matmul", "addmm", "baddbmm", "mv", "addmv", "dot", "vdot", "linear",
       "_scaled_mm", "_addmm_activation", "_sparse_addmm")  # fmt: skip
def _product(call: OpCall) -> Owners:
    tensors = [v for v in call.args.values() if isinstance(v, Tensor)]
    if call.op.base == "linear" or any(t.dim() == 1 for t in tensors[-2:]):
        return _by_vectors(call)
    rest = []
    if call.op.base in ("addmm", "baddbmm", "_addmm_activation", "_sparse_addmm"):
        rest, tensors = tensors[:1], tensors[1:]
    left, right = (call.owners(t) for t in tensors[:2])
    parts = [over(left, [-1]), over(right, [-2]), *call.owned(rest)]
    return [joined(parts, call.out.dim())]


def _by_vectors(call: OpCall) -> Owners:
    """Handle matrix-vector products, and linear layers that are a single op."""
    tensors = [v for v in call.args.values() if isinstance(v, Tensor)]
    if call.op.base == "linear":
        parts = [over(call.owners(tensors[0]), [-1]), *call.owned(tensors[1:])]
        if len(parts) == 1:
            return [joined(parts, call.out.dim())]
    if call.op.base == "mv":
        right = call.owners(tensors[1])
        left = over(call.owners(tensors[0]), [-1], keep=False)
        return [joined([left, over(right, [0])], 1)]
    return everything(call)


@flows("_grouped_mm")
def _grouped(call: OpCall) -> Owners:
    """Handle rows, sorted by expert, times the matrix of their expert."""
    rows, experts = call["self"], call["mat2"]
    if rows.dim() != 2 or experts.dim() != 3 or call.owners(experts) is not None:
        return everything(call)
    call.moved_by(call["offs"])
    return [over(call.owners(rows), [-1])]


@flows("_trilinear")
def _trilinear(call: OpCall) -> Owners:
    """Handle the product and sum of three tensors that are unsqueezed to one rank (bilinear)."""
    parts = []
    for name, places in (("i1", "expand1"), ("i2", "expand2"), ("i3", "expand3")):
        planes = call.owners(call[name])
        if planes is not None:
            for dim in sorted(call[places]):
                planes = planes.unsqueeze(dim + 1)
            parts.append(planes)
    return [over(merge(parts), call["sumdim"], keep=False)]


@flows("convolution", "_convolution", "mkldnn_convolution", "convolution_overrideable")
def _convolution(call: OpCall) -> Owners:
    source, weight = call["input"], call["weight"]
    planes, groups = call.owners(source), call["groups"]
    if planes is None:
        return everything(call)
    n, channels, out = source.shape[0], source.shape[1], call.out
    spatial = [1] * (source.dim() - 2)
    result = over(planes, range(2, source.dim()))
    assert result is not None
    if result.shape[2] > 1 and groups > 1:  # samples folded into the channels
        grouped = result.expand(-1, -1, channels, *spatial).reshape(
            len(planes), result.shape[1], groups, channels // groups
        )
        result = grouped.amax(3).repeat_interleave(out.shape[1] // groups, dim=2)
        result = result.reshape(len(planes), -1, out.shape[1], *spatial)
    else:
        result = over(result, [1])
    kernel = call.owners(weight)
    bias = call.owners(call["bias"]) if call.args.get("bias") is not None else None
    if kernel is not None:
        if call["transposed"]:
            return everything(call)
        kernel = over(kernel, range(1, weight.dim()))
        assert kernel is not None
        kernel = kernel.reshape(len(kernel), 1, -1, *spatial)
    if bias is not None:
        bias = bias.reshape(len(bias), 1, -1, *spatial)
    assert n == out.shape[0]
    return [joined([result, kernel, bias], out.dim())]


@flows(
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable", "_scaled_dot_product_attention_math",
)  # fmt: skip
def _attention(call: OpCall) -> Owners:
    mask = call.args.get("attn_mask", call.args.get("attn_bias"))
    parts = [
        over(call.owners(call["query"]), [-1]),
        over(call.owners(call["key"]), [-1, -2]),
        over(call.owners(call["value"]), [-1, -2]),
    ]
    if isinstance(mask, Tensor):
        parts.append(over(call.owners(mask), [-1]))
    result = joined(parts, call.out.dim())
    return [result, *everything(call)[1:]]


@flows("mkldnn_rnn_layer")
def _rnn_layer(call: OpCall) -> Owners:
    """Handle (T, N, d) to (T, N, h): time and features are mixed, samples are not."""
    states = call.owned([call["input"], call["hx_"], call["cx_"]])
    samples = [(over(p, [0, 2]) if p.dim() == 4 else over(p, [-1])) for p in states]
    result = joined(samples, 3)  # (1, N, 1); states may come without the leading dimension
    assert result is not None
    state = result.squeeze(1) if call.outs[1].dim() == 2 else result
    return [result, state, state, None]  # None: the workspace


@flows("_cdist_forward", "_euclidean_dist")
def _pairs(call: OpCall) -> Owners:
    left, right = (call.owners(call[name]) for name in ("x1", "x2"))
    right = None if right is None else over(right, [-1])
    return [
        joined(
            [over(left, [-1]), None if right is None else right.transpose(-1, -2)], call.out.dim()
        )
    ]
