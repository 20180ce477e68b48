"""The plan by which backward passes of one kind are observed.

It says where each parameter meets the data (its uses), where the rows of each sample lie there, and
how the contributions get from there to the parameter. It holds positions in the list of nodes, so
it also fits the next graph with the same signature.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from heldin._private_torch import gradient_hooks, outputs_of, saved

from .graph import Graph, shape_of
from .layout import Layout
from .ops import UseCache, batched_or_single

__all__ = ["CUTS", "ParameterPath", "Plan", "cut_of", "move", "pull_back"]

# Nodes that select rows by Python numbers, and the attributes that hold them.
CUTS = {
    "SelectBackward0": ("dim", "index"), "SliceBackward0": ("dim", "start", "end", "step"),
    "SplitBackward0": ("dim", "split_size"), "SplitWithSizesBackward0": ("dim", "split_sizes"),
    "UnsafeSplitBackward0": ("dim", "split_size"),
    "UnsafeSplitWithSizesBackward0": ("dim", "split_sizes"),
}  # fmt: skip


def cut_of(node: Any, name: str) -> tuple[Any, ...]:
    """Return the numbers by which a node selects rows; the dimension comes first."""
    return tuple([saved(node, attribute, None) for attribute in CUTS[name]])


@dataclass(frozen=True)
class ParameterPath:
    """The path from the point where a parameter-only subgraph meets data down to its parameters.

    Such a subgraph (a view, a cast, weight norm) holds no data. Contributions are collected at its
    top, an output of the node `node`, and pulled back to `params` from there.
    """

    node: int
    output: int
    shape: tuple[int, ...]
    params: tuple[str, ...]
    chain: tuple[tuple[int, int, int], ...] | None  # if all are views: (position, output, input)
    transposed: bool  # the chain is a single transposition

    @property
    def key(self) -> tuple[int, int]:
        return self.node, self.output


@dataclass
class Plan:
    """The plan for observing graphs of one signature."""

    m: int  # number of samples
    # By node: the position of each sample's rows in its outputs; the arguments that parameters
    # reach, and the path to each.
    layouts: dict[int, list[Layout | None]] = field(default_factory=dict)
    uses: dict[int, list[tuple[int, ParameterPath]]] = field(default_factory=dict)
    shared: set[str] = field(default_factory=set)  # parameters with a penalty in the loss
    unused: set[str] = field(default_factory=set)  # parameters that meet no row of the batch
    leaves: dict[str, int] = field(default_factory=dict)  # positions of the observed parameters
    cuts: dict[int, tuple[Any, ...]] = field(default_factory=dict)  # `cut_of` nodes, by position
    caches: dict[tuple[int, int], UseCache] = field(default_factory=dict)  # by node and argument
    # By path: whether a batched pull-back agrees with single ones.
    trusted: dict[tuple[int, int], bool] = field(default_factory=dict)

    # -- derived from the uses

    @cached_property
    def all_uses(self) -> list[ParameterPath]:
        return [path for uses in self.uses.values() for _, path in uses]

    @cached_property
    def paths(self) -> dict[str, list[ParameterPath]]:
        paths_by_name: dict[str, list[ParameterPath]] = {}
        for path in dict.fromkeys(self.all_uses):
            for name in path.params:
                paths_by_name.setdefault(name, []).append(path)
        return paths_by_name

    @cached_property
    def use_counts(self) -> Counter[tuple[int, int]]:
        return Counter(path.key for path in self.all_uses)

    @cached_property
    def pulled(self) -> dict[int, list[ParameterPath]]:
        """The paths that are more than views, by their topmost node."""
        paths_by_node: dict[int, list[ParameterPath]] = {}
        for path in dict.fromkeys(self.all_uses):
            if path.chain is None:
                paths_by_node.setdefault(path.node, []).append(path)
        return paths_by_node

    @cached_property
    def direct(self) -> dict[str, int]:
        """The number of uses of every parameter that is reached through views only."""
        return {
            name: sum(self.use_counts[path.key] for path in paths)
            for name, paths in self.paths.items()
            if name not in self.shared and all(path.chain is not None for path in paths)
        }

    @property
    def owned_layouts(self) -> dict[tuple[int, int], Layout]:
        """The layouts, by position and number of the output."""
        return {
            (position, number): layout
            for position, layouts in self.layouts.items()
            for number, layout in enumerate(layouts)
            if layout is not None
        }

    # -- other graphs

    def fits(self, graph: Graph) -> bool:
        """Return whether a graph with the plan's signature also has the sizes of the plan.

        They may differ: a model may truncate its inputs to a length that no argument shows, a layer
        may be replaced by one of another size, and rows may be assigned to samples by Python
        numbers from anywhere.
        """
        for position, numbers in self.cuts.items():
            if cut_of(graph.nodes[position], graph.names[position]) != numbers:
                return False
        for position, layouts in self.layouts.items():
            outputs = outputs_of(graph.nodes[position])
            for layout, metadata in zip(layouts, outputs, strict=False):
                if layout is not None and tuple(metadata.shape) != layout.shape:
                    return False
        return all(self._shape_at(graph, path) == path.shape for path in self.all_uses)

    def _shape_at(self, graph: Graph, path: ParameterPath) -> tuple[int, ...]:
        if path.transposed or path.chain == ():  # read the shape from the parameter itself
            shape = tuple(graph.leaves[self.leaves[path.params[0]]].shape)
            return shape[::-1] if path.transposed else shape
        return shape_of(graph.nodes[path.node], path.output)

    @cached_property
    def skeleton(self) -> Any:
        """The plan without its sizes; equal for plans that differ in sizes only."""
        uses = {
            position: [(argument, replace(path, shape=())) for argument, path in uses]
            for position, uses in self.uses.items()
        }
        return uses, set(self.owned_layouts), self.shared, self.unused, self.leaves

    def resized(self, graph: Graph, m: int, layouts: dict[int, list[Layout | None]]) -> Plan:
        """Return this plan for a graph of other sizes."""
        uses = {
            position: [
                (argument, replace(path, shape=self._shape_at(graph, path)))
                for argument, path in uses
            ]
            for position, uses in self.uses.items()
        }
        caches = {k: UseCache(c.no_cancellation, c.batched) for k, c in self.caches.items()}
        trusted = dict(self.trusted)
        return replace(self, m=m, layouts=layouts, uses=uses, caches=caches, trusted=trusted)


def move(graph: Graph, path: ParameterPath, value: Tensor) -> Tensor:
    """Bring a tensor of the path's shape into the parameter's shape."""
    assert path.chain is not None
    for position, output, argument in path.chain:
        node = graph.nodes[position]
        if graph.names[position] == "TBackward0":
            value = value.t()
            continue
        grads: list[Tensor | None] = [None] * len(outputs_of(node))
        grads[output] = value
        if graph.names[position] == "ToCopyBackward0":
            continue  # a cast: statistics keep their precision
        result = node(*grads)
        value = result[argument] if isinstance(result, (tuple, list)) else result
    return value


def pull_back(
    graph: Graph,
    path: ParameterPath,
    value: Tensor,
    leaves: Sequence[Tensor],
    trusted: dict[tuple[int, int], bool],
) -> list[Tensor]:
    """Pull per-sample contributions (n, *path.shape) back to the parameters, (n, *shape) each.

    `trusted` stores by path whether a batched backward pass agrees with single ones.
    """
    edge = torch.autograd.graph.GradientEdge(graph.nodes[path.node], path.output)
    cotangents = value.to(outputs_of(edge.node)[path.output].dtype)
    hooks = [(live, dict(live)) for leaf in leaves if (live := gradient_hooks(leaf))]
    for live, _ in hooks:
        live.clear()  # the user's hooks must not fire in this pass

    def pulled(cotangent: Tensor, batched: bool) -> tuple[Tensor, ...]:
        return torch.autograd.grad(
            [edge], list(leaves), [cotangent], retain_graph=True, is_grads_batched=batched
        )

    def single() -> list[Tensor]:
        parts = [pulled(cotangent, False) for cotangent in cotangents]
        return [torch.stack(same) for same in zip(*parts, strict=True)]

    try:
        grads, is_trusted = batched_or_single(
            lambda: pulled(cotangents, True), single, trusted.get(path.key)
        )
    finally:
        for live, saved_hooks in hooks:
            live.update(saved_hooks)
    if is_trusted is not None:
        trusted[path.key] = is_trusted
    real = value.real.dtype if value.is_complex() else value.dtype
    return [grad if grad.is_complex() else grad.to(real) for grad in grads]
