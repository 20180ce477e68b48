"""The sums of all backward passes of one step.

A pass that retains its graph stays *open*: another pass may go through the same calls of the model,
as with one loss per task. A sample's contribution is then the sum over both passes and must be
squared after the sum, so the contributions of an open pass are kept until the step is over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from heldin.errors import NotObservable

from .call import Call
from .contributions import Contributions, Rows, moments
from .passes import ParameterSums, PassResult
from .sampling import Sampler

__all__ = ["OPEN", "Step"]

OPEN = 2  # maximum number of open passes; beyond it the oldest is closed


@dataclass(eq=False)
class OpenPass:
    """A pass that has retained its graph, with all later passes through the same calls."""

    m: int  # number of samples
    factor: float  # of its contributions
    calls: list[Call] = field(default_factory=list)
    parts: dict[str, list[Contributions]] = field(default_factory=dict)  # of all uses
    sums: dict[str, ParameterSums] = field(default_factory=dict)
    # Gradients that the parts read from; holding them prevents in-place accumulation.
    held: list[Any] = field(default_factory=list)
    lost: set[str] = field(default_factory=set)  # parameters whose gradients were zeroed since then
    complete: bool = True  # whether `parts` has all contributions


class Step:
    """The sums of all backward passes since the last `clear`."""

    def __init__(self, sampler: Sampler | None) -> None:
        self.count = self.first_count = 0  # samples in all passes, and in the first
        self.passes = 0
        self.sums: dict[str, ParameterSums] = {}  # by name of the parameter
        self._closed = self.sums  # sums of the closed passes only
        self._open: list[OpenPass] = []
        self._zeroed_counts: dict[str, int] = {}  # samples with zeroed gradients, by parameter
        self._sampler = sampler

    def samples_of(self, name: str) -> int:
        """Return the number of samples that contribute to a parameter's gradient."""
        return self.count - self._zeroed_counts.get(name, 0)

    def open_pass(self, calls: Sequence[Call]) -> OpenPass | None:
        """Return the open pass that went through any of these calls; None if there is none."""
        passes = [each for each in self._open if not set(each.calls).isdisjoint(calls)]
        if len(passes) > 1 or any(not each.complete for each in passes):
            raise NotObservable(
                "this backward pass goes through a retained graph that earlier passes have used, "
                "and their contributions are no longer available. Add up the losses and call "
                "backward() once: (loss_a + loss_b).backward()"
            )
        return passes[0] if passes else None

    @torch.no_grad()
    def add(
        self, result: PassResult, calls: Sequence[Call], retained: bool, by_size: bool
    ) -> list[Call]:
        """Add the result of a pass; return the calls that no later pass can go through.

        Args:
            result: the sums of the pass.
            calls: the calls of the model that it went through.
            retained: whether another pass may go through them.
            by_size: give every sample the same weight when passes differ in size.
        """
        self.passes += 1
        self.first_count = self.first_count or result.m
        if self._sampler is not None and result.m > 1:
            self._sampler.whole |= result.whole
        open_pass = self.open_pass(calls) if self._open else None
        factor = result.m / self.first_count if by_size else 1.0
        over: list[Call] = []
        if open_pass is None:
            self.count += result.m
            if retained:
                self._open.append(open_pass := OpenPass(result.m, factor))
        if open_pass is None:
            over += calls
            self._merge(self._closed, {n: sums.scaled(factor) for n, sums in result.sums.items()})
        else:
            open_pass.calls += [call for call in calls if call not in open_pass.calls]
            self._extend(open_pass, result)
        ending = [open_pass] if open_pass is not None and not retained else []
        ending += [each for each in self._open[:-OPEN] if each not in ending]
        for each in ending:
            over += each.calls
            self._open.remove(each)
            self._merge(self._closed, each.sums)
        self.sums = dict(self._closed) if self._open else self._closed
        for each in self._open:
            self._merge(self.sums, each.sums)
        return over

    def _extend(self, open_pass: OpenPass, result: PassResult) -> None:
        """Add the contributions of a pass to those of earlier passes through the same calls."""
        factor = open_pass.factor
        open_pass.held += result.held
        for name, pass_sums in result.sums.items():
            if name in open_pass.lost:  # zeroed before, and now its samples contribute again
                open_pass.lost.remove(name)
                self._zeroed_counts[name] -= open_pass.m
            if name not in result.parts and bool((pass_sums.squares != 0).any()):
                open_pass.complete = False
            parts = [*open_pass.parts.get(name, ()), *result.parts.get(name, ())]
            new, old = pass_sums.scaled(factor), open_pass.sums.get(name)
            if old is not None:
                new = old.plus(new, name, self._sampler)
                if len({part.shape for part in parts}) > 1:  # one pass was not sampled
                    parts = [self._cut(name, part, new) for part in parts]
                if parts:
                    total, squares = moments(parts)
                    new.total, new.squares = total * factor, squares * factor**2
            open_pass.parts[name], open_pass.sums[name] = parts, new

    def _cut(self, name: str, part: Contributions, like: ParameterSums) -> Contributions:
        """Restrict contributions to the sampled block, unless they already are."""
        if part.shape == tuple(like.total.shape):
            return part
        assert self._sampler is not None
        block, _ = self._sampler.drawn(name, part.shape, in_part=True)
        assert block is not None
        return Rows(part.samples(0, part.m)).restrict(block)

    def _merge(self, sums: dict[str, ParameterSums], more: Mapping[str, ParameterSums]) -> None:
        """Add sums of other passes to a table of sums."""
        for name, new in more.items():
            old = sums.get(name)
            sums[name] = new if old is None else old.plus(new, name, self._sampler)

    def close_all(self) -> list[Call]:
        """Close all open passes, because the weights have changed; return their calls."""
        over = [call for each in self._open for call in each.calls]
        self._closed, self._open = self.sums, []
        return over

    def forget(self, gone: set[str]) -> None:
        """Remove parameters from the step whose gradients were set to None or zero."""
        for name in gone:
            for sums in (self.sums, self._closed, *(each.sums for each in self._open)):
                sums.pop(name, None)
            for each in self._open:
                each.parts.pop(name, None)
                each.lost.add(name)
            self._zeroed_counts[name] = self.count
