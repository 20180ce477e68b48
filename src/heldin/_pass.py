"""One backward pass under observation: from the graph to the moments of every parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ._errors import NotObservable
from ._graph import Graph, Plan, Sink, hidden, make_plan, move, pull_back
from ._parts import CHUNK, Lazy, Moved, Part, Rows, moments, wide
from ._replay import Output, mixes_samples, replay, topmost
from ._rules import Use, contributions, narrowed

if TYPE_CHECKING:
    from ._calls import Call
    from ._observe import Observation

__all__ = ["Pass", "Sums"]

Sums = tuple[Tensor, Tensor, Tensor | None, float]  # total, squares, a penalty's part, weight


@contextmanager
def _no_autocast() -> Iterator[None]:
    """Statistics keep their precision where the user runs backward() under autocast."""
    with ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


class Pass:
    """One observation during one backward pass: prepare, hook, (backward), finish, close."""

    def __init__(
        self, observation: Observation, graph: Graph, roots: Sequence[Any], seeds: Any
    ) -> None:
        self.seen = observation
        self.graph = graph
        self.roots, self.seeds = roots, seeds
        self.plan: Plan | None = None
        self.calls: list[Call] = []
        self.done: dict[str, Sums] = {}
        self._handles: list[Any] = []
        self._parts: dict[tuple[int, int], list[Part]] = {}  # per sink, until it is complete
        self._written: dict[str, list[Part]] = {}  # per parameter, pulled back already
        self._busy = self._started = False
        self._autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")

    # -- before the pass

    def prepare(self) -> None:
        """Find out how to observe this pass, or refuse to."""
        seen, graph = self.seen, self.graph
        names = seen.names_of(graph.leaves.values())
        reached = [names[id(p)] for p in graph.leaves.values() if id(p) in names]
        self.calls = seen.calls.within(graph)
        if seen.estimator == "microbatch":
            if reached:
                self.plan = self._leaves_only(1)
            return
        trap = hidden(graph)
        if trap is not None and (reached or self.calls):
            raise NotObservable(
                f"{trap[0]} hides parameters from observation: {trap[1]}; or pass "
                'estimator="microbatch", which looks at whole micro-batches only'
            )
        if not reached:
            return
        if not self.calls:
            raise NotObservable(
                f"a backward pass reached parameter {reached[0]!r}, but not through a call of the "
                "model inside the observed block that was still to be followed back. Call the "
                "model (or run the step through call()), and add up losses and penalties before "
                "one backward()"
            )
        counts = {call.m for call in self.calls}
        if len(counts) > 1:
            raise NotObservable(
                f"one backward pass through calls of the model with {sorted(counts)} samples: "
                "which of them belong together is not known. Call backward() once for each"
            )
        seen.calls.passing += 1
        self._started = True
        (m,) = counts
        self.plan = self._plan(m)
        if seen.truth is not None:
            seen.truth.update(self._replayed(self.plan))

    def _plan(self, m: int) -> Plan:
        seen, graph = self.seen, self.graph
        if m == 1:
            return self._leaves_only(1)
        leaves = tuple([seen.names.get(id(p)) for p in graph.leaves.values()])
        key = (*[call.key for call in self.calls], leaves, graph.signature)
        plan = seen.knowledge.plans.get(key)
        if plan is not None:
            return plan
        trackers = [call.tracker for call in self.calls if call.tracker is not None]
        if len(trackers) < len(self.calls):
            return self._surprise(m)
        outputs = self._outputs()
        if outputs and mixes_samples(self.roots, outputs):
            seen.knowledge.warn_mixed({"the loss": "it depends on several samples jointly"})
        owners = {k: v for tracker in trackers for k, v in tracker.nodes.items()}
        slots = {k: v for tracker in trackers for k, v in tracker.slots.items()}
        cause = next((t.first_mixed for t in trackers if t.first_mixed), None)
        plan = make_plan(graph, seen.names, owners, slots, m, cause)
        if not any(tracker.volatile for tracker in trackers):
            seen.knowledge.remember(key, plan, self.calls)
        return plan

    def _leaves_only(self, m: int) -> Plan:
        names = self.seen.names
        leaves = {names[id(p)]: i for i, p in self.graph.leaves.items() if id(p) in names}
        return Plan(m, leaves=leaves)

    def _outputs(self) -> list[Output]:
        known = self.seen.knowledge.results
        pairs = [pair for c in self.calls for pair in c.outputs(known.get(c.key, []))]
        return topmost(self.graph, pairs)

    def _replayed(self, plan: Plan) -> dict[str, tuple[Tensor, Tensor]]:
        params = {name: self.graph.leaves[i] for name, i in plan.leaves.items()}
        outputs = self._outputs()
        return replay(self.roots, self.seeds, outputs, params, plan.m) if outputs else {}

    def _surprise(self, m: int) -> Plan:
        """A graph whose forward pass was not followed: one backward pass per sample, this once."""
        self.seen.knowledge.doubt(self.calls)
        plan = self._leaves_only(m)
        plan.replayed = True
        for name, (first, second) in self._replayed(plan).items():
            self.done[name] = (first, second, None, 1.0)
        return plan

    # -- hooks

    def hook(self) -> None:
        """Listen at the nodes of the plan."""
        plan, nodes = self.plan, self.graph.nodes
        if plan is None:
            return
        add = self._handles.append
        for position in plan.uses:
            add(nodes[position].register_prehook(self._listener(self._used, position)))
        for position in plan.general:
            add(nodes[position].register_prehook(self._listener(self._pulled, position)))
        for name, position in plan.leaves.items():
            if name in plan.sinks or name in plan.shared or plan.m == 1 or plan.replayed:
                add(nodes[position].register_prehook(self._listener(self._arrived, name)))

    def _listener(self, respond: Callable[[Any, Any], None], what: Any) -> Callable[[Any], None]:
        def fired(grads: Sequence[Tensor | None]) -> None:
            if self._busy:  # a backward pass of our own, inside the one observed
                return
            self._busy = True
            try:
                if self._autocast:
                    with _no_autocast():
                        respond(what, grads)
                else:
                    respond(what, grads)
            finally:
                self._busy = False

        return fired

    def _used(self, position: int, grads: Sequence[Tensor | None]) -> None:
        """A parameter meets data, and the gradient is about to pass by."""
        plan = self.plan
        assert plan is not None
        node, layouts = self.graph.nodes[position], plan.layouts[position]
        with torch.no_grad():
            for argument, sink in plan.uses[position]:
                use = Use(node, grads, layouts, argument, sink.shape)
                self._take(use, sink, plan)

    def _take(self, use: Use, sink: Sink, plan: Plan) -> None:
        sampler = self.seen.sampler
        alone = sink.chain is not None and plan.alone(sink.params[0])
        if sampler is not None and sink.chain == () and len(use.shape) == 1:
            use = narrowed(use, sampler, sink.params[0])
        part = contributions(use)
        if isinstance(part, Lazy):  # what it reads will be gone when the node has run
            if alone and not plan.shared:
                name = sink.params[0]
                first, second = self._in_place(sink, part).moments(None)
                self.done[name] = (first, second, None, 1.0)
                return
            part = part.written_out()
        self._parts.setdefault(sink.key, []).append(part)

    def _in_place(self, sink: Sink, part: Part) -> Part:
        """The part in the shape of its parameter."""
        if not sink.chain:
            return part
        if sink.transposed:
            swap = getattr(part, "t", None)
            if swap is not None:
                swapped: Part = swap()
                return swapped
        assert self.plan is not None
        leaf = self.graph.leaves[self.plan.leaves[sink.params[0]]]
        return Moved(part, lambda value: move(self.graph, sink, value), tuple(leaf.shape))

    def _pulled(self, position: int, grads: Any) -> None:
        """All uses of a data-free tensor are known and it is about to pass its gradient down."""
        plan = self.plan
        assert plan is not None
        for sink in plan.general[position]:
            parts = self._parts.pop(sink.key, None)
            if parts is not None:
                self._pull(plan, sink, parts)

    def _pull(self, plan: Plan, sink: Sink, parts: list[Part]) -> None:
        leaves = [self.graph.leaves[plan.leaves[name]] for name in sink.params]
        sizes = sum(leaf.numel() for leaf in leaves) + sum(p.numel for p in parts)
        step = max(1, min(plan.m, CHUNK // max(1, sizes)))
        single = not plan.shared and all(len(plan.sinks[name]) == 1 for name in sink.params)
        chunks = []
        for lo in range(0, plan.m, step):
            with torch.no_grad():
                value = parts[0].take(lo, min(plan.m, lo + step))
                for part in parts[1:]:
                    value = value + part.take(lo, min(plan.m, lo + step))
            pulled = [wide(grad) for grad in pull_back(self.graph, sink, value, leaves)]
            if single:
                for name, grad in zip(sink.params, pulled, strict=True):
                    first, second = grad.sum(0), grad.square().sum(0)
                    if name in self.done:
                        first = self.done[name][0] + first
                        second = self.done[name][1] + second
                    self.done[name] = (first, second, None, 1.0)
            else:
                chunks.append(pulled)
        if chunks:
            for name, *pieces in zip(sink.params, *chunks, strict=True):
                self._written.setdefault(name, []).append(Rows(torch.cat(pieces)))

    def _arrived(self, name: str, grads: Sequence[Tensor | None]) -> None:
        """The gradient of a parameter is complete."""
        plan, grad = self.plan, grads[0]
        assert plan is not None
        if grad is None:
            return
        with torch.no_grad():
            if plan.m == 1:
                dense = wide(grad.to_dense() if grad.is_sparse else grad)
                self.done[name] = (dense.clone(), dense.square(), None, 1.0)
            elif plan.replayed:
                self._check_replayed(plan, name, grad)
            elif name not in self.done:
                self._settle(plan, name, grad)

    def _settle(self, plan: Plan, name: str, grad: Tensor) -> None:
        parts = list(self._written.pop(name, []))
        for sink in plan.sinks.get(name, []):
            if sink.chain is not None:
                parts += [self._in_place(sink, part) for part in self._parts.pop(sink.key, [])]
        penalised = name in plan.shared
        leaf = self.graph.leaves[plan.leaves[name]]
        if not parts:
            if not penalised:
                return
            zero = torch.zeros_like(wide(grad))
            self.done[name] = (zero, zero.clone(), wide(grad).clone(), 1.0)
            return
        sampler = self.seen.sampler
        if sampler is not None and not penalised:
            found = self._sampled(name, leaf, parts)
            if found is not None:
                self.done[name] = found
                return
        usable = not (penalised or leaf._backward_hooks or grad.is_sparse or wide(grad) is not grad)
        first, second = moments(parts, grad if usable else None)
        if first is grad:
            first = grad.clone()
        self.done[name] = (first, second, wide(grad) - first if penalised else None, 1.0)

    def _sampled(self, name: str, leaf: Tensor, parts: list[Part]) -> Sums | None:
        sampler = self.seen.sampler
        assert sampler is not None
        spread = leaf.dim() > 1 and all(part.rows == 1 for part in parts)
        block, weight = sampler.block(name, leaf.shape, spread=spread)
        if block is None:
            return None
        sizes = zip(block, leaf.shape, strict=False)
        shape = (*[len(range(size)[piece]) for piece, size in sizes], *leaf.shape[len(block) :])
        smaller = [part if part.shape == shape else part.cut(block) for part in parts]
        if not all(smaller):
            return None
        first, second = moments([part for part in smaller if part is not None])
        return first, second, None, weight

    def _check_replayed(self, plan: Plan, name: str, grad: Tensor) -> None:
        found = self.done.get(name)
        grad = wide(grad.to_dense() if grad.is_sparse else grad)
        largest = float(grad.abs().max()) if grad.numel() else 0.0
        if found is None:
            missing = largest
        elif self.graph.leaves[plan.leaves[name]]._backward_hooks:
            missing = 0.0  # the user changes the gradient on its way
        else:
            missing = float((grad - found[0]).abs().max())
        if missing > 0.01 * largest:
            raise NotObservable(
                f"parameter {name!r}: the graph of this step differs from those seen so far, and "
                "part of its gradient does not come through the model's outputs. The next steps "
                "will be followed from their forward pass on"
            )

    # -- after the pass

    def finish(self) -> None:
        """The pass went through: add what it showed."""
        if self.plan is not None:
            with torch.no_grad():
                self.seen.add(self.done, self.plan.m, self.calls)

    def close(self) -> None:
        """Let go of the graph, also after an error."""
        if self._started:
            self._started = False
            self.seen.calls.passing -= 1
        for handle in self._handles:
            handle.remove()
        for call in self.calls:
            call.release()
        self._handles, self._parts, self._written, self.done = [], {}, {}, {}
        self.graph, self.roots, self.seeds = Graph([], {}, [], [], {}), [], None
