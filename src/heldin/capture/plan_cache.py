"""A cache of the plans and layouts that traced calls have given, by the structure of calls."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge

from heldin._private_torch import raw_saved, saved, saved_names
from heldin.errors import HeldinWarning, MixedSamplesWarning, more

from .call import Call, Candidate
from .graph import Graph, shape_of, walk
from .layout import Layout
from .plan import Plan
from .reference import Output
from .sizes import LayoutPattern, Range, ScalablePlan, Sizes

__all__ = ["PlanCache"]

KINDS = 512  # maximum number of entries per table; the oldest is dropped
ANSWERED = 4  # calls to trace before trusting which `if tensor:` answers depend on data
IDLE = 3  # evaluations without no_grad() after which such calls are no longer traced
UNEXPECTED = 3  # unknown graphs of cached calls after which a kind of call is always traced


class OutputRecord(NamedTuple):
    """An output of a traced call."""

    layout: Layout
    last_op: tuple[Any, ...]  # name and settings (not sizes), and the output's number
    ops: int  # hash of the graph of all ops that have computed it


@dataclass
class OutputPatterns:
    """The layouts of the outputs of calls of one kind, for all sizes."""

    sizes: Range
    records: list[OutputRecord | None]  # of the first call; None: the layout is not established
    patterns: list[LayoutPattern | None]  # None: no pattern fits all calls


@dataclass
class PlanCache:
    """A cache of plans and layouts by the structure of calls, independent of batch contents."""

    _plans: dict[Any, Plan] = field(default_factory=dict)  # by calls, leaves and graph
    _scalable: dict[Any, ScalablePlan] = field(default_factory=dict)  # the same without sizes
    _known: set[Any] = field(default_factory=set)  # keys of calls that need no trace
    _ranges: dict[Any, Range] = field(default_factory=dict)  # sizes that need no trace, by kind
    _own_sizes: set[Any] = field(default_factory=set)  # kinds whose plans hold for one size only
    _outputs: dict[Any, list[OutputRecord | None]] = field(default_factory=dict)  # by call's key
    _output_patterns: dict[Any, OutputPatterns] = field(default_factory=dict)  # by kind
    _unexpected: Counter[Any] = field(default_factory=Counter)  # unknown graphs of cached calls
    _idle: Counter[Any] = field(default_factory=Counter)  # traces without a backward, by call's key
    _warned: set[str] = field(default_factory=set)
    # By kind: which of the values that Python reads out of tensors depend on data.
    branch_questions: dict[Any, tuple[bool, ...]] = field(default_factory=dict)
    _asked: Counter[Any] = field(default_factory=Counter)  # traced calls with questions, by kind

    def __len__(self) -> int:
        return len(self._plans)

    # -- calls

    def covers(self, kind: Any, sizes: Sizes) -> bool:
        """Return whether a call can be observed without tracing it."""
        if self._idle and self._idle[kind, sizes] >= IDLE:
            return not self._unexpected[kind, sizes]
        if self.branch_questions and kind in self.branch_questions and self._asked[kind] < ANSWERED:
            return False
        if (kind, sizes) in self._known:
            return True
        between = self._ranges.get(kind)
        return between is not None and sizes in between and kind not in self._own_sizes

    def record_idle(self, call: Call) -> None:
        """Count a traced evaluation that no backward pass has reached."""
        is_training = call.kind[2]
        lasting = all(tracker.volatile_reason is None for tracker in call.trackers)
        if call.candidates and lasting and not is_training:
            if len(self._idle) > KINDS:
                self._idle.clear()
            self._idle[call.key] += 1

    def invalidate(self, calls: Sequence[Call]) -> None:
        """Trace the next calls of these kinds again, because they have built an unknown graph."""
        if len(self._unexpected) > KINDS:
            self._unexpected.clear()
        for call in calls:
            for key in (call.key, call.kind):
                self._unexpected[key] += 1
            self._known.discard(call.key)
            self._ranges.pop(call.kind, None)

    # -- plans

    def plan(
        self, calls: Sequence[Call], leaves: tuple[str | None, ...], graph: Graph
    ) -> Plan | None:
        """Return the plan for a graph, if it is cached or follows from plans at other sizes."""
        key, key_without_sizes = _keys(calls, leaves, graph)
        plan = self._plans.get(key)
        if plan is not None:
            return plan if plan.fits(graph) else None
        if any(call.tracker is not None for call in calls):
            return None  # a fresh trace is preferred to a scaled plan
        if len({call.m for call in calls}) != 1:
            return None
        scalable = self._scalable.get(key_without_sizes)
        if scalable is None or _all_sizes(calls) not in scalable.sizes:
            return None
        plan = scalable.instantiate(graph, calls[0].m)
        if plan is not None:
            self._keep(key, plan)
        return plan

    def remember(
        self, calls: Sequence[Call], leaves: tuple[str | None, ...], graph: Graph, plan: Plan
    ) -> None:
        """Cache a plan for later graphs of this kind, unless too many were unexpected."""
        key, key_without_sizes = _keys(calls, leaves, graph)
        self._keep(key, plan)
        self._known.update(call.key for call in calls if self._unexpected[call.key] < UNEXPECTED)
        scalable = self._scalable.get(key_without_sizes)
        if scalable is None:
            scalable = self._scalable[key_without_sizes] = ScalablePlan(plan, _all_sizes(calls))
            _shorten(self._scalable)
        else:
            scalable.add(plan, _all_sizes(calls))
        for call in calls:
            if not scalable.scales or self._unexpected[call.kind] >= UNEXPECTED:
                self._own_sizes.add(call.kind)
            self._ranges.setdefault(call.kind, Range(call.sizes, call.sizes)).widen(call.sizes)
            _shorten(self._ranges)

    def _keep(self, key: Any, plan: Plan) -> None:
        self._plans[key] = plan
        if len(self._plans) > KINDS:  # calls of a dropped plan have to be traced again
            oldest = next(iter(self._plans))
            del self._plans[oldest]
            self._known.difference_update(oldest[0])

    # -- outputs

    def confirm(self, call: Call, candidate: Candidate) -> None:
        """Store the trace of a call whose number of samples is decided."""
        call.choose(candidate)
        if candidate.tracker is None:
            return
        call.record_branches(None)
        if call.answers:
            self.branch_questions[call.kind] = tuple(
                [counts for _, counts in candidate.tracker.answers]
            )
            self._asked[call.kind] += 1
            _shorten(self.branch_questions)
        self._record_outputs(call, candidate.layouts)
        self.warn_mixed(candidate.tracker.mixing_ops)

    def _record_outputs(self, call: Call, layouts: list[Layout | None]) -> None:
        key, kind = (call.key, call.answers), (call.kind, call.answers)
        records = [
            None if node is None or layout is None else OutputRecord(layout, *_ops_of(node, number))
            for (node, number), layout in zip(call.ends, layouts, strict=True)
        ]
        self._outputs.pop(key, None)
        self._outputs[key] = records
        if len(self._outputs) > 2 * KINDS:  # keep the records of cached calls
            for old in [k for k in self._outputs if k[0] not in self._known][: KINDS // 2]:
                del self._outputs[old]
        at_all_sizes = self._output_patterns.get(kind)
        if at_all_sizes is None or len(at_all_sizes.patterns) != len(records):
            patterns = [record and LayoutPattern.from_layout(record.layout) for record in records]
            sizes = Range(call.sizes, call.sizes)
            self._output_patterns[kind] = OutputPatterns(sizes, records, patterns)
            _shorten(self._output_patterns)
            return
        at_all_sizes.sizes.widen(call.sizes)
        at_all_sizes.patterns = [
            pattern and record and pattern.merge(record.layout)
            for pattern, record in zip(at_all_sizes.patterns, records, strict=True)
        ]

    def outputs(self, call: Call) -> list[Output]:
        """Return the outputs of a call in which the place of each sample is established.

        That is so for a traced call. Another call of the same kind takes over its layouts for
        outputs that the same ops have computed, and for outputs at the same place with the same
        shape, if the layout fits in one way only or comes from the same last op.
        """
        records = self._outputs.get((call.key, call.answers))
        if records is None:
            at_all_sizes = self._output_patterns.get((call.kind, call.answers))
            if at_all_sizes is None or call.sizes not in at_all_sizes.sizes:
                return []
            records = [None] * len(at_all_sizes.patterns)
            pairs = zip(call.ends, at_all_sizes.records, at_all_sizes.patterns, strict=False)
            for i, ((node, number), record, pattern) in enumerate(pairs):
                if node is not None and record is not None and pattern is not None:
                    layout = pattern.instantiate(shape_of(node, number), call.m)
                    records[i] = None if layout is None else record._replace(layout=layout)
        outputs = []
        for i, (node, number) in enumerate(call.ends):
            same_place = records[i] if len(records) == len(call.ends) else None
            layout = None if node is None else _layout_of(node, number, same_place, records)
            if layout is not None:
                outputs.append((GradientEdge(node, number), layout))
        return outputs

    # -- warnings

    def warn_once(self, key: str, text: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            warnings.warn(text, HeldinWarning, stacklevel=2)

    def warn_unobserved(self, why: str) -> None:
        """Warn once that calls are not observed."""
        self.warn_once(
            why,
            f"the model is called {why}: such calls run normally, but are not observed "
            + more("calls-that-are-not-observed"),
        )

    def warn_mixed(self, mixing_ops: Mapping[str, str]) -> None:
        """Warn once per cause that samples are mixed: name the first place, count the others."""
        for cause in dict.fromkeys(mixing_ops.values()):
            if cause in self._warned:
                continue
            self._warned.add(cause)
            first, *others = [place for place, other in mixing_ops.items() if other == cause]
            count = f", as in {len(others)} other place{'s' * (len(others) > 1)}" if others else ""
            warnings.warn(
                f"{first} mixes the samples of a batch ({cause}{count}), so that per-sample "
                "gradients do not exist. heldin uses the contributions of each sample's rows "
                "instead. If an argument only looks like a batch, pass batch_dim={name: None} "
                + more("samples-are-mixed"),
                MixedSamplesWarning,
                stacklevel=2,
            )


def _ops_of(node: Any, number: int) -> tuple[tuple[Any, ...], int]:
    """Describe the ops that have computed an output of a node: see `OutputRecord`."""
    names = [name for name in saved_names(node) if not name.endswith(("sizes", "numel"))]
    plain = [(n, str(saved(node, n, None))) for n in names if raw_saved(node, n) is None]
    return (node.name(), *plain, number), hash(walk([node]).signature)


def _layout_of(
    node: Any, number: int, same_place: OutputRecord | None, records: Sequence[OutputRecord | None]
) -> Layout | None:
    """Return the layout of an output of a call; None if the records do not establish it."""
    shape, (last_op, ops) = shape_of(node, number), _ops_of(node, number)
    fitting = [record for record in records if record is not None and record.layout.shape == shape]
    if same_place is not None and same_place.layout.shape == shape:
        dim = same_place.layout.dim
        fits_one_way = dim is not None and shape.count(shape[dim]) == 1
        if fits_one_way or same_place.last_op == last_op:
            return same_place.layout
    same_ops = [record.layout for record in fitting if record[1:] == (last_op, ops)]
    if same_ops and all(torch.equal(same_ops[0].owner, other.owner) for other in same_ops[1:]):
        return same_ops[0]
    return None


def _keys(
    calls: Sequence[Call], leaves: tuple[str | None, ...], graph: Graph
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the key of a plan, and a key that is the same for calls of other sizes."""
    rest = (tuple([call.answers for call in calls]), leaves, *graph.signature)
    return (tuple([call.key for call in calls]), *rest), (tuple([c.kind for c in calls]), *rest)


def _all_sizes(calls: Sequence[Call]) -> Sizes:
    return tuple([size for call in calls for size in call.sizes])


def _shorten(table: dict[Any, Any]) -> None:
    if len(table) > KINDS:
        del table[next(iter(table))]
