"""Saved states as JSON, for frameworks whose checkpoints hold nothing else."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["packed", "unpacked"]


def packed(value: Any) -> Any:
    """A state as JSON; numbers and tensors keep every bit.

    >>> packed({"a": [1.5, math.nan], "b": torch.tensor([1, 2])})
    {'a': [1.5, {'float': 'nan'}], 'b': {'tensor': 'int64', 'shape': [2], 'data': 'AQAAAAA...'}}
    """
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        data = base64.b64encode(flat.view(torch.uint8).numpy().tobytes()).decode("ascii")
        kind = str(value.dtype).removeprefix("torch.")
        return {"tensor": kind, "shape": list(value.shape), "data": data}
    if isinstance(value, Mapping):
        return {key: packed(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [packed(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    return value


def unpacked(value: Any) -> Any:
    """What was `packed`.

    >>> state = {"a": [math.inf], "b": torch.tensor([[0.1, 2.0]]), "c": None}
    >>> unpacked(packed(state))
    {'a': [inf], 'b': tensor([[0.1000, 2.0000]]), 'c': None}
    """
    if isinstance(value, Mapping):
        if value.keys() == {"float"}:
            return float(value["float"])
        if value.keys() == {"tensor", "shape", "data"}:
            data = bytearray(base64.b64decode(value["data"]))
            dtype = getattr(torch, value["tensor"])
            flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
            return flat.reshape(value["shape"])
        return {key: unpacked(each) for key, each in value.items()}
    if isinstance(value, list):
        return [unpacked(each) for each in value]
    return value
