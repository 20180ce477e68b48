"""Sums over samples on a CPU, without tensors in between: `_kernels.c`, if it was compiled.

All that is computed here is computed by PyTorch elsewhere in the package as well, which is what
happens where there is no compiled file, or with HELDIN_KERNELS=0 in the environment.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["KERNELS", "Kernels", "readable"]


class Kernels:
    """The compiled functions for one type of numbers; they take addresses of tensors."""

    def __init__(self, module: Any, suffix: str, size: int) -> None:
        self.size = size  # bytes of a number
        self.ratios = getattr(module, f"ratios_{suffix}")
        self.outer = getattr(module, f"outer_{suffix}")
        self.columns = getattr(module, f"columns_{suffix}")
        self.planes = getattr(module, f"planes_{suffix}")
        self.outer_ratios = getattr(module, f"outer_ratios_{suffix}")


_PLAIN, _STRIDED = (Tensor, nn.Parameter), torch.strided


def readable(tensor: Tensor) -> bool:
    """Whether the numbers lie in the memory of the CPU as the strides say."""
    plain = type(tensor) in _PLAIN and tensor.is_cpu and tensor.layout is _STRIDED
    return plain and not tensor.is_neg()


def _load() -> dict[torch.dtype, Kernels]:
    if os.environ.get("HELDIN_KERNELS", "1") == "0":
        return {}
    try:
        module = import_module("heldin._compiled")
        return {
            torch.float32: Kernels(module, "float", 4),
            torch.float64: Kernels(module, "double", 8),
        }
    except (ImportError, AttributeError):  # of another platform, or of another version
        return {}


KERNELS = _load()
