"""The loss of each row, from a loss function that returns one number for a batch."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from heldin._private_torch import version_of
from heldin.errors import HeldinError

__all__ = ["LossFunction", "PerRowLoss", "RowLossRecorder", "criterion_state"]

LossFunction = Callable[[Tensor, Tensor], Tensor]

FUNCTIONS: dict[type, LossFunction] = {
    nn.MSELoss: F.mse_loss,
    nn.BCEWithLogitsLoss: F.binary_cross_entropy_with_logits,
    nn.CrossEntropyLoss: F.cross_entropy,
}


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


@dataclass(frozen=True, eq=False)
class PerRowLoss:
    """A loss function, row by row."""

    loss_fn: LossFunction  # the user's: (b, ...) outputs, (b, ...) targets -> one number
    per_row: LossFunction  # the same for each row -> (b,)
    # how `loss_fn` follows from the rows; "other": class weights, for instance, make a mean with
    # its own denominator
    kind: Literal["mean", "sum", "other"]
    row_gradient: LossFunction | None  # of `per_row` by the outputs in closed form, if there is one
    in_one_call: bool  # whether `per_row` is one call, not one for each row
    # brings targets into the form that `gradient` takes; to be done once for all rows
    prepare: Callable[[Tensor], Tensor]

    @classmethod
    def of(cls, loss_fn: LossFunction, outputs: Tensor, targets: Tensor) -> PerRowLoss:
        """Determine how a loss function treats rows, on outputs (b, ...) and targets (b, ...)."""
        if not callable(loss_fn):
            raise HeldinError(f"loss_fn: expected a function (outputs, targets), got {loss_fn!r}")
        try:
            total = loss_fn(outputs, targets)
        except Exception as error:
            raise HeldinError(
                f"loss_fn failed on outputs {tuple(outputs.shape)} and targets "
                f"{tuple(targets.shape)} of data: {error}"
            ) from error
        if not isinstance(total, Tensor) or total.numel() != 1:
            raise HeldinError(
                "loss_fn must return one number for a batch (reduction='mean' or 'sum'), got "
                f"{type(total).__name__ if not isinstance(total, Tensor) else tuple(total.shape)}"
            )
        separate = _separate(loss_fn, outputs, targets)
        found = separate or _one_by_one(loss_fn, outputs, targets)
        raw = found(outputs, targets)
        kind: Literal["mean", "sum", "other"] = "other"
        if torch.allclose(total, raw.mean(), rtol=1e-4, atol=1e-7):
            kind = "mean"
        elif torch.allclose(total, raw.sum(), rtol=1e-4, atol=1e-7):
            kind = "sum"

        def per_row(o: Tensor, t: Tensor) -> Tensor:
            rows = found(o, t)
            if rows.dim() == 1:
                return rows
            return rows.flatten(1).sum(1) if kind == "sum" else rows.flatten(1).mean(1)

        slope = _slope(loss_fn, outputs, targets, kind) if kind != "other" else None
        classes, dtype = outputs.shape[-1] if outputs.dim() > 1 else 1, outputs.dtype

        def prepare(t: Tensor) -> Tensor:
            return F.one_hot(t, classes).to(dtype) if slope is _softmax_slope else t

        return cls(loss_fn, per_row, kind, slope, separate is not None, prepare)

    def rows(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """(K, b) losses of stacked outputs (K, b, ...) and targets (K, b, ...)."""
        rows = self.per_row(outputs.flatten(0, 1), targets.flatten(0, 1))
        return rows.view(outputs.shape[:2])

    def gradient(
        self,
        outputs: Tensor,
        targets: Tensor,
        keep: Tensor,
        weights: Tensor | None = None,
        own_rows: bool = False,
    ) -> Tensor:
        """(K, b, ...): by the outputs, of every model's loss on the rows that it keeps.

        outputs: (K, b, ...) of the stacked models; targets: (b, ...), prepared by `prepare`, or
        (K, b, ...) where the models have rows of their own; keep: (K, b), the rows that a model may
        see: one that sees none has gradient 0; weights: (b,) of the rows, whose loss is then the
        mean (or sum) of weight x loss.
        """
        if self.kind == "other" or (weights is None and not self.in_one_call):
            assert weights is None
            return self._whole_gradient(outputs, targets, keep, own_rows)
        share = keep.to(outputs.dtype)
        if self.kind == "mean":
            share = share / share.sum(1, keepdim=True).clamp_(min=1)
        if weights is not None:
            share = share * weights.to(share.dtype)
        if self.row_gradient is not None:
            slope = self.row_gradient(outputs, targets)
            return slope.mul_(share.view(*share.shape, *[1] * (slope.dim() - 2)))
        with torch.enable_grad():
            free = outputs.detach().requires_grad_()
            targets = targets if own_rows else targets.expand(len(free), *targets.shape)
            (gradient,) = torch.autograd.grad(self.rows(free, targets), free, share)
        return gradient

    def _whole_gradient(
        self, outputs: Tensor, targets: Tensor, keep: Tensor, own_rows: bool
    ) -> Tensor:
        """Call the user's function for each model."""
        with torch.enable_grad():
            free = outputs.detach().requires_grad_()
            targets = targets if own_rows else targets.expand(len(free), *targets.shape)
            models = zip(free, targets, keep, strict=True)
            losses = [self.loss_fn(o[kept], t[kept]) for o, t, kept in models if bool(kept.any())]
            total = sum(losses, free.new_zeros(()))
            if not total.requires_grad:
                return torch.zeros_like(outputs)
            (gradient,) = torch.autograd.grad(total, free)
        return gradient


