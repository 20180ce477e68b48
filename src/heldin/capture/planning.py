"""The construction of a plan from a graph and the owners that a traced call has established."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from heldin._private_torch import outputs_of, saved, saved_names
from heldin.errors import NotObservable

from .graph import Graph, shape_of
from .layout import Layout
from .ownership.planes import Key, canonical, is_mixed, is_ownerless
from .plan import CUTS, ParameterPath, Plan, cut_of

__all__ = ["make_plan", "refuse_hidden"]

# Nodes that hide parameters from a walk through the graph, and the way out.
_HIDING = {
    "CheckpointFunctionBackward": "call torch.utils.checkpoint.checkpoint with use_reentrant=False",
    "CompiledFunctionBackward": "do not compile what is outside the model (the loss, say)",
}
# Nodes that only move elements, so that squares move as the elements do.
_MOVING = {
    "TBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0", "SqueezeBackward0",
    "SqueezeBackward1", "UnsqueezeBackward0", "ToCopyBackward0", "CloneBackward0", "AliasBackward0",
    "SplitBackward0", "SplitWithSizesBackward0", "SliceBackward0", "SelectBackward0",
    "UnbindBackward0", "UnsafeSplitBackward0",
}  # fmt: skip


# Elementwise nodes, and concatenations of their results; nodes that look up by an index.
_ENTRYWISE = {
    "AddBackward0", "SubBackward0", "RsubBackward0", "MulBackward0", "DivBackward0", "PowBackward1",
    "AddcmulBackward0", "AddcdivBackward0", "LerpBackward0", "LerpBackward1", "WhereBackward0",
    "MaximumBackward0", "MinimumBackward0", "MseLossBackward0", "SmoothL1LossBackward0",
    "HuberLossBackward0", "NativeDropoutBackward0", "StackBackward0", "CatBackward0",
}  # fmt: skip
_INDEXED = ("Embedding", "Index", "Gather", "Take", "Scatter", "MaskedSelect", "MaskedScatter")


DATA, FREE, OUTSIDE = "data", "free", "outside"


def make_plan(
    graph: Graph,
    names: Mapping[int, str],
    owners: Mapping[Key, Tensor | None],
    slots: Mapping[Key, Tensor | None],
    m: int,
    causes: Mapping[Key, str],
    hypothesis: int = 0,
) -> Plan:
    """Return a plan with the uses of every observed parameter.

    Raises:
        NotObservable: if a parameter meets data whose samples are mixed or unknown.
    """
    outputs: dict[int, dict[int, Tensor | None]] = {}
    for (node, number), planes in owners.items():
        position = graph.index.get(node)
        if position is not None:
            outputs.setdefault(position, {})[number] = planes
    kinds = _kinds(graph, outputs)
    cuts = _cuts(graph, slots, kinds)
    plan = Plan(m, cuts=_row_cuts(graph, outputs))
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
            _check_penalty(graph, position, outputs, below, m)  # a separate loss without data
            plan.shared |= below[position]
        if not reached or (kind == FREE and position not in cuts):
            continue
        empty = [r for r in reached if _is_empty(graph, r[1], r[2])]
        for _, child, _ in empty:  # an expert without any rows
            plan.unused |= below[child]
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
        node_outputs = cuts[position] if position in cuts else outputs[position]
        plan.layouts[position] = _layouts(
            graph, position, node_outputs, slots, m, hypothesis, params, causes
        )
        for argument, child, output in reached:
            path = _path(graph, child, output, below, named)
            plan.uses.setdefault(position, []).append((argument, path))
    lost = sorted(set(plan.leaves) - set(plan.paths) - plan.shared - plan.unused)
    if lost:
        raise NotObservable(
            f"parameter {lost[0]!r} gets a gradient, but meets nothing that comes from the model's "
            "inputs. heldin cannot trace data that leave PyTorch (numpy(), item(), tolist()): keep "
            "them in tensors, or exclude the parameter with parameters=... If it has a penalty, "
            "add the penalty to the loss"
        )
    return plan


def _is_empty(graph: Graph, position: int, output: int) -> bool:
    if position in graph.leaves:
        return graph.leaves[position].numel() == 0
    return 0 in shape_of(graph.nodes[position], output)


def _kinds(graph: Graph, outputs: Mapping[int, Mapping[int, Tensor | None]]) -> list[str]:
    """Classify nodes: they hold data, depend on parameters only, or were not traced."""
    kinds = [""] * len(graph.nodes)
    for i in graph.children_first:
        if i in outputs:
            holds = any(planes is not None for planes in outputs[i].values())
            kinds[i] = DATA if holds else FREE
        elif i in graph.leaves:
            kinds[i] = FREE
        else:
            below = {kinds[child] for child, _ in graph.children[i] if child >= 0}
            kinds[i] = OUTSIDE if below & {DATA, OUTSIDE} else FREE
    return kinds


def _row_cuts(
    graph: Graph, outputs: Mapping[int, Mapping[int, Tensor | None]]
) -> dict[int, tuple[Any, ...]]:
    """Return the nodes that select samples by Python numbers, with these numbers."""
    cuts = {}
    for position, name in enumerate(graph.names):
        if name in CUTS:
            child, number = graph.children[position][0]
            planes = outputs.get(child, {}).get(number)
            numbers = cut_of(graph.nodes[position], name)
            dim = numbers[0]
            if planes is None or dim is None:
                continue
            dim = dim - (1 << 64) if dim >= 1 << 63 else dim  # a negative number, saved unsigned
            if planes.shape[dim % (planes.dim() - 1) + 1] > 1:
                cuts[position] = numbers
    return cuts


def _cuts(
    graph: Graph,
    slots: Mapping[Key, Tensor | None],
    kinds: Sequence[str],
) -> dict[int, dict[int, Tensor | None]]:
    """Return data-free nodes whose output elements each fill one sample's slot, and its owner."""
    cuts: dict[int, dict[int, Tensor | None]] = {}
    for (node, number), planes in slots.items():
        i = graph.index.get(node)
        if i is None or planes is None or len(outputs_of(node)) != 1:
            continue
        if kinds[i] == FREE and all(kinds[p] == DATA for p in graph.parents[i]):
            cuts[i] = {number: planes}
    return cuts


