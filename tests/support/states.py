"""What the tests of saved state share."""

from __future__ import annotations

import io
from typing import Any

import torch


def through_a_file(state: Any) -> Any:
    """Save a state and load it, with nothing but tensors and plain values allowed."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def same(a: Any, b: Any) -> bool:
    """Compare to the last bit; nan is nan."""
    if isinstance(a, torch.Tensor):
        return bool(a.dtype == b.dtype and torch.equal(a.nan_to_num(-9.0), b.nan_to_num(-9.0)))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b) or bool(a != a and b != b)
