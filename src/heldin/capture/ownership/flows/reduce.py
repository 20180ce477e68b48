"""Reductions, normalisation, losses and other ops along a dimension."""

from __future__ import annotations

from torch import Tensor

from heldin.capture.ownership.flow import OpCall, Owners, everything, flows, joined, over, pointwise


@flows(
    "sum", "mean", "amax", "amin", "max", "min", "var", "std", "var_mean", "std_mean", "logsumexp",
    "norm", "linalg_vector_norm", "prod", "any", "all", "argmax", "argmin", "nansum", "median",
    "nanmedian", "mode", "count_nonzero", "aminmax", "kthvalue", "nanmean",
)  # fmt: skip
def _reduce(call: OpCall) -> Owners:
    if isinstance(call.args.get("other"), Tensor):  # max(self, other)
        return pointwise(call)
    planes, dims = call.needed("self"), call.args.get("dim")
    if dims is None or dims == []:
        dims = list(range(call["self"].dim()))
    dims = [dims] if isinstance(dims, int) else dims
    keep = bool(call.args.get("keepdim", False))
    result = over(planes, dims, keep)
    if any(result.dim() - 1 != out.dim() for out in call.outs):
        return everything(call)
    return [result] * len(call.outs)


@flows(
    "_softmax", "_log_softmax", "softmax", "log_softmax", "cumsum", "cumprod", "cummax", "cummin",
    "logcumsumexp", "sort", "argsort", "topk", "_fft_r2c", "_fft_c2r", "_fft_c2c", "glu",
    "_safe_softmax",
)  # fmt: skip
def _along(call: OpCall) -> Owners:
    dims = call["dim"] if "dim" in call.args else -1
    result = over(call.owners(call["self"]), [dims] if isinstance(dims, int) else dims)
    return [result] * len(call.outs)


@flows("multinomial")
def _drawn(call: OpCall) -> Owners:
    return [over(call.owners(call["self"]), [-1])]


@flows("linalg_cross")
def _cross(call: OpCall) -> Owners:
    return [over(joined(call.owned(), call.out.dim()), [call["dim"]])]


@flows("searchsorted")
def _searched(call: OpCall) -> Owners:
    """Handle searches in one sorted row per row of values, or in one row for all."""
    values, row = call["self"], call["sorted_sequence"]
    row_owners = call.owners(row)
    beside = row_owners is not None and row.dim() != values.dim()
    if not isinstance(values, Tensor) or beside or call.args.get("sorter") is not None:
        return everything(call)
    return [joined([call.owners(values), over(row_owners, [-1])], call.out.dim())]


@flows("native_layer_norm", "_fused_rms_norm", "rms_norm")
def _norm_last(call: OpCall) -> Owners:
    source, planes = call["input"], call.needed("input")
    last = range(source.dim() - len(call["normalized_shape"]), source.dim())
    weights = call.owned([call.args.get("weight"), call.args.get("bias")])
    result = joined([over(planes, list(last)), *weights], source.dim())
    return [result, *[result] * (len(call.outs) - 1)]  # mean and rstd keep the rank


@flows("native_group_norm")
def _group_norm(call: OpCall) -> Owners:
    whole = over(call.needed("input"), range(1, call["input"].dim()))
    return [whole, *[whole.reshape(*whole.shape[:2], 1)] * 2]


@flows(
    "native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm", "miopen_batch_norm",
    "_native_batch_norm_legit_no_training", "batch_norm", "_batch_norm_no_update",
    "_native_batch_norm_legit_functional", "_batch_norm_with_update_functional",
    "_batch_norm_with_update",
)  # fmt: skip
def _batch_norm(call: OpCall) -> Owners:
    """Handle batch norm: in training mode rows share statistics, but keep their owners."""
    planes = call.needed("input")
    training = call.args.get("training", "no_" not in call.op.name)
    other_dims = [d for d in range(call["input"].dim()) if d != 1]
    if training and any(planes.shape[d + 1] > 1 for d in other_dims):
        call.note_mixing("batch normalisation", "training mode")
    return [planes, *everything(call)[1:]]


@flows("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "soft_margin_loss",
       "binary_cross_entropy_with_logits")  # fmt: skip
def _elementwise_loss(call: OpCall) -> Owners:
    if call.args.get("reduction", 1) == 0:
        return pointwise(call)
    return everything(call)


@flows("nll_loss_forward", "nll_loss2d_forward")
def _nll_loss(call: OpCall) -> Owners:
    if call["reduction"] != 0 or call["self"].dim() == 1:
        return everything(call)
    scores = over(call.owners(call["self"]), [1], keep=False)
    return [joined([scores, *call.owned(call["target"])], call.out.dim()), *everything(call)[1:]]


@flows("_ctc_loss")
def _ctc_loss(call: OpCall) -> Owners:
    planes = call.needed("log_probs")
    if planes.dim() != 4:
        return everything(call)
    per_sample = over(planes, [0, 2])
    return [per_sample.reshape(len(per_sample), -1), per_sample.reshape(len(per_sample), -1, 1, 1)]