def criterion_state(loss_fn: LossFunction) -> tuple[Any, ...]:
    """Return what changes if the settings or the tensors of a loss that is a module change."""
    if not isinstance(loss_fn, nn.Module):
        return ()
    settings = {k: v for k, v in vars(loss_fn).items() if isinstance(v, (int, float, str))}
    settings.pop("training", None)
    tensors = [*loss_fn.buffers(), *loss_fn.parameters()]
    return (*settings.items(), *((id(tensor), version_of(tensor)) for tensor in tensors))


def _separate(loss_fn: LossFunction, outputs: Tensor, targets: Tensor) -> LossFunction | None:
    """Return the function with reduction="none", if that gives one loss per row."""
    found: LossFunction
    if isinstance(loss_fn, nn.Module) and hasattr(loss_fn, "reduction"):
        loose = copy.copy(loss_fn)
        vars(loose)["reduction"] = "none"
        found = loose
    else:
        try:
            if "reduction" not in inspect.signature(loss_fn).parameters:
                return None
        except (TypeError, ValueError):
            return None

        def found(o: Tensor, t: Tensor) -> Tensor:
            return loss_fn(o, t, reduction="none")  # type: ignore[call-arg]

    raw = found(outputs, targets)
    return found if raw.dim() >= 1 and len(raw) == len(outputs) else None


def _one_by_one(loss_fn: LossFunction, outputs: Tensor, targets: Tensor) -> LossFunction:
    """Return the function on batches of one row, by vmap where possible, else in a loop."""

    def row(output: Tensor, target: Tensor) -> Tensor:
        return loss_fn(output[None], target[None]).reshape(())

    def loop(o: Tensor, t: Tensor) -> Tensor:
        return torch.stack([row(*pair) for pair in zip(o, t, strict=True)])

    try:
        at_once = torch.func.vmap(row)(outputs, targets)
        if torch.allclose(at_once, loop(outputs, targets), equal_nan=True):
            return torch.func.vmap(row)
    except Exception:  # whatever vmap cannot do, the loop can
        pass
    return loop


def _slope(
    loss_fn: LossFunction, outputs: Tensor, targets: Tensor, kind: str
) -> LossFunction | None:
    """Return the slope of a usual loss in closed form: (stacked outputs, targets) -> slope."""
    share = 1.0 / max(1, outputs[0].numel()) if kind == "mean" else 1.0
    is_plain = all(getattr(loss_fn, name, None) is None for name in ("weight", "pos_weight"))
    if not is_plain or getattr(loss_fn, "label_smoothing", 0) != 0:
        return None
    same_shape, function = outputs.shape == targets.shape, FUNCTIONS.get(type(loss_fn), loss_fn)
    if function is F.mse_loss and same_shape:
        return lambda o, t: (o - t).mul_(2 * share)
    if function is F.binary_cross_entropy_with_logits and same_shape:
        return lambda o, t: (o.sigmoid() - t).mul_(share)
    if function is F.cross_entropy and outputs.dim() == 2 and targets.dim() == 1:
        if not targets.is_floating_point() and int(targets.min()) >= 0:
            return _softmax_slope
    return None


def _softmax_slope(outputs: Tensor, one_hot: Tensor) -> Tensor:
    return outputs.softmax(-1).sub_(one_hot)


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
