"""The autograd graph of one backward pass, and the plan by which it is observed.

`walk` lists the nodes between a loss and its leaves. `make_plan` finds, with the owners that a
followed forward pass established, where each parameter meets the data (its uses), where the rows of
each sample lie there, and how the contributions get from there to the parameter. A plan holds
positions in the list of nodes, so it also fits the next graph with the same signature.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ._errors import NotObservable
from ._layout import Layout
from ._owners import Key, is_mixed, is_nobody

__all__ = ["Graph", "Plan", "Sink", "make_plan", "shape_of", "types_of", "walk"]

LEAF = "torch::autograd::AccumulateGrad"
# The dispatch mode turns some aliases into plain views; they are the same to us.
_SYNONYMS = {"ReshapeAliasBackward0": "ViewBackward0", "UnsafeViewBackward0": "ViewBackward0"}
# Nodes behind which parameters are hidden from a walk, and what to do instead.
_HIDING = {
    "CheckpointFunctionBackward": "call torch.utils.checkpoint.checkpoint with use_reentrant=False",
    "CompiledFunctionBackward": "do not compile what is outside the model (the loss, say)",
}
# Nodes that put every element of their input in one place: squares move as the elements do.
_MOVING = {
    "TBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0", "SqueezeBackward0",
    "SqueezeBackward1", "UnsqueezeBackward0", "ToCopyBackward0", "CloneBackward0", "AliasBackward0",
    "SplitBackward0", "SplitWithSizesBackward0", "SliceBackward0", "SelectBackward0",
    "UnbindBackward0", "UnsafeSplitBackward0",
}  # fmt: skip


@dataclass(eq=False)
class Graph:
    """The nodes reachable from some roots, in a fixed order."""

    nodes: list[Any]
    index: dict[Any, int]
    names: list[str]
    edges: list[int]  # flat: for each node its number of inputs, then a code for each of them
    leaves: dict[int, Tensor]  # position -> leaf tensor

    @property
    def signature(self) -> tuple[Any, ...]:
        """Equal for graphs with the same ops in the same places."""
        return tuple(self.names), tuple(self.edges)

    @cached_property
    def children(self) -> list[list[tuple[int, int]]]:
        """Per node and input: (position, output), with position -1 where there is nothing."""
        result: list[list[tuple[int, int]]] = []
        codes = iter(self.edges)
        for count in codes:
            inputs = [next(codes) for _ in range(count)]
            result.append([(-1, 0) if code < 0 else divmod(code, _OUTPUTS) for code in inputs])
        return result

    @cached_property
    def parents(self) -> list[list[int]]:
        """Per node: the positions of the nodes that it feeds."""
        result: list[list[int]] = [[] for _ in self.nodes]
        for position, inputs in enumerate(self.children):
            for child, _ in inputs:
                if child >= 0:
                    result[child].append(position)
        return result


_OUTPUTS = 1 << 20  # more than any op has outputs
_NAMES: dict[type, str] = {}  # of nodes, by type
KINDS = 4096  # types that are remembered


def walk(roots: Sequence[Any]) -> Graph:
    """All nodes between the roots and the leaves."""
    nodes = list(dict.fromkeys(roots))
    index = {node: position for position, node in enumerate(nodes)}
    names: list[str] = []
    edges: list[int] = []
    leaves: dict[int, Tensor] = {}
    for position, node in enumerate(nodes):  # grows while it is gone through
        kind = type(node)
        name = _NAMES.get(kind)
        if name is None:
            name = node.name()
            if name.endswith(kind.__name__) and len(_NAMES) < KINDS:  # not if several share a type
                _NAMES[kind] = name
        names.append(_SYNONYMS.get(name, name))
        if name == LEAF:
            leaves[position] = node.variable
            edges.append(0)
            continue
        following = node.next_functions
        edges.append(len(following))
        for child, output in following:
            if child is None:
                edges.append(-1)
                continue
            at = index.get(child)
            if at is None:
                at = index[child] = len(nodes)
                nodes.append(child)
            edges.append(at * _OUTPUTS + output)
    return Graph(nodes, index, names, edges, leaves)


def types_of(graph: Graph) -> tuple[type, ...] | None:
    """The types of the nodes, if they tell the names."""
    types = tuple([type(node) for node in graph.nodes])
    return types if all(kind in _NAMES for kind in types) else None


@dataclass(frozen=True)
class Sink:
    """An output of the topmost node (or leaf) of the data-free way down to parameters."""

    node: int
    output: int
    shape: tuple[int, ...]
    params: tuple[str, ...]
    chain: tuple[tuple[int, int, int], ...] | None  # moving nodes: (position, output, input)

    key: tuple[int, int]
    transposed: bool  # the way is a single transposition


@dataclass
class Plan:
    """How to observe graphs of one signature."""

    m: int
    layouts: dict[int, list[Layout | None]] = field(default_factory=dict)  # per use: its outputs
    uses: dict[int, list[tuple[int, Sink]]] = field(default_factory=dict)  # node -> inputs
    sinks: dict[str, list[Sink]] = field(default_factory=dict)  # parameter -> its sinks
    shared: set[str] = field(default_factory=set)  # parameters with a penalty in the loss
    silent: set[str] = field(default_factory=set)  # parameters used on no row at all
    leaves: dict[str, int] = field(default_factory=dict)
    expected: dict[tuple[int, int], int] = field(default_factory=dict)  # sink -> number of uses
    general: dict[int, list[Sink]] = field(default_factory=dict)  # node -> sinks that are no views
    sites: dict[tuple[int, int], Any] = field(default_factory=dict)  # see `_rules.Site`
    trusted: dict[tuple[int, int], bool] = field(default_factory=dict)  # see `pull_back`
    spots: Any = None  # see `_pass.Pass.hook`
    blocks: Any = None
    _watched: dict[bool, list[tuple[str, int]]] = field(default_factory=dict)

    def fits(self, graph: Graph) -> bool:
        """Whether the sizes at the uses are those of the plan; names and edges are known to be.

        A model may cut its inputs to a length that no argument tells, and a layer may be replaced
        by one of another size.
        """
        nodes = graph.nodes
        for position, layouts in self.layouts.items():
            for layout, found in zip(layouts, nodes[position]._input_metadata, strict=False):
                if layout is not None and tuple(found.shape) != layout.shape:
                    return False
        for uses in self.uses.values():
            for _, sink in uses:
                if sink.transposed or sink.chain == ():  # the parameter is at hand
                    shape = graph.leaves[self.leaves[sink.params[0]]].shape
                    if shape != (sink.shape[::-1] if sink.transposed else sink.shape):
                        return False
                elif shape_of(nodes[sink.node], sink.output) != sink.shape:
                    return False
        return True

    def alone(self, name: str) -> bool:
        """Whether a parameter has one use only."""
        sinks = self.sinks.get(name, [])
        return len(sinks) == 1 and self.expected[sinks[0].key] == 1

    def watched(self, early: bool) -> list[tuple[str, int]]:
        """The leaves whose gradient is waited for; with `early`, only where there is no other way.

        A parameter whose uses all lead straight to it is complete with the last of them.
        """
        known = self._watched.get(early)
        if known is None:
            every = self.m == 1
            known = self._watched[early] = [
                (name, position)
                for name, position in self.leaves.items()
                if every
                or name in self.shared
                or name in self.silent
                or (name in self.sinks and not (early and name in self.direct))
            ]
        return known

    @cached_property
    def direct(self) -> dict[str, int]:
        """The number of uses of every parameter that all its uses lead straight to."""
        return {
            name: sum(self.expected[sink.key] for sink in sinks)
            for name, sinks in self.sinks.items()
            if name not in self.shared and all(sink.chain is not None for sink in sinks)
        }


DATA, FREE, OUTSIDE = "data", "free", "outside"


def make_plan(
    graph: Graph,
    names: Mapping[int, str],
    owners: Mapping[Key, Tensor | None],
    slots: Mapping[Key, Tensor | None],
    m: int,
    cause: str | None,
) -> Plan:
    """Find the uses of every observed parameter; raise NotObservable where that cannot be done."""
    some = next((p for p in owners.values() if p is not None), None)
    readings = 1 if some is None else some.shape[0] // 2
    error: NotObservable | None = None
    for reading in range(readings):
        try:
            return _make_plan(graph, names, owners, slots, m, cause, reading)
        except NotObservable as failure:
            error = error or failure
    assert error is not None
    raise error


def _make_plan(
    graph: Graph,
    names: Mapping[int, str],
    owners: Mapping[Key, Tensor | None],
    slots: Mapping[Key, Tensor | None],
    m: int,
    cause: str | None,
    reading: int,
) -> Plan:
    outputs: dict[int, dict[int, Tensor | None]] = {}
    for (node, number), planes in owners.items():
        position = graph.index.get(node)
        if position is not None:
            outputs.setdefault(position, {})[number] = planes
    kinds = _kinds(graph, outputs)
    cuts = _cuts(graph, slots, kinds)
    plan = Plan(m)
    named = {i: names[id(leaf)] for i, leaf in graph.leaves.items() if id(leaf) in names}
    plan.leaves = {name: i for i, name in named.items()}
    below = _below(graph, kinds, cuts, named)
    for position, kind in enumerate(kinds):
        reached = [
            (argument, child, output)
            for argument, (child, output) in enumerate(graph.children[position])
            if child >= 0 and kinds[child] != DATA and below[child] and child not in cuts
        ]
        if kind == FREE and not graph.parents[position] and _is_unknown(graph, position, outputs):
            _check_penalty(graph, position, outputs, below, m)  # a loss of its own, without data
            plan.shared |= below[position]
        if not reached or (kind == FREE and position not in cuts):
            continue
        empty = [r for r in reached if _is_empty(graph, r[1], r[2])]
        for _, child, _ in empty:  # an expert that nothing was routed to
            plan.silent |= below[child]
        reached = [r for r in reached if r not in empty]
        if not reached:
            continue
        if _is_added_on(graph, position, outputs.get(position, {}), kind):
            for _, child, _ in reached:
                _check_penalty(graph, child, outputs, below, m)
                plan.shared |= below[child]
            continue
        params = sorted({name for _, child, _ in reached for name in below[child]})
        if kind == OUTSIDE:
            _refuse_outside(graph, position, params)
        known = cuts[position] if position in cuts else outputs[position]
        plan.layouts[position] = _layouts(graph, position, known, m, reading, params, cause)
        for argument, child, output in reached:
            sink = _sink(graph, child, output, below, named)
            plan.uses.setdefault(position, []).append((argument, sink))
            plan.expected[sink.key] = plan.expected.get(sink.key, 0) + 1
            for name in sink.params:
                if sink not in plan.sinks.setdefault(name, []):
                    plan.sinks[name].append(sink)
            if sink.chain is None and sink not in plan.general.setdefault(sink.node, []):
                plan.general[sink.node].append(sink)
    lost = sorted(set(plan.leaves) - set(plan.sinks) - plan.shared - plan.silent)
    if lost:
        raise NotObservable(
            f"parameter {lost[0]!r} gets a gradient, but meets nothing that comes from the model's "
            "inputs. Data cannot be followed out of PyTorch (numpy(), item(), tolist()): stay in "
            "tensors, or leave the parameter out with parameters=... A penalty has to be added to "
            "the loss"
        )
    return plan


def _is_empty(graph: Graph, position: int, output: int) -> bool:
    if position in graph.leaves:
        return graph.leaves[position].numel() == 0
    return 0 in shape_of(graph.nodes[position], output)


def shape_of(node: Any, output: int) -> tuple[int, ...]:
    """The shape of what a node has put out."""
    try:
        return tuple(node._input_metadata[output].shape)
    except RuntimeError:  # it has no shape of numbers
        raise NotObservable(
            f"{node.name()} works on nested tensors, in which rows cannot be followed; use padded "
            "or packed sequences"
        ) from None


def _kinds(graph: Graph, outputs: Mapping[int, Mapping[int, Tensor | None]]) -> list[str]:
    """Which nodes hold data, which depend on parameters alone, which were not followed."""
    kinds = [""] * len(graph.nodes)
    order = _children_first(graph)
    for i in order:
        if i in outputs:
            holds = any(planes is not None for planes in outputs[i].values())
            kinds[i] = DATA if holds else FREE
        elif i in graph.leaves:
            kinds[i] = FREE
        else:
            below = {kinds[child] for child, _ in graph.children[i] if child >= 0}
            kinds[i] = OUTSIDE if below & {DATA, OUTSIDE} else FREE
    return kinds


def _children_first(graph: Graph) -> list[int]:
    order: list[int] = []
    state = [0] * len(graph.nodes)
    for start in range(len(graph.nodes)):
        stack = [start]
        while stack:
            i = stack[-1]
            if state[i] == 0:
                state[i] = 1
                stack.extend(c for c, _ in graph.children[i] if c >= 0 and state[c] == 0)
            else:
                stack.pop()
                if state[i] == 1:
                    state[i] = 2
                    order.append(i)
    return order


def _cuts(
    graph: Graph,
    slots: Mapping[Key, Tensor | None],
    kinds: Sequence[str],
) -> dict[int, dict[int, Tensor | None]]:
    """Data-free nodes whose every output element is put into one sample's place, and into whose."""
    cuts: dict[int, dict[int, Tensor | None]] = {}
    for (node, number), planes in slots.items():
        i = graph.index.get(node)
        if i is None or planes is None or len(node._input_metadata) != 1:
            continue
        if kinds[i] == FREE and all(kinds[p] == DATA for p in graph.parents[i]):
            cuts[i] = {number: planes}
    return cuts


