"""The constant factor of a loss, read from its graph."""

from __future__ import annotations

import math
from typing import Any

from heldin._private_torch import saved
from heldin.capture.collector import Collector
from heldin.capture.graph import Backward

__all__ = ["LossWeight", "root_factor"]

MEAN, SUM = 1, 2  # as PyTorch numbers the reductions of its losses


def root_factor(root: Any) -> tuple[float, int] | None:
    """Return the factor of a mean or a sum over samples, and which it is; None if unknown.

    >>> import torch
    >>> losses = torch.ones(8, requires_grad=True)
    >>> root_factor(3 * losses.mean() / 2)
    (1.5, 1)
    >>> root_factor(losses.sum() / 8)
    (0.125, 2)
    >>> root_factor(losses.mean() + losses.square().sum())
    """
    node, factor = getattr(root, "grad_fn", None), 1.0
    while node is not None:
        kind = type(node).__name__
        if kind in ("MulBackward0", "DivBackward0"):
            nexts = [step for step, _ in node.next_functions]
            constant = saved(node, "self" if nexts[0] is None else "other")
            if None not in nexts[:2] or constant is None or constant.numel() != 1:
                return None  # not a constant factor
            if kind == "DivBackward0" and nexts[0] is None:
                return None
            value = float(constant)
            factor = factor * value if kind == "MulBackward0" else factor / (value or math.nan)
            node = nexts[0] or nexts[1]
        elif kind.startswith(("MeanBackward", "SumBackward")):
            return factor, MEAN if kind.startswith("Mean") else SUM
        else:
            reduction = saved(node, "reduction", None)
            return (factor, reduction) if reduction in (MEAN, SUM) else None
    return None


class LossWeight:
    """The factor of the loss in the first backward pass of each step.

    Attributes:
        found: the factor and the reduction; None: unknown.
    """

    def __init__(self, seen: Collector) -> None:
        self.found: tuple[float, int] | None = None
        self._seen = seen
        seen.before_backward.append(self._before_backward)

    def _before_backward(self, backward: Backward) -> None:
        if not self._seen.passes:
            plain = len(backward.roots) == 1 and backward.seeds is None
            self.found = root_factor(backward.roots[0]) if plain else None

    def of_mean(self, count: int) -> float:
        """Return the factor of a mean over `count` samples; nan if unknown."""
        if self.found is None:
            return math.nan
        factor, reduction = self.found
        return factor * (count if reduction == SUM else 1)
