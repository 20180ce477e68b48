"""Observing training steps: `observe`, and the backward pass it looks into."""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ._errors import HeldinError, MixedSamplesWarning, NotObservable
from ._graph import Graph, Plan, Sink, hidden, make_plan, move, pull_back, walk
from ._layout import Layout
from ._moments import Moments
from ._owners import Tracker, is_mixed, is_nobody, tensors_in
from ._parts import Lazy, Moved, Part, Rows, moments, wide
from ._replay import Output, mixes_samples, replay, topmost
from ._rules import Use, contributions

__all__ = ["BatchDim", "Observation", "observe"]

BatchDim = int | Mapping[str | int, int | None]
T = TypeVar("T")


# --- the one hook into PyTorch ---------------------------------------------------------------

_live: list[Observation] = []
_lock = threading.Lock()
_plain_backward = torch.autograd.backward


def _observed_backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
    """torch.autograd.backward while something is observed: look at the graph, then run it."""
    watching = list(_live)
    if not watching:
        return _plain_backward(tensors, *args, **kwargs)
    roots = [tensors] if not isinstance(tensors, Sequence) else list(tensors)
    nodes = [
        t.grad_fn if isinstance(t, Tensor) else t.node
        for t in roots
        if not isinstance(t, Tensor) or t.grad_fn is not None
    ]
    graph = walk(nodes)
    seeds = args[0] if args else kwargs.get("grad_tensors")
    seeds = None if seeds is None else [seeds] if isinstance(seeds, Tensor) else list(seeds)
    passes = []
    try:
        for observation in watching:
            passes.append(Pass(observation, graph, roots, seeds))
            passes[-1].prepare()
        for each in passes:  # only now: preparing may run other backward passes
            each.hook()
        _plain_backward(tensors, *args, **kwargs)
        for each in passes:
            each.finish()
    finally:
        for each in passes:
            each.close()


def _attach(observation: Observation) -> None:
    with _lock:
        _live.append(observation)
        torch.autograd.backward = _observed_backward


def _detach(observation: Observation) -> None:
    with _lock:
        if observation in _live:
            _live.remove(observation)
        if not _live and torch.autograd.backward is _observed_backward:
            torch.autograd.backward = _plain_backward


# --- one call of the model -------------------------------------------------------------------


@dataclass(eq=False)
class Call:
    """A forward pass under observation."""

    key: Any
    m: int
    tracker: Tracker | None
    edges: list[GradientEdge | None] = field(default_factory=list)  # its outputs, in order

    def outputs(self, layouts: Sequence[Layout | None]) -> list[Output]:
        """The outputs whose rows have known owners."""
        pairs = zip(self.edges, layouts, strict=False)
        return [(edge, layout) for edge, layout in pairs if edge is not None and layout is not None]