def _below(
    graph: Graph, kinds: Sequence[str], cuts: Mapping[int, Any], named: Mapping[int, str]
) -> list[frozenset[str]]:
    """Return the observed parameters that each data-free node depends on."""
    below: list[frozenset[str]] = [frozenset()] * len(graph.nodes)
    for i in graph.children_first:
        if i in named:
            below[i] = frozenset([named[i]])
        elif kinds[i] == FREE:
            children = [c for c, _ in graph.children[i] if c >= 0]
            below[i] = frozenset().union(*(below[c] for c in children))
    return below


def _is_added_on(
    graph: Graph, position: int, node_outputs: Mapping[int, Tensor | None], kind: str
) -> bool:
    """Return whether a parameter enters the loss as a penalty: in a sum of reduced losses."""
    node = graph.nodes[position]
    if kind == DATA and not all(
        p is not None and bool(is_mixed(p).all()) for p in node_outputs.values()
    ):
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
    """Refuse a penalty that may depend on data.

    A penalty outside the model is not traced, so its ops are checked. Constants may be added to
    parameters or multiplied with them entry by entry (old weights, their importance). Any other
    operand may be data: an input of a layer, an index, targets that a parameter is broadcast over.
    """
    stack, visited = [start], {start}
    while stack:
        i = stack.pop()
        inputs = graph.children[i]
        if i not in outputs and i not in graph.leaves and _may_hold_data(graph, i, m):
            _refuse_outside(graph, i, sorted(below[start]))
        new_nodes = [c for c, _ in inputs if c >= 0 and c not in visited]
        visited.update(new_nodes)
        stack.extend(new_nodes)


def _may_hold_data(graph: Graph, i: int, m: int) -> bool:
    node, name, inputs = graph.nodes[i], graph.names[i], graph.children[i]
    if name.startswith(_INDEXED):
        return True
    connected = [(c, o) for c, o in inputs if c >= 0]
    if not connected or len(connected) == len(inputs):
        return False
    shapes = [
        tuple(graph.leaves[c].shape) if c in graph.leaves else shape_of(graph.nodes[c], o)
        for c, o in connected
    ]
    if name not in _ENTRYWISE or shape_of(node, 0) not in (*shapes, ()):
        return True
    for attribute in saved_names(node):
        value = saved(node, attribute)
        if isinstance(value, Tensor) and not value.requires_grad:
            if m in value.shape or (value.dim() and tuple(value.shape) not in shapes):
                return True
    return False


