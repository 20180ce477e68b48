"""The autograd graph of one backward pass: the nodes between a loss and its leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from graphlib import TopologicalSorter
from typing import Any

from torch import Tensor

from heldin._private_torch import outputs_of, sequence_number
from heldin.errors import NotObservable

__all__ = ["LEAF", "Backward", "Graph", "number_of", "reachable", "shape_of", "walk"]

LEAF = "torch::autograd::AccumulateGrad"
# The dispatch mode turns some aliases into plain views.
_SYNONYMS = {"ReshapeAliasBackward0": "ViewBackward0", "UnsafeViewBackward0": "ViewBackward0"}


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
        """A value that is equal for graphs with the same ops in the same places."""
        return tuple(self.names), tuple(self.edges)

    @cached_property
    def children(self) -> list[list[tuple[int, int]]]:
        """Per node and input: (position, output), with position -1 where there is no edge."""
        result: list[list[tuple[int, int]]] = []
        codes = iter(self.edges)
        for count in codes:
            inputs = [next(codes) for _ in range(count)]
            result.append([(-1, 0) if code < 0 else divmod(code, _OUTPUTS) for code in inputs])
        return result

    @cached_property
    def inputs(self) -> list[list[int]]:
        """Per node: the positions of the nodes that it gets its inputs from."""
        return [[child for child, _ in edges if child >= 0] for edges in self.children]

    @cached_property
    def children_first(self) -> list[int]:
        """The positions of all nodes, each after those of its inputs."""
        return list(TopologicalSorter(dict(enumerate(self.inputs))).static_order())

    @cached_property
    def by_number(self) -> dict[Any, Any]:
        """The nodes by `number_of`; None where nodes of two threads have the same number."""
        nodes_by_number: dict[Any, Any] = {}
        for position, node in enumerate(self.nodes):
            if position not in self.leaves:
                number = number_of(node)
                nodes_by_number[number] = None if number in nodes_by_number else node
        return nodes_by_number

    @cached_property
    def parents(self) -> list[list[int]]:
        """Per node: the positions of the nodes that it feeds."""
        result: list[list[int]] = [[] for _ in self.nodes]
        for position, inputs in enumerate(self.inputs):
            for child in inputs:
                result[child].append(position)
        return result


def number_of(node: Any) -> Any:
    """Return a key that identifies a node without keeping its graph alive; not for leaves."""
    return sequence_number(node), type(node)


_OUTPUTS = 1 << 20  # more than any op has outputs
_NAMES: dict[type, str] = {}  # names of nodes, by type
KINDS = 4096  # maximum number of entries of _NAMES


def walk(roots: Sequence[Any]) -> Graph:
    """Collect all nodes between the roots and the leaves."""
    nodes = list(dict.fromkeys(roots))
    index = {node: position for position, node in enumerate(nodes)}
    names: list[str] = []
    edges: list[int] = []
    leaves: dict[int, Tensor] = {}
    for position, node in enumerate(nodes):  # the list grows during the loop
        kind = type(node)
        name = _NAMES.get(kind)
        if name is None:
            name = node.name()
            if name.endswith(kind.__name__) and len(_NAMES) < KINDS:  # else nodes share a type
                _NAMES[kind] = name
        names.append(_SYNONYMS.get(name, name))
        if name == LEAF:
            leaves[position] = node.variable
            edges.append(0)
            continue
        recording = node.next_functions
        edges.append(len(recording))
        for child, output in recording:
            if child is None:
                edges.append(-1)
                continue
            at = index.get(child)
            if at is None:
                at = index[child] = len(nodes)
                nodes.append(child)
            edges.append(at * _OUTPUTS + output)
    return Graph(nodes, index, names, edges, leaves)


def shape_of(node: Any, output: int) -> tuple[int, ...]:
    """Return the shape of an output of a node."""
    try:
        return tuple(outputs_of(node)[output].shape)
    except RuntimeError:  # a nested tensor
        raise NotObservable(
            f"{node.name()} works on nested tensors, whose rows cannot be assigned to samples; use "
            "padded or packed sequences"
        ) from None


def reachable(starts: Iterable[int], neighbours: Callable[[int], Iterable[int]]) -> Iterator[int]:
    """Yield the positions that can be reached from some positions, and these positions."""
    stack = list(starts)
    visited = set(stack)
    while stack:
        at = stack.pop()
        yield at
        new = [i for i in dict.fromkeys(neighbours(at)) if i not in visited]
        visited.update(new)
        stack.extend(new)


@dataclass(frozen=True)
class Backward:
    """A call of `torch.autograd.backward`, and the graph that it goes through."""

    graph: Graph
    roots: Sequence[Any]
    seeds: Any
    inputs: Any
    retained: bool = False  # whether another pass may go through the graph
