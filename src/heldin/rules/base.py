"""The base class of all stopping rules."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from heldin.errors import HeldinError
from heldin.state.schema import Saved, check_settings, checked_state, load_or_roll_back

from .reporting import Follower, RunFacts

__all__ = ["StoppingRule", "copied", "evaluation", "trained_tensors"]


def trained_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that training changes, by name: trained parameters, and buffers."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return {**trained, **dict(model.named_buffers())}


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of tensors."""
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


@contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, without gradients; its modes are put back."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


class StoppingRule(Follower, Saved, ABC):
    """The base class of rules that decide at each step of a training loop whether to stop.

    A subclass adds the decision, `_settings` (which a resumed run must share with the saved one),
    its `_saved` attributes, and what else belongs to its state: `_own_state`, of the schema
    `_state_schema`, and `_take_own_state`.

    Attributes:
        should_stop: whether training should stop; once true, it stays true.
        stopped_step: the step at which it became true.
        reason: the current state in words.
    """

    owner: str = "heldin.EarlyStopping"  # by which messages name the rule
    _state_version: ClassVar[int] = 1
    _state_schema: ClassVar[dict[str, Any]] = {}  # of the result of `_own_state`
    _saved: ClassVar[dict[str, Any]] = {
        "_step": int,
        "should_stop": bool,
        "stopped_step": (int, None),
        "reason": str,
    }

    def __init__(self) -> None:
        self.should_stop = False
        self.stopped_step: int | None = None
        self.reason = "no check yet"
        self._step = 0
        self.run = RunFacts()
        self._model: nn.Module | None = None  # until `close`

    def _opened(self, method: str) -> nn.Module:
        """Return the model, or raise an error that names the method if the rule is closed."""
        if self._model is None:
            name = self.owner
            raise HeldinError(f"{name}.{method}: called after close(); create a new {name}")
        return self._model

    @abstractmethod
    def metrics(self) -> dict[str, float]:
        """Return the current values as a flat mapping for a tracker, without missing ones."""

    def intervals(self) -> Mapping[str, Any]:
        """Return estimates by name, with their intervals."""
        return {}

    def conclusions(self) -> list[str]:
        """Return why the run ended and what was chosen, in words."""
        stopped = f"stopped at step {self.stopped_step}" if self.should_stop else "not stopped"
        words, best = [f"{stopped} ({self.reason})"], getattr(self, "best_step", None)
        return words if best is None else [*words, f"the best weights are those of step {best}"]

    def __repr__(self) -> str:
        return f"<{self.owner}: {self.reason}>"

    # -- saving

    @abstractmethod
    def _settings(self) -> dict[str, Any]:
        """Return the settings that a resumed run must share with the saved one."""

    def _own_state(self) -> dict[str, Any]:
        """Return the state of the rule beside its `_saved` attributes."""
        return {}

    def _take_own_state(self, state: Mapping[str, Any]) -> None:
        """Restore a state from `_own_state`, or raise an error."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a resumed run, loadable by `torch.load(..., weights_only=True)`."""
        return {
            "heldin": type(self).__name__,
            "version": self._state_version,
            "settings": self._settings(),
            **super().state_dict(),
            **self._own_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state from `state_dict`; all later values are the same to the last bit."""
        schema = {"settings": dict, **self.saved_schema(), **self._state_schema}
        kind = type(self).__name__
        state = checked_state(self.owner, state, self._state_version, schema, kind)
        check_settings(self.owner, state["settings"], self._settings())
        load_or_roll_back(self.owner, self._take, state, self.state_dict())

    def _take(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._take_own_state(state)
