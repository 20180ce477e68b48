"""What the backward passes of one step add up to.

A pass that retains its graph stays *open*: another one may go through the same calls of the model,
one for each of several tasks. A sample's contribution is then the sum of what both give it, and is
squared only then, so the contributions of an open pass are kept until the step is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from heldin.errors import NotObservable

from .contributions import Contributions, Rows, moments
from .knowledge import Call
from .passes import ParameterSums, PassResult
from .sampling import Sampler

__all__ = ["OPEN", "OpenPass", "Step"]

OPEN = 2  # passes that stay open at a time; the oldest is closed


@dataclass(eq=False)
class OpenPass:
    """A pass that has retained its graph, and those through the same calls since then.

    Attributes:
        calls: of the model.
        m: number of samples.
        factor: what its contributions are multiplied by.
        parts: by parameter, the contributions of all its uses.
        sums: by parameter.
        held: gradients of the pass; whoever adds to them in place would change the parts.
        lost: parameters whose gradients were thrown away since then.
        complete: whether all contributions are in `parts`.
    """

    calls: list[Call]
    m: int
    factor: float
    parts: dict[str, list[Contributions]] = field(default_factory=dict)
    sums: dict[str, ParameterSums] = field(default_factory=dict)
    held: list[Any] = field(default_factory=list)
    lost: set[str] = field(default_factory=set)
    complete: bool = True


class Step:
    """The sums of all backward passes since the last `clear`.

    Attributes:
        count: number of samples.
        passes: number of backward passes.
        first_count: number of samples in the first of them.
        sums: by name of the parameter.
    """

    def __init__(self, sampler: Sampler | None = None) -> None:
        self.count = self.passes = self.first_count = 0
        self.sums: dict[str, ParameterSums] = {}
        self._closed = self.sums  # without those of open passes
        self._open: list[OpenPass] = []
        self._thrown_away: dict[str, int] = {}  # by parameter: samples whose gradients are gone
        self._sampler = sampler

    def samples_of(self, name: str) -> int:
        """The number of samples whose gradients are part of a parameter's."""
        return self.count - self._thrown_away.get(name, 0)

    # -- passes

    def opened(self, calls: Sequence[Call]) -> OpenPass | None:
        """The open pass that went through some of these calls."""
        found = [each for each in self._open if not set(each.calls).isdisjoint(calls)]
        if len(found) > 1 or any(not each.complete for each in found):
            raise NotObservable(
                "a backward pass goes through calls of the model that others went through before, "
                "which were counted apart or could not be kept. Add up the losses: "
                "(loss_a + loss_b).backward()"
            )
        return found[0] if found else None

    @torch.no_grad()
    def add(
        self, result: PassResult, calls: Sequence[Call], retained: bool, by_size: bool
    ) -> list[Call]:
        """Take in what a pass has shown; the calls that no pass can go through any more.

        Args:
            calls: the calls of the model that the pass went through.
            retained: whether another pass may go through them.
            by_size: let samples count alike, though the sizes of the passes differ.
        """
        self.passes += 1
        self.first_count = self.first_count or result.m
        if self._sampler is not None and result.m > 1:
            self._sampler.whole |= result.whole
        known = self.opened(calls) if self._open else None
        factor = result.m / self.first_count if by_size else 1.0
        if known is None and not retained:
            self.count += result.m
            for name, new in result.sums.items():
                self._put(self._closed, name, _scaled(new, factor))
        else:
            if known is None:
                self.count += result.m
                self._open.append(known := OpenPass([], result.m, factor))
            known.calls += [call for call in calls if call not in known.calls]
            self._extend(known, result)
        return self._close(known, retained, calls)

    def _extend(self, known: OpenPass, result: PassResult) -> None:
        """Put the contributions of a pass to those of earlier ones through the same calls."""
        known.held += result.held
        for name, each in result.sums.items():
            if name in known.lost:  # its samples are there again
                known.lost.remove(name)
                self._thrown_away[name] -= known.m
            if name not in result.parts and bool((each.squares != 0).any()):
                known.complete = False
            new, old = _scaled(each, known.factor), known.sums.get(name)
            kept = known.parts[name] = [*known.parts.get(name, ()), *result.parts.get(name, ())]
            if old is None:
                known.sums[name] = new
                continue
            both = known.sums[name] = self._added(name, old, new)
            if kept:
                if len({part.shape for part in kept}) > 1:  # a pass was looked at as a whole
                    assert self._sampler is not None
                    kept = known.parts[name] = [_cut(self._sampler, name, p, both) for p in kept]
                both.total, both.squares = moments(kept)
                both.total, both.squares = both.total * known.factor, both.squares * known.factor**2

    def _close(self, known: OpenPass | None, retained: bool, calls: Sequence[Call]) -> list[Call]:
        over = [] if known is not None else list(calls)
        ending = [known] if known is not None and not retained else []
        ending += [each for each in self._open[:-OPEN] if each not in ending]
        for each in ending:
            over += each.calls
            self._open.remove(each)
            for name, sums in each.sums.items():
                self._put(self._closed, name, sums)
        if not self._open:
            self.sums = self._closed
        else:
            self.sums = dict(self._closed)
            for each in self._open:
                for name, sums in each.sums.items():
                    self._put(self.sums, name, sums)
        return over

    def close_all(self) -> list[Call]:
        """The weights have changed: no pass can go through the same calls again."""
        over = [call for each in self._open for call in each.calls]
        self._closed, self._open = self.sums, []
        return over

    # -- adding

    def _put(self, sums: dict[str, ParameterSums], name: str, new: ParameterSums) -> None:
        old = sums.get(name)
        sums[name] = new if old is None else self._added(name, old, new)

    def _added(self, name: str, old: ParameterSums, new: ParameterSums) -> ParameterSums:
        totals, squares = [old.total, new.total], [old.squares, new.squares]
        shared = [each.shared for each in (old, new) if each.shared is not None]
        if old.total.shape != new.total.shape:  # one of them was looked at as a whole
            assert self._sampler is not None
            cut = self._sampler.cutter(name, old.total.shape, new.total.shape)
            totals, squares, shared = ([*map(cut, each)] for each in (totals, squares, shared))
        weight = max(old.weight, new.weight)
        both = sum(shared[1:], start=shared[0]) if shared else None
        return ParameterSums(totals[0] + totals[1], squares[0] + squares[1], both, weight)

    # -- gradients that are thrown away

    def forget(self, gone: set[str]) -> None:
        """The gradients of these parameters were set to None or zero: they are no part of it."""
        for name in gone:
            for sums in (self.sums, self._closed, *(each.sums for each in self._open)):
                sums.pop(name, None)
            for each in self._open:
                each.parts.pop(name, None)
                each.lost.add(name)
            self._thrown_away[name] = self.count


def _scaled(sums: ParameterSums, factor: float) -> ParameterSums:
    if factor == 1.0:
        return sums
    shared = None if sums.shared is None else sums.shared * factor
    return ParameterSums(sums.total * factor, sums.squares * factor**2, shared, sums.weight)


def _cut(sampler: Sampler, name: str, part: Contributions, like: ParameterSums) -> Contributions:
    """Contributions to a block, of some that may be to all of a parameter."""
    if part.shape == tuple(like.total.shape):
        return part
    block, _ = sampler.drawn(name, part.shape, in_part=True)
    assert block is not None
    return Rows(part.samples(0, part.m)).restrict(block)
