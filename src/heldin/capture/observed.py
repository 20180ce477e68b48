"""One backward pass under observation: attach, (the pass), finish, close."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from .call import Call
from .forward import Calls
from .passes import PassResult, Recorder

__all__ = ["ObservedPass"]


class PassOwner(Protocol):
    """The part of a collector's interface that its passes need."""

    @property
    def calls(self) -> Calls:
        """The forward passes of the model."""

    def add(self, observed: ObservedPass, result: PassResult) -> None:
        """Add the result of a backward pass."""

    def on_backward_failed(self, leaves: Mapping[str, Tensor]) -> None:
        """Record the gradients that a failed backward pass has left."""


class ObservedPass:
    """A backward pass that one collector observes.

    Attributes:
        calls: the calls of the model that it goes back through.
        leaves: the observed parameters that it reaches, by name.
        retained: whether another pass may go through the same graph.
    """

    def __init__(
        self,
        collector: PassOwner,
        recorder: Recorder,
        calls: Sequence[Call],
        leaves: Mapping[str, Tensor],
        retained: bool,
    ) -> None:
        self._collector, self._recorder = collector, recorder
        self.calls, self.leaves, self.retained = calls, leaves, retained
        self._attached = self._finished = False
        collector.calls.backward_depth += 1

    def attach(self) -> None:
        """Register the hooks on the graph's nodes."""
        self._attached = True
        self._recorder.attach()

    def finish(self) -> None:
        """Pass the result to the collector after a successful backward pass."""
        self._finished = True
        self._collector.add(self, self._recorder.result())

    def close(self) -> None:
        """Remove the hooks and release the graph, also after an error."""
        self._recorder.close()
        self._collector.calls.backward_depth -= 1
        if not self._finished:
            self._collector.calls.done(self.calls)
            if self._attached:
                self._collector.on_backward_failed(self.leaves)
