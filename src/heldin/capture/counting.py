"""The number of samples of a backward pass, and the inputs that are batches.

The call was traced under each number that its arguments allow. A number is possible if every
parameter then meets rows of single samples, and the loss is a sum over them. If several remain, the
pass is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from heldin.errors import NotObservable

from .arguments import Arguments, Count, Entry, name_of
from .call import Call
from .coupling import couples
from .graph import Graph, shape_of
from .plan import Plan
from .planning import PlanMaker
from .reference import Output, frontier

__all__ = ["Counting", "Option", "different_counts_error"]


@dataclass(frozen=True, eq=False)
class Option:
    """One way to count the samples of a pass, with its consequences."""

    count: Count | None  # None: the arguments allowed one number only
    members: frozenset[int]  # the indices of the inputs that are batches
    plan: Plan | None  # None: a single sample, which needs no plan
    outputs: Sequence[Output] = ()  # the last tensors whose rows have owners
    graph: Graph | None = None
    roots: Sequence[Any] = ()  # the losses; empty: heldin may run no backward pass of its own

    @cached_property
    def coupled(self) -> str | None:
        """The op in which the loss couples the samples under this option; None: it does not."""
        if self.graph is None or not self.roots:
            return None
        return couples(self.graph, self.roots, self.outputs)


@dataclass(frozen=True, eq=False)
class Counting:
    """The decision on the number of samples of one backward pass."""

    graph: Graph
    names: Mapping[int, str]  # of the observed parameters, by id
    calls: Sequence[Call]  # the calls of the model that the pass goes through
    roots: Sequence[Any]  # see `Option`
    argument_names: Sequence[str]
    dim: int  # the usual batch dimension

    @cached_property
    def arguments(self) -> Arguments | None:
        """The arguments of the first call with several possible numbers of samples."""
        return next((call.arguments for call in self.calls if call.arguments is not None), None)

    def decide(self) -> Option:
        """Return the only possible way to count samples.

        Raises:
            NotObservable: if there is none, or more than one.
        """
        singles: list[Option] = []
        many: list[Option] = []
        errors: list[NotObservable] = []
        for count in self._counts():
            options, error = self._options(count)
            singles += [option for option in options if option.plan is None]
            many += [option for option in options if option.plan is not None]
            if error is not None and not options:
                errors.append(error)
        none = next((o for o in singles if o.count is not None and o.count.m == 0), None)
        if none is not None:  # an empty batch, or an argument that happens to be empty
            shapes = self._output_shapes()
            if not (many or errors) or (shapes and all(0 in shape for shape in shapes)):
                return none
            singles.remove(none)
        if singles and (many or errors):  # one sample, or an argument that many samples share
            shapes = self._output_shapes()
            if shapes and all(shape[self.dim] == 1 for shape in shapes):
                return singles[0]
            if errors and not many:
                raise errors[0]
            is_list = any(o.count is not None and o.count.is_list for o in singles)
            has_ones = any(1 in shape for shape in shapes)
            # A parameter that met an argument with one row before any batch may have met the only
            # sample.
            trackers = [candidate.tracker for call in self.calls for candidate in call.candidates]
            met_row = any(t is not None and t.param_met_broadcast_row for t in trackers)
            along = self._along(many)
            if along and shapes and not (is_list or has_ones or met_row):
                many, singles = along, []
        if len(many) > 1:
            many = [o for o in many if o.coupled is None] or many
        if len(many) > 1:
            many = self._without_masks(many)
        if len(many) > 1:
            many = self._without_parts(many)
        if not many and not singles:
            raise errors[0]
        if len(many) + len(singles) > 1:
            raise self._undecided_error([*many, *singles])
        return (many or singles)[0]

    def _counts(self) -> list[Count | None]:
        """List the numbers of samples that all calls may have; [None] if each has one only."""
        open_ones = [
            [candidate.count for candidate in call.candidates]
            for call in self.calls
            if len(call.candidates) > 1
        ]
        if not open_ones:
            return [None]
        return [count for count in open_ones[0] if all(count in other for other in open_ones[1:])]

    def _options(self, count: Count | None) -> tuple[list[Option], NotObservable | None]:
        """Return the options for a number of samples, and the error if it allows no plan."""
        for call in self.calls:
            for candidate in call.candidates if len(call.candidates) > 1 else ():
                if candidate.count == count:
                    call.choose(candidate)
        if len({call.m for call in self.calls}) > 1:
            return [], different_counts_error(self.calls)
        m = self.calls[0].m
        if m < 2:
            return [Option(count, frozenset(), None)], None
        trackers = [call.tracker for call in self.calls if call.tracker is not None]
        input_subsets = max((tracker.input_subsets for tracker in trackers), key=len)
        maker = PlanMaker(self.graph, self.names, trackers)
        options: list[Option] = []
        error: NotObservable | None = None
        for hypothesis, members in enumerate(input_subsets):
            try:
                plan = maker.make(hypothesis)
            except NotObservable as failure:
                error = error or failure
                continue
            outputs = frontier(self.graph, maker.owners, m, hypothesis)
            if count is not None and count.is_list:
                owners = {i for _, layout in outputs for i in layout.owner.unique().tolist()}
                if len(owners) != m:
                    continue  # a pair of an input and its target is not a list of two samples
            options.append(Option(count, members, plan, outputs, self.graph, self.roots))
            if hypothesis == 0 and (len(input_subsets) == 1 or options[0].coupled is None):
                break  # every input with m rows is a batch, and the loss is separable: accept
        # The loss couples samples under the first hypothesis; an input with m rows may be a mask.
        if len(options) > 1 and options[0].members == input_subsets[0]:
            others = [o for o in options[1:] if o.coupled is None]
            better = self._without_masks([*others, options[0]])
            return (better if len(better) == 1 else options[:1]), None
        largest = [o for o in options if all(o.members >= other.members for other in options)]
        return (largest[:1] or options), error

    def _output_shapes(self) -> list[tuple[int, ...]]:
        ends = [end for call in self.calls for end in call.ends if end[0]]
        return [shape for end in ends if (shape := shape_of(*end))]

    def _along(self, options: Sequence[Option]) -> list[Option]:
        """Return the options with samples along the usual batch dimension of the outputs."""
        return [o for o in options if any(layout.dim == self.dim for _, layout in o.outputs)]

    def _batches(self, option: Option) -> tuple[Count, list[Entry], list[Entry]]:
        """Return the count of an option, all inputs with this count, and those that are batches."""
        assert self.arguments is not None
        count = option.count or Count(self.calls[0].m)
        counted = [entry for entry in self.arguments.entries if entry.counts(count)]
        return count, counted, [entry for i, entry in enumerate(counted) if i in option.members]

    def _without_masks(self, options: Sequence[Option]) -> list[Option]:
        """Drop options in which a mask (T, T) or positions (T,) count as a batch of sequences.

        Only where another option has samples of length T along the batch dimension of the outputs.
        """
        if self.arguments is None:
            return list(options)
        along = self._along(options)
        shapes = {o: [tuple(e.tensor.shape) for e in self._batches(o)[2]] for o in options}

        def is_mask(option: Option) -> bool:
            """Return whether an input has the shape of a mask for another option's samples."""
            others = [shape for o in along if o is not option for shape in shapes[o]]
            lengths = {s[self.dim + 1] for s in others if len(s) > max(self.dim, 0) + 1}
            looks = {(t, t) for t in lengths} | {(t,) for t in lengths}
            return not looks.isdisjoint(shapes[option])

        return [o for o in options if not is_mask(o)] or list(options)

    def _without_parts(self, options: Sequence[Option]) -> list[Option]:
        """Drop options that are part of a flat batch, such as features of graphs beside nodes."""
        flat = next((o for o in options if o.count is not None and o.count.flat), None)
        if self.arguments is None or flat is None or flat.count is None:
            return list(options)
        line = torch.arange(flat.count.m)
        entries = self.arguments.entries
        inputs = [entry for entry in entries if entry.owner is not None]

        def is_part(option: Option) -> bool:
            if option.count is None or option.count.flat or option.count.m != len(line):
                return False
            owners = [entry.owner for entry in entries if entry.counts(option.count)]
            same = all(o is not None and torch.equal(o.flatten(), line) for o in owners)
            return same and len(owners) < len(inputs)

        return [o for o in options if not is_part(o)]

    def _undecided_error(self, options: Sequence[Option]) -> NotObservable:
        descriptions: dict[str, None] = {}
        for option in options if self.arguments is not None else ():
            count, counted, batches = self._batches(option)
            unit = "entries" if count.is_list else "samples in one" if count.flat else "rows"
            places = dict.fromkeys(entry.place for entry in batches or counted)
            names = [repr(name_of(place, self.argument_names)) for place in places]
            descriptions[f"{count.m} {unit} of {' and '.join(names)}"] = None
        is_flat = any(option.count is not None and option.count.flat for option in options)
        owner = 'an argument with the owner of each row with batch_dim={name: "owner"}, '
        return NotObservable(
            f"the number of samples of this pass is ambiguous: {', or '.join(descriptions)}. "
            "Declare arguments that are not batches with batch_dim={name: None}, "
            f"{owner if is_flat else ''}or the batch dimension with batch_dim={{name: 0}} (1 for a "
            "recurrent state)"
        )


def different_counts_error(calls: Sequence[Call]) -> NotObservable:
    counts = sorted({call.m for call in calls})
    return NotObservable(
        "one backward pass goes through calls of the model with different numbers of samples, "
        f"{counts}, which cannot be matched. Call backward() once for each call"
    )
