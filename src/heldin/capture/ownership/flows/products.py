"""Products of matrices, convolutions, attention."""

from __future__ import annotations

from torch import Tensor

from heldin.capture.ownership.flow import OpCall, Owners, everything, flows, joined, over
from heldin.capture.ownership.planes import merge


@flows("mm", "bmm", "matmul", "addmm", "baddbmm", "addmv", "dot", "vdot", "_scaled_mm",
       "_addmm_activation", "_sparse_addmm")  # fmt: skip
def _product(call: OpCall) -> Owners:
    tensors = [value for value in call.args.values() if isinstance(value, Tensor)]
    if any(t.dim() == 1 for t in tensors[-2:]):
        return everything(call)
    rest = []
    if call.op.base in ("addmm", "baddbmm", "_addmm_activation", "_sparse_addmm"):
        rest, tensors = tensors[:1], tensors[1:]
    left, right = (call.owners(t) for t in tensors[:2])
    parts = [over(left, [-1]), over(right, [-2]), *call.owned(rest)]
    return [joined(parts, call.out.dim())]


@flows("mv")
def _by_vector(call: OpCall) -> Owners:
    left, right = call.owners(call["self"]), call.owners(call["vec"])
    return [joined([over(left, [-1], keep=False), over(right, [0])], 1)]


@flows("linear")
def _linear(call: OpCall) -> Owners:
    """Handle linear layers that are a single op."""
    if call.owned(call["weight"], call.args.get("bias")):
        return everything(call)
    return [joined([over(call.owners(call["input"]), [-1])], call.out.dim())]


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
    source, weight, groups = call["input"], call["weight"], call["groups"]
    planes = call.needed("input")
    channels, out, spatial = source.shape[1], call.out, [1] * (source.dim() - 2)
    assert source.shape[0] == out.shape[0]
    result = over(planes, range(2, source.dim()))
    if result.shape[2] > 1 and groups > 1:  # samples folded into the channels
        grouped = result.expand(-1, -1, channels, *spatial).reshape(
            len(planes), result.shape[1], groups, channels // groups
        )
        result = grouped.amax(3).repeat_interleave(out.shape[1] // groups, dim=2)
        result = result.reshape(len(planes), -1, out.shape[1], *spatial)
    else:
        result = over(result, [1])
    kernel, bias = call.owners(weight), call.owners(call.args.get("bias"))
    if kernel is not None:
        if call["transposed"]:
            return everything(call)
        kernel = over(kernel, range(1, weight.dim())).reshape(len(kernel), 1, -1, *spatial)
    if bias is not None:
        bias = bias.reshape(len(bias), 1, -1, *spatial)
    return [joined([result, kernel, bias], out.dim())]


@flows(
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable", "_scaled_dot_product_attention_math",
)  # fmt: skip
def _attention(call: OpCall) -> Owners:
    mask = call.args.get("attn_mask", call.args.get("attn_bias"))
    parts = [over(call.owners(tensor), [-1]) for tensor in (call["query"], mask)]
    parts += [over(call.owners(call[name]), [-1, -2]) for name in ("key", "value")]
    return [joined(parts, call.out.dim()), *everything(call)[1:]]


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
    left, right = (over(call.owners(call[name]), [-1]) for name in ("x1", "x2"))
    right = None if right is None else right.transpose(-1, -2)
    return [joined([left, right], call.out.dim())]
