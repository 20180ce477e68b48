"""One backward pass per sample, through the graph of a single forward pass.

Slow and simple: the way out where a graph was not seen before, and the truth that `verify` and the
tests compare with. All of it starts at the outputs of the model, whose rows have known owners.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from .graph import Graph, shape_of
from .layout import Layout
from .moments import upcast
from .ownership.planes import Key, canonical, is_mixed, is_nobody

__all__ = ["Output", "frontier", "partly_missed", "replay", "topmost"]

Output = tuple[GradientEdge, Layout]  # one output of the model, and where its samples' rows lie


def topmost(graph: Graph, outputs: Sequence[Output]) -> list[Output]:
    """The outputs in the graph that no other output is computed from."""
    inside = [(edge, layout) for edge, layout in outputs if edge.node in graph.index]
    starts = {graph.index[edge.node] for edge, _ in inside}
    below: set[int] = set()
    for start in starts:
        stack = [child for child, _ in graph.children[start] if child >= 0]
        while stack:
            i = stack.pop()
            if i not in below:
                below.add(i)
                stack.extend(child for child, _ in graph.children[i] if child >= 0)
    return [(edge, layout) for edge, layout in inside if graph.index[edge.node] not in below]


def frontier(
    graph: Graph, owners: Mapping[Key, Tensor | None], m: int, reading: int = 0
) -> list[Output]:
    """The last tensors in which every element has one owner: what follows is the loss's."""
    alone, inside = {}, set()
    for (node, number), planes in owners.items():
        position = graph.index.get(node)
        if position is not None and planes is not None:
            mine = canonical(planes[2 * reading : 2 * reading + 2])
            if not bool((is_mixed(mine) | is_nobody(mine)).any()):
                alone[node, number] = (position, mine[0])
                inside.add(position)
    last = [
        (GradientEdge(node, number), Layout.of(owner, shape_of(node, number), m))
        for (node, number), (position, owner) in alone.items()
        if not inside.issuperset(graph.parents[position])
    ]
    return topmost(graph, last)


def replay(
    roots: Sequence[Any],
    seeds: Sequence[Tensor | None] | None,
    outputs: Sequence[Output],
    params: Mapping[str, Tensor],
    m: int,
) -> dict[str, tuple[Tensor, Tensor]]:
    """Sum and sum of squares of the contributions of every parameter, by m backward passes."""
    edges = [edge for edge, _ in outputs]
    arriving = torch.autograd.grad(list(roots), edges, seeds, retain_graph=True, allow_unused=True)
    given = [k for k, grad in enumerate(arriving) if grad is not None]
    sums: dict[str, tuple[Tensor, Tensor]] = {}
    for i in range(m):
        masked = []
        for k in given:
            grad = arriving[k]
            assert grad is not None
            masked.append(grad * outputs[k][1].mask(i, i + 1, grad.device)[0])
        grads: Sequence[Tensor | None] = torch.autograd.grad(
            [edges[k] for k in given],
            list(params.values()),
            masked,
            retain_graph=True,
            allow_unused=True,
        )
        for name, found in zip(params, grads, strict=True):
            if found is None:
                continue
            each = upcast(found.to_dense() if found.is_sparse else found)
            if name in sums:
                sums[name][0].add_(each)
                sums[name][1].addcmul_(each, each)
            else:
                sums[name] = (each.clone(), each.square())
    return sums


def partly_missed(
    roots: Sequence[Any],
    seeds: Any,
    leaves: Mapping[str, Tensor],
    found: Mapping[str, tuple[Tensor, Tensor]],
) -> str | None:
    """A parameter whose gradient is not the sum of what `replay` found; None if there is none."""
    grads = torch.autograd.grad(roots, list(leaves.values()), seeds, retain_graph=True)
    for name, grad in zip(leaves, grads, strict=True):
        whole = upcast(grad.to_dense() if grad.is_sparse else grad)
        part = found[name][0] if name in found else torch.zeros_like(whole)
        if not bool(whole.isfinite().all()):
            continue  # nothing to compare; a broken number is reported as such
        if not torch.allclose(part, whole, rtol=1e-2, atol=1e-2 * float(whole.abs().max())):
            return name
    return None
