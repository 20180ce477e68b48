"""What was found out about a model, from one backward pass to the next.

A call is *followed* if it runs under a tracker that records which sample each element belongs to.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from heldin._private_torch import raw_saved, saved, saved_names
from heldin.errors import HeldinWarning, MixedSamplesWarning, NotObservable, more

from .arguments import Arguments, Count
from .graph import Graph, number_of, shape_of, walk
from .layout import Layout
from .ownership.numbers import Numbers
from .ownership.tracker import Tracker
from .plan import Plan
from .reference import Output
from .sizes import Form, Range, ScalablePlan, Sizes

__all__ = ["Call", "Candidate", "Knowledge"]

KINDS = 512  # entries that are kept in each table, by kind of call; the oldest goes
ANSWERED = 4  # calls to follow before it is clear which values that Python reads follow from data
IDLE = 3  # evaluations without no_grad() after which such calls are not followed any more
UNEXPECTED = 3  # surprises (unknown graphs of known calls) after which a kind is always followed


@dataclass(eq=False, slots=True)
class Candidate:
    """One number of samples that a call may have, and what following it as such has found."""

    count: Count
    tracker: Tracker | None
    layouts: list[Layout | None] = field(default_factory=list)  # of the outputs


@dataclass(eq=False, slots=True)
class Call:
    """A forward pass under observation.

    Attributes:
        kind: all that decides which graph it builds, but for sizes.
        sizes: see `sizes_of`.
        m: number of samples.
        tracker: what has followed it, if it was followed.
        ends: node and number of each output.
        given: its arguments, if more than one number of samples is possible; else None.
        candidates: the numbers of samples under which it was followed.
        numbers: records what Python reads out of tensors (`item()`, `if tensor`), if the call was
            not followed.
        answers: the values that it read and that may change the graph.
        sealed: nodes are kept by number only, so that their graph may go.
    """

    kind: Any
    sizes: Sizes
    m: int
    tracker: Tracker | None = None
    ends: Sequence[tuple[Any, int]] = ()
    given: Arguments | None = None
    candidates: list[Candidate] = field(default_factory=list)
    numbers: Numbers | None = None
    answers: Any = ()
    sealed: bool = False

    @property
    def key(self) -> Any:
        return self.kind, self.sizes

    def choose(self, candidate: Candidate) -> None:
        """Take one of the numbers of samples for the true one."""
        self.m, self.tracker = candidate.count.m, candidate.tracker

    def distrust(self, why: str) -> None:
        """What is found about this call need not hold for the next one."""
        for candidate in self.candidates:
            if candidate.tracker is not None:
                candidate.tracker.volatile = candidate.tracker.volatile or why

    def note_answers(self, counting: tuple[bool, ...] | None) -> None:
        """Keep the answers that count; which ones do was found out when it was followed."""
        if self.numbers is not None:
            given = [answer for answer, _ in self.numbers.answers]
            flags = counting if counting is not None and len(counting) == len(given) else None
            self.answers = (len(given), *[a for i, a in enumerate(given) if not flags or flags[i]])
            self.numbers = None
        elif self.tracker is not None and any(counts for _, counts in self.tracker.answers):
            found = self.tracker.answers
            self.answers = (len(found), *[answer for answer, counts in found if counts])

    def seal(self) -> None:
        """Keep numbers in the place of nodes: their graph may go if no backward pass comes."""
        self.sealed = True
        self._rename(lambda node: None if node is None else number_of(node))

    def unseal(self, graph: Graph) -> bool:
        """Look up the nodes in a graph; whether the call is part of it."""
        found = graph.by_number
        if not any(node in found for node, _ in self.ends):
            return False
        if any(node in found and found[node] is None for node, _ in self.ends):
            raise NotObservable(
                "which call of the model this backward pass belongs to is not known: several "
                "calls were waiting, and their graphs were built by several threads. Call "
                "backward() after each call"
            )
        self.sealed = False
        self._rename(found.get)
        return True

    def _rename(self, renamed: Any) -> None:
        self.ends = [(renamed(node), number) for node, number in self.ends]
        for candidate in self.candidates:
            if candidate.tracker is not None:
                candidate.tracker.rename(renamed)

    def release(self) -> None:
        """Let go of the graph."""
        self.ends = ()
        for candidate in self.candidates:
            if candidate.tracker is not None:
                candidate.tracker.release()
        self.candidates, self.given = [], None


@dataclass(frozen=True)
class Ops:
    """The ops that have computed a tensor.

    Attributes:
        last: name and settings (not sizes) of the last one, number of the tensor among its outputs.
        signature: hash of the graph of all of them.
    """

    last: tuple[Any, ...]
    signature: int


@dataclass(frozen=True)
class OutputRecord:
    """An output of a followed call: where samples lie in it, and which ops have computed it."""

    layout: Layout
    ops: Ops


@dataclass
class OutputForms:
    """Where samples lie in the outputs of calls of one kind, at all sizes.

    Attributes:
        sizes: the sizes of the calls.
        forms: per output, its form and the ops that have computed it; None: no form fits.
    """

    sizes: Range
    forms: list[tuple[Form, Ops] | None]


@dataclass
class Knowledge:
    """Plans and layouts, by the shapes and structure of calls; nothing in it depends on a batch."""

    _plans: dict[Any, Plan] = field(default_factory=dict)  # by calls, leaves and graph
    _scalable: dict[Any, ScalablePlan] = field(default_factory=dict)  # the same without sizes
    _known: set[Any] = field(default_factory=set)  # keys of calls that need not be followed
    _ranges: dict[Any, Range] = field(default_factory=dict)  # by kind: sizes that need not be
    _own_sizes: set[Any] = field(default_factory=set)  # kinds whose plans hold for one size only
    _outputs: dict[Any, list[OutputRecord | None]] = field(default_factory=dict)  # by call's key
    _output_forms: dict[Any, OutputForms] = field(default_factory=dict)  # by kind
    _unexpected: Counter[Any] = field(default_factory=Counter)  # unknown graphs of known calls
    _idle: Counter[Any] = field(default_factory=Counter)  # followed in vain, by key of the call
    _warned: set[str] = field(default_factory=set)
    # by kind: which of the values that Python reads out of tensors follow from the data
    questions: dict[Any, tuple[bool, ...]] = field(default_factory=dict)
    _asked: Counter[Any] = field(default_factory=Counter)  # by kind: calls followed with questions

    def __len__(self) -> int:
        return len(self._plans)

    # -- calls

    def knows(self, kind: Any, sizes: Sizes) -> bool:
        """Whether a call need not be followed."""
        if self._idle and self._idle[kind, sizes] >= IDLE:
            return not self._unexpected[kind, sizes]
        if self.questions and kind in self.questions and self._asked[kind] < ANSWERED:
            return False
        if (kind, sizes) in self._known:
            return True
        between = self._ranges.get(kind)
        return between is not None and sizes in between and kind not in self._own_sizes

    def note_idle(self, call: Call) -> None:
        """No backward pass has come to a call; if it was an evaluation, none will to the next."""
        training, trackers = call.kind[2], [candidate.tracker for candidate in call.candidates]
        lasting = all(tracker is None or tracker.volatile is None for tracker in trackers)
        if trackers and lasting and not training:
            if len(self._idle) > KINDS:
                self._idle.clear()
            self._idle[call.key] += 1

    def doubt(self, calls: Sequence[Call]) -> None:
        """These calls led to a graph that was not known: follow the next ones again."""
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
        """The plan for a graph, if it is known or follows from those at other sizes."""
        rest = (tuple([call.answers for call in calls]), leaves, *graph.signature)
        key = (tuple([call.key for call in calls]), *rest)
        plan = self._plans.get(key)
        if plan is not None:
            return plan if plan.fits(graph) else None
        if any(call.tracker is not None for call in calls):
            return None  # it was followed: what was seen counts
        if len({call.m for call in calls}) != 1:
            return None
        scalable = self._scalable.get((tuple([call.kind for call in calls]), *rest))
        if scalable is None or _all_sizes(calls) not in scalable.sizes:
            return None
        plan = scalable.at(graph, calls[0].m)
        if plan is not None:
            self._keep(key, plan)
        return plan

    def remember(
        self, calls: Sequence[Call], leaves: tuple[str | None, ...], graph: Graph, plan: Plan
    ) -> None:
        """Keep a plan for later graphs of this kind, unless the kind has surprised too often."""
        rest = (tuple([call.answers for call in calls]), leaves, *graph.signature)
        self._keep((tuple([call.key for call in calls]), *rest), plan)
        self._known.update(call.key for call in calls if self._unexpected[call.key] < UNEXPECTED)
        kinds = (tuple([call.kind for call in calls]), *rest)
        scalable = self._scalable.get(kinds)
        if scalable is None:
            self._scalable[kinds] = ScalablePlan.of(plan, _all_sizes(calls))
            _shorten(self._scalable)
        else:
            scalable.add(plan, _all_sizes(calls))
        for call in calls:
            if self._scalable[kinds].forms is None or self._unexpected[call.kind] >= UNEXPECTED:
                self._own_sizes.add(call.kind)
            between = self._ranges.get(call.kind)
            if between is None:
                self._ranges[call.kind] = Range(call.sizes, call.sizes)
                _shorten(self._ranges)
            else:
                between.widen(call.sizes)

    def _keep(self, key: Any, plan: Plan) -> None:
        self._plans[key] = plan
        if len(self._plans) > KINDS:  # a call whose plan is gone has to be followed again
            oldest = next(iter(self._plans))
            del self._plans[oldest]
            self._known.difference_update(oldest[0])

    # -- outputs

    def settle(self, call: Call, candidate: Candidate) -> None:
        """How many samples a followed call has is known: keep what was found about it."""
        call.choose(candidate)
        if candidate.tracker is None:
            return
        call.note_answers(None)
        if call.answers:
            self.questions[call.kind] = tuple([counts for _, counts in candidate.tracker.answers])
            self._asked[call.kind] += 1
            _shorten(self.questions)
        self._note_outputs(call, candidate.layouts)
        self.warn_mixed(candidate.tracker.mixers)

    def _note_outputs(self, call: Call, layouts: list[Layout | None]) -> None:
        """Record the layouts of a followed call's outputs."""
        key, kind = (call.key, call.answers), (call.kind, call.answers)
        ends = zip(call.ends, layouts, strict=True)
        records = [
            None if node is None or layout is None else OutputRecord(layout, _ops_below(node, nr))
            for (node, nr), layout in ends
        ]
        self._outputs.pop(key, None)
        self._outputs[key] = records
        if len(self._outputs) > 2 * KINDS:  # those of known calls are needed
            for old in [k for k in self._outputs if k[0] not in self._known][: KINDS // 2]:
                del self._outputs[old]
        at_all_sizes = self._output_forms.get(kind)
        if at_all_sizes is None or len(at_all_sizes.forms) != len(records):
            forms = [None if record is None else _form_of(record) for record in records]
            self._output_forms[kind] = OutputForms(Range(call.sizes, call.sizes), forms)
            _shorten(self._output_forms)
            return
        at_all_sizes.sizes.widen(call.sizes)
        pairs = zip(at_all_sizes.forms, records, strict=True)
        at_all_sizes.forms = [
            None if form is None or record is None else _common_form(form, record)
            for form, record in pairs
        ]

    def outputs(self, call: Call) -> list[Output]:
        """Return the outputs of a call in which the place of each sample is established.

        That is so for a followed call. Another call of the same kind has the layouts of that one
        where the same ops have computed the output; or where it is at the same place, has the same
        shape, and the layout fits in one way only or comes from the same last op.
        """
        records = self._outputs.get((call.key, call.answers))
        if records is None:
            at_all_sizes = self._output_forms.get((call.kind, call.answers))
            if at_all_sizes is None or call.sizes not in at_all_sizes.sizes:
                return []
            records = [None] * len(at_all_sizes.forms)
            for i, (end, entry) in enumerate(zip(call.ends, at_all_sizes.forms, strict=False)):
                if end[0] is not None and entry is not None:
                    form, ops = entry
                    layout = form.at(shape_of(*end), call.m)
                    records[i] = None if layout is None else OutputRecord(layout, ops)
        found = []
        for i, (node, number) in enumerate(call.ends):
            layout = None if node is None else _layout_of(node, number, i, call.ends, records)
            if layout is not None:
                found.append((GradientEdge(node, number), layout))
        return found

    # -- warnings

    def warn_once(self, key: str, text: str) -> None:
        """Say something once."""
        if key not in self._warned:
            self._warned.add(key)
            warnings.warn(text, HeldinWarning, stacklevel=2)

    def warn_unobserved(self, why: str) -> None:
        """Say once that calls go by unobserved."""
        self.warn_once(
            why,
            f"the model is called {why}: such calls run as they would without heldin, and are "
            "not observed " + more("calls-that-are-not-observed"),
        )

    def warn_mixed(self, mixers: Mapping[str, str]) -> None:
        """Warn once per cause that samples are mixed: name the first place, count the others.

        Args:
            mixers: the cause by place in the model.
        """
        for cause in dict.fromkeys(mixers.values()):
            if cause in self._warned:
                continue
            self._warned.add(cause)
            first, *others = [place for place, other in mixers.items() if other == cause]
            count = f", as in {len(others)} other place{'s' * (len(others) > 1)}" if others else ""
            warnings.warn(
                f"{first} mixes the samples of a batch ({cause}{count}): there is no per-sample "
                "gradient as such. The contributions of each sample's rows are taken instead. "
                "An argument that only looks like a batch: batch_dim={name: None} "
                + more("samples-are-mixed"),
                MixedSamplesWarning,
                stacklevel=2,
            )


def _ops_below(node: Any, number: int) -> Ops:
    """Describe the ops that have computed an output of a node."""
    names = [name for name in saved_names(node) if not name.endswith(("sizes", "numel"))]
    plain = [(n, str(saved(node, n, None))) for n in names if raw_saved(node, n) is None]
    return Ops((node.name(), *plain, number), hash(walk([node]).signature))


def _layout_of(
    node: Any,
    number: int,
    i: int,
    ends: Sequence[Any],
    records: Sequence[OutputRecord | None],
) -> Layout | None:
    """Return the layout of the i-th output of a call; None if the records do not establish it."""
    shape, ops = shape_of(node, number), _ops_below(node, number)
    fitting = [r for r in records if r is not None and r.layout.shape == shape]
    same_place = records[i] if len(records) == len(ends) else None
    if same_place in fitting:
        assert same_place is not None
        dim = same_place.layout.dim
        fits_one_way = dim is not None and shape.count(shape[dim]) == 1
        if fits_one_way or same_place.ops.last == ops.last:
            return same_place.layout
    same_ops = [r.layout for r in fitting if r.ops == ops]
    if same_ops and all(torch.equal(same_ops[0].owner, other.owner) for other in same_ops[1:]):
        return same_ops[0]
    return None


def _form_of(record: OutputRecord) -> tuple[Form, Ops] | None:
    form = Form.of(record.layout)
    return None if form is None else (form, record.ops)


def _common_form(entry: tuple[Form, Ops], record: OutputRecord) -> tuple[Form, Ops] | None:
    form = entry[0].also(record.layout)
    return None if form is None else (form, record.ops)


def _all_sizes(calls: Sequence[Call]) -> Sizes:
    return tuple([size for call in calls for size in call.sizes])


def _shorten(table: dict[Any, Any]) -> None:
    if len(table) > KINDS:
        del table[next(iter(table))]
