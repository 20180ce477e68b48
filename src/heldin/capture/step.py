"""The sums of all backward passes of one step.

A pass that retains its graph stays *open*: another pass may go through the same calls of the model,
as with one loss per task. A sample's contribution is then the sum over both passes and must be
squared after the sum, so the contributions of an open pass are kept until the step is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from heldin.errors import NotObservable

from .call import Call
from .contributions import Contributions, Rows, moments
from .passes import ParameterSums, PassResult
from .sampling import Sampler

__all__ = ["OPEN", "OpenPass", "Step"]

OPEN = 2  # maximum number of open passes; beyond it the oldest is closed


@dataclass(eq=False)
class OpenPass:
    """A pass that has retained its graph, with all later passes through the same calls.

    Attributes:
        calls: the calls of the model that it goes through.
        m: number of samples.
        factor: factor of its contributions.
        parts: contributions of all uses, by parameter.
        sums: sums by parameter.
        held: gradients that `parts` read from; holding them prevents in-place accumulation.
        lost: parameters whose gradients were zeroed since then.
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
        self._closed = self.sums  # sums of the closed passes only
        self._open: list[OpenPass] = []
        self._zeroed_counts: dict[str, int] = {}  # samples with zeroed gradients, by parameter
        self._sampler = sampler

    def samples_of(self, name: str) -> int:
        """Return the number of samples that contribute to a parameter's gradient."""
        return self.count - self._zeroed_counts.get(name, 0)

    # -- passes

    def open_pass(self, calls: Sequence[Call]) -> OpenPass | None:
        """Return the open pass that went through any of these calls; None if there is none."""
        passes = [
            candidate for candidate in self._open if not set(candidate.calls).isdisjoint(calls)
        ]
        if len(passes) > 1 or any(not candidate.complete for candidate in passes):
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
            calls: the calls of the model that the pass went through.
            retained: whether another pass may go through them.
            by_size: give every sample the same weight when passes differ in size.
        """
        self.passes += 1
        self.first_count = self.first_count or result.m
        if self._sampler is not None and result.m > 1:
            self._sampler.whole |= result.whole
        open_pass = self.open_pass(calls) if self._open else None
        factor = result.m / self.first_count if by_size else 1.0
        if open_pass is None and not retained:
            self.count += result.m
            for name, new in result.sums.items():
                self._put(self._closed, name, _scaled(new, factor))
        else:
            if open_pass is None:
                self.count += result.m
                self._open.append(open_pass := OpenPass([], result.m, factor))
            open_pass.calls += [call for call in calls if call not in open_pass.calls]
            self._extend(open_pass, result)
        return self._close(open_pass, retained, calls)

    def _extend(self, open_pass: OpenPass, result: PassResult) -> None:
        """Add the contributions of a pass to those of earlier passes through the same calls."""
        open_pass.held += result.held
        for name, pass_sums in result.sums.items():
            if name in open_pass.lost:  # zeroed before, and now its samples contribute again
                open_pass.lost.remove(name)
                self._zeroed_counts[name] -= open_pass.m
            if name not in result.parts and bool((pass_sums.squares != 0).any()):
                open_pass.complete = False
            new, old = _scaled(pass_sums, open_pass.factor), open_pass.sums.get(name)
            parts = open_pass.parts[name] = [
                *open_pass.parts.get(name, ()),
                *result.parts.get(name, ()),
            ]
            if old is None:
                open_pass.sums[name] = new
                continue
            both = open_pass.sums[name] = self._added(name, old, new)
            if parts:
                if len({part.shape for part in parts}) > 1:  # one pass was not sampled
                    assert self._sampler is not None
                    parts = open_pass.parts[name] = [
                        _cut(self._sampler, name, p, both) for p in parts
                    ]
                both.total, both.squares = moments(parts)
                both.total, both.squares = (
                    both.total * open_pass.factor,
                    both.squares * open_pass.factor**2,
                )

    def _close(
        self, open_pass: OpenPass | None, retained: bool, calls: Sequence[Call]
    ) -> list[Call]:
        over = [] if open_pass is not None else list(calls)
        ending = [open_pass] if open_pass is not None and not retained else []
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
        """Close all open passes, because the weights have changed; return their calls."""
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
        if old.total.shape != new.total.shape:  # one of them was not sampled
            assert self._sampler is not None
            cut = self._sampler.cutter(name, old.total.shape, new.total.shape)
            totals, squares, shared = ([*map(cut, each)] for each in (totals, squares, shared))
        weight = max(old.weight, new.weight)
        both = sum(shared[1:], start=shared[0]) if shared else None
        return ParameterSums(totals[0] + totals[1], squares[0] + squares[1], both, weight)

    # -- zeroed gradients

    def forget(self, gone: set[str]) -> None:
        """Remove parameters from the step whose gradients were set to None or zero."""
        for name in gone:
            for sums in (self.sums, self._closed, *(each.sums for each in self._open)):
                sums.pop(name, None)
            for each in self._open:
                each.parts.pop(name, None)
                each.lost.add(name)
            self._zeroed_counts[name] = self.count


def _scaled(sums: ParameterSums, factor: float) -> ParameterSums:
    if factor == 1.0:
        return sums
    shared = None if sums.shared is None else sums.shared * factor
    return ParameterSums(sums.total * factor, sums.squares * factor**2, shared, sums.weight)


def _cut(sampler: Sampler, name: str, part: Contributions, like: ParameterSums) -> Contributions:
    """Restrict contributions to the sampled block, unless they already are."""
    if part.shape == tuple(like.total.shape):
        return part
    block, _ = sampler.drawn(name, part.shape, in_part=True)
    assert block is not None
    return Rows(part.samples(0, part.m)).restrict(block)
