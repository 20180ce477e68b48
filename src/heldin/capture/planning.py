"""The construction of a plan from a graph and the owners that a traced call has established."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from heldin._private_torch import outputs_of, saved, saved_names
from heldin.errors import NotObservable

from .graph import Graph, reachable, shape_of
from .layout import Layout
from .ownership.planes import Key, canonical, is_mixed, is_ownerless
from .ownership.tracker import Tracker
from .plan import CUTS, ParameterPath, Plan, cut_of

__all__ = ["PlanMaker", "refuse_hidden"]

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
# Nodes hold data, depend on parameters only, or were not traced.
DATA, FREE, OUTSIDE = "data", "free", "outside"


class PlanMaker:
    """A maker of plans for one graph under one number of samples.

    Args:
        graph: the graph of a backward pass.
        names: the names of the observed parameters, by id.
        trackers: the traces of the calls that the pass goes through.

    Attributes:
        owners: the planes of the outputs of every traced node (None: holds no data).
    """

    def __init__(self, graph: Graph, names: Mapping[int, str], trackers: Sequence[Tracker]) -> None:
        self._graph, self._m = graph, trackers[0].m
        self.owners = {k: v for tracker in trackers for k, v in tracker.nodes.items()}
        self._slots = {k: v for tracker in trackers for k, v in tracker.slots.items()}
        self._causes = {k: v for tracker in trackers for k, v in tracker.causes.items()}
        self._named = {i: names[id(p)] for i, p in graph.leaves.items() if id(p) in names}
        self._outputs = self._by_position(self.owners)
        self._kinds = self._classified()
        # Data-free nodes whose output elements each fill one sample's slot, and its owner.
        self._filled = {
            i: planes
            for i, planes in self._by_position(self._slots).items()
            if len(outputs_of(graph.nodes[i])) == 1
            and planes[0] is not None
            and self._kinds[i] == FREE
            and all(self._kinds[parent] == DATA for parent in graph.parents[i])
        }
        # The observed parameters that each data-free node depends on.
        self._below: list[frozenset[str]] = [frozenset()] * len(graph.nodes)
        for i in graph.children_first:
            if i in self._named:
                self._below[i] = frozenset([self._named[i]])
            elif self._kinds[i] == FREE:
                self._below[i] = frozenset().union(*(self._below[c] for c in graph.inputs[i]))

    def _by_position(self, table: Mapping[Key, Tensor | None]) -> dict[int, dict[int, Any]]:
        """Sort the planes of nodes in the graph by position and number of the output."""
        planes_by_position: dict[int, dict[int, Any]] = {}
        for (node, number), planes in table.items():
            if node in self._graph.index:
                planes_by_position.setdefault(self._graph.index[node], {})[number] = planes
        return planes_by_position

    def _classified(self) -> list[str]:
        kinds = [""] * len(self._graph.nodes)
        for i in self._graph.children_first:
            if i in self._outputs:
                holds_data = any(planes is not None for planes in self._outputs[i].values())
                kinds[i] = DATA if holds_data else FREE
            else:
                below = {kinds[child] for child in self._graph.inputs[i]}
                kinds[i] = OUTSIDE if below & {DATA, OUTSIDE} else FREE
        return kinds

    def make(self, hypothesis: int) -> Plan:
        """Return a plan with the uses of every observed parameter.

        Raises:
            NotObservable: if a parameter meets data whose samples are mixed or unknown.
        """
        graph, below = self._graph, self._below
        plan = Plan(self._m, cuts=self._row_cuts())
        plan.leaves = {name: i for i, name in self._named.items()}
        for position, kind in enumerate(self._kinds):
            if kind == FREE and not graph.parents[position] and below[position]:
                if self._outputs.keys().isdisjoint(reachable([position], graph.inputs.__getitem__)):
                    self._check_penalty(position)  # a separate loss without data
                    plan.shared |= below[position]
            if kind == FREE and position not in self._filled:
                continue
            reached = []
            for argument, (child, output) in enumerate(graph.children[position]):
                is_data = child < 0 or self._kinds[child] == DATA or child in self._filled
                if not is_data and below[child]:
                    if 0 in self._shape(child, output):  # an expert without any rows
                        plan.unused |= below[child]
                    else:
                        reached.append((argument, child, output))
            if not reached:
                continue
            if self._is_added_on(position):
                for _, child, _ in reached:
                    self._check_penalty(child)
                    plan.shared |= below[child]
                continue
            name = min(name for _, child, _ in reached for name in below[child])
            if kind == OUTSIDE:
                self._refuse_outside(position, name)
            plan.layouts[position] = self._layouts(position, name, hypothesis)
            plan.uses[position] = [
                (argument, self._path(child, output)) for argument, child, output in reached
            ]
        lost = sorted(set(plan.leaves) - set(plan.paths) - plan.shared - plan.unused)
        if lost:
            raise NotObservable(
                f"parameter {lost[0]!r} gets a gradient, but meets nothing that comes from the "
                "model's inputs. heldin cannot trace data that leave PyTorch (numpy(), item(), "
                "tolist()): keep them in tensors, or exclude the parameter with parameters=... If "
                "it has a penalty, add the penalty to the loss"
            )
        return plan

    def _shape(self, position: int, output: int) -> tuple[int, ...]:
        leaf = self._graph.leaves.get(position)
        return shape_of(self._graph.nodes[position], output) if leaf is None else tuple(leaf.shape)

    def _row_cuts(self) -> dict[int, tuple[Any, ...]]:
        """Return the nodes that select samples by Python numbers, with these numbers."""
        cuts = {}
        for position, name in enumerate(self._graph.names):
            if name in CUTS:
                child, number = self._graph.children[position][0]
                planes = self._outputs.get(child, {}).get(number)
                numbers = cut_of(self._graph.nodes[position], name)
                dim = numbers[0]
                if planes is None or dim is None:
                    continue
                dim -= (1 << 64) * (dim >= 1 << 63)  # a negative number, saved unsigned
                if planes.shape[dim % (planes.dim() - 1) + 1] > 1:
                    cuts[position] = numbers
        return cuts

    # -- penalties, and data outside of the model

    def _is_added_on(self, position: int) -> bool:
        """Return whether a parameter enters the loss as a penalty: in a sum of reduced losses."""
        outputs = self._outputs.get(position, {}).values()
        if self._kinds[position] == DATA and not all(
            planes is not None and bool(is_mixed(planes).all()) for planes in outputs
        ):
            return False
        scalar = all(size == 1 for size in shape_of(self._graph.nodes[position], 0))
        name = self._graph.names[position]
        return scalar and name in ("AddBackward0", "SubBackward0", "StackBackward0")

    def _check_penalty(self, start: int) -> None:
        """Refuse a penalty that may depend on data.

        A penalty outside the model is not traced, so its ops are checked. Constants may be added to
        parameters or multiplied with them entry by entry (old weights, their importance). Any other
        operand may be data: an input of a layer, an index, targets that a parameter is broadcast
        over.
        """
        for i in reachable([start], self._graph.inputs.__getitem__):
            is_traced = i in self._outputs or i in self._graph.leaves
            if not is_traced and self._may_hold_data(i):
                self._refuse_outside(i, min(self._below[start]))

    def _may_hold_data(self, i: int) -> bool:
        node, name, inputs = self._graph.nodes[i], self._graph.names[i], self._graph.children[i]
        if name.startswith(_INDEXED):
            return True
        shapes = [self._shape(child, output) for child, output in inputs if child >= 0]
        if not shapes or len(shapes) == len(inputs):
            return False
        if name not in _ENTRYWISE or shape_of(node, 0) not in (*shapes, ()):
            return True
        for attribute in saved_names(node):
            value = saved(node, attribute)
            if isinstance(value, Tensor) and not value.requires_grad:
                shape = tuple(value.shape)
                if self._m in shape or (shape and shape not in shapes):
                    return True
        return False

    def _refuse_outside(self, position: int, name: str) -> None:
        raise NotObservable(
            f"parameter {name!r} meets data in {self._graph.names[position]} outside the model's "
            "forward pass, where samples are not traced. Move that computation into forward(), or "
            "run it through the observation's call() method"
        )

    # -- uses

    def _layouts(self, position: int, name: str, hypothesis: int) -> list[Layout | None]:
        """Return the layouts of the outputs of a node in which a parameter meets data."""
        node = self._graph.nodes[position]
        where = f"parameter {name!r} (in {self._graph.names[position]})"
        outputs = self._filled.get(position) or self._outputs[position]
        planes_of = slice(2 * hypothesis, 2 * hypothesis + 2)
        result: list[Layout | None] = []
        for number in range(len(outputs_of(node))):
            planes = outputs.get(number)
            if planes is None:
                result.append(None)
                continue
            selected = planes[planes_of]
            if planes.shape[0] > 2:  # this hypothesis may vary along fewer dimensions
                selected = canonical(selected)
            if bool(is_mixed(selected).any()):
                cause = self._causes.get((node, number))
                raise NotObservable(
                    f"{where} meets the data after samples were mixed"
                    f"{f' by {cause}' if cause else ''}; it has no per-sample gradient there. If "
                    "an argument of the model only looks like a batch, pass batch_dim={name: None} "
                    "for it; otherwise exclude the parameter with parameters=..."
                )
            slot = self._slots.get((node, number))
            if slot is not None and bool(is_ownerless(selected).any()):
                # The zeros of an initial state belong to the sample whose slot they fill.
                owned = torch.where(is_ownerless(selected), slot[planes_of], selected)
                selected = selected if bool(is_mixed(owned).any()) else canonical(owned)
            if bool(is_ownerless(selected).any()):
                raise NotObservable(
                    f"{where} meets a tensor with elements that cannot be assigned to a sample. "
                    "Exclude the parameter with parameters=..."
                )
            result.append(Layout.from_owners(selected[0], shape_of(node, number), self._m))
        return result

    def _path(self, child: int, output: int) -> ParameterPath:
        """Return the path from an input of a use down to the parameters."""
        graph, shape = self._graph, self._shape(child, output)
        chain: list[tuple[int, int, int]] = []
        at, number, is_moving = child, output, True
        while is_moving and at not in self._named:
            inputs = [(j, c, o) for j, (c, o) in enumerate(graph.children[at]) if c >= 0]
            is_moving = graph.names[at] in _MOVING and len(inputs) == 1
            argument, below, output_below = inputs[0]
            chain.append((at, number, argument))
            at, number = below, output_below
        flip = is_moving and [graph.names[position] for position, _, _ in chain] == ["TBackward0"]
        params = tuple(sorted(self._below[child]))
        views = tuple(chain) if is_moving else None
        return ParameterPath(child, output, shape, params, views, flip)


def refuse_hidden(graph: Graph) -> None:
    """Refuse nodes that hide parameters from a walk through the graph."""
    for name in graph.names:
        if name in _HIDING:
            raise NotObservable(
                f"{name} hides parameters from observation: {_HIDING[name]}; or pass "
                'estimator="microbatch", which observes whole micro-batches only'
            )
