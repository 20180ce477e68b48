"""One backward pass under observation: from the hooks of a plan to sums of contributions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from heldin._private_torch import gradient_hooks

from .contributions import CHUNK, Contributions, Lazy, Moved, Outer, Rows, moments, samples_of
from .graph import Graph
from .hooks import Grads, NodeHooks
from .moments import as_real, as_statistic, upcast
from .ops import OpUse, UseCache, contributions, narrowed
from .plan import ParameterPath, Plan, move, pull_back
from .sampling import Sampler

__all__ = ["ParameterSums", "PassResult", "Recorder", "block_of"]


@dataclass(slots=True)
class ParameterSums:
    """The sums of one parameter over one backward pass or several."""

    total: Tensor  # sum of the samples' contributions
    squares: Tensor  # sum of their squares
    shared: Tensor | None = None  # gradient of a penalty, in which all samples have the same share
    weight: float = 1.0  # number of coordinates that each sampled coordinate represents

    def scaled(self, factor: float) -> ParameterSums:
        """Return the sums of contributions that are multiplied by a factor."""
        if factor == 1.0:
            return self
        shared = None if self.shared is None else self.shared * factor
        return ParameterSums(self.total * factor, self.squares * factor**2, shared, self.weight)

    def plus(self, other: ParameterSums, name: str, sampler: Sampler | None) -> ParameterSums:
        """Return the sums of other samples added to these.

        If only one of them was sampled, the other one is cut to the block of the parameter.
        """
        totals, squares = [self.total, other.total], [self.squares, other.squares]
        shared = [each.shared for each in (self, other) if each.shared is not None]
        if self.total.shape != other.total.shape:
            assert sampler is not None
            cut = sampler.cutter(name, self.total.shape, other.total.shape)
            totals, squares, shared = ([*map(cut, each)] for each in (totals, squares, shared))
        both = sum(shared[1:], start=shared[0]) if shared else None
        weight = max(self.weight, other.weight)
        return ParameterSums(totals[0] + totals[1], squares[0] + squares[1], both, weight)


@dataclass
class PassResult:
    """The result of an observed backward pass, by name of the parameter."""

    m: int  # number of samples
    sums: dict[str, ParameterSums]
    per_sample: dict[str, Tensor] = field(default_factory=dict)  # if `Recorder.per_sample`
    whole: set[str] = field(default_factory=set)  # parameters that cannot be sampled in blocks
    # If `Recorder.keep`: the contributions behind the sums, and gradients that they read from.
    parts: dict[str, list[Contributions]] = field(default_factory=dict)
    held: list[Any] = field(default_factory=list)


@dataclass(eq=False)
class Recorder:
    """A recorder of the contributions to each parameter during one backward pass.

    It writes into nothing but its result and the caches of its plan.
    """

    graph: Graph
    plan: Plan
    known: dict[str, ParameterSums]  # sums that were computed before the pass
    sampler: Sampler | None  # None: observe all coordinates
    chosen: frozenset[str] | None  # the parameters to observe; None: all of them
    wanted: set[str] | None  # the parameters that get a gradient; None: all that are reached
    per_sample: bool  # return the contributions themselves instead of their sums
    keep: bool  # return the contributions as well, because another pass may add to them
    spare: dict[str, ParameterSums]  # sums that are no longer read, whose memory may be reused

    def __post_init__(self) -> None:
        self._hooks = NodeHooks(self._start)
        self._sums_only = not (self.per_sample or self.keep)
        self._start()

    def _start(self) -> None:
        self._result = PassResult(self.plan.m, dict(self.known))
        self._parts: dict[tuple[int, int], list[Contributions]] = {}  # by path, until complete
        self._pulled: dict[str, list[Contributions]] = {}  # by parameter, pulled back already
        self._uses_seen: dict[str, int] = {}

    # -- around the pass

    def attach(self) -> None:
        plan, nodes, hooks = self.plan, self.graph.nodes, self._hooks
        for position, uses in plan.uses.items():
            if self.chosen is not None:
                uses = [use for use in uses if self._is_chosen(use[1])]
            if uses:
                hooks.add(nodes[position], partial(self._on_use, position, uses))
        for position, paths in plan.pulled.items():
            if any(map(self._is_chosen, paths)):
                hooks.add(nodes[position], partial(self._on_pull, position))
        for name, position in plan.leaves.items():
            if (self.chosen is None or name in self.chosen) and self._waits_for_leaf(name):
                hooks.add(nodes[position], partial(self._on_leaf, name))

    def _is_chosen(self, path: ParameterPath) -> bool:
        return self.chosen is None or not self.chosen.isdisjoint(path.params)

    def _waits_for_leaf(self, name: str) -> bool:
        """Return whether the gradient itself is needed, as the sum or for a penalty's share.

        A sampled parameter that is reached through views only is complete with its last use.
        """
        plan = self.plan
        if plan.m == 1 or name in plan.shared or name in plan.unused:
            return True
        return name in plan.paths and not (self.sampler is not None and name in plan.direct)

    def result(self) -> PassResult:
        """Return the sums after a successful pass."""
        result = self._result
        for names in (self.wanted, self.chosen):  # a path may lead to other parameters as well
            if names is not None:
                result.sums = {name: sums for name, sums in result.sums.items() if name in names}
        return result

    def close(self) -> None:
        """Remove the hooks and release the graph, also after an error."""
        self._hooks.remove()
        self.graph = Graph([], {}, [], [], {})
        self.known, self.spare, self._parts, self._pulled = {}, {}, {}, {}
        self._result = PassResult(0, {})

    # -- during the pass

    def _on_use(
        self, position: int, uses: Sequence[tuple[int, ParameterPath]], grads: Grads
    ) -> None:
        """Record contributions at a node where parameters meet data, just before it runs."""
        plan, node = self.plan, self.graph.nodes[position]
        layouts = plan.layouts[position]
        if self.keep:
            self._result.held.append(grads)
        for argument, path in uses:
            cache = plan.caches.get((position, argument))
            if cache is None:
                cache = plan.caches[position, argument] = UseCache()
            self._record(OpUse(node, grads, layouts, argument, path.shape, cache), path)

    def _record(self, use: OpUse, path: ParameterPath) -> None:
        name, plan = path.params[0], self.plan
        part = self._contributions(use, path)
        if isinstance(part, Lazy):  # the node frees its saved tensors when it has run
            is_only_use = len(plan.paths[name]) == 1 == plan.use_counts[path.key]
            is_direct = path.chain is not None and name not in plan.shared
            if is_only_use and is_direct and self._sums_only:
                self._result.whole.add(name)
                self._result.sums[name] = ParameterSums(*self._in_place(path, part).moments(None))
                return
            part = Rows(part.samples(0, part.m))
        expected = 0 if self.sampler is None else plan.direct.get(name, 0)
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
        if self.sampler is None or path.chain != () or len(use.shape) != 1:
            return contributions(use)
        new, name = use.cache.no_cancellation is None, path.params[0]
        part = contributions(narrowed(use, self.sampler, name))
        if new and use.cache.no_cancellation is not None:
            # From the next step on the vector is narrowed: a resumed run must not differ by a bit.
            small = narrowed(use, self.sampler, name)
            part = part if small is use else contributions(small)
        return part

    def _in_place(self, path: ParameterPath, part: Contributions) -> Contributions:
        """Return the contributions in the shape of the parameter."""
        if path.transposed and isinstance(part, Outer):
            return part.transposed()
        leaf = self.graph.leaves[self.plan.leaves[path.params[0]]]
        if path.chain:
            part = Moved(part, partial(move, self.graph, path), tuple(leaf.shape))
        inner = part
        if leaf.is_complex():  # as real numbers (..., 2)
            part = Lazy(lambda lo, hi: as_real(inner.samples(lo, hi)), part.m, (*part.shape, 2))
        return part

    def _on_pull(self, position: int, grads: Grads) -> None:
        """Pull contributions back through a data-free node, all uses of which are recorded."""
        for path in self.plan.pulled[position]:
            parts = self._parts.pop(path.key, None)
            if parts is not None:
                self._pull(path, parts)

    def _pull(self, path: ParameterPath, parts: list[Contributions]) -> None:
        plan, graph = self.plan, self.graph
        leaves = [graph.leaves[plan.leaves[name]] for name in path.params]
        sizes = sum(leaf.numel() for leaf in leaves) + sum(part.numel for part in parts)
        step = max(1, min(plan.m, CHUNK // max(1, sizes)))
        sums_directly = self._sums_only and not plan.shared
        sums_directly = sums_directly and all(len(plan.paths[name]) == 1 for name in path.params)
        self._result.whole.update(path.params)
        chunks = []
        for lo in range(0, plan.m, step):
            value = samples_of(parts, lo, min(plan.m, lo + step))
            pulled = pull_back(graph, path, value, leaves, plan.trusted)
            grads = [as_real(upcast(grad)) for grad in pulled]
            if not sums_directly:
                chunks.append(grads)
                continue
            for name, grad in zip(path.params, grads, strict=True):
                new = ParameterSums(grad.sum(0), grad.square().sum(0))
                previous = self._result.sums.get(name)
                new = new if previous is None else previous.plus(new, name, None)
                self._result.sums[name] = new
        if chunks:
            for name, *pieces in zip(path.params, *chunks, strict=True):
                self._pulled.setdefault(name, []).append(Rows(torch.cat(pieces)))

    def _on_leaf(self, name: str, grads: Grads) -> None:
        """Finish a parameter whose gradient is complete."""
        grad = grads[0]
        if grad is None:
            return
        if self.plan.m == 1:
            dense = as_statistic(grad)
            block, weight = block_of(self.sampler, name, dense, 1)
            values = dense[block]
            self._result.sums[name] = ParameterSums(values.clone(), values.square(), None, weight)
            if self.keep:
                self._result.parts[name] = [Rows(values.clone()[None])]
        elif name not in self._result.sums:
            self._finish(name, as_real(grad))

    def _finish(self, name: str, grad: Tensor | None) -> None:
        """Reduce all contributions to a parameter; `grad` is its gradient, if it was needed."""
        plan = self.plan
        parts = list(self._pulled.pop(name, []))
        for path in plan.paths.get(name, []):
            if path.chain is not None:
                parts += [self._in_place(path, part) for part in self._parts.pop(path.key, [])]
        if parts:
            self._reduce(name, parts, grad)
        elif grad is not None and (name in plan.shared or name in plan.unused):
            zero = torch.zeros_like(upcast(grad))
            shared = upcast(grad).clone() if name in plan.shared else None
            self._result.whole.add(name)
            self._result.sums[name] = ParameterSums(zero, zero.clone(), shared)

    def _reduce(self, name: str, parts: list[Contributions], grad: Tensor | None) -> None:
        """Sum the contributions of all uses of a parameter, or store them per sample."""
        plan, sampler = self.plan, self.sampler
        if self.per_sample:
            self._result.per_sample[name] = samples_of(parts, 0, plan.m)
            return
        penalised, weight = name in plan.shared, 1.0
        leaf = self.graph.leaves[plan.leaves[name]]
        if sampler is not None and penalised:
            self._result.whole.add(name)
        elif sampler is not None:
            shape = (*leaf.shape, 2) if leaf.is_complex() else tuple(leaf.shape)
            parts, weight = self._restricted(sampler, name, shape, parts)
        if self.keep:
            self._result.parts[name] = parts
        if weight != 1.0:
            self._result.sums[name] = ParameterSums(*moments(parts), None, weight)
            return
        total = None
        if grad is not None and not (penalised or gradient_hooks(leaf) or grad.is_sparse):
            total = grad if upcast(grad) is grad else None  # else its precision is too low
        spare = self.spare.pop(name, None) if total is not None else None
        if spare is not None and (spare.total.shape != leaf.shape or spare.weight != 1.0):
            spare = None
        first, second = moments(parts, total, None if spare is None else spare.squares)
        if first is total:
            first = first.clone() if spare is None else spare.total.copy_(first)
        shared = upcast(grad) - first if penalised and grad is not None else None
        self._result.sums[name] = ParameterSums(first, second, shared)

    def _restricted(
        self, sampler: Sampler, name: str, shape: tuple[int, ...], parts: list[Contributions]
    ) -> tuple[list[Contributions], float]:
        """Return the contributions to the sampled block, and the weight of its coordinates."""
        uncut = [part.shape == shape for part in parts]  # others were narrowed before
        if any(part.whole_only for part, whole in zip(parts, uncut, strict=True) if whole):
            self._result.whole.add(name)
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