def _below(
    graph: Graph, kinds: Sequence[str], cuts: Mapping[int, Any], named: Mapping[int, str]
) -> list[frozenset[str]]:
    """The observed parameters that a data-free node depends on."""
    below: list[frozenset[str]] = [frozenset()] * len(graph.nodes)
    for i in _children_first(graph):
        if i in named:
            below[i] = frozenset([named[i]])
        elif kinds[i] == FREE:
            children = [c for c, _ in graph.children[i] if c >= 0]
            below[i] = frozenset().union(*(below[c] for c in children))
    return below


def _is_added_on(
    graph: Graph, position: int, known: Mapping[int, Tensor | None], kind: str
) -> bool:
    """Whether a parameter enters the loss here as a penalty: in a sum, after the samples met."""
    node = graph.nodes[position]
    if kind == DATA and not all(p is not None and bool(is_mixed(p).all()) for p in known.values()):
        return False
    scalar = all(size == 1 for size in shape_of(node, 0))
    return scalar and graph.names[position] in ("AddBackward0", "SubBackward0", "StackBackward0")


def _check_penalty(
    graph: Graph,
    start: int,
    outputs: Mapping[int, Any],
    below: Sequence[frozenset[str]],
    m: int,
) -> None:
    """A penalty holds no data. Outside the model nobody has followed it, so look at its tensors."""
    stack, visited = [start], {start}
    while stack:
        i = stack.pop()
        node, inputs = graph.nodes[i], graph.children[i]
        if i not in outputs and i not in graph.leaves and any(c < 0 for c, _ in inputs):
            for name in dir(node):
                value = getattr(node, name) if name.startswith("_saved_") else None
                if isinstance(value, Tensor) and m in value.shape and not value.requires_grad:
                    _refuse_outside(graph, i, sorted(below[start]))
        fresh = [c for c, _ in inputs if c >= 0 and c not in visited]
        visited.update(fresh)
        stack.extend(fresh)


