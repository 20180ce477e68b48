"""Plans of backward passes: from the cache, from a trace, or by one pass per sample."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from heldin.errors import HeldinWarning, NotObservable, more

from .call import Call
from .counting import Counting, different_counts_error
from .forward import Calls
from .graph import Backward, Graph
from .names import Names
from .passes import ParameterSums, block_of
from .plan import Plan
from .planning import refuse_hidden
from .reference import exposed, partly_missed, replay, summed
from .sampling import Sampler
from .sharding import refuse_parallel, runs_once

__all__ = ["PassPlanner"]

Known = dict[str, ParameterSums]  # sums that were computed before the pass, by parameter name


class PassPlanner:
    """A planner that decides how to observe each backward pass of a model.

    If calls of the model are not traced (`traces`), each backward pass is one sample.
    """

    def __init__(
        self, calls: Calls, names: Names, sampler: Sampler | None, batch_dim: int, traces: bool
    ) -> None:
        self._calls, self._plan_cache, self._names = calls, calls.plan_cache, names
        self._sampler, self._batch_dim, self._traces = sampler, batch_dim, traces
        self.is_sharded = False  # whether `fully_shard` was applied to the model
        self.had_batches = False  # whether any pass had more than one sample

    def plan(
        self, backward: Backward, names: Mapping[int, str]
    ) -> tuple[Plan, Sequence[Call], Known] | None:
        """Return plan, calls of the model and known sums of a pass; None: it is not observed."""
        graph = backward.graph
        if not self._traces:
            if not any(id(leaf) in names for leaf in graph.leaves.values()):
                return None
            refuse_parallel(graph.leaves.values(), self._names.by_id)
            return self._leaves_only(graph, 1), (), {}
        calls = self._calls.within(graph)
        leaves = tuple([names.get(id(leaf)) for leaf in graph.leaves.values()])
        plan = self._plan_cache.plan(calls, leaves, graph)
        known: Known = {}
        if plan is None:
            plan, known = self._plan_new_graph(backward, calls, leaves)
        if plan is None:
            self._calls.done(calls, backward.retained)
            return None
        return plan, calls, known

    def _plan_new_graph(
        self, backward: Backward, calls: Sequence[Call], leaves: tuple[str | None, ...]
    ) -> tuple[Plan | None, Known]:
        """Plan a graph without a cached plan; the plan is None if the pass is not observed."""
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
                if len(calls) > 1 and not self.had_batches:
                    self._plan_cache.warn_once(
                        "single calls",
                        f"one backward pass goes through {len(calls)} calls of the model with one "
                        "sample each: they count as one sample, as if they were views of it. If "
                        "they are different samples, put them into one batch, or call backward() "
                        "after each call " + more("calls-that-are-not-observed"),
                    )
                return self._leaves_only(graph, 1), {}
        if any(not call.candidates for call in calls):
            return self._by_reference(backward, calls, calls[0].m)
        once = runs_once(graph.nodes)
        roots = () if once or self.is_sharded else backward.roots
        argument_names, dim = self._calls.argument_names, self._batch_dim
        option = Counting(graph, self._names.by_id, calls, roots, argument_names, dim).decide()
        for call in calls:
            if len(call.candidates) > 1:
                self._calls.confirm(call, option.count)
        if option.plan is None:
            return self._leaves_only(graph, 1), {}
        if option.coupled is not None:
            why = f"in {option.coupled} it depends on several of them jointly"
            self._plan_cache.warn_mixed({"the loss": why})
        if not once and not any(call.is_volatile for call in calls):
            self._plan_cache.remember(calls, leaves, graph, option.plan)
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
        outputs = exposed(graph, [pair for c in calls for pair in self._plan_cache.outputs(c)])
        return replay(backward.roots, backward.seeds, outputs, params, plan.m)

    def _by_reference(
        self, backward: Backward, calls: Sequence[Call], m: int
    ) -> tuple[Plan | None, Known]:
        """Run one backward pass per sample, because a cached call has built an unknown graph.

        This works if the whole gradient comes through the model's outputs. Otherwise the pass is
        skipped with a warning. In both cases the next calls are traced again.
        """
        self._plan_cache.invalidate(calls)
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
        known: Known = {}
        for name, (first, second) in sample_sums.items():
            block, weight = block_of(self._sampler, name, first, m)
            known[name] = ParameterSums(first[block], second[block], None, weight)
        return plan, known

    def _skip_pass(self, why: str) -> tuple[None, Known]:
        warnings.warn(
            "this backward pass is not observed: the same call of the model has built "
            f"another graph before, and {why}. heldin traces the next calls again "
            + more("calls-that-are-not-observed"),
            HeldinWarning,
            stacklevel=2,
        )
        return None, {}
