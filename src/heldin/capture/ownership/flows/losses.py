"""Loss functions."""

from __future__ import annotations

from heldin.capture.ownership.flow import (
    OpCall,
    Owners,
    everything,
    flows,
    joined,
    over,
    pointwise,
)


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
    planes = call.owners(call["log_probs"])
    if planes is None or planes.dim() != 4:
        return everything(call)
    per_sample = over(planes, [0, 2])
    assert per_sample is not None
    return [per_sample.reshape(len(per_sample), -1), per_sample.reshape(len(per_sample), -1, 1, 1)]