def _is_unknown(graph: Graph, start: int, outputs: Mapping[int, Any]) -> bool:
    """Return whether no node below this one was part of a traced forward pass."""
    stack, visited = [start], {start}
    while stack:
        i = stack.pop()
        if i in outputs:
            return False
        new_nodes = {c for c, _ in graph.children[i] if c >= 0} - visited
        visited |= new_nodes
        stack.extend(new_nodes)
    return True


def _refuse_outside(graph: Graph, position: int, params: Sequence[str]) -> None:
    raise NotObservable(
        f"parameter {params[0]!r} meets data in {graph.names[position]} outside the model's "
        "forward pass, where samples are not traced. Move that computation into forward(), or run "
        "it through the observation's call() method"
    )


def _layouts(
    graph: Graph,
    position: int,
    node_outputs: Mapping[int, Tensor | None],
    slots: Mapping[Key, Tensor | None],
    m: int,
    hypothesis: int,
    params: Sequence[str],
    causes: Mapping[Key, str],
) -> list[Layout | None]:
    node = graph.nodes[position]
    result: list[Layout | None] = []
    for number in range(len(outputs_of(node))):
        planes = node_outputs.get(number)
        if planes is None:
            result.append(None)
            continue
        selected = planes[2 * hypothesis : 2 * hypothesis + 2]
        if planes.shape[0] > 2:  # this hypothesis may vary along fewer dimensions
            selected = canonical(selected)
        if bool(is_mixed(selected).any()):
            cause = causes.get((node, number))
            where = f" by {cause}" if cause else ""
            raise NotObservable(
                f"parameter {params[0]!r} (in {graph.names[position]}) meets the data after "
                f"samples were mixed{where}; it has no per-sample gradient there. If an argument "
                "of the model only looks like a batch, pass batch_dim={name: None} for it; "
                "otherwise exclude the parameter with parameters=..."
            )
        if bool(is_ownerless(selected).any()):  # for instance the zeros of an initial state
            selected = _served(selected, slots.get((node, number)), hypothesis)
        if bool(is_ownerless(selected).any()):
            raise NotObservable(
                f"parameter {params[0]!r} (in {graph.names[position]}) meets a tensor with "
                "elements that cannot be assigned to a sample. Exclude the parameter with "
                "parameters=..."
            )
        result.append(Layout.from_owners(selected[0], shape_of(node, number), m))
    return result


def _served(planes: Tensor, place: Tensor | None, hypothesis: int) -> Tensor:
    """Assign ownerless elements (initial states) to the sample whose slot they fill."""
    if place is None:
        return planes
    put = place[2 * hypothesis : 2 * hypothesis + 2]
    owned = torch.where(is_ownerless(planes), put, planes)
    return canonical(owned) if not bool(is_mixed(owned).any()) else planes


def _path(
    graph: Graph,
    child: int,
    output: int,
    below: Sequence[frozenset[str]],
    named: Mapping[int, str],
) -> ParameterPath:
    if child in named:
        shape = tuple(graph.leaves[child].shape)
        return ParameterPath(child, output, shape, (named[child],), (), False)
    chain: list[tuple[int, int, int]] = []
    at, number, moving = child, output, True
    while moving and at not in named:
        inputs = [(j, c, o) for j, (c, o) in enumerate(graph.children[at]) if c >= 0]
        moving = graph.names[at] in _MOVING and len(inputs) == 1
        argument, recording, following_output = inputs[0]
        chain.append((at, number, argument))
        at, number = recording, following_output
    shape = shape_of(graph.nodes[child], output)
    params = tuple(sorted(below[child]))
    flip = moving and [graph.names[position] for position, _, _ in chain] == ["TBackward0"]
    view_chain = tuple(chain) if moving else None
    return ParameterPath(child, output, shape, params, view_chain, flip)


def refuse_hidden(graph: Graph) -> None:
    """Refuse nodes that hide parameters from a walk through the graph."""
    for name in graph.names:
        if name in _HIDING:
            raise NotObservable(
                f"{name} hides parameters from observation: {_HIDING[name]}; or pass "
                'estimator="microbatch", which observes whole micro-batches only'
            )
