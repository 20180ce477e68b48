"""What all stopping rules have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import TracebackType
from typing import Any, ClassVar, TypeVar

from torch import nn

from heldin.errors import HeldinError, docs
from heldin.pages.run import Advice, RunPage
from heldin.state.schema import check_settings, checked_state, load_or_roll_back

from .reporting import Reporting, table

__all__ = ["Closing", "StoppingRule"]

Self = TypeVar("Self", bound="Closing")


class Closing:
    """Watches a model until it is closed, at the latest at the end of its `with` block."""

    def close(self) -> None:
        """Watch no more. What was found stays readable."""
        raise NotImplementedError

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


STATE_SCHEMA: dict[str, Any] = {  # of a saved state, for every rule
    "settings": dict,
    "step": int,
    "should_stop": bool,
    "stopped_step": (int, None),
    "reason": str,
}


class StoppingRule(Closing, Reporting, ABC):
    """Says at each step of a training loop whether to stop.

    A rule adds how it decides, `_settings` (what a resumed run must have in common with the saved
    one), `_own_state` and `_take_own_state` (what it saves beside the attributes below).

    Attributes:
        should_stop: whether it has asked to; it then goes on asking.
        stopped_step: the step at which it did.
        reason: what it says at the moment, in words.
    """

    _state_version: ClassVar[int] = 1
    _state_schema: ClassVar[dict[str, Any]]  # of what `_own_state` returns

    def __init__(self) -> None:
        self.should_stop = False
        self.stopped_step: int | None = None
        self.reason = "no check yet"
        self._step = 0
        self._model: nn.Module | None = None  # until `close`

    def _opened(self, method: str) -> nn.Module:
        """The model, for a method that needs it."""
        if self._model is None:
            name = type(self).__name__
            raise HeldinError(f"{name}.{method}: called after close(); make a new one")
        return self._model

    @abstractmethod
    def metrics(self) -> dict[str, float]:
        """The state as a flat mapping for any tracker; values that do not exist are left out."""

    def __repr__(self) -> str:
        return f"<heldin.{type(self).__name__}: {self.reason}>"

    # -- showing

    history: Any  # a rule has its own kind of checks

    def _look(self) -> tuple[int, str]:
        text = self.reason.removeprefix(f"step {self._step}: ")
        if self.should_stop:
            return self._step, f"stopped, {text}"
        return self._step, f"at {text}" if text.startswith("step ") else text

    def _advice(self) -> list[Advice]:
        """What to try if the run looks wrong."""
        return [("Where rules go wrong is shown with figures.", docs("when-to-trust.html"))]

    def _standing(self, groups: bool) -> dict[str, Any]:
        """Where the run stands, in words."""
        found = {k.removeprefix("heldin/"): v for k, v in self.metrics().items()}
        shown = {k: v for k, v in found.items() if not k.startswith("group/") or groups}
        return {"steps": self._step, **shown}

    def _cost(self) -> dict[str, Any]:
        """What the rule took, beside the training itself."""
        return {"steps": self._step, "checks": len(self.history)}

    def _plot(self, ax: Any, groups: bool) -> None:
        self.history.plot(ax)

    def _page(self, groups: bool) -> RunPage:
        name = type(self).__name__
        done = f"stopped at step {self.stopped_step}" if self.should_stop else "not stopped"
        return RunPage(
            title=f"{name}: {done}",
            verdict=self.reason,
            facts=table(self._standing(groups)),
            settings=table(self._settings()),
            cost=table(self._cost()),
            advice=self._advice(),
            plot=(lambda ax: self._plot(ax, groups)) if len(self.history) else None,
        )

    # -- saving

    @abstractmethod
    def _settings(self) -> dict[str, Any]:
        """What decides how values are formed; a resumed run must have the same."""

    @abstractmethod
    def _own_state(self) -> dict[str, Any]:
        """What the rule saves beside what all rules save."""

    @abstractmethod
    def _take_own_state(self, state: Mapping[str, Any]) -> None:
        """Take over what `_own_state` gave, or raise."""

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs; loads with `torch.load(..., weights_only=True)`."""
        return {
            "heldin": type(self).__name__,
            "version": self._state_version,
            "settings": self._settings(),
            "step": self._step,
            "should_stop": self.should_stop,
            "stopped_step": self.stopped_step,
            "reason": self.reason,
            **self._own_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken: all later values are the same to the last bit."""
        name, schema = type(self).__name__, STATE_SCHEMA | self._state_schema
        state = checked_state(name, state, self._state_version, schema)
        check_settings(name, state["settings"], self._settings())
        load_or_roll_back(name, self._take, state, self.state_dict())

    def _take(self, state: Mapping[str, Any]) -> None:
        self._take_own_state(state)
        self._step, self.reason = state["step"], state["reason"]
        self.should_stop, self.stopped_step = state["should_stop"], state["stopped_step"]
