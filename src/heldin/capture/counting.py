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

from heldin.errors import NotObservable, more

from .arguments import Count
from .call import Call
from .coupling import couples
from .graph import Graph, shape_of
from .plan import Plan
from .planning import make_plan
from .reference import Output, frontier

__all__ = ["Option", "decide", "different_counts_error", "single_calls_warning"]


@dataclass(frozen=True, eq=False)
class Option:
    """One way to count the samples of a pass, with its consequences.

    Attributes:
        count: the number of samples; None: the arguments allowed one number only.
        members: the indices of the inputs that are batches.
        plan: how to observe the pass; None: a single sample, which needs no plan.
        outputs: the last tensors whose rows have owners.
        graph, roots: graph and losses of the pass; without roots, heldin may run no backward pass
            through the graph.
    """

    count: Count | None
    members: frozenset[int]
    plan: Plan | None
    outputs: Sequence[Output] = ()
    graph: Graph | None = None
    roots: Sequence[Any] = ()

    @cached_property
    def coupled(self) -> str | None:
        """The op in which the loss couples the samples under this option; None: it does not."""
        if self.graph is None or not self.roots:
            return None
        return couples(self.graph, self.roots, self.outputs)


def counts_of(calls: Sequence[Call]) -> list[Count | None]:
    """List the numbers of samples that all calls may have; [None] if every call has one only."""
    open_ones = [
        [candidate.count for candidate in call.candidates]
        for call in calls
        if len(call.candidates) > 1
    ]
    if not open_ones:
        return [None]
    return [count for count in open_ones[0] if all(count in other for other in open_ones[1:])]


def options_of(
    graph: Graph,
    names: Mapping[int, str],
    calls: Sequence[Call],
    count: Count | None,
    roots: Sequence[Any],
    dim: int,
) -> tuple[list[Option], NotObservable | None]:
    """Return the options for a number of samples, and the error if it allows no plan."""
    for call in calls:
        for candidate in call.candidates if len(call.candidates) > 1 else ():
            if candidate.count == count:
                call.choose(candidate)
    if len({call.m for call in calls}) > 1:
        return [], different_counts_error(calls)
    m = calls[0].m
    if m < 2:
        return [Option(count, frozenset(), None)], None
    trackers = [call.tracker for call in calls if call.tracker is not None]
    owners = {k: v for tracker in trackers for k, v in tracker.nodes.items()}
    slots = {k: v for tracker in trackers for k, v in tracker.slots.items()}
    causes = {k: v for tracker in trackers for k, v in tracker.causes.items()}
    input_subsets = max((tracker.input_subsets for tracker in trackers), key=len)
    options: list[Option] = []
    error: NotObservable | None = None
    for hypothesis, members in enumerate(input_subsets):
        try:
            plan = make_plan(graph, names, owners, slots, m, causes, hypothesis)
        except NotObservable as failure:
            error = error or failure
            continue
        outputs = frontier(graph, owners, m, hypothesis)
        if count is not None and count.is_list and not _all_in(outputs, m):
            continue  # a pair of an input and its target is not a list of two samples
        options.append(Option(count, members, plan, outputs, graph, roots))
        if hypothesis == 0 and (len(input_subsets) == 1 or options[0].coupled is None):
            break  # every input with m rows is a batch, and the loss is separable: accept
    # The loss couples samples under the first hypothesis; an input with m rows may be a mask.
    if len(options) > 1 and options[0].members == input_subsets[0]:
        others = [o for o in options[1:] if o.coupled is None]
        better = _without_masks([*others, options[0]], calls, dim)
        return (better if len(better) == 1 else options[:1]), None
    largest = [o for o in options if all(o.members >= other.members for other in options)]
    return (largest[:1] or options), error


def _all_in(outputs: Sequence[Output], m: int) -> bool:
    """Return whether every sample owns elements of the outputs."""
    owners = {i for _, layout in outputs for i in layout.owner.unique().tolist()}
    return len(owners) == m


def different_counts_error(calls: Sequence[Call]) -> NotObservable:
    counts = sorted({call.m for call in calls})
    return NotObservable(
        "one backward pass goes through calls of the model with different numbers of samples, "
        f"{counts}, which cannot be matched. Call backward() once for each call"
    )


def single_calls_warning(number: int) -> str:
    """Return the warning for a loop over single samples before one backward pass."""
    return (
        f"one backward pass goes through {number} calls of the model with one sample each: they "
        "count as one sample, as if they were views of it. If they are different samples, put "
        "them into one batch, or call backward() after each call "
        + more("calls-that-are-not-observed")
    )


