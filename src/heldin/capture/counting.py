"""How many samples a backward pass has, and which inputs count them.

Each number that the arguments allow was followed on its own. A number is possible if every
parameter then meets the rows of single samples, and the loss adds up over them. If that leaves more
than one, nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from heldin.errors import NotObservable, more

from .arguments import Count
from .coupling import couples
from .graph import Graph, shape_of
from .knowledge import Call
from .plan import Plan
from .planning import make_plan
from .reference import Output, frontier

__all__ = ["Option", "decide", "different_counts", "single_calls"]


@dataclass(frozen=True, eq=False)
class Option:
    """One way to count the samples of a pass, and what follows from it.

    Attributes:
        count: the number of samples; None: there was no question.
        members: the inputs that count them, by number.
        plan: how to observe the pass; None: a single sample, there is nothing to tell apart.
        outputs: the last tensors whose rows have owners.
        graph, roots: of the pass; no roots: no passes of our own may go through it.
    """

    count: Count | None
    members: frozenset[int]
    plan: Plan | None
    outputs: Sequence[Output] = ()
    graph: Graph | None = None
    roots: Sequence[Any] = ()

    @cached_property
    def coupled(self) -> str | None:
        """The op in which the loss couples the samples that are counted so."""
        if self.graph is None or not self.roots:
            return None
        return couples(self.graph, self.roots, self.outputs)


def counts_of(calls: Sequence[Call]) -> list[Count | None]:
    """The numbers of samples that all calls may have in common."""
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
    """What a number of samples leads to: plans, or the reason why there is none."""
    for call in calls:
        for candidate in call.candidates if len(call.candidates) > 1 else ():
            if candidate.count == count:
                call.choose(candidate)
    if len({call.m for call in calls}) > 1:
        return [], different_counts(calls)
    m = calls[0].m
    if m < 2:
        return [Option(count, frozenset(), None)], None
    trackers = [call.tracker for call in calls if call.tracker is not None]
    owners = {k: v for tracker in trackers for k, v in tracker.nodes.items()}
    slots = {k: v for tracker in trackers for k, v in tracker.slots.items()}
    causes = {k: v for tracker in trackers for k, v in tracker.causes.items()}
    ways = max((tracker.ways for tracker in trackers), key=len)
    found: list[Option] = []
    error: NotObservable | None = None
    for reading, members in enumerate(ways):
        try:
            plan = make_plan(graph, names, owners, slots, m, causes, reading)
        except NotObservable as failure:
            error = error or failure
            continue
        outputs = frontier(graph, owners, m, reading)
        if count is not None and count.listed and not _all_in(outputs, m):
            continue  # a pair of an input and its target is no list of two samples
        found.append(Option(count, members, plan, outputs, graph, roots))
        if reading == 0 and (len(ways) == 1 or found[0].coupled is None):
            break  # all that look like it count samples, and nothing is mixed
    if (
        len(found) > 1 and found[0].members == ways[0]
    ):  # the loss mixes: does one only look like it?
        others = [o for o in found[1:] if o.coupled is None]
        better = _without_masks([*others, found[0]], calls, dim)
        return (better if len(better) == 1 else found[:1]), None
    largest = [o for o in found if all(o.members >= other.members for other in found)]
    return (largest[:1] or found), error


def _all_in(outputs: Sequence[Output], m: int) -> bool:
    """Whether every sample has a part in the outputs."""
    found = {i for _, layout in outputs for i in layout.owner.unique().tolist()}
    return len(found) == m


def different_counts(calls: Sequence[Call]) -> NotObservable:
    counts = sorted({call.m for call in calls})
    return NotObservable(
        f"one backward pass through calls of the model with {counts} samples: which of them belong "
        "together is not known. Call backward() once for each"
    )


def single_calls(number: int) -> str:
    """Of a loop over samples before one backward pass, for a warning."""
    return (
        f"one backward pass goes through {number} calls of the model with one sample each: they "
        "count as one sample, as if they were views of it. If each is a sample of its own, put "
        "them into one batch, or call backward() after each call "
        + more("calls-that-are-not-observed")
    )


def decide(
    graph: Graph, names: Mapping[int, str], calls: Sequence[Call], roots: Sequence[Any],
    arguments: Sequence[str], dim: int,
) -> Option:  # fmt: skip
    """The one way to count samples that is possible; raises NotObservable if there is not one."""
    found: list[Option] = []
    errors: list[NotObservable] = []
    for count in counts_of(calls):
        options, error = options_of(graph, names, calls, count, roots, dim)
        found += options
        if error is not None and not options:
            errors.append(error)
    singles = [o for o in found if o.plan is None]
    many = [o for o in found if o.plan is not None]
    none = next((o for o in singles if o.count is not None and o.count.m == 0), None)
    if none is not None:  # an empty batch, or an argument that is empty this time
        sizes = _shapes(calls)
        if not (many or errors) or (sizes and all(0 in shape for shape in sizes)):
            return none
        singles.remove(none)
    if singles and (many or errors):  # one sample, or something that is shared by many
        shapes = _shapes(calls)
        if shapes and all(shape[dim] == 1 for shape in shapes):
            return singles[0]
        along = [o for o in many if any(layout.dim == dim for _, layout in o.outputs)]
        if errors and not many:
            raise errors[0]
        listed = any(o.count is not None and o.count.listed for o in singles)
        plain = not listed and not any(1 in shape for shape in shapes) and not _met_alone(calls)
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
        raise _undecided([*many, *singles], calls, arguments)
    return (many or singles)[0]


def _met_alone(calls: Sequence[Call]) -> bool:
    """Whether a parameter has met an argument with one row on its own: it may be the one sample."""
    trackers = [candidate.tracker for call in calls for candidate in call.candidates]
    return any(tracker is not None and tracker.met_alone for tracker in trackers)


def _shapes(calls: Sequence[Call]) -> list[tuple[int, ...]]:
    """The shapes of all outputs of the calls that are no single numbers."""
    shapes = [shape_of(node, number) for call in calls for node, number in call.ends if node]
    return [shape for shape in shapes if shape]


def _without_masks(options: Sequence[Option], calls: Sequence[Call], dim: int) -> list[Option]:
    """The options in which no mask counts, nor positions: T by T, or T, beside samples of length T.

    Only where the samples then lie along the batch dimension of the outputs.
    """
    given = next((call.given for call in calls if call.given is not None), None)
    if given is None:
        return list(options)

    def shapes(option: Option) -> list[tuple[int, ...]]:
        batched = [e for e in given.entries if e.counts(option.count or Count(calls[0].m))]
        return [tuple(e.tensor.shape) for i, e in enumerate(batched) if i in option.members]

    along = [o for o in options if any(layout.dim == dim for _, layout in o.outputs)]

    def is_mask(option: Option) -> bool:
        """Beside the samples of another option: a square batch is no mask of its own."""
        others = [s for o in along if o is not option for s in shapes(o)]
        lengths = {s[dim + 1] for s in others if len(s) > max(dim, 0) + 1}
        looks = {(t, t) for t in lengths} | {(t,) for t in lengths}
        return not looks.isdisjoint(shapes(option))

    masks = [o for o in options if is_mask(o)]
    return [o for o in options if o not in masks] or list(options)


def _without_parts(options: Sequence[Option], calls: Sequence[Call]) -> list[Option]:
    """The options without those that are part of a flat one: features of graphs beside nodes."""
    given = next((call.given for call in calls if call.given is not None), None)
    flat = next((o for o in options if o.count is not None and o.count.flat), None)
    if given is None or flat is None or flat.count is None:
        return list(options)
    line, inputs = torch.arange(flat.count.m), [e for e in given.entries if e.owner is not None]

    def is_part(option: Option) -> bool:
        if option.count is None or option.count.flat or option.count.m != len(line):
            return False
        own = [e.owner for e in given.entries if e.counts(option.count)]
        same = all(o is not None and torch.equal(o.flatten(), line) for o in own)
        return same and len(own) < len(inputs)

    return [o for o in options if not is_part(o)]


def _undecided(
    options: Sequence[Option], calls: Sequence[Call], arguments: Sequence[str]
) -> NotObservable:
    given = next((call.given for call in calls if call.given is not None), None)
    found = []
    for option in options:
        count = option.count or Count(calls[0].m)
        if given is not None:
            batched = [e for e in given.entries if e.counts(count)]
            chosen = [e for i, e in enumerate(batched) if i in option.members] or batched
            found.append(given.named(count, arguments, chosen))
    owner = 'that one holds the owner of each row with batch_dim={name: "owner"}, '
    flat = any(option.count is not None and option.count.flat for option in options)
    return NotObservable(
        "how many samples this pass has is not established: each of these would do, "
        f"{'; '.join(dict.fromkeys(found))}. Say which arguments are no batch with "
        f"batch_dim={{name: None}}, {owner if flat else ''}or along which dimension samples lie "
        "with batch_dim={name: 0} (a state carried from batch to batch has them along 1)"
    )
