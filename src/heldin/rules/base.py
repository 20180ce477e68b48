"""What all stopping rules have in common."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Any, TypeVar

__all__ = ["Closing", "StoppingRule", "deprecated"]

Self = TypeVar("Self", bound="Closing")


def deprecated(old: str, new: str) -> None:
    """Warn whoever called the function that calls this one."""
    warnings.warn(
        f"{old} is now {new}; the old name goes with the next release",
        DeprecationWarning,
        stacklevel=3,
    )


class Closing:
    """Watches a model until it is closed, at the latest at the end of its `with` block."""

    def close(self) -> None:
        """Watch no more. What was found stays readable."""
        raise NotImplementedError

    def remove(self) -> None:
        """The old name of `close`."""
        name = type(self).__name__
        deprecated(f"{name}.remove", f"{name}.close")
        self.close()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class StoppingRule(Closing, ABC):
    """Says at each step of a training loop whether to stop.

    Attributes:
        should_stop: whether it has asked to; it then goes on asking.
        stopped_step: the step at which it did.
        reason: what it says at the moment, in words.
    """

    def __init__(self) -> None:
        self.should_stop = False
        self.stopped_step: int | None = None
        self.reason = "no check yet"

    @abstractmethod
    def metrics(self) -> dict[str, float]:
        """The state as a flat mapping for any tracker; values that do not exist are left out."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs; loads with `torch.load(..., weights_only=True)`."""

    def __repr__(self) -> str:
        return f"<heldin.{type(self).__name__}: {self.reason}>"
