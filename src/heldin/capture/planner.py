"""Plans of backward passes: from the cache, from a trace, or by one pass per sample."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from heldin.errors import HeldinWarning, NotObservable, more

from .arguments import BatchDim
from .call import Call
from .counting import Counting, different_counts_error
from .forward import Calls
from .graph import Backward, Graph
from .names import Names
from .passes import ParameterSums, block_of
from .plan import Plan
from .plan_cache import PlanCache
from .planning import refuse_hidden
from .reference import exposed, partly_missed, replay, summed
from .sampling import Sampler
from .sharding import refuse_parallel, runs_once, watch_unsharded

__all__ = ["PassPlanner", "PlannedPass"]


@dataclass(frozen=True, eq=False)
class PlannedPass:
    """The plan of one backward pass, with its calls.

    Attributes:
        plan: how to observe the pass.
        calls: the calls of the model that the pass goes through.
        known_sums: sums that were computed before the pass, by parameter name.
    """

    plan: Plan
    calls: Sequence[Call]
    known_sums: dict[str, ParameterSums]


class PassPlanner:
    """A planner that decides how to observe each backward pass of a model.

    Args:
        model: the model, without wrappers.
        batch_dim: see `heldin.observe`.
        names: the names of the model's parameters.
        sampler: draws blocks of coordinates; None: observe all coordinates.
        traces: whether calls of the model are traced. If not, each backward pass is one sample.

    Attributes:
        calls: the forward passes of the model.
        plan_cache: plans for graphs that were seen before.
        is_sharded: whether `fully_shard` was applied to the model.
    """

    def __init__(
        self,
        model: nn.Module,
        batch_dim: BatchDim,
        names: Names,
        sampler: Sampler | None,
        traces: bool,
    ) -> None:
        self.plan_cache = PlanCache()
        self.calls = Calls(model, batch_dim, self.plan_cache, names)
        self.is_sharded = False
        self._had_batches = False  # whether any pass had more than one sample
        self._names, self._sampler, self._traces = names, sampler, traces
        self._batch_dim = batch_dim if isinstance(batch_dim, int) else 0
        self._handles: list[Any] = []

    # -- hooks

    def attach(self, model: nn.Module) -> None:
        """Register the hooks on the model."""
        self._handles = watch_unsharded(model, self._names.gathered)
        self.is_sharded = bool(self._handles)
        if self._traces:
            self.calls.attach()

    def detach(self) -> None:
        """Remove the hooks."""
        self.calls.detach()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def record_count(self, m: int) -> None:
        """Record the number of samples of a finished pass."""
        self._had_batches = self._had_batches or m > 1

    # -- plans

    def plan(self, backward: Backward, names: Mapping[int, str]) -> PlannedPass | None:
        """Plan a backward pass; None if it is not observed.

        Args:
            backward: the pass.
            names: the names of the observed parameters, by id.
        """
        graph = backward.graph
        if not self._traces:
            if not any(id(leaf) in names for leaf in graph.leaves.values()):
                return None
            refuse_parallel(graph.leaves.values(), self._names.by_id)
            return PlannedPass(self._leaves_only(graph, 1), (), {})
        calls = self.calls.within(graph)
        leaves = tuple([names.get(id(leaf)) for leaf in graph.leaves.values()])
        plan = self.plan_cache.plan(calls, leaves, graph)
        known_sums: dict[str, ParameterSums] = {}
        if plan is None:
            plan, known_sums = self._plan_new_graph(backward, calls, leaves)
        if plan is None:
            self.calls.done(calls, backward.retained)
            return None
        return PlannedPass(plan, calls, known_sums)

    def _plan_new_graph(
        self, backward: Backward, calls: Sequence[Call], leaves: tuple[str | None, ...]
    ) -> tuple[Plan | None, dict[str, ParameterSums]]:
        """Plan a graph without a cached plan.

        Returns:
            The plan (None: do not observe the pass), and sums that are computed before the pass.
        """
        graph, reached = backward.graph, [name for name in leaves if name is not None]
        if reached or calls:
            refuse_hidden(graph)
        if not reached:
            return None, {}
        refuse_parallel(graph.leaves.values(), self._names.by_id)
        if not calls:
            raise NotObservable(
                f"backward() reached parameter {reached[0]!r}, but no call of the model is pending "
                "in the observed block. Call the model before each backward() (or run the step "
                "through call()), and add up losses and penalties: (loss_a + loss_b).backward()"
            )
        if not any(len(call.candidates) > 1 for call in calls):
            if len({call.m for call in calls}) > 1:
                raise different_counts_error(calls)
            if calls[0].m == 1:
                if len(calls) > 1 and not self._had_batches:
                    self.plan_cache.warn_once(
                        "single calls",
                        f"one backward pass goes through {len(calls)} calls of the model with one "
                        "sample each: they count as one sample, as if they were views of it. If "
                        "they are different samples, put them into one batch, or call backward() "
                        "after each call " + more("calls-that-are-not-observed"),
                    )
                return self._leaves_only(graph, 1), {}
        if any(not call.candidates for call in calls):
            return self._by_reference(backward, calls, calls[0].m)
        argument_names, dim = self.calls.argument_names, self._batch_dim
        once = runs_once(graph.nodes)
        roots = () if once or self.is_sharded else backward.roots
        option = Counting(graph, self._names.by_id, calls, roots, argument_names, dim).decide()
        for call in calls:
            if len(call.candidates) > 1:
                self.calls.confirm(call, option.count)
        if option.plan is None:
            return self._leaves_only(graph, 1), {}
        if option.coupled is not None:
            why = f"in {option.coupled} it depends on several of them jointly"
            self.plan_cache.warn_mixed({"the loss": why})
        if not once and not any(call.is_volatile for call in calls):
            self.plan_cache.remember(calls, leaves, graph, option.plan)
        return option.plan, {}

    def _leaves_only(self, graph: Graph, m: int) -> Plan:
        names = self._names.by_id
        leaves = {names[id(p)]: i for i, p in graph.leaves.items() if id(p) in names}
        return Plan(m, leaves=leaves)

    # -- one backward pass per sample

    def by_sample(
        self, backward: Backward, calls: Sequence[Call], plan: Plan
    ) -> Iterator[dict[str, Tensor]]:
        """Yield the contributions of each sample, from one backward pass per sample."""
        graph = backward.graph
        params = {name: graph.leaves[i] for name, i in plan.leaves.items()}
        outputs = exposed(graph, [pair for c in calls for pair in self.plan_cache.outputs(c)])
        return replay(backward.roots, backward.seeds, outputs, params, plan.m)

    def _by_reference(
        self, backward: Backward, calls: Sequence[Call], m: int
    ) -> tuple[Plan | None, dict[str, ParameterSums]]:
        """Run one backward pass per sample, because a cached call has built an unknown graph.

        This works if the whole gradient comes through the model's outputs. Otherwise the pass is
        skipped with a warning. In both cases the next calls are traced again.
        """
        self.plan_cache.invalidate(calls)
        if self.is_sharded:
            return self._skip_pass("fully_shard does not allow extra backward passes")
        plan = self._leaves_only(backward.graph, m)
        sample_sums = summed(self.by_sample(backward, calls, plan))
        leaves = {name: backward.graph.leaves[i] for name, i in plan.leaves.items()}
        missed = partly_missed(backward.roots, backward.seeds, leaves, sample_sums)
        if missed is not None:
            return self._skip_pass(
                f"a part of the gradient of {missed!r} does not come through outputs of the model "
                "in which the place of each sample is known. Return the same tensors from every "
                "call, and use parameters in the model only, not between the model and the loss"
            )
        known_sums = {}
        for name, (first, second) in sample_sums.items():
            block, weight = block_of(self._sampler, name, first, m)
            known_sums[name] = ParameterSums(first[block], second[block], None, weight)
        return plan, known_sums

    def _skip_pass(self, why: str) -> tuple[None, dict[str, ParameterSums]]:
        warnings.warn(
            "this backward pass is not observed: the same call of the model has built "
            f"another graph before, and {why}. heldin traces the next calls again "
            + more("calls-that-are-not-observed"),
            HeldinWarning,
            stacklevel=2,
        )
        return None, {}
