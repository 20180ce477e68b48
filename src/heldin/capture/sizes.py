"""What stays the same when batches of another size come: padded texts, a last batch, and so on.

A call of the model has a *kind*: all that decides which graph it builds, but for the sizes of its
tensors. Two calls of one kind have equal sizes in the same places, and ones in the same places; the
sizes themselves are a tuple of numbers. What was followed at several sizes, and found to have the
same layout in terms of the samples, holds for all sizes in between: in every component, at least
as large as the smallest and at most as large as the largest that was followed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from .graph import Graph, shape_of
from .layout import Layout
from .ops import UseCache
from .plan import Plan

__all__ = ["Form", "Range", "ScalablePlan", "sizes_of"]

Sizes = tuple[int, ...]


def sizes_of(shapes: Sequence[Sequence[int]]) -> tuple[tuple[tuple[int, ...], ...], Sizes]:
    """Which sizes are equal to which others, and the sizes in the order in which they first occur.

    >>> sizes_of([(16, 60), (16, 60), (60, 1)])
    (((0, 1), (0, 1), (1, -1)), (16, 60))
    """
    numbers: dict[int, int] = {0: -2, 1: -1}  # nothing, and what is broadcast, are kinds of a size
    pattern = tuple(
        tuple([numbers.setdefault(size, len(numbers) - 2) for size in shape]) for shape in shapes
    )
    return pattern, tuple(numbers)[2:]


@dataclass
class Range:
    """The sizes between those that were followed."""

    low: Sizes
    high: Sizes

    def __contains__(self, sizes: Sizes) -> bool:
        return len(sizes) == len(self.low) and all(
            low <= size <= high for low, size, high in zip(self.low, sizes, self.high, strict=True)
        )

    def widen(self, sizes: Sizes) -> None:
        """Another size was followed."""
        self.low = tuple(map(min, self.low, sizes))
        self.high = tuple(map(max, self.high, sizes))


@dataclass(frozen=True)
class Form:
    """A regular layout, (index // inner) % m along one dimension, without its sizes.

    Along the dimension lie `outer` times m times `inner` elements. One of the two numbers, or both,
    has been the same at all sizes; the other one follows from the size of the tensor.
    """

    ndim: int
    dim: int
    inner: int | None
    outer: int | None

    @classmethod
    def of(cls, layout: Layout) -> Form | None:
        """The form of one layout; None if it is not regular."""
        if layout.dim is None or layout.inner is None:
            return None
        return cls(len(layout.shape), layout.dim, layout.inner, layout.outer)

    def also(self, layout: Layout) -> Form | None:
        """The form of this one and another layout; None if they have none in common."""
        other = Form.of(layout)
        if other is None or (other.ndim, other.dim) != (self.ndim, self.dim):
            return None
        inner = self.inner if self.inner == other.inner else None
        outer = self.outer if self.outer == other.outer else None
        return None if inner is None and outer is None else replace(self, inner=inner, outer=outer)

    def at(self, shape: Sequence[int], m: int) -> Layout | None:
        """The layout of a tensor of this shape; None if the form does not fit it."""
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


Forms = dict[int, list[Form | None]]  # by position of the node: one for each of its outputs


@dataclass
class ScalablePlan:
    """Plans for several sizes that are one but for these sizes.

    Attributes:
        plan: the first of them.
        sizes: the sizes for which they hold.
        forms: where samples lie at the uses; None: no form fits all plans, each size is its own.
    """

    plan: Plan
    sizes: Range
    forms: Forms | None = field(default=None)

    @classmethod
    def of(cls, plan: Plan, sizes: Sizes) -> ScalablePlan:
        """What one plan says about others."""
        forms = {
            position: [None if layout is None else Form.of(layout) for layout in layouts]
            for position, layouts in plan.layouts.items()
        }
        regular = all(
            (layout is None) == (form is None)
            for position, layouts in plan.layouts.items()
            for layout, form in zip(layouts, forms[position], strict=True)
        )
        return cls(plan, Range(sizes, sizes), forms if regular and not plan.cuts else None)

    def add(self, plan: Plan, sizes: Sizes) -> None:
        """Another plan for the same graph, at other sizes, was found by following a call."""
        self.sizes.widen(sizes)
        if self.forms is None or plan.skeleton != self.plan.skeleton:
            self.forms = None
            return
        forms: Forms = {}
        for position, layouts in plan.layouts.items():
            forms[position] = []
            for form, layout in zip(self.forms[position], layouts, strict=True):
                shared = None if form is None or layout is None else form.also(layout)
                if (layout is None) != (form is None) or (layout is not None and shared is None):
                    self.forms = None
                    return
                forms[position].append(shared)
        self.forms = forms

    def at(self, graph: Graph, m: int) -> Plan | None:
        """The plan for a graph of other sizes; None if the forms do not fit it."""
        if self.forms is None:
            return None
        layouts: dict[int, list[Layout | None]] = {}
        for position, forms in self.forms.items():
            node, found = graph.nodes[position], []
            for number, form in enumerate(forms):
                layout = None if form is None else form.at(shape_of(node, number), m)
                if form is not None and layout is None:
                    return None
                found.append(layout)
            layouts[position] = found
        caches = {
            key: UseCache(cache.no_cancellation, cache.batched)
            for key, cache in self.plan.caches.items()
        }
        return self.plan.resized(graph, m, layouts, caches)
