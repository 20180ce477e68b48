"""One backward pass per sample, through the graph of a single forward pass.

Slow and simple: the fallback for unknown graphs, and the reference that `verify` and the tests
compare with. All passes start at the outputs of the model, whose rows have known owners.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from .graph import Graph, reachable, shape_of
from .layout import Layout
from .moments import as_statistic
from .ownership.planes import Key, canonical, is_mixed, is_ownerless

__all__ = [
    "Output", "ReferenceSums", "Sums", "exposed", "frontier", "partly_missed", "replay", "summed",
]  # fmt: skip

Output = tuple[GradientEdge, Layout]  # one output of the model, and the position of its samples
Sums = dict[str, tuple[Tensor, Tensor]]  # sum and sum of squares, by parameter name


def exposed(graph: Graph, outputs: Iterable[Output]) -> list[Output]:
    """Return the outputs that the loss reads directly, those nearest to the loss first."""
    places = [(graph.index[o[0].node], o) for o in outputs if o[0].node in graph.index]
    ends = {place for place, _ in places}
    tops = [i for i, parents in enumerate(graph.parents) if not parents]
    reached = set(reachable(tops, lambda i: () if i in ends else graph.inputs[i]))
    height = {position: rank for rank, position in enumerate(graph.children_first)}
    directly_read = [pair for pair in places if pair[0] in reached]
    return [output for _, output in sorted(directly_read, key=lambda pair: -height[pair[0]])]


def frontier(
    graph: Graph, owners: Mapping[Key, Tensor | None], m: int, hypothesis: int
) -> list[Output]:
    """Return the last tensors in which every element has one owner; the loss comes after them."""
    single_owner = {}
    for (node, number), planes in owners.items():
        if node in graph.index and planes is not None:
            selected = canonical(planes[2 * hypothesis : 2 * hypothesis + 2])
            if not bool((is_mixed(selected) | is_ownerless(selected)).any()):
                single_owner[node, number] = selected[0]
    inside = {graph.index[node] for node, _ in single_owner}
    last = [
        (GradientEdge(node, number), Layout.from_owners(owner, shape_of(node, number), m))
        for (node, number), owner in single_owner.items()
        if not inside.issuperset(graph.parents[graph.index[node]])
    ]
    return exposed(graph, last)


def replay(
    roots: Sequence[Any],
    seeds: Any,
    outputs: Sequence[Output],
    params: Mapping[str, Tensor],
    m: int,
) -> Iterator[dict[str, Tensor]]:
    """Yield the contributions of each sample, from m backward passes."""
    if not outputs:
        return
    arriving = _arriving(roots, seeds, [edge for edge, _ in outputs])
    pairs = zip(outputs, arriving, strict=True)
    reached = [(*output, grad) for output, grad in pairs if grad is not None]
    for i in range(m):
        grads: Sequence[Tensor | None] = torch.autograd.grad(
            [edge for edge, _, _ in reached],
            list(params.values()),
            [grad * layout.mask(i, i + 1, grad.device)[0] for _, layout, grad in reached],
            retain_graph=True,
            allow_unused=True,
        )
        yield {
            name: as_statistic(grad)
            for name, grad in zip(params, grads, strict=True)
            if grad is not None
        }


def _arriving(roots: Sequence[Any], seeds: Any, edges: Sequence[Any]) -> list[Tensor | None]:
    """Return the gradient that each edge gets from the loss directly, not through earlier edges."""
    arriving: list[Tensor | None] = list(
        torch.autograd.grad(list(roots), edges, seeds, retain_graph=True, allow_unused=True)
    )
    for k, grad in enumerate(arriving):
        above = [(edges[j], arriving[j]) for j in range(k) if arriving[j] is not None]
        if grad is None or not above:
            continue
        (through,) = torch.autograd.grad(
            [edge for edge, _ in above], [edges[k]], [direct for _, direct in above],
            retain_graph=True, allow_unused=True,
        )  # fmt: skip
        if through is not None:
            arriving[k] = grad - through
    return arriving


def summed(samples: Iterable[Mapping[str, Tensor]]) -> Sums:
    """Return sum and sum of squares of the samples' contributions."""
    sums: Sums = {}
    for sample in samples:
        for name, contribution in sample.items():
            if name in sums:
                sums[name][0].add_(contribution)
                sums[name][1].addcmul_(contribution, contribution)
            else:
                sums[name] = (contribution.clone(), contribution.square())
    return sums


class ReferenceSums:
    """The reference sums of a step; passes that retain their graph are kept per sample."""

    def __init__(self) -> None:
        self._passes: list[tuple[set[Any], list[dict[str, Tensor]] | Sums]] = []

    def add(
        self, calls: Sequence[Any], samples: Iterator[dict[str, Tensor]], retained: bool
    ) -> None:
        """Add the per-sample passes of one backward pass through these calls of the model."""
        earlier = next((p for p in self._passes if not p[0].isdisjoint(calls)), None)
        if earlier is None:
            self._passes.append((set(calls), list(samples) if retained else summed(samples)))
            return
        for old, new in zip(earlier[1], samples, strict=True):
            assert isinstance(old, dict)
            for name, contribution in new.items():
                old[name] = old[name] + contribution if name in old else contribution

    @property
    def sums(self) -> Sums:
        """Sum and sum of squares, by parameter name."""
        result: Sums = {}
        for _, stored in self._passes:
            pass_sums = summed(stored) if isinstance(stored, list) else stored
            for name, (total, squares) in pass_sums.items():
                first, second = result.get(name, (0.0, 0.0))
                result[name] = first + total, second + squares
        return result


def partly_missed(
    roots: Sequence[Any],
    seeds: Any,
    leaves: Mapping[str, Tensor],
    sample_sums: Mapping[str, tuple[Tensor, Tensor]],
) -> str | None:
    """Return a parameter whose gradient is not the sum over `replay`; None if there is none."""
    grads = torch.autograd.grad(roots, list(leaves.values()), seeds, retain_graph=True)
    for name, grad in zip(leaves, grads, strict=True):
        whole = as_statistic(grad)
        part = sample_sums[name][0] if name in sample_sums else torch.zeros_like(whole)
        if not bool(whole.isfinite().all()):
            continue  # inf and nan are reported elsewhere
        if not torch.allclose(part, whole, rtol=1e-2, atol=1e-2 * float(whole.abs().max())):
            return name
    return None
