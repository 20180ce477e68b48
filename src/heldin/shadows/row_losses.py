"""The loss of each row, written down where PyTorch's own loss functions take their mean."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

__all__ = ["RowLossRecorder"]

LOSSES: dict[Callable[..., Any], inspect.Signature] = {
    function: inspect.signature(function)
    for function in (
        F.binary_cross_entropy,
        F.binary_cross_entropy_with_logits,
        F.cross_entropy,
        F.gaussian_nll_loss,
        F.huber_loss,
        F.kl_div,
        F.l1_loss,
        F.mse_loss,
        F.nll_loss,
        F.poisson_nll_loss,
        F.smooth_l1_loss,
    )
}


class RowLossRecorder(TorchFunctionMode):
    """While it is on, loss functions are called again, with reduction="none".

    A loss of a batch that ends in one of them then comes with the losses of its rows. Others leave
    nothing behind, or something of another mean; the caller compares the means.
    """

    def __init__(self) -> None:
        super().__init__()
        self._found: list[tuple[Tensor, str]] = []

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in LOSSES and isinstance(result, Tensor) and result.dim() == 0:
            given = LOSSES[func].bind(*args, **(kwargs or {}))
            how = given.arguments.get("reduction", "mean")
            given.arguments["reduction"] = "none"
            self._found.append((func(*given.args, **given.kwargs).detach(), how))
        return result

    def of(self, rows: int) -> Tensor | None:
        """(rows,) if exactly one loss was taken, over this number of rows; else None."""
        if len(self._found) != 1:
            return None
        losses, how = self._found[0]
        if losses.dim() == 0 or len(losses) != rows:
            return None
        each = losses.reshape(rows, -1)
        return each.sum(1) if how == "sum" else each.mean(1)