class Observation(Mapping[str, Moments]):
    """What `heldin.observe` yields: the moments of every parameter seen, by name.

    The moments of all backward passes in the block add up. Parameters that are frozen or were not
    used are absent.
    """

    def __init__(
        self,
        model: nn.Module,
        batch_dim: BatchDim = 0,
        parameters: Callable[[str], bool] | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise HeldinError(f"heldin.observe: expected a torch.nn.Module, got {type(model)}")
        if not any(p.requires_grad for p in model.parameters()):
            raise HeldinError(
                "heldin.observe: the model has no parameter that requires a gradient; unfreeze at "
                "least one"
            )
        self.count = 0
        self.truth: dict[str, tuple[Tensor, Tensor]] | None = None  # filled in if it is a dict
        self._model: nn.Module | None = model
        self._batch_dim = batch_dim
        self._chosen = parameters
        self._names: dict[int, str] = {}
        self._sums: dict[str, tuple[Tensor, Tensor, Tensor | None]] = {}
        self._plans: dict[Any, Plan] = {}
        self._known: set[Any] = set()  # signatures of calls that need not be followed again
        self._misses: Counter[Any] = Counter()  # graphs that came as a surprise, by call signature
        self._results: dict[Any, list[Layout | None]] = {}  # layouts of the outputs, by signature
        self._pending: list[Call] = []
        self._depth = 0
        self._passing = 0  # backward passes under way, in which checkpoints call forward again
        self._warned: set[str] = set()
        self._handles: list[Any] = []
        self._current: Call | None = None  # under way
        self._open: Any = None
        self._find_names()

    # -- the mapping; two observations are never the same

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __getitem__(self, name: str) -> Moments:
        total, squares, shared = self._sums[name]
        if shared is not None and self.count:
            squares = squares + (2 * total + shared) * shared / self.count
            total = total + shared
        return Moments(total, squares, self.count)

    def __iter__(self) -> Iterator[str]:
        return iter(self._sums)

    def __len__(self) -> int:
        return len(self._sums)

    def __repr__(self) -> str:
        return f"<heldin.Observation of {len(self)} parameters, {self.count} samples>"

    def clear(self) -> None:
        """Forget the sums, and calls not followed by a backward pass; what was learnt is kept."""
        self._sums = {}
        self.count = 0
        self._drop_calls()

    # -- opening and closing

    def __enter__(self) -> Observation:
        if self._model is None or self._handles:
            raise HeldinError("heldin.observe: a block can be entered only once; call it again")
        self.resume()
        return self

    def resume(self) -> None:
        """Go on observing after `pause`."""
        model = self._model
        if model is None or self._handles:
            return
        self._handles = [  # entered last, left first: several observations of a model nest
            model.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            model.register_forward_hook(self._after_forward, prepend=True, always_call=True),
        ]
        _attach(self)

    def pause(self) -> None:
        """Observe nothing, at no cost, until `resume`; sums and what was learnt are kept."""
        _detach(self)
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._drop_calls()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop observing and let go of the model."""
        self.pause()
        self._model = None
        self._names = {}

    def _drop_calls(self) -> None:
        for call in self._pending:
            if call.tracker is not None:
                call.tracker.release()
        self._pending = []

    # -- the model's forward pass

    def call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run a function as if it were the model's forward pass, and return its result.

        For training steps that do not go through the model's own `forward`: the tensors among the
        arguments count the samples.
        """
        self._before_forward(self._model, args, kwargs)
        result = None
        try:
            result = function(*args, **kwargs)
            return result
        finally:
            self._after_forward(self._model, args, result)

    def _before_forward(self, module: Any, args: Any, kwargs: Any) -> None:
        self._depth += 1
        if self._depth > 1 or self._passing or not torch.is_grad_enabled():
            return
        inputs = _batched_inputs(self._batch_dim, args, kwargs)
        if inputs is None:
            raise NotObservable(
                "heldin.observe: no argument of the model is a tensor with a batch dimension, so "
                "samples cannot be counted; pass batch_dim=..., or run the step through call()"
            )
        m, owned, signature = inputs
        key = (signature, m, self._state())
        self._current = call = Call(key, m, None)
        if m > 1 and key not in self._known:
            call.tracker = tracker = Tracker(m, self._model)
            for tensor, planes in owned:
                tracker.own(tensor, self._earlier(tensor, planes))
            self._open = tracker.following()
            self._open.__enter__()

    def _after_forward(self, module: Any, args: Any, output: Any) -> None:
        self._depth -= 1
        if self._depth > 0 or self._passing or not torch.is_grad_enabled():
            return
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None
        call, self._current = self._current, None
        if call is None or output is None:  # an error was raised
            return
        self._pending.append(call)
        outputs = tensors_in(output)
        call.edges = [None if t.grad_fn is None else get_gradient_edge(t) for t in outputs]
        if call.tracker is not None:
            self._results[call.key] = [self._result(call.tracker, t) for t in outputs]
            self._warn_mixed(call.tracker.mixers)

    @staticmethod
    def _result(tracker: Tracker, tensor: Tensor) -> Layout | None:
        """The layout of an output, if each of its elements has one owner."""
        planes = tracker.owners(tensor)
        tracker.record_use(tensor, planes)
        if planes is None or bool((is_mixed(planes[:2]) | is_nobody(planes[:2])).any()):
            return None
        return Layout.of(planes[0], tensor.shape, tracker.m)

    def _earlier(self, tensor: Tensor, planes: Tensor) -> Tensor:
        """Owners that an earlier call of the same step has established for an input."""
        for call in self._pending:
            if call.tracker is not None and tensor.grad_fn is not None:
                known = call.tracker.nodes.get((tensor.grad_fn, tensor.output_nr))
                if known is not None and known.shape[0] == planes.shape[0]:
                    return known
        return planes

    def _state(self) -> Any:
        """What besides the inputs decides which graph a forward pass builds."""
        model = self._model
        assert model is not None
        return (
            model.training,
            torch.is_autocast_enabled("cpu"),
            torch.is_autocast_enabled("cuda"),
            tuple([p.requires_grad for p in model.parameters()]),
        )

    def _warn_mixed(self, mixers: Mapping[str, str]) -> None:
        for place, why in mixers.items():
            if place not in self._warned:
                self._warned.add(place)
                warnings.warn(
                    f"{place} mixes the samples of a batch ({why}): there is no per-sample "
                    "gradient as such. The contributions of each sample's rows are taken instead",
                    MixedSamplesWarning,
                    stacklevel=2,
                )

    def _find_names(self) -> None:
        assert self._model is not None
        self._names = {
            id(p): name
            for name, p in self._model.named_parameters()
            if self._chosen is None or self._chosen(name)
        }

    def _add(self, name: str, total: Tensor, squares: Tensor, shared: Tensor | None) -> None:
        if name not in self._sums:
            self._sums[name] = (total, squares, shared)
            return
        first, second, third = self._sums[name]
        both = shared if third is None else (third if shared is None else third + shared)
        self._sums[name] = (first + total, second + squares, both)


def _batched_inputs(
    batch_dim: BatchDim, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[int, list[tuple[Tensor, Tensor]], Any] | None:
    """Number of samples, the owners of the inputs, and a signature of the whole call."""
    found: list[tuple[Tensor, int | None]] = []
    signature: list[Any] = []
    places: list[tuple[str | int, Any]] = [*enumerate(args), *kwargs.items()]
    for place, value in places:
        dim = batch_dim if isinstance(batch_dim, int) else batch_dim.get(place, 0)
        tensors = tensors_in(value)
        for tensor in tensors:
            fits = dim is not None and -tensor.dim() <= dim < tensor.dim()
            found.append((tensor, dim % tensor.dim() if dim is not None and fits else None))
            signature.append((place, tuple(tensor.shape), tensor.dtype, tensor.requires_grad))
        if not tensors:
            plain = isinstance(value, (int, float, str, bool, type(None)))
            signature.append((place, value if plain else type(value)))
    sizes = [tensor.shape[dim] for tensor, dim in found if dim is not None]
    if not sizes:
        return None
    m = next((size for size in sizes if size != 1), 1)
    batched = [(t, dim) for t, dim in found if dim is not None and t.shape[dim] == m]
    # Readings: all of them count samples, or all but one, or only the first.
    readings = [set(range(len(batched)))]
    if len(batched) > 1:
        readings += [set(range(len(batched))) - {i} for i in range(1, len(batched))]
        readings += [{0}] if len(batched) > 2 else []
    line = torch.arange(m, dtype=torch.float32)
    owned = []
    for i, (tensor, dim) in enumerate(batched):
        shape = [1] * tensor.dim()
        shape[dim] = m
        rows = []
        for reading in readings:
            inside = i in reading
            rows.append((line if inside else torch.full((m,), -1.0)).reshape(shape))
            rows.append((-line if inside else torch.full((m,), -float(m))).reshape(shape))
        owned.append((tensor, torch.stack(rows)))
    return m, owned, tuple(signature)


# --- one backward pass -----------------------------------------------------------------------


@contextmanager
def _no_autocast() -> Iterator[None]:
    """Statistics keep their precision where the user runs backward() under autocast."""
    on = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    with ExitStack() as stack:
        for kind in on:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextmanager
def _apart() -> Iterator[None]:
    with torch.no_grad(), _no_autocast():
        yield


class Pass:
    """One observation during one backward pass."""

    def __init__(
        self, observation: Observation, graph: Graph, roots: Sequence[Any], seeds: Any
    ) -> None:
        self.seen = observation
        self.graph = graph
        self.roots, self.seeds = roots, seeds
        self.plan: Plan | None = None
        self.calls: list[Call] = []
        self.handles: list[Any] = []
        self.parts: dict[tuple[int, int], list[Part]] = {}
        self.done: dict[str, tuple[Tensor, Tensor, Tensor | None]] = {}
        self.written: dict[str, list[Part]] = {}
        self.busy = False
        self.started = False

    def prepare(self) -> None:
        """Find out how to observe this pass, or refuse to."""
        seen, graph = self.seen, self.graph
        if any(id(leaf) not in seen._names for leaf in graph.leaves.values()):
            seen._find_names()
        reached = [seen._names[id(p)] for p in graph.leaves.values() if id(p) in seen._names]
        trap = hidden(graph)
        self.calls = self._calls()
        if trap is not None and (reached or self.calls):
            raise NotObservable(f"{trap[0]} hides parameters from observation: {trap[1]}")
        if not reached:
            return
        if not self.calls:
            raise NotObservable(
                f"a backward pass reached parameter {reached[0]!r}, but not through a call of the "
                "model inside the observed block that was still to be followed back. Call the "
                "model (or run the step through call()), and add up losses and penalties before "
                "one backward()"
            )
        counts = sorted({call.m for call in self.calls})
        if len(counts) > 1:
            raise NotObservable(
                f"one backward pass through calls of the model with {counts} samples: which of "
                "them belong together is not known. Call backward() once for each"
            )
        seen._passing += 1
        self.started = True
        self.plan = self._plan(counts[0])
        if seen.truth is not None:
            params = {name: graph.leaves[i] for name, i in self.plan.leaves.items()}
            outputs = self._outputs()
            found = replay(self.roots, self.seeds, outputs, params, counts[0]) if outputs else {}
            seen.truth.update(found)

    def _calls(self) -> list[Call]:
        """The calls of the model that this pass goes back through."""
        index = self.graph.index
        return [
            call
            for call in self.seen._pending
            if any(edge is not None and edge.node in index for edge in call.edges)
        ]

    def _plan(self, m: int) -> Plan:
        seen, graph = self.seen, self.graph
        if m == 1:
            return self._leaves_only(1)
        leaves = tuple(seen._names.get(id(p)) for p in graph.leaves.values())
        key = (tuple(c.key for c in self.calls), tuple(graph.names), tuple(graph.children), leaves)
        plan = seen._plans.get(key)
        if plan is not None:
            return plan
        trackers = [c.tracker for c in self.calls if c.tracker is not None]
        if len(trackers) < len(self.calls):
            return self._replay(m)
        self._look_at_loss()
        owners = {k: v for tracker in trackers for k, v in tracker.nodes.items()}
        slots = {k: v for tracker in trackers for k, v in tracker.slots.items()}
        cause = next((t.first_mixed for t in trackers if t.first_mixed), None)
        plan = make_plan(graph, seen._names, owners, slots, m, cause)
        if not any(tracker.volatile for tracker in trackers):
            seen._plans[key] = plan
            seen._known.update(c.key for c in self.calls if seen._misses[c.key] < 3)
        return plan

    def _outputs(self) -> list[Output]:
        known = self.seen._results
        pairs = [pair for c in self.calls for pair in c.outputs(known.get(c.key, []))]
        return topmost(self.graph, pairs)

    def _look_at_loss(self) -> None:
        outputs = self._outputs()
        if outputs and mixes_samples(self.roots, outputs):
            self.seen._warn_mixed({"the loss": "it depends on several samples jointly"})

    def _replay(self, m: int) -> Plan:
        """A graph whose forward pass was not followed: one backward pass per sample, this once."""
        seen = self.seen
        for call in self.calls:
            seen._misses[call.key] += 1
            seen._known.discard(call.key)
        plan = self._leaves_only(m)
        outputs = self._outputs()
        params = {name: self.graph.leaves[i] for name, i in plan.leaves.items()}
        found = replay(self.roots, self.seeds, outputs, params, m) if outputs else {}
        self.done = {name: (first, second, None) for name, (first, second) in found.items()}
        plan.replayed = True
        return plan

    def _leaves_only(self, m: int) -> Plan:
        names = self.seen._names
        leaves = {names[id(p)]: i for i, p in self.graph.leaves.items() if id(p) in names}
        return Plan(m, leaves=leaves)

    # -- hooks

    def hook(self) -> None:
        """Listen at the nodes of the plan."""
        plan, nodes = self.plan, self.graph.nodes
        if plan is None:
            return
        for position in plan.uses:
            self.handles.append(nodes[position].register_prehook(self._use_hook(position)))
        general = {s.node for sinks in plan.sinks.values() for s in sinks if s.chain is None}
        for position in general:
            self.handles.append(nodes[position].register_prehook(self._sink_hook(position)))
        for name, position in plan.leaves.items():
            if name in plan.sinks or name in plan.shared or plan.m == 1 or plan.replayed:
                self.handles.append(nodes[position].register_prehook(self._leaf_hook(name)))

    def _use_hook(self, position: int) -> Callable[[Any], None]:
        def fired(grads: Sequence[Tensor | None]) -> None:
            if not self.busy and any(g is not None for g in grads):
                with _apart():
                    self._used(position, [None if g is None else g.detach() for g in grads])

        return fired

    def _sink_hook(self, position: int) -> Callable[[Any], None]:
        def fired(grads: Any) -> None:
            if not self.busy:
                self.busy = True
                try:
                    with _no_autocast():
                        self._pulled(position)
                finally:
                    self.busy = False

        return fired

    def _leaf_hook(self, name: str) -> Callable[[Any], None]:
        def fired(grads: Sequence[Tensor | None]) -> None:
            if not self.busy and grads[0] is not None:
                with _apart():
                    self._arrived(name, grads[0].detach())

        return fired

    # -- what happens in them

    def _used(self, position: int, grads: Sequence[Tensor | None]) -> None:
        plan = self.plan
        assert plan is not None
        for argument, sink in plan.uses[position]:
            use = Use(
                self.graph.nodes[position], grads, plan.layouts[position], argument, sink.shape
            )
            part = contributions(use)
            if isinstance(part, Lazy):  # what it reads will be gone when the node has run
                alone = len(sink.params) == 1 and plan.alone(sink.params[0])
                if alone and sink.chain is not None and not plan.shared:
                    name = sink.params[0]
                    first, second = self._in_place(sink, part).moments(None)
                    self.done[name] = (first, second, None)
                    continue
                part = part.written_out()
            self.parts.setdefault(sink.key, []).append(part)

    def _in_place(self, sink: Sink, part: Part) -> Part:
        """The part in the shape of its parameter."""
        if not sink.chain:
            return part
        if len(sink.chain) == 1 and self.graph.names[sink.chain[0][0]] == "TBackward0":
            if hasattr(part, "t"):
                swapped: Part = part.t()
                return swapped
        position = self.plan.leaves[sink.params[0]]  # type: ignore[union-attr]
        shape = tuple(self.graph.leaves[position].shape)
        return Moved(part, lambda value: move(self.graph, sink, value), shape)

    def _pulled(self, position: int) -> None:
        """All uses of a data-free tensor are known and it is about to pass its gradient down."""
        plan = self.plan
        assert plan is not None
        for sink in {s for sinks in plan.sinks.values() for s in sinks}:
            parts = self.parts.pop(sink.key, None) if sink.node == position else None
            if parts is None or sink.chain is not None:
                continue
            leaves = [self.graph.leaves[plan.leaves[name]] for name in sink.params]

            def take(lo: int, hi: int, parts: list[Part] = parts) -> Tensor:
                with torch.no_grad():
                    value = parts[0].take(lo, hi)
                    for part in parts[1:]:
                        value = value + part.take(lo, hi)
                return value

            sizes = sum(leaf.numel() for leaf in leaves) + _numel(sink.shape)
            step = max(1, min(plan.m, (1 << 22) // max(1, sizes)))
            single = all(len(plan.sinks[name]) == 1 for name in sink.params)
            chunks = []
            for lo in range(0, plan.m, step):
                grads = pull_back(self.graph, sink, take(lo, min(plan.m, lo + step)), leaves)
                wider = [wide(grad) for grad in grads]
                if single and not plan.shared:
                    for name, grad in zip(sink.params, wider, strict=True):
                        first, second = grad.sum(0), grad.square().sum(0)
                        if name in self.done:
                            first = self.done[name][0] + first
                            second = self.done[name][1] + second
                        self.done[name] = (first, second, None)
                else:
                    chunks.append(wider)
            if chunks:
                for name, *pieces in zip(sink.params, *chunks, strict=True):
                    self.written.setdefault(name, []).append(Rows(torch.cat(pieces)))

    def _arrived(self, name: str, grad: Tensor) -> None:
        """The gradient of a parameter is complete."""
        plan = self.plan
        assert plan is not None
        if plan.m == 1:
            dense = wide(grad.to_dense() if grad.is_sparse else grad)
            self.done[name] = (dense.clone(), dense.square(), None)
            return
        if plan.replayed:
            self._check_replayed(name, wide(grad.to_dense() if grad.is_sparse else grad))
        if name in self.done:
            return
        parts = list(self.written.pop(name, []))
        leaf = self.graph.leaves[plan.leaves[name]]
        for sink in plan.sinks.get(name, []):
            if sink.chain is not None:
                parts += [self._in_place(sink, p) for p in self.parts.pop(sink.key, [])]
        penalised = name in plan.shared
        if parts:
            usable = (
                not penalised
                and not leaf._backward_hooks
                and not grad.is_sparse
                and wide(grad) is grad
            )
            first, second = moments(parts, grad.clone() if usable else None)
        else:
            first, second = torch.zeros_like(wide(grad)), torch.zeros_like(wide(grad))
        shared = wide(grad) - first if penalised else None
        self.done[name] = (first, second, shared)

    def _check_replayed(self, name: str, grad: Tensor) -> None:
        found = self.done.get(name)
        leaf = self.graph.leaves[self.plan.leaves[name]]  # type: ignore[union-attr]
        if found is None or leaf._backward_hooks:
            missing = float(grad.abs().max()) if found is None else 0.0
        else:
            missing = float((grad - found[0]).abs().max())
        if missing > 0.01 * float(grad.abs().max()):
            raise NotObservable(
                f"parameter {name!r}: the graph of this step differs from those seen so far, and "
                "part of its gradient does not come through the model's outputs. The next steps "
                "will be followed from their forward pass on"
            )

    def finish(self) -> None:
        """The pass went through: add what it showed."""
        plan = self.plan
        if plan is None:
            return
        with torch.no_grad():
            for name, (first, second, shared) in self.done.items():
                self.seen._add(name, first, second, shared)
        self.seen.count += plan.m
        for call in self.calls:
            if call in self.seen._pending:
                self.seen._pending.remove(call)

    def close(self) -> None:
        """Let go of the graph, also after an error."""
        if self.started:
            self.started = False
            self.seen._passing -= 1
        for handle in self.handles:
            handle.remove()
        self.handles = []
        for call in self.calls:
            if call.tracker is not None:
                call.tracker.release()
        self.parts, self.done, self.written = {}, {}, {}
        for call in self.calls:
            call.edges = []
        self.graph, self.roots, self.seeds = Graph([], {}, [], [], {}), [], None


def _numel(shape: Sequence[int]) -> int:
    size = 1
    for extent in shape:
        size *= extent
    return size


def observe(
    model: nn.Module,
    *,
    batch_dim: BatchDim = 0,
    parameters: Callable[[str], bool] | None = None,
) -> Observation:
    """Observe the per-sample gradient contributions of a model's parameters in a `with` block.

    Args:
        model: any eager PyTorch model. It is neither wrapped nor changed.
        batch_dim: the dimension of the model's inputs that counts samples; or, for inputs that
            differ, a mapping from argument names or positions to it (None: not a batch; the others
            have 0).
        parameters: which parameters to observe, by name (default: all).

    >>> import heldin, torch
    >>> model = torch.nn.Linear(3, 1)
    >>> x, y = torch.randn(8, 3), torch.randn(8, 1)
    >>> with heldin.observe(model) as seen:
    ...     torch.nn.functional.mse_loss(model(x), y).backward()
    >>> seen
    <heldin.Observation of 2 parameters, 8 samples>
    >>> torch.allclose(seen["weight"].total, model.weight.grad)
    True
    """
    return Observation(model, batch_dim, parameters)
