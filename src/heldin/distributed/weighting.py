"""The constant factor of a loss, read from its graph."""

from __future__ import annotations

import math
from typing import Any

from heldin._private_torch import saved

__all__ = ["MEAN", "SUM", "root_factor"]

MEAN, SUM = 1, 2  # as PyTorch numbers the reductions of its losses


def root_factor(root: Any) -> tuple[float, int] | None:
    """Return the factor of a mean or a sum over samples, and which it is; None if unknown."""
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