def _is_unknown(graph: Graph, start: int, outputs: Mapping[int, Any]) -> bool:
    """Whether no node from here down was part of a forward pass that was followed."""
    stack, visited = [start], {start}
    while stack:
        i = stack.pop()
        if i in outputs:
            return False
        fresh = {c for c, _ in graph.children[i] if c >= 0} - visited
        visited |= fresh
        stack.extend(fresh)
    return True


def _refuse_outside(graph: Graph, position: int, params: Sequence[str]) -> None:
    raise NotObservable(
        f"parameter {params[0]!r} is used in {graph.names[position]} outside the model's forward "
        "pass, together with data; which sample is which is not known there. Move that computation "
        "into forward(), or run it through the observation's call() method"
    )


def _layouts(
    graph: Graph,
    position: int,
    known: Mapping[int, Tensor | None],
    m: int,
    reading: int,
    params: Sequence[str],
    cause: str | None,
) -> list[Layout | None]:
    node = graph.nodes[position]
    result: list[Layout | None] = []
    for number in range(len(node._input_metadata)):
        planes = known.get(number)
        if planes is None:
            result.append(None)
            continue
        mine = planes[2 * reading : 2 * reading + 2]
        if bool(is_mixed(mine).any()):
            where = f" by {cause}" if cause else ""
            raise NotObservable(
                f"parameter {params[0]!r} (in {graph.names[position]}) meets the data after "
                f"samples were mixed{where}; it has no per-sample gradient there. If an argument "
                "of the model only looks like a batch, pass batch_dim={name: None} for it; "
                "otherwise leave the parameter out with parameters=..."
            )
        if bool(is_nobody(mine).any()):
            raise NotObservable(
                f"parameter {params[0]!r} (in {graph.names[position]}) meets a tensor some of "
                "whose elements belong to no sample; which sample they serve is not established. "
                "Leave the parameter out with parameters=..."
            )
        result.append(Layout.of(mine[0], shape_of(node, number), m))
    return result


