"""One backward pass that a collector watches: attach, (the pass), finish, close."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from .forward import Calls
from .knowledge import Call
from .passes import PassResult, Recorder

__all__ = ["ObservedPass"]


class Watching(Protocol):
    """A collector, as far as its passes need it."""

    calls: Calls

    def add(self, observed: ObservedPass, result: PassResult) -> None:
        """Take in what a backward pass has shown."""

    def broken_off(self, leaves: Mapping[str, Tensor]) -> None:
        """A backward pass has failed."""


class ObservedPass:
    """A backward pass that one collector watches.

    Attributes:
        calls: the calls of the model that it goes back through.
        leaves: the observed parameters that it reaches, by name.
        retained: whether another pass may go through the same graph.
    """

    def __init__(
        self,
        collector: Watching,
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
        """Listen at the nodes of the graph."""
        self._attached = True
        self._recorder.attach()

    def finish(self) -> None:
        """The pass went through."""
        self._finished = True
        self._collector.add(self, self._recorder.result())

    def close(self) -> None:
        """Let go of the graph, also after an error."""
        self._recorder.close()
        self._collector.calls.backward_depth -= 1
        if not self._finished:
            self._collector.calls.done(self.calls)
            if self._attached:
                self._collector.broken_off(self.leaves)
