"""One backward pass under observation: from the hooks of a plan to sums of contributions.

A recorder takes a context and returns a result. It writes into nothing else but the caches of its
plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from heldin._private_torch import gradient_hooks

from .contributions import CHUNK, Contributions, Lazy, Moved, Outer, Real, Rows, moments, samples_of
from .graph import Graph
from .hooks import Grads, NodeHooks
from .moments import as_real, upcast
from .ops import OpUse, UseCache, contributions, narrowed
from .plan import ParameterPath, Plan, move, pull_back
from .sampling import Sampler

__all__ = ["ParameterSums", "PassContext", "PassResult", "Recorder"]

NO_GRAPH = Graph([], {}, [], [], {})


@dataclass(slots=True)
class ParameterSums:
    """The sums of one parameter over one backward pass or several.

    Attributes:
        total: sum of the samples' contributions.
        squares: sum of their squares.
        shared: gradient of a penalty, in which all samples have the same share.
        weight: number of coordinates that each sampled coordinate represents.
    """

    total: Tensor
    squares: Tensor
    shared: Tensor | None = None
    weight: float = 1.0


@dataclass(frozen=True)
class PassContext:
    """The inputs of a recorder.

    Attributes:
        graph, plan: the graph of the pass, and how to observe it.
        sampler: draws blocks of coordinates; None: observe all coordinates.
        chosen: the parameters to observe; None: all of them.
        per_sample: return the contributions themselves instead of their sums.
        known: sums that were computed before the pass.
        inputs: the argument of `backward(inputs=...)`.
        names: the names of the observed parameters, by id.
        spare: sums of earlier passes that are no longer read, whose memory may be reused.
        keep: return the contributions as well, because another pass may add to them.
    """

    graph: Graph
    plan: Plan
    sampler: Sampler | None = None
    chosen: frozenset[str] | None = None
    per_sample: bool = False
    known: dict[str, ParameterSums] = field(default_factory=dict)
    inputs: Any = None
    names: dict[int, str] = field(default_factory=dict)
    spare: dict[str, ParameterSums] = field(default_factory=dict)
    keep: bool = False


@dataclass(frozen=True)
class PassResult:
    """The result of an observed backward pass.

    Attributes:
        m: number of samples.
        sums: sums by parameter name.
        per_sample: contributions (m, ...) by parameter name, if `PassContext.per_sample`.
        whole: parameters that cannot be sampled in blocks.
        parts: the contributions behind the sums, if `PassContext.keep`.
        held: gradients that `parts` were read from.
    """

    m: int
    sums: dict[str, ParameterSums]
    per_sample: dict[str, Tensor]
    whole: set[str]
    parts: dict[str, list[Contributions]] = field(default_factory=dict)
    held: list[Any] = field(default_factory=list)


class Recorder:
    """A recorder of the contributions to each parameter during one backward pass.

    Attributes:
        wanted: the observed parameters that get a gradient; None: all that the pass reaches.
    """

    def __init__(self, context: PassContext) -> None:
        self._context = context
        self._graph, self._plan = context.graph, context.plan
        self._sampler, self._chosen = context.sampler, context.chosen
        self._hooks = NodeHooks(self._start)
        inputs = context.inputs  # if given, only these get a gradient
        self.wanted = None if inputs is None else self._names_of(inputs)
        self._start()

    def _start(self) -> None:
        self._sums = dict(self._context.known)
        self._per_sample: dict[str, Tensor] = {}
        self._whole: set[str] = set()
        self._kept: dict[str, list[Contributions]] = {}
        self._held: list[Any] = []
        self._parts: dict[tuple[int, int], list[Contributions]] = {}  # by path, until complete
        self._pulled: dict[str, list[Contributions]] = {}  # by parameter, pulled back already
        self._uses_seen: dict[str, int] = {}

    # -- around the pass

    def attach(self) -> None:
        """Register hooks on the nodes of the plan."""
        plan, nodes, hooks = self._plan, self._graph.nodes, self._hooks
        for position, uses in plan.uses.items():
            if self._chosen is not None:
                uses = [use for use in uses if self._is_chosen(use[1])]
            if uses:
                hooks.add(nodes[position], partial(self._on_use, position, uses))
        for position, paths in plan.pulled.items():
            if any(map(self._is_chosen, paths)):
                hooks.add(nodes[position], partial(self._on_pull, position))
        for name, position in plan.leaves.items():
            if (self._chosen is None or name in self._chosen) and self._waits_for_leaf(name):
                hooks.add(nodes[position], partial(self._on_leaf, name))

    def _is_chosen(self, path: ParameterPath) -> bool:
        return self._chosen is None or not self._chosen.isdisjoint(path.params)

    @property
    def _writes_out(self) -> bool:
        """Whether the contributions are needed, not only their sums."""
        return self._context.per_sample or self._context.keep

    def _waits_for_leaf(self, name: str) -> bool:
        """Return whether the gradient itself is needed, as the sum or for a penalty's share.

        A sampled parameter that is reached through views only is complete with its last use.
        """
        plan = self._plan
        if plan.m == 1 or name in plan.shared or name in plan.unused:
            return True
        return name in plan.paths and not (self._sampler is not None and name in plan.direct)

    def result(self) -> PassResult:
        """Return the sums after a successful pass."""
        sums = self._sums
        if self.wanted is not None:
            sums = {
                name: parameter_sums for name, parameter_sums in sums.items() if name in self.wanted
            }
        if self._chosen is not None:  # a path may lead to other parameters as well
            sums = {
                name: parameter_sums
                for name, parameter_sums in sums.items()
                if name in self._chosen
            }
        parts, held = self._kept, self._held
        return PassResult(self._plan.m, sums, self._per_sample, self._whole, parts, held)

    def _names_of(self, inputs: Any) -> set[str]:
        targets = inputs if isinstance(inputs, Sequence) else [inputs]
        nodes = [edge.node for edge in targets if not isinstance(edge, Tensor)]
        ids = {id(tensor) for tensor in targets if isinstance(tensor, Tensor)}
        leaves = self._graph.leaves.items()
        ids |= {id(leaf) for i, leaf in leaves if self._graph.nodes[i] in nodes}
        names = self._context.names
        return {names[key] for key in ids if key in names}

    def close(self) -> None:
        """Remove the hooks and release the graph, also after an error."""
        self._hooks.remove()
        self._parts, self._pulled = {}, {}
        self._graph = NO_GRAPH
        self._context = PassContext(NO_GRAPH, self._plan)

    # -- during the pass

    def _on_use(
        self, position: int, uses: Sequence[tuple[int, ParameterPath]], grads: Grads
    ) -> None:
        """Record contributions at a node where parameters meet data, just before it runs."""
        plan, node = self._plan, self._graph.nodes[position]
        layouts = plan.layouts[position]
        if self._context.keep:
            self._held.append(grads)
        for argument, path in uses:
            cache = plan.caches.get((position, argument))
            if cache is None:
                cache = plan.caches[position, argument] = UseCache()
            self._record(OpUse(node, grads, layouts, argument, path.shape, cache), path)

    def _record(self, use: OpUse, path: ParameterPath) -> None:
        name, sampler = path.params[0], self._sampler
        part = self._contributions(use, path)
        if isinstance(part, Lazy):  # the node frees its saved tensors when it has run
            is_only_use = len(self._plan.paths[name]) == 1 == self._plan.use_counts[path.key]
            if (
                is_only_use
                and path.chain is not None
                and name not in self._plan.shared
                and not self._writes_out
            ):
                self._whole.add(name)
                self._sums[name] = ParameterSums(*self._in_place(path, part).moments(None))
                return
            part = Rows(part.samples(0, part.m))
        expected = 0 if sampler is None else self._plan.direct.get(name, 0)
        if expected == 1:
            self._reduce(name, [self._in_place(path, part)], None)
            return
        self._parts.setdefault(path.key, []).append(part)
        if expected:
            seen = self._uses_seen[name] = self._uses_seen.get(name, 0) + 1
            if seen == expected:
                self._finish(name, None)

    def _contributions(self, use: OpUse, path: ParameterPath) -> Contributions:
        """Return the contributions of a use; for a sampled vector, only to its block."""
        if self._sampler is None or path.chain != () or len(use.shape) != 1:
            return contributions(use)
        new, name = use.cache.no_cancellation is None, path.params[0]
        part = contributions(narrowed(use, self._sampler, name))
        if new and use.cache.no_cancellation is not None:
            # From the next step on the vector is narrowed: a resumed run must not differ by a bit.
            small = narrowed(use, self._sampler, name)
            part = part if small is use else contributions(small)
        return part

    def _in_place(self, path: ParameterPath, part: Contributions) -> Contributions:
        """Return the contributions in the shape of the parameter."""
        if path.transposed and isinstance(part, Outer):
            return part.transposed()
        leaf = self._graph.leaves[self._plan.leaves[path.params[0]]]
        if path.chain:
            part = Moved(part, partial(move, self._graph, path), tuple(leaf.shape))
        return Real(part) if leaf.is_complex() else part

    def _on_pull(self, position: int, grads: Grads) -> None:
        """Pull contributions back through a data-free node, all uses of which are recorded."""
        for path in self._plan.pulled[position]:
            parts = self._parts.pop(path.key, None)
            if parts is not None:
                self._pull(path, parts)

    def _pull(self, path: ParameterPath, parts: list[Contributions]) -> None:
        plan, graph = self._plan, self._graph
        leaves = [graph.leaves[plan.leaves[name]] for name in path.params]
        sizes = sum(leaf.numel() for leaf in leaves) + sum(part.numel for part in parts)
        step = max(1, min(plan.m, CHUNK // max(1, sizes)))
        sums_directly = not self._writes_out and not plan.shared
        sums_directly = sums_directly and all(len(plan.paths[name]) == 1 for name in path.params)
        self._whole.update(path.params)
        chunks = []
        for lo in range(0, plan.m, step):
            value = samples_of(parts, lo, min(plan.m, lo + step))
            pulled = pull_back(graph, path, value, leaves, plan.trusted)
            grads = [as_real(upcast(grad)) for grad in pulled]
            if not sums_directly:
                chunks.append(grads)
                continue
            for name, grad in zip(path.params, grads, strict=True):
                first, second = grad.sum(0), grad.square().sum(0)
                previous = self._sums.get(name)
                if previous is not None:
                    first, second = previous.total + first, previous.squares + second
                self._sums[name] = ParameterSums(first, second)
        if chunks:
            for name, *pieces in zip(path.params, *chunks, strict=True):
                self._pulled.setdefault(name, []).append(Rows(torch.cat(pieces)))

    def _on_leaf(self, name: str, grads: Grads) -> None:
        """Finish a parameter whose gradient is complete."""
        grad = grads[0]
        if grad is None:
            return
        if self._plan.m == 1:
            dense = as_real(upcast(grad.to_dense() if grad.is_sparse else grad))
            block, weight = block_of(self._sampler, name, dense, 1)
            values = dense[block]
            self._sums[name] = ParameterSums(values.clone(), values.square(), None, weight)
            if self._context.keep:
                self._kept[name] = [Rows(values.clone()[None])]
        elif name not in self._sums:
            self._finish(name, as_real(grad))

    def _finish(self, name: str, grad: Tensor | None) -> None:
        """Reduce all contributions to a parameter; `grad` is its gradient, if it was needed."""
        plan = self._plan
        parts = list(self._pulled.pop(name, []))
        for path in plan.paths.get(name, []):
            if path.chain is not None:
                parts += [self._in_place(path, part) for part in self._parts.pop(path.key, [])]
        if parts:
            self._reduce(name, parts, grad)
        elif grad is not None and (name in plan.shared or name in plan.unused):
            zero = torch.zeros_like(upcast(grad))
            shared = upcast(grad).clone() if name in plan.shared else None
            self._whole.add(name)
            self._sums[name] = ParameterSums(zero, zero.clone(), shared)

    def _reduce(self, name: str, parts: list[Contributions], grad: Tensor | None) -> None:
        """Sum the contributions of all uses of a parameter, or store them per sample."""
        plan, sampler = self._plan, self._sampler
        if self._context.per_sample:
            self._per_sample[name] = samples_of(parts, 0, plan.m)
            return
        penalised, weight = name in plan.shared, 1.0
        leaf = self._graph.leaves[plan.leaves[name]]
        if sampler is not None and penalised:
            self._whole.add(name)
        elif sampler is not None:
            shape = (*leaf.shape, 2) if leaf.is_complex() else tuple(leaf.shape)
            parts, weight = self._restricted(sampler, name, shape, parts)
        if self._context.keep:
            self._kept[name] = parts
        if weight != 1.0:
            self._sums[name] = ParameterSums(*moments(parts), None, weight)
            return
        total = grad  # unless a hook or a penalty changes it, or its precision is too low
        if (
            grad is None
            or penalised
            or gradient_hooks(leaf)
            or grad.is_sparse
            or upcast(grad) is not grad
        ):
            total = None
        spare = self._context.spare.pop(name, None) if total is not None else None
        if spare is not None and (spare.total.shape != leaf.shape or spare.weight != 1.0):
            spare = None
        first, second = moments(parts, total, None if spare is None else spare.squares)
        if first is total:
            first = first.clone() if spare is None else spare.total.copy_(first)
        shared = upcast(grad) - first if penalised and grad is not None else None
        self._sums[name] = ParameterSums(first, second, shared)

    def _restricted(
        self, sampler: Sampler, name: str, shape: tuple[int, ...], parts: list[Contributions]
    ) -> tuple[list[Contributions], float]:
        """Return the contributions to the sampled block, and the weight of its coordinates."""
        uncut = [part.shape == shape for part in parts]  # others were narrowed before
        if any(part.whole_only for part, whole in zip(parts, uncut, strict=True) if whole):
            self._whole.add(name)
            return parts, 1.0
        spread, reads = all(part.spread for part in parts), max(part.reads for part in parts)
        block, weight = sampler.block(name, shape, reads, spread and len(shape) > 1)
        if block is None:
            return parts, 1.0
        cut = zip(parts, uncut, strict=True)
        return [part.restrict(block) if whole else part for part, whole in cut], weight


def block_of(sampler: Sampler | None, name: str, whole: Tensor, reads: int) -> tuple[Any, float]:
    """Return the sampled block of a whole parameter, and the weight of its coordinates."""
    if sampler is None:
        return (), 1.0
    block, weight = sampler.block(name, whole.shape, reads, whole.dim() > 1)
    return (() if block is None else block), weight
