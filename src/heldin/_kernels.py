"""Sums over samples on a CPU, without tensors in between: `_kernels.c`, if it was compiled.

All that is computed here is computed by PyTorch elsewhere in the package as well, which is what
happens where there is no compiled file, or with HELDIN_KERNELS=0 in the environment.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["KERNELS", "Kernels", "readable"]

# Of every function, in the order of `_kernels.c`: pointers, integers and real numbers.
_ARGUMENTS = {
    "ratios": "pipiiirp",
    "outer": "piiipiiiiiiipprp",
    "columns": "piiiiiirpiiippiipprp",
    "planes": "ppppiiiiipprp",
    "outer_ratios": "piipiiiiipirp",
}
_KINDS = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "r": ctypes.c_double}


class Kernels:
    """The compiled functions for one type of numbers; they take addresses of tensors."""

    ratios: Any
    outer: Any
    columns: Any
    planes: Any
    outer_ratios: Any

    def __init__(self, library: ctypes.CDLL, suffix: str, size: int) -> None:
        self.size = size  # bytes of a number
        for name, codes in _ARGUMENTS.items():
            function = getattr(library, f"{name}_{suffix}")
            function.argtypes = [_KINDS[code] for code in codes]
            function.restype = ctypes.c_int
            setattr(self, name, function)


_PLAIN, _STRIDED = (Tensor, nn.Parameter), torch.strided


def readable(tensor: Tensor) -> bool:
    """Whether the numbers lie in the memory of the CPU as the strides say."""
    plain = type(tensor) in _PLAIN and tensor.is_cpu and tensor.layout is _STRIDED
    return plain and not tensor.is_neg()


def _load() -> dict[torch.dtype, Kernels]:
    path = Path(__file__).with_name("libheldin.so")
    if os.environ.get("HELDIN_KERNELS", "1") == "0" or not path.exists():
        return {}
    try:
        library = ctypes.CDLL(str(path))
        return {
            torch.float32: Kernels(library, "float", 4),
            torch.float64: Kernels(library, "double", 8),
        }
    except (OSError, AttributeError):  # of another platform, or of another version
        return {}


KERNELS = _load()
