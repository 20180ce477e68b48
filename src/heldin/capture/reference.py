"""One backward pass per sample, through the graph of a single forward pass.

Slow and simple: the way out where a graph was not seen before, and the truth that `verify` and the
tests compare with. All of it starts at the outputs of the model, whose rows have known owners.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from .graph import Graph, children_first, shape_of
from .layout import Layout
from .moments import as_real, upcast
from .ownership.planes import Key, canonical, is_mixed, is_nobody

__all__ = ["Output", "Sums", "Truth", "exposed", "frontier", "partly_missed", "replay", "summed"]

Output = tuple[GradientEdge, Layout]  # one output of the model, and where its samples' rows lie
Sums = dict[str, tuple[Tensor, Tensor]]  # sum and sum of squares, by name of the parameter


def exposed(graph: Graph, outputs: Sequence[Output]) -> list[Output]:
    """The outputs that the loss reads itself, not only through others; the highest come first."""
    inside = [(edge, layout) for edge, layout in outputs if edge.node in graph.index]
    ends = {graph.index[edge.node] for edge, _ in inside}
    stack = [i for i, parents in enumerate(graph.parents) if not parents]
    reached = set(stack)
    while stack:
        at = stack.pop()
        if at not in ends:
            fresh = {child for child, _ in graph.children[at] if child >= 0} - reached
            reached |= fresh
            stack.extend(fresh)
    height = {position: rank for rank, position in enumerate(children_first(graph))}
    found = [output for output in inside if graph.index[output[0].node] in reached]
    return sorted(found, key=lambda output: -height[graph.index[output[0].node]])


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
    return exposed(graph, last)


def replay(
    roots: Sequence[Any],
    seeds: Sequence[Tensor | None] | None,
    outputs: Sequence[Output],
    params: Mapping[str, Tensor],
    m: int,
) -> Iterator[dict[str, Tensor]]:
    """The contributions of one sample after the other, by m backward passes."""
    if not outputs:
        return
    edges = [edge for edge, _ in outputs]
    arriving = _arriving(roots, seeds, edges)
    given = [k for k, grad in enumerate(arriving) if grad is not None]
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
        yield {
            name: as_real(upcast(grad.to_dense() if grad.is_sparse else grad))
            for name, grad in zip(params, grads, strict=True)
            if grad is not None
        }


def summed(samples: Iterable[Mapping[str, Tensor]]) -> Sums:
    """Sum and sum of squares of the samples' contributions."""
    sums: Sums = {}
    for sample in samples:
        for name, each in sample.items():
            if name in sums:
                sums[name][0].add_(each)
                sums[name][1].addcmul_(each, each)
            else:
                sums[name] = (each.clone(), each.square())
    return sums


class Truth:
    """The sums of all passes of a step; those that retain their graph are kept by sample."""

    def __init__(self) -> None:
        self._passes: list[tuple[set[Any], list[dict[str, Tensor]] | Sums]] = []

    def add(
        self, calls: Sequence[Any], samples: Iterator[dict[str, Tensor]], retained: bool
    ) -> None:
        """Take in one backward pass per sample of a pass through these calls of the model."""
        earlier = next((p for p in self._passes if not p[0].isdisjoint(calls)), None)
        if earlier is None:
            found = list(samples) if retained else summed(samples)
            self._passes.append((set(calls), found))
            return
        for old, new in zip(earlier[1], samples, strict=True):
            assert isinstance(old, dict)
            for name, each in new.items():
                old[name] = old[name] + each if name in old else each

    @property
    def sums(self) -> Sums:
        """Sum and sum of squares by name of the parameter."""
        result: Sums = {}
        for _, found in self._passes:
            each = summed(found) if isinstance(found, list) else found
            for name, (total, squares) in each.items():
                first, second = result.get(name, (0.0, 0.0))
                result[name] = first + total, second + squares
        return result


def _arriving(roots: Sequence[Any], seeds: Any, edges: Sequence[Any]) -> list[Tensor | None]:
    """The gradient that comes to each edge straight from the loss, not through those before it."""
    found: list[Tensor | None] = list(
        torch.autograd.grad(list(roots), edges, seeds, retain_graph=True, allow_unused=True)
    )
    for k, grad in enumerate(found):
        above = [(edges[j], found[j]) for j in range(k) if found[j] is not None]
        if grad is None or not above:
            continue
        (through,) = torch.autograd.grad(
            [edge for edge, _ in above], [edges[k]], [direct for _, direct in above],
            retain_graph=True, allow_unused=True,
        )  # fmt: skip
        if through is not None:
            found[k] = grad - through
    return found


def partly_missed(
    roots: Sequence[Any],
    seeds: Any,
    leaves: Mapping[str, Tensor],
    found: Mapping[str, tuple[Tensor, Tensor]],
) -> str | None:
    """A parameter whose gradient is not the sum of what `replay` found; None if there is none."""
    grads = torch.autograd.grad(roots, list(leaves.values()), seeds, retain_graph=True)
    for name, grad in zip(leaves, grads, strict=True):
        whole = as_real(upcast(grad.to_dense() if grad.is_sparse else grad))
        part = found[name][0] if name in found else torch.zeros_like(whole)
        if not bool(whole.isfinite().all()):
            continue  # nothing to compare; a broken number is reported as such
        if not torch.allclose(part, whole, rtol=1e-2, atol=1e-2 * float(whole.abs().max())):
            return name
    return None
