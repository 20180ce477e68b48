"""Saved states as one string, for checkpoints whose entries cannot grow."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from pickle import UnpicklingError
from typing import Any

import torch

from heldin.errors import HeldinError

__all__ = ["Packed"]


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
        """Return the state of the rule as one string."""
        file = io.BytesIO()
        torch.save(self.rule.state_dict(), file)
        return {"packed": base64.b64encode(file.getvalue()).decode("ascii")}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state from `state_dict`."""
        try:
            file = io.BytesIO(base64.b64decode(state_dict["packed"]))
            state = torch.load(file, map_location="cpu", weights_only=True)
        except (EOFError, KeyError, RuntimeError, TypeError, UnpicklingError, ValueError) as error:
            raise HeldinError(
                f"Packed.load_state_dict: this is not a packed state ({error!r}); pass what "
                "Packed.state_dict() returned"
            ) from error
        self.rule.load_state_dict(state)
