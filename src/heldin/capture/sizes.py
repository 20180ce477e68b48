"""Plans and layouts for batches of other sizes: padded texts, a smaller last batch, and so on.

A call of the model has a *kind*: everything that decides which graph it builds, except the sizes of
its tensors. Two calls of one kind have equal sizes in the same places, and ones in the same places;
the sizes themselves are a tuple of numbers. If calls of several sizes were traced and have the same
layout in terms of the samples, it holds for all sizes in between: each component lies between the
smallest and the largest traced one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import le

from .graph import Graph, shape_of
from .layout import Layout
from .plan import Plan

__all__ = ["LayoutPattern", "Range", "ScalablePlan", "sizes_of"]

Sizes = tuple[int, ...]


def sizes_of(shapes: Sequence[Sequence[int]]) -> tuple[tuple[tuple[int, ...], ...], Sizes]:
    """Return the pattern of equal sizes, and the distinct sizes in order of first occurrence.

    >>> sizes_of([(16, 60), (16, 60), (60, 1)])
    (((0, 1), (0, 1), (1, -1)), (16, 60))
    """
    numbers: dict[int, int] = {0: -2, 1: -1}  # empty and broadcast dimensions are part of the kind
    pattern = tuple(
        tuple([numbers.setdefault(size, len(numbers) - 2) for size in shape]) for shape in shapes
    )
    return pattern, tuple(numbers)[2:]


@dataclass
class Range:
    """The sizes between the smallest and the largest traced ones."""

    low: Sizes
    high: Sizes

    def __contains__(self, sizes: Sizes) -> bool:
        fits = len(sizes) == len(self.low) and all(map(le, self.low, sizes))
        return fits and all(map(le, sizes, self.high))

    def widen(self, sizes: Sizes) -> None:
        self.low = tuple(map(min, self.low, sizes))
        self.high = tuple(map(max, self.high, sizes))


@dataclass(frozen=True)
class LayoutPattern:
    """A regular layout, (index // inner) % m along one dimension, without its sizes.

    The dimension has `outer` times m times `inner` elements. At least one of the two numbers was
    the same at all sizes; the other one follows from the size of the tensor.
    """

    ndim: int
    dim: int
    inner: int | None
    outer: int | None

    @classmethod
    def from_layout(cls, layout: Layout) -> LayoutPattern | None:
        """Return the pattern of a layout; None if it is not regular."""
        if layout.dim is None or layout.inner is None:
            return None
        outer = layout.shape[layout.dim] // (layout.m * layout.inner)
        return cls(len(layout.shape), layout.dim, layout.inner, outer)

    def merge(self, layout: Layout) -> LayoutPattern | None:
        """Return the common pattern of this one and another layout; None if there is none."""
        other = LayoutPattern.from_layout(layout)
        if other is None or (other.ndim, other.dim) != (self.ndim, self.dim):
            return None
        inner = self.inner if self.inner == other.inner else None
        outer = self.outer if self.outer == other.outer else None
        return None if inner is None and outer is None else replace(self, inner=inner, outer=outer)

    def instantiate(self, shape: Sequence[int], m: int) -> Layout | None:
        """Return the layout of a tensor of this shape; None if the pattern does not fit it."""
        if len(shape) != self.ndim:
            return None
        size = shape[self.dim]
        inner = self.inner
        if inner is None:
            assert self.outer is not None
            inner = size // (m * self.outer)
        outer = size // (m * inner) if inner else 0
        if inner * outer * m != size or not size or self.outer not in (None, outer):
            return None
        return Layout(m, tuple(shape), self.dim, inner)


class ScalablePlan:
    """Several plans that differ in sizes only; `plan` is the first one."""

    def __init__(self, plan: Plan, sizes: Sizes) -> None:
        self.plan, self.sizes = plan, Range(sizes, sizes)
        layouts = plan.owned_layouts
        self._patterns = {key: LayoutPattern.from_layout(layouts[key]) for key in layouts}
        # Whether the plans have the same layouts in terms of the samples.
        self.scales = not plan.cuts and None not in self._patterns.values()

    def add(self, plan: Plan, sizes: Sizes) -> None:
        """Add the plan that a traced call of other sizes has given for the same graph."""
        self.sizes.widen(sizes)
        self.scales = self.scales and plan.skeleton == self.plan.skeleton
        if self.scales:
            layouts = plan.owned_layouts
            self._patterns = {
                key: pattern and pattern.merge(layouts[key])
                for key, pattern in self._patterns.items()
            }
            self.scales = None not in self._patterns.values()

    def instantiate(self, graph: Graph, m: int) -> Plan | None:
        """Return the plan for a graph of other sizes; None if the patterns do not fit it."""
        if not self.scales:
            return None
        layouts: dict[int, list[Layout | None]] = {
            position: [None] * len(each) for position, each in self.plan.layouts.items()
        }
        for (position, number), pattern in self._patterns.items():
            shape = shape_of(graph.nodes[position], number)
            layout = None if pattern is None else pattern.instantiate(shape, m)
            if layout is None:
                return None
            layouts[position][number] = layout
        return self.plan.resized(graph, m, layouts)
