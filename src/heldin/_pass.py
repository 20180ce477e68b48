"""One backward pass under observation: from the graph to the moments of every parameter."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ._distributed import is_parallel, runs_once
from ._errors import HeldinWarning, NotObservable
from ._graph import Graph, Plan, Sink, hidden, make_plan, move, pull_back
from ._moments import Sums, usual
from ._parts import CHUNK, Lazy, Moved, Part, Rows, moments, wide
from ._replay import Output, frontier, mixes_samples, replay, topmost
from ._routine import is_batched, routine
from ._rules import Site, Use, contributions, narrowed
from ._shortcuts import Blocks, Spot, fill, shortcut

if TYPE_CHECKING:
    from ._calls import Call
    from ._observe import Observation

__all__ = ["Held", "Pass", "Reduced", "Stored"]

NOTHING = Graph([], {}, [], [], {})
# Elements of activations that are copied, to be looked at after the pass:
BLOCK = 1 << 18  # for a block of coordinates
WHOLE = 1 << 14  # for all of them

Stored = tuple[Tensor, Tensor, Tensor | None, float]  # total, squares, a penalty's part, weight
Reduced = tuple[Sums, int, float]  # with the number of coordinates and the weight of each
Held = tuple[Callable[[], tuple[Tensor, Tensor]], float]  # total and squares, if needed; weight


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
        self,
        observation: Observation,
        graph: Graph,
        roots: Sequence[Any],
        seeds: Any,
        inputs: Any = None,
    ) -> None:
        self.seen = observation
        self.graph = graph
        self.roots, self.seeds, self.inputs = roots, seeds, inputs
        self.plan: Plan | None = None
        self.calls: list[Call] = []
        self.done: dict[str, Stored] = {}
        self.ratios: dict[str, Reduced] = {}
        self.held: dict[str, Held] = {}  # see `Observation.careful`
        self._handles: list[Any] = []
        self._parts: dict[tuple[int, int], list[Part]] = {}  # per sink, until it is complete
        self._written: dict[str, list[Part]] = {}  # per parameter, pulled back already
        self._later: list[tuple[str, list[Part], float]] = []  # small, for the end of the pass
        self._blocks: list[Blocks] = []  # read by shortcuts
        self._short: set[str] = set()  # parameters of which no more is waited for
        self._uses: dict[str, int] = {}
        self._busy = self._started = self._aiming = False
        self._task: int | None = None  # the engine's number for this pass
        self._known: dict[str, Stored] = {}  # of `done`, before the pass
        self._autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")

    # -- before the pass

    def prepare(self) -> None:
        """Find out how to observe this pass, or refuse to."""
        seen, graph = self.seen, self.graph
        names = seen.names_of(graph.leaves.values())
        if seen.estimator == "microbatch":
            if any(id(leaf) in names for leaf in graph.leaves.values()):
                self._refuse_parallel_tensors()
                self.plan = self._leaves_only(1)
            return
        self.calls = seen.calls.within(graph)
        leaves = tuple([names.get(id(leaf)) for leaf in graph.leaves.values()])
        key = (tuple([call.key for call in self.calls]), leaves, *graph.signature)
        self.plan = seen.knowledge.plans.get(key)
        if self.plan is None or not self.plan.fits(graph):
            self.plan = None
            self._inspect([name for name in leaves if name is not None], key)
        if self.plan is not None:
            if seen.passes:
                seen.write_out()
            seen.calls.passing += 1
            self._started = True
            if seen.truth is not None and seen.sharded:
                raise NotObservable(
                    "the truth takes backward passes of our own, which would disturb fully_shard; "
                    "compare before the model is sharded"
                )
            if seen.truth is not None:
                seen.truth.update(self._replayed(self.plan))
        self._known = self.done.copy()

    def _inspect(self, reached: Sequence[str], key: Any) -> None:
        """A graph that was not seen before."""
        trap = hidden(self.graph)
        if trap is not None and (reached or self.calls):
            raise NotObservable(
                f"{trap[0]} hides parameters from observation: {trap[1]}; or pass "
                'estimator="microbatch", which looks at whole micro-batches only'
            )
        if not reached:
            return
        self._refuse_parallel_tensors()
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
        (m,) = counts
        self.plan = self._leaves_only(1) if m == 1 else self._plan(m, key)

    def _refuse_parallel_tensors(self) -> None:
        """A parameter that no rank has as a whole, not even during the pass."""
        for leaf in self.graph.leaves.values():
            if is_parallel(leaf):
                name = self.seen.names.get(id(leaf), "of a frozen or unobserved layer")
                raise NotObservable(
                    f"parameter {name!r} is a DTensor during the forward pass (tensor parallel): "
                    "samples cannot be followed through it, nor can its gradient be summed here. "
                    "Use data-parallel ranks, or fully_shard, for the layers that are observed"
                )

    def _plan(self, m: int, key: Any) -> Plan | None:
        seen = self.seen
        trackers = [call.tracker for call in self.calls if call.tracker is not None]
        if len(trackers) < len(self.calls):
            return self._surprise(m)
        once = runs_once(self.graph.nodes)
        owners = {k: v for tracker in trackers for k, v in tracker.nodes.items()}
        slots = {k: v for tracker in trackers for k, v in tracker.slots.items()}
        cause = next((t.first_mixed for t in trackers if t.first_mixed), None)
        plan = make_plan(self.graph, seen.names, owners, slots, m, cause)
        outputs = self._outputs() or topmost(self.graph, frontier(self.graph, owners, m))
        if outputs and not (once or seen.sharded) and mixes_samples(self.roots, outputs):
            seen.knowledge.warn_mixed({"the loss": "it depends on several samples jointly"})
        if not once and not any(tracker.volatile for tracker in trackers):
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

    def _surprise(self, m: int) -> Plan | None:
        """A familiar call has led to an unknown graph: one backward pass per sample, this once.

        That needs the model's outputs, and that all of the gradient comes through them; without
        them the pass is let go, with a warning, and the next calls are followed again.
        """
        self.seen.knowledge.doubt(self.calls)
        if self.seen.sharded:
            self._let_go("backward passes of our own would disturb fully_shard")
            return None
        plan = self._leaves_only(m)
        found = self._replayed(plan)
        leaves = [self.graph.leaves[i] for i in plan.leaves.values()]
        grads = torch.autograd.grad(self.roots, leaves, self.seeds, retain_graph=True)
        for name, grad in zip(plan.leaves, grads, strict=True):
            whole = wide(grad.to_dense() if grad.is_sparse else grad)
            part = found[name][0] if name in found else torch.zeros_like(whole)
            if not bool(whole.isfinite().all()):
                continue  # nothing to compare; a broken number is reported as such
            if not torch.allclose(part, whole, rtol=1e-2, atol=1e-2 * float(whole.abs().max())):
                self._let_go(f"not all of {name!r}'s gradient comes through the model's outputs")
                return None
        for name, (first, second) in found.items():
            block, weight = self._block_of(name, first, m)
            self.done[name] = (first[block], second[block], None, weight)
        return plan

    def _let_go(self, why: str) -> None:
        self.seen.calls.done(self.calls)
        warnings.warn(
            "this backward pass is not observed: its graph differs from those that the same call "
            f"of the model has led to before, and {why}. The next calls are followed anew",
            HeldinWarning,
            stacklevel=2,
        )

    # -- hooks

    def hook(self) -> None:
        """Listen at the nodes of the plan."""
        plan, nodes, seen = self.plan, self.graph.nodes, self.seen
        if plan is None:
            return
        seen.routine = None  # its places may be taken
        add, listen, sampler = self._handles.append, self._listener, seen.sampler
        if plan.spots is None:
            plan.spots = _spots(plan)
        free = seen.rows is None and not seen.aiming  # a pass inside another has no shortcuts
        for position, spots in plan.spots:
            node = nodes[position]
            mine = [s if free and s and s.ready(node, sampler) else None for s in spots]
            self._short.update([s.name for s in mine if s])
            add(node.register_prehook(self._reader(position, mine)))
        if self._short:
            self._aim(plan)
        for position in plan.general:
            add(nodes[position].register_prehook(listen(self._pulled, position)))
        for name, position in plan.watched(sampler is not None):
            if name not in self._short:
                add(nodes[position].register_prehook(listen(self._arrived, name)))

    def _aim(self, plan: Plan) -> None:
        """Have places for what the shortcuts will read."""
        seen, part = self.seen, self._part
        seen.aiming = self._aiming = True
        if plan.blocks is None or not plan.blocks.fit(part, seen.memory):
            spots = [spot for _, spots in plan.spots or () for spot in spots if spot]
            plan.blocks = Blocks(spots, part, seen.memory)
            seen.memory = plan.blocks.memory
        self._blocks.append(plan.blocks)

    def _ours(self, grads: Sequence[Tensor | None]) -> bool:
        """Whether it is this pass that goes through a node.

        Not one of our own, nor one that the user's hooks run through the same graph, which the
        engine has given a higher number.
        """
        if self._busy:
            return False
        task = torch._C._current_graph_task_id()
        if task == self._task:
            return True
        if self._task is not None and task > self._task:
            return False
        if any(grad is not None and is_batched(grad) for grad in grads):
            return False  # of several passes at once
        if self._task is not None:  # what was seen so far belonged to another
            self._forget()
        self._task = task
        return True

    def _forget(self) -> None:
        self.done, self.ratios, self.held = self._known.copy(), {}, {}
        self._parts, self._written, self._later, self._uses = {}, {}, [], {}
        for blocks in self._blocks:
            for spot in blocks.spots:
                spot.full = False

    def _listener(self, respond: Callable[[Any, Any], None], what: Any) -> Callable[[Any], None]:
        def fired(grads: Sequence[Tensor | None]) -> None:
            if not self._ours(grads):
                return
            self._busy = True
            try:
                if torch.is_grad_enabled() or self._autocast:
                    with torch.no_grad(), _no_autocast():
                        respond(what, grads)
                else:
                    respond(what, grads)
            finally:
                self._busy = False

        return fired

    def _reader(self, position: int, spots: Sequence[Spot | None]) -> Callable[[Any], None]:
        """A listener that takes the shortcuts that there are."""
        node = self.graph.nodes[position]

        def fired(grads: Sequence[Tensor | None]) -> None:
            if not self._ours(grads):
                return
            for i in fill(spots, node, grads[0]):
                self._listener(self._used, position)((i, grads))

        return fired

    def _used(self, position: int, given: tuple[int, Sequence[Tensor | None]]) -> None:
        """A parameter meets data, and the gradient is about to pass by."""
        plan, (i, grads) = self.plan, given
        assert plan is not None
        argument, sink = plan.uses[position][i]
        site = plan.sites.get((position, argument))
        if site is None:
            site = plan.sites[position, argument] = Site()
        node, layouts = self.graph.nodes[position], plan.layouts[position]
        self._take(Use(node, grads, layouts, argument, sink.shape, site), sink, plan)

    def _take(self, use: Use, sink: Sink, plan: Plan) -> None:
        sampler, whole = self.seen.sampler, use
        narrows = sampler if sink.chain == () and len(use.shape) == 1 else None
        new = use.site.clean is None
        if narrows is not None:
            use = narrowed(use, narrows, sink.params[0])
        part = contributions(use)
        if narrows is not None and new and use.site.clean is not None:  # as from the next step on
            use = narrowed(use, narrows, sink.params[0])
            part = part if use is whole else contributions(use)
        if isinstance(part, Lazy):  # what it reads will be gone when the node has run
            alone = sink.chain is not None and plan.alone(sink.params[0])
            if alone and not plan.shared and self.seen.rows is None:
                first, second = self._in_place(sink, part).moments(None)
                self.done[sink.params[0]] = (first, second, None, 1.0)
                return
            part = part.written_out()
        name = sink.params[0]
        expected = plan.direct.get(name, 0)
        if expected == 1 and use.site.shortcut is None and self.seen.rows is None:
            if self._shortened(whole, sink):
                return
        if sampler is None and name not in self._short:
            expected = 0  # the gradient is waited for: it is the sum
        if expected == 1:
            self._look(plan, name, [self._in_place(sink, part)], None)
            return
        self._parts.setdefault(sink.key, []).append(part)
        if expected:  # with the last use of a parameter, it can be settled
            uses = self._uses[name] = self._uses.get(name, 0) + 1
            if uses == expected:
                self._settle(plan, name, None)

    def _shortened(self, use: Use, sink: Sink) -> bool:
        """Look for a shortcut, and take it at once: a resumed run must not differ by a bit."""
        plan, sampler = self.plan, self.seen.sampler
        assert plan is not None
        if use.grads[0] is None or (self.seen.aiming and not self._aiming):
            return False
        spot = shortcut(use, sink, sampler)
        use.site.shortcut = spot or False
        if spot is None or not spot.ready(use.node, sampler):
            return False
        plan.spots = plan.blocks = None  # from the next pass on it is one of them
        self.seen.aiming = self._aiming = True
        self._blocks.append(Blocks([spot], self._part, None))
        return not fill([spot], use.node, use.grad)

    @property
    def _part(self) -> float:
        """What `ratios` in `_kernels.c` takes."""
        assert self.plan is not None
        return 0.0 if self.seen.reducing else 1 / self.plan.m

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
        single = self.seen.rows is None and not plan.shared
        single = single and all(len(plan.sinks[name]) == 1 for name in sink.params)
        chunks = []
        for lo in range(0, plan.m, step):
            value = parts[0].take(lo, min(plan.m, lo + step))
            for part in parts[1:]:
                value = value + part.take(lo, min(plan.m, lo + step))
            grads = pull_back(self.graph, sink, value, leaves, plan.trusted)
            pulled = [wide(grad) for grad in grads]
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
        if plan.m == 1:
            dense = wide(grad.to_dense() if grad.is_sparse else grad)
            block, weight = self._block_of(name, dense, 1)
            self.done[name] = (dense[block].clone(), dense[block].square(), None, weight)
        elif name not in self.done:
            self._settle(plan, name, grad)

    def _settle(self, plan: Plan, name: str, grad: Tensor | None) -> None:
        """All contributions to a parameter are known (and its gradient, if it was waited for)."""
        parts = list(self._written.pop(name, []))
        for sink in plan.sinks.get(name, []):
            if sink.chain is not None:
                parts += [self._in_place(sink, part) for part in self._parts.pop(sink.key, [])]
        if parts:
            self._look(plan, name, parts, grad)
        elif grad is not None and (name in plan.shared or name in plan.silent):
            zero = torch.zeros_like(wide(grad))
            shared = wide(grad).clone() if name in plan.shared else None
            self.done[name] = (zero, zero.clone(), shared, 1.0)

    def _look(self, plan: Plan, name: str, parts: list[Part], grad: Tensor | None) -> None:
        """Form the moments of a parameter from its parts, or what is asked for in their place."""
        penalised = name in plan.shared
        leaf = self.graph.leaves[plan.leaves[name]]
        if self.seen.rows is not None:
            first, *others = (part.take(0, plan.m) for part in parts)
            self.seen.rows[name] = sum(others, start=first)
            return
        sampler = self.seen.sampler
        if sampler is not None and not penalised:
            parts, weight = self._sampled(name, leaf, parts)
            most = BLOCK if weight > 1 else WHOLE
            if all(0 < part.holds <= most for part in parts):
                self._later.append((name, [part.held() for part in parts], weight))
                return
            if weight != 1.0:
                self.done[name] = (*moments(parts), None, weight)
                return
        total = grad
        if grad is None or penalised or leaf._backward_hooks or grad.is_sparse:
            total = None
        elif wide(grad) is not grad:
            total = None  # the gradient is rounded more than the statistics are
        if not penalised and len(parts) == 1 and self._reduced(name, leaf, parts[0], total):
            return
        first, second = moments(parts, total)
        if first is total:
            first = first.clone()
        shared = wide(grad) - first if penalised and grad is not None else None
        self.done[name] = (first, second, shared, 1.0)

    def _reduced(self, name: str, leaf: Tensor, part: Part, total: Tensor | None) -> bool:
        """Form the ratios at once, if that is asked for and can be undone where it has to be."""
        seen = self.seen
        if seen.reducing is None or (seen.careful and seen.passes):
            return False
        if seen.careful:
            if not 0 < part.holds <= part.numel // 4:
                return False
            self.held[name] = (partial(part.held().moments, None), 1.0)
        self.ratios[name] = (part.ratios(total, seen.reducing), leaf.numel(), 1.0)
        return True

    def _sampled(self, name: str, leaf: Tensor, parts: list[Part]) -> tuple[list[Part], float]:
        """The parts of the sampled block, and how many coordinates each one stands for."""
        sampler = self.seen.sampler
        assert sampler is not None
        shape: tuple[int, ...] = tuple(leaf.shape)
        whole = [part.shape == shape for part in parts]  # others were narrowed before
        for part, uncut in zip(parts, whole, strict=True):
            if uncut and part.whole_only:
                return parts, 1.0
        spread, reads = parts[0].spread, parts[0].reads
        for part in parts[1:]:
            spread, reads = spread and part.spread, max(reads, part.reads)
        block, weight = sampler.block(name, shape, reads, spread and len(shape) > 1)
        if block is None:
            return parts, 1.0
        cut = [p.cut(block) if uncut else p for p, uncut in zip(parts, whole, strict=True)]
        return cut, weight

    def _block_of(self, name: str, whole: Tensor, reads: int) -> tuple[Any, float]:
        """The sampled block of moments that are there as a whole."""
        if self.seen.sampler is None:
            return (), 1.0
        block, weight = self.seen.sampler.block(name, whole.shape, reads, whole.dim() > 1)
        return (() if block is None else block), weight

    # -- after the pass

    def finish(self) -> None:
        """The pass went through: add what it showed."""
        if self.plan is not None:
            sampler = self.seen.sampler
            if self._later:
                with torch.no_grad(), _no_autocast():  # together: the caches are warm
                    for name, parts, weight in self._later:
                        self.done[name] = (*moments(parts), None, weight)
            for blocks in self._blocks:
                self._collect(blocks, self.plan.m)
            if self.inputs is not None:
                self._restrict()
            if sampler is not None and self.done and self.plan.m > 1:
                sampler.whole.update(self.done.keys() - sampler.noted.keys() - sampler.known.keys())
            seen = self.seen
            seen.routine = routine(self) if seen.latest is self.plan else None
            seen.latest = self.plan
            seen.add(self.done, self.ratios, self.held, self.plan.m, self.calls)

    def _restrict(self) -> None:
        """Only what `backward(inputs=...)` names gets a gradient."""
        given = self.inputs if isinstance(self.inputs, Sequence) else [self.inputs]
        nodes = [edge.node for edge in given if not isinstance(edge, Tensor)]
        ids = {id(tensor) for tensor in given if isinstance(tensor, Tensor)}
        ids |= {id(leaf) for i, leaf in self.graph.leaves.items() if self.graph.nodes[i] in nodes}
        names = {self.seen.names[each] for each in ids if each in self.seen.names}
        found: Sequence[dict[str, Any]] = (self.done, self.ratios, self.held)
        for kept in found:
            for name in kept.keys() - names:
                del kept[name]

    def _collect(self, blocks: Blocks, m: int) -> None:
        """Take in what the shortcuts have read."""
        seen = self.seen
        reduces = seen.reducing is not None and not seen.passes
        ratios = iter(blocks.ratios() if reduces else ())
        for spot in blocks.spots:
            sums = usual(next(ratios), next(ratios), m, seen.reducing) if reduces else None
            if not spot.full:
                continue
            if sums is None:
                self.done[spot.name] = (*blocks.moments(spot), None, spot.weight)
            else:
                self.ratios[spot.name] = (sums, spot.size, spot.weight)
                self.held[spot.name] = (partial(blocks.moments, spot), spot.weight)

    def close(self) -> None:
        """Let go of the graph, also after an error."""
        if self._started:
            self._started = False
            self.seen.calls.passing -= 1
        for handle in self._handles:
            handle.remove()
        for call in self.calls:
            call.release()
        self._handles, self._parts, self._written, self._later = [], {}, {}, []
        for blocks in self._blocks:
            for spot in blocks.spots:
                spot.let_go()
        self._blocks = []
        if self._aiming:
            self._aiming = self.seen.aiming = False
        self.done, self.ratios, self.held = {}, {}, {}
        self.graph, self.roots, self.seeds, self.inputs = NOTHING, [], None, None


def _spots(plan: Plan) -> list[tuple[int, list[Spot | None]]]:
    """The shortcuts that were found, for all uses at each node."""
    found = []
    for position, uses in plan.uses.items():
        sites = [plan.sites.get((position, argument)) for argument, _ in uses]
        found.append((position, [(site and site.shortcut) or None for site in sites]))
    return found
