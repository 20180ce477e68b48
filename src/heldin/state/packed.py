"""Saved states as JSON, for frameworks whose checkpoints hold only JSON."""

from __future__ import annotations

import base64
import ctypes
import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from heldin.errors import HeldinError

__all__ = ["Packed", "packed", "unpacked"]


def packed(value: Any) -> Any:
    """Convert a state to JSON values; numbers and tensors keep every bit."""
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        raw = ctypes.string_at(flat.data_ptr(), flat.numel() * flat.element_size())  # no numpy
        data = base64.b64encode(raw).decode("ascii")
        kind = str(value.dtype).removeprefix("torch.")
        return {"tensor": kind, "shape": list(value.shape), "data": data}
    if isinstance(value, Mapping):
        return {key: packed(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [packed(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    return value


def unpacked(value: Any) -> Any:
    """Convert the result of `packed` back to a state."""
    if isinstance(value, Mapping):
        if value.keys() == {"float"}:
            return float(value["float"])
        if value.keys() == {"tensor", "shape", "data"}:
            data = bytearray(base64.b64decode(value["data"]))
            dtype = getattr(torch, value["tensor"])
            flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
            return flat.reshape(value["shape"])
        return {key: unpacked(item) for key, item in value.items()}
    if isinstance(value, list):
        return [unpacked(item) for item in value]
    return value


class Packed:
    """A stopping rule whose state is one string, for `torch.distributed.checkpoint`.

    `torch.distributed.checkpoint` reads a checkpoint into the existing entries of a state, but the
    state of a rule grows with its history. A string can be replaced by a longer one.

    Args:
        rule: a `heldin.EarlyStopping`, or anything else with `state_dict` and `load_state_dict`.

    >>> import heldin, torch
    >>> import torch.distributed.checkpoint as dcp
    >>> model = torch.nn.Linear(3, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> stopping = heldin.EarlyStopping(model, optimizer, rule="evidence")
    >>> state = {"stopping": heldin.state.Packed(stopping)}  # beside the model and so on
    >>> # dcp.save(state, checkpoint_id="..."), and later dcp.load(state, checkpoint_id="...")
    >>> list(state["stopping"].state_dict())
    ['packed']
    >>> stopping.close()
    """

    def __init__(self, rule: Any) -> None:
        self.rule = rule

    def state_dict(self) -> dict[str, str]:
        """Return the state of the rule as one JSON string."""
        return {"packed": json.dumps(packed(self.rule.state_dict()))}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state from `state_dict`."""
        try:
            state = unpacked(json.loads(state_dict["packed"]))
        except (KeyError, TypeError, ValueError) as error:
            raise HeldinError(
                f"Packed.load_state_dict: this is not a packed state ({error!r}); pass what "
                "Packed.state_dict() returned"
            ) from error
        self.rule.load_state_dict(state)
