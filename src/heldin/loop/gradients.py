"""Which gradients belong to a step: those that the loop has not thrown away."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from heldin.capture.gradient_ledger import is_zeroed

__all__ = ["were_thrown_away"]


def were_thrown_away(parameters: Iterable[Tensor]) -> bool:
    """Return whether the loop has set the gradients of earlier passes to None or to zero.

    >>> import torch
    >>> weight, bias = torch.ones(2, requires_grad=True), torch.ones(1, requires_grad=True)
    >>> (weight.sum() + bias).backward()
    >>> weight.grad = None
    >>> were_thrown_away([weight, bias]), were_thrown_away([weight])
    (False, True)
    """
    return all(is_zeroed(p.grad) for p in parameters)