def _sink(
    graph: Graph,
    child: int,
    output: int,
    below: Sequence[frozenset[str]],
    named: Mapping[int, str],
) -> Sink:
    if child in named:
        shape = tuple(graph.leaves[child].shape)
        return Sink(child, output, shape, (named[child],), (), (child, output), False)
    chain: list[tuple[int, int, int]] = []
    at, number, moving = child, output, True
    while moving and at not in named:
        inputs = [(j, c, o) for j, (c, o) in enumerate(graph.children[at]) if c >= 0]
        moving = graph.names[at] in _MOVING and len(inputs) == 1
        argument, following, following_output = inputs[0]
        chain.append((at, number, argument))
        at, number = following, following_output
    shape = shape_of(graph.nodes[child], output)
    params = tuple(sorted(below[child]))
    flip = moving and [graph.names[position] for position, _, _ in chain] == ["TBackward0"]
    way = tuple(chain) if moving else None
    return Sink(child, output, shape, params, way, (child, output), flip)


def hidden(graph: Graph) -> tuple[str, str] | None:
    """A node that hides parameters from the walk, and the way out."""
    for name in graph.names:
        if name in _HIDING:
            return name, _HIDING[name]
    return None


def move(graph: Graph, sink: Sink, value: Tensor) -> Tensor:
    """Bring a tensor of the sink's shape into the parameter's shape."""
    assert sink.chain is not None
    for position, output, argument in sink.chain:
        node = graph.nodes[position]
        if graph.names[position] == "TBackward0":
            value = value.t()
            continue
        grads: list[Tensor | None] = [None] * len(node._input_metadata)
        grads[output] = value
        if graph.names[position] == "ToCopyBackward0":
            continue  # a cast: statistics keep their own precision
        result = node(*grads)
        value = result[argument] if isinstance(result, (tuple, list)) else result
    return value