def decide(
    graph: Graph, names: Mapping[int, str], calls: Sequence[Call], roots: Sequence[Any],
    argument_names: Sequence[str], dim: int,
) -> Option:  # fmt: skip
    """Return the only possible way to count samples.

    Raises:
        NotObservable: if there is none, or more than one.
    """
    all_options: list[Option] = []
    errors: list[NotObservable] = []
    for count in counts_of(calls):
        options, error = options_of(graph, names, calls, count, roots, dim)
        all_options += options
        if error is not None and not options:
            errors.append(error)
    singles = [o for o in all_options if o.plan is None]
    many = [o for o in all_options if o.plan is not None]
    none = next((o for o in singles if o.count is not None and o.count.m == 0), None)
    if none is not None:  # an empty batch, or an argument that happens to be empty
        sizes = _shapes(calls)
        if not (many or errors) or (sizes and all(0 in shape for shape in sizes)):
            return none
        singles.remove(none)
    if singles and (many or errors):  # one sample, or an argument that many samples share
        shapes = _shapes(calls)
        if shapes and all(shape[dim] == 1 for shape in shapes):
            return singles[0]
        along = [o for o in many if any(layout.dim == dim for _, layout in o.outputs)]
        if errors and not many:
            raise errors[0]
        is_list = any(o.count is not None and o.count.is_list for o in singles)
        plain = (
            not is_list
            and not any(1 in shape for shape in shapes)
            and not _param_met_broadcast_row(calls)
        )
        if along and shapes and plain:
            many, singles = along, []
    if len(many) > 1:
        many = [o for o in many if o.coupled is None] or many
    if len(many) > 1:
        many = _without_masks(many, calls, dim)
    if len(many) > 1:
        many = _without_parts(many, calls)
    if not many and not singles:
        raise errors[0]
    if len(many) + len(singles) > 1:
        raise _undecided_error([*many, *singles], calls, argument_names)
    return (many or singles)[0]


def _param_met_broadcast_row(calls: Sequence[Call]) -> bool:
    """Return whether a parameter met an argument with one row before it met any batch.

    Such an argument may be the only sample.
    """
    trackers = [candidate.tracker for call in calls for candidate in call.candidates]
    return any(tracker is not None and tracker.param_met_broadcast_row for tracker in trackers)


def _shapes(calls: Sequence[Call]) -> list[tuple[int, ...]]:
    """Return the shapes of all outputs of the calls, except scalars."""
    shapes = [shape_of(node, number) for call in calls for node, number in call.ends if node]
    return [shape for shape in shapes if shape]


def _without_masks(options: Sequence[Option], calls: Sequence[Call], dim: int) -> list[Option]:
    """Drop options in which a mask (T, T) or positions (T,) count as a batch of sequences.

    Only where another option has samples of length T along the batch dimension of the outputs.
    """
    arguments = next((call.arguments for call in calls if call.arguments is not None), None)
    if arguments is None:
        return list(options)

    def shapes(option: Option) -> list[tuple[int, ...]]:
        batched = [e for e in arguments.entries if e.counts(option.count or Count(calls[0].m))]
        return [tuple(e.tensor.shape) for i, e in enumerate(batched) if i in option.members]

    along = [o for o in options if any(layout.dim == dim for _, layout in o.outputs)]

    def is_mask(option: Option) -> bool:
        """Return whether an input has the shape of a mask for another option's samples."""
        others = [s for o in along if o is not option for s in shapes(o)]
        lengths = {s[dim + 1] for s in others if len(s) > max(dim, 0) + 1}
        looks = {(t, t) for t in lengths} | {(t,) for t in lengths}
        return not looks.isdisjoint(shapes(option))

    masks = [o for o in options if is_mask(o)]
    return [o for o in options if o not in masks] or list(options)


def _without_parts(options: Sequence[Option], calls: Sequence[Call]) -> list[Option]:
    """Drop options that are part of a flat batch, such as features of graphs beside nodes."""
    arguments = next((call.arguments for call in calls if call.arguments is not None), None)
    flat = next((o for o in options if o.count is not None and o.count.flat), None)
    if arguments is None or flat is None or flat.count is None:
        return list(options)
    line, inputs = torch.arange(flat.count.m), [e for e in arguments.entries if e.owner is not None]

    def is_part(option: Option) -> bool:
        if option.count is None or option.count.flat or option.count.m != len(line):
            return False
        owners = [e.owner for e in arguments.entries if e.counts(option.count)]
        same = all(o is not None and torch.equal(o.flatten(), line) for o in owners)
        return same and len(owners) < len(inputs)

    return [o for o in options if not is_part(o)]


def _undecided_error(
    options: Sequence[Option], calls: Sequence[Call], argument_names: Sequence[str]
) -> NotObservable:
    arguments = next((call.arguments for call in calls if call.arguments is not None), None)
    descriptions = []
    for option in options:
        count = option.count or Count(calls[0].m)
        if arguments is not None:
            batched = [e for e in arguments.entries if e.counts(count)]
            chosen = [e for i, e in enumerate(batched) if i in option.members] or batched
            descriptions.append(arguments.named(count, argument_names, chosen))
    owner = 'an argument with the owner of each row with batch_dim={name: "owner"}, '
    flat = any(option.count is not None and option.count.flat for option in options)
    return NotObservable(
        "the number of samples of this pass is ambiguous: "
        f"{', or '.join(dict.fromkeys(descriptions))}. Declare arguments that are not batches with "
        f"batch_dim={{name: None}}, {owner if flat else ''}or the batch dimension with "
        "batch_dim={name: 0} (1 for a recurrent state)"
    )
