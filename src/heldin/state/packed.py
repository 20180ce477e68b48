"""Saved states as JSON, for frameworks whose checkpoints hold nothing else."""

from __future__ import annotations

import base64
import ctypes
import json
import math
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from heldin.errors import HeldinError

__all__ = ["Packed", "packed", "unpacked"]


def packed(value: Any) -> Any:
    """A state as JSON; numbers and tensors keep every bit.

    >>> packed({"a": [1.5, math.nan], "b": torch.tensor([1, 2])})
    {'a': [1.5, {'float': 'nan'}], 'b': {'tensor': 'int64', 'shape': [2], 'data': 'AQAAAAA...'}}
    """
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        raw = ctypes.string_at(flat.data_ptr(), flat.numel() * flat.element_size())  # no numpy
        data = base64.b64encode(raw).decode("ascii")
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


class _HasState(Protocol):
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Any) -> None: ...


class Packed:
    """A stopping rule whose state is one string, for `torch.distributed.checkpoint`.

    That reads a checkpoint into the entries that a state has already, and the state of a rule grows
    with its history. A string can be replaced by a longer one.

    Args:
        rule: an `EvidenceStopping`, or anything else with `state_dict` and `load_state_dict`.

    >>> import heldin, torch
    >>> import torch.distributed.checkpoint as dcp
    >>> with heldin.EvidenceStopping(torch.nn.Linear(3, 1)) as stopping:
    ...     state = {"stopping": heldin.state.Packed(stopping)}  # beside the model and so on
    ...     # dcp.save(state, checkpoint_id="..."), and later dcp.load(state, checkpoint_id="...")
    ...     list(state["stopping"].state_dict())
    ['packed']
    """

    def __init__(self, rule: _HasState) -> None:
        self.rule = rule

    def state_dict(self) -> dict[str, str]:
        """The state of the rule as JSON."""
        return {"packed": json.dumps(packed(self.rule.state_dict()))}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        try:
            state = unpacked(json.loads(state_dict["packed"]))
        except (KeyError, TypeError, ValueError) as error:
            raise HeldinError(
                f"Packed.load_state_dict: this is not a packed state ({error!r}); pass what "
                "Packed.state_dict() returned"
            ) from error
        self.rule.load_state_dict(state)