def pull_back(
    graph: Graph,
    sink: Sink,
    value: Tensor,
    leaves: Sequence[Tensor],
    trusted: dict[tuple[int, int], bool],
) -> list[Tensor]:
    """Per-sample contributions (n, *sink.shape) to the parameters below, (n, *shape) each.

    `trusted` keeps, by sink, whether a batched backward pass is what single ones are: a few ops
    have none, or a wrong one.
    """
    edge = torch.autograd.graph.GradientEdge(graph.nodes[sink.node], sink.output)
    dtype = graph.nodes[sink.node]._input_metadata[sink.output].dtype
    hooks = [(live, dict(live)) for leaf in leaves if (live := leaf._backward_hooks)]
    for live, _ in hooks:
        live.clear()  # the user's hooks are for the user's own backward pass

    def pulled(cotangent: Tensor, batched: bool) -> tuple[Tensor, ...]:
        return torch.autograd.grad(
            [edge], list(leaves), [cotangent], retain_graph=True, is_grads_batched=batched
        )

    def single(cotangent: Tensor) -> tuple[Tensor, ...]:
        return pulled(cotangent, False)

    cotangents = value.to(dtype)
    grads: Sequence[Tensor] | None = None
    try:
        known = trusted.get(sink.key)
        if known is not False:
            try:
                grads = pulled(cotangents, True)
            except RuntimeError:
                trusted[sink.key] = False
        if grads is None or known is None:
            apart = [torch.stack(each) for each in zip(*map(single, cotangents), strict=True)]
            if grads is not None and all(bool(a.isfinite().all()) for a in apart):
                trusted[sink.key] = all(map(_agree, grads, apart))
            if grads is None or not trusted.get(sink.key):  # else as from now on (resumed runs)
                grads = apart
    finally:
        for live, saved in hooks:
            live.update(saved)
    real = value.real.dtype if value.is_complex() else value.dtype
    return [grad.to(real) for grad in grads]


def _agree(one: Tensor, other: Tensor) -> bool:
    allowed = torch.finfo(other.dtype).eps ** 0.5 * float(other.abs().max() if other.numel() else 0)
    return bool(((one - other).abs() <= allowed).all())
