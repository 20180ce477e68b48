"""A forward pass under observation, and the traces of it.

A call is *traced* if it runs under a tracker that records which sample each element belongs to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

from heldin.errors import NotObservable

from .arguments import Arguments, Count
from .graph import Graph, number_of
from .layout import Layout
from .ownership.numbers import Numbers
from .ownership.tracker import Tracker
from .sizes import Sizes

__all__ = ["Call", "Candidate"]


@dataclass(eq=False, slots=True)
class Candidate:
    """One number of samples that a call may have, with the trace under this assumption."""

    count: Count
    tracker: Tracker | None
    layouts: list[Layout | None] = field(default_factory=list)  # one per output


@dataclass(eq=False, slots=True)
class Call:
    """A forward pass under observation."""

    kind: Any  # everything that decides which graph it builds, except sizes
    sizes: Sizes
    m: int  # number of samples
    tracker: Tracker | None = None  # of a traced call
    ends: Sequence[tuple[Any, int]] = ()  # autograd node and output number of each output
    arguments: Arguments | None = None  # of a traced call with anything but a single tensor
    candidates: list[Candidate] = field(default_factory=list)  # of a traced call
    numbers: Numbers | None = None  # records what Python reads out of tensors in an untraced call
    answers: Any = ()  # the values that Python read and that may change the graph
    sealed: bool = False  # nodes are kept by number only, so that their graph can be freed

    @property
    def key(self) -> Any:
        return self.kind, self.sizes

    @property
    def is_volatile(self) -> bool:
        """Whether the trace is valid for this call only."""
        return self.tracker is not None and self.tracker.volatile_reason is not None

    @property
    def trackers(self) -> list[Tracker]:
        return [each.tracker for each in self.candidates if each.tracker is not None]

    def choose(self, candidate: Candidate) -> None:
        self.m, self.tracker = candidate.count.m, candidate.tracker

    def record_branches(self, counting: tuple[bool, ...] | None) -> None:
        """Store the answers that may change the graph.

        Args:
            counting: of an untraced call, which of its answers do; None: all of them.
        """
        source = self.numbers or self.tracker
        answers = [] if source is None else source.answers
        flags: Sequence[bool] = [counts for _, counts in answers]
        if self.numbers is not None and counting is not None and len(counting) == len(answers):
            flags = counting
        if self.numbers is not None or any(flags):
            self.answers = (len(answers), *compress([answer for answer, _ in answers], flags))
        self.numbers = None

    def seal(self) -> None:
        """Replace nodes by their numbers, so that the graph can be freed without a backward."""
        self.sealed = True
        self._rename(lambda node: None if node is None else number_of(node))

    def unseal(self, graph: Graph) -> bool:
        """Look up the nodes of a sealed call in a graph; return whether the call is part of it."""
        nodes_by_number = graph.by_number
        inside = [node for node, _ in self.ends if node in nodes_by_number]
        if any(nodes_by_number[node] is None for node in inside):
            raise NotObservable(
                "this backward pass may belong to several calls of the model: several calls were "
                "pending, and several threads built their graphs. Call backward() after each call"
            )
        if inside:
            self.sealed = False
            self._rename(nodes_by_number.get)
        return bool(inside)

    def _rename(self, renamed: Any) -> None:
        self.ends = [(renamed(node), number) for node, number in self.ends]
        for tracker in self.trackers:
            tracker.rename(renamed)

    def release(self) -> None:
        """Drop all references to the graph."""
        self.ends = ()
        for tracker in self.trackers:
            tracker.release()
        self.candidates, self.arguments = [], None
