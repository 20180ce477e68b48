"""Collects what the backward passes of one model show, from one `clear` to the next."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

from torch import Tensor, nn

from heldin.errors import HeldinError, HeldinWarning, NotObservable, more

from .arguments import BatchDim
from .counting import decide, different_counts, single_calls
from .forward import Calls
from .graph import Backward, Graph
from .knowledge import Call, Knowledge
from .leftovers import Leftovers, still_there, tell_of_steps
from .moments import Moments
from .names import Names
from .observed import ObservedPass
from .passes import ParameterSums, PassContext, PassResult, Recorder, block_of
from .plan import Plan
from .planning import refuse_hidden
from .reference import Sums, Truth, exposed, partly_missed, replay, summed
from .sampling import Sampler
from .sharding import refuse_parallel, runs_once, unwrapped, watch_unsharded
from .step import Step

__all__ = ["BUDGET", "Collector", "Estimator"]

Estimator = Literal["exact", "sampled", "microbatch"]
T = TypeVar("T")
BUDGET = 4096  # coordinates per parameter of the sampled estimator


class Collector:
    """The sums of all backward passes of a model since the last `clear`.

    Args:
        model, batch_dim, parameters, estimator, budget, seed: see `heldin.observe`.
        per_sample: collect the contributions of single samples in the place of their sums.
        real: refuse complex parameters (as those who want contributions in their shape must).
        with_reference: also take one backward pass per sample, to compare with.
        reuses_memory: `clear` lets the next pass overwrite the sums. For owners that hand none out.

    Attributes:
        weight_by_batch_size: let samples count alike, though the sizes of the passes differ.
        per_sample: contributions (m, ...) by name, of the last pass.
        keeps_all_passes: count passes though their gradients are set to None before the next one,
            for loops that have added them up elsewhere by then.
        before_backward: functions that are told of every backward pass before it is looked into.
    """

    def __init__(
        self,
        model: nn.Module,
        batch_dim: BatchDim = 0,
        parameters: Callable[[str], bool] | None = None,
        estimator: Estimator = "exact",
        budget: int = BUDGET,
        seed: int = 0,
        *,
        per_sample: bool = False,
        real: bool = False,
        with_reference: bool = False,
        reuses_memory: bool = False,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise HeldinError(f"heldin.observe: expected a torch.nn.Module, got {type(model)}")
        model = unwrapped(model)
        if not any(p.requires_grad for p in model.parameters()):
            raise HeldinError(
                "heldin.observe: the model has no parameter that requires a gradient; unfreeze at "
                "least one"
            )
        if estimator not in ("exact", "sampled", "microbatch"):
            raise HeldinError(
                f"heldin.observe: estimator must be 'exact', 'sampled' or 'microbatch', got "
                f"{estimator!r}"
            )
        if budget < 1:
            raise HeldinError(f"heldin.observe: budget must be at least 1, got {budget}")
        self.estimator = estimator
        self.sampler = Sampler(budget, seed) if estimator == "sampled" else None
        self.weight_by_batch_size = False
        self.keeps_all_passes = False
        self.per_sample: dict[str, Tensor] = {}
        self.before_backward: list[Callable[[Backward], None]] = []
        self._leftovers = self._earlier = Leftovers()
        self._unfinished = Leftovers()  # of a pass that was broken off
        self._several = False  # whether a pass of more than one sample was seen
        self._has_forgotten = False  # whether passes of this step were thrown away
        self._start()
        self.knowledge = Knowledge()
        self._names = Names(model, parameters, real or per_sample)
        self.calls = Calls(model, batch_dim, self.knowledge, self._names)
        self._batch_dim = batch_dim if isinstance(batch_dim, int) else 0
        self._wants_samples, self._wants_reference = per_sample, with_reference
        self._reuses_memory = reuses_memory
        self._spare: dict[str, ParameterSums] = {}
        self._model: nn.Module | None = model
        self._selects = parameters
        self.watching = False
        self._watching: list[Any] = []
        self._sharded = False

    # -- opening and closing

    @property
    def closed(self) -> bool:
        return self._model is None

    def open(self) -> None:
        """Watch the model's forward passes."""
        if self._model is not None and not self.watching:
            self.watching = True
            self._watching = watch_unsharded(self._model, self._names.gathered)
            self._sharded = bool(self._watching)
            self._watching.append(tell_of_steps(self))
            if self.estimator != "microbatch":  # which needs no owners
                self.calls.attach()

    def pause(self) -> None:
        """Watch nothing, at no cost; sums and what was learnt are kept."""
        self.watching = False
        self.calls.detach()
        for handle in self._watching:
            handle.remove()
        self._watching = []

    def close(self) -> None:
        """Let go of the model."""
        self.pause()
        self.calls.close()
        self._model, self._spare = None, {}
        self._leftovers = self._earlier = self._unfinished = Leftovers()
        self._names.forget()

    def clear(self, redraw: bool = True) -> None:
        """Forget the sums, and calls not followed by a backward pass; what was learnt is kept.

        Args:
            redraw: whether the sampled estimator looks at other coordinates from now on.
        """
        if self._reuses_memory and self.sampler is None:
            self._spare = self.sums
        self._start()
        self._has_forgotten = False
        if self.calls.pending:
            self.calls.drop()
        if self.sampler is not None:
            self.sampler.close_step(redraw)

    def _start(self) -> None:
        self._step, self._truth = Step(self.sampler), Truth()
        self._earlier = self._leftovers or self._earlier
        self._leftovers = Leftovers()

    def call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run a function as if it were the model's forward pass, and return its result."""
        if self.calls.watching:
            return self.calls.run(function, args, kwargs)
        return function(*args, **kwargs)

    # -- what was collected

    def parameters(self) -> dict[str, Tensor]:
        """The parameters that are observed, by name, in the model's order."""
        assert self._model is not None
        chosen = set(self._names.by_id.values())
        return {name: p for name, p in self._model.named_parameters() if name in chosen}

    def in_order(self, names: Iterable[str]) -> list[str]:
        """Names in the model's order; those that it does not have any more come first."""
        order = self._names.order
        return sorted(names, key=lambda name: order.get(name, -1))

    def trained(self) -> list[str]:
        """The names of the observed parameters that require a gradient, in the model's order."""
        return self._names.trained()

    def turn(self) -> frozenset[str] | None:
        """The parameters that are looked at until the next draw; None: all of them."""
        return None if self.sampler is None else self.sampler.turn(self.trained)

    @property
    def count(self) -> int:
        """Number of samples seen."""
        return self._step.count

    @property
    def passes(self) -> int:
        """Number of backward passes."""
        return self._step.passes

    @property
    def first_count(self) -> int:
        """Number of samples in the first backward pass."""
        return self._step.first_count

    @property
    def sums(self) -> dict[str, ParameterSums]:
        """What was seen of each parameter, by name."""
        return self._step.sums

    @property
    def reference(self) -> Sums:
        """Sums by one backward pass per sample."""
        return self._truth.sums

    def moments(self, name: str) -> Moments:
        """The moments of one parameter."""
        found = self.sums[name]
        total, squares, shared = found.total, found.squares, found.shared
        count = self._step.samples_of(name)
        if shared is not None and count:  # every sample has its part of a penalty
            squares = squares + (2 * total + shared) * shared / count
            total = total + shared
        return Moments(total, squares, count, found.weight)

    def add(self, observed: ObservedPass, result: PassResult) -> None:
        """Take in what a backward pass has shown; passes of one step add up."""
        self.per_sample.update(result.per_sample)
        self._several = self._several or result.m > 1
        over = self._step.add(result, observed.calls, observed.retained, self.weight_by_batch_size)
        self.calls.done(over)
        self._leftovers.note(observed.leaves)

    def broken_off(self, leaves: Mapping[str, Tensor]) -> None:
        """A backward pass has failed, and may have left a part of its gradients."""
        self._unfinished.note(leaves, self._leftovers, self._earlier)

    def stepped(self, parameters: Sequence[Tensor]) -> None:
        """An optimiser has stepped: gradients were used, and no graph can be run again."""
        self._leftovers.used(parameters)
        self._unfinished.used(parameters)
        self.calls.done(self._step.close_all())

    def put_by_hand(self) -> str | None:
        """A parameter whose gradient is none that a pass has left, though some were thrown away."""
        return self._leftovers.replaced() if self._has_forgotten else None

    def _forget_thrown_away(self) -> None:
        """Passes whose gradients were set to None or zero since then are no part of this step."""
        gone = self._leftovers.thrown_away()
        self._has_forgotten |= bool(gone)
        if gone and gone >= set(self.sums):
            self._start()
        else:
            self._step.forget(gone)

    # -- before a pass

    def prepare(self, backward: Backward) -> ObservedPass | None:
        """Find out how to observe a backward pass; None: there is nothing to observe."""
        for tell in self.before_backward:
            tell(backward)
        graph = backward.graph
        names = self._names.of(graph.leaves.values())
        if self.passes and not (self._sharded or self.keeps_all_passes):
            self._forget_thrown_away()
        if self._unfinished:
            self._unfinished.thrown_away()
            for name in self._unfinished.names[:1]:
                self.knowledge.warn_once("broken off", still_there(name))
            self._unfinished = Leftovers()
        known: dict[str, ParameterSums] = {}
        calls: list[Call] = []
        plan: Plan | None = None
        if self.estimator == "microbatch":
            if any(id(leaf) in names for leaf in graph.leaves.values()):
                refuse_parallel(graph.leaves.values(), self._names.by_id)
                plan = self._leaves_only(graph, 1)
        else:
            calls = self.calls.within(graph)
            leaves = tuple([names.get(id(leaf)) for leaf in graph.leaves.values()])
            plan = self.knowledge.plan(calls, leaves, graph)
            if plan is None:
                plan, known = self._inspect(backward, calls, leaves)
            if plan is not None and self._wants_reference:
                self._take_reference(backward, calls, plan)
        if plan is None:
            self.calls.done(calls, backward.retained)
            return None
        wants, inputs = self._wants_samples, backward.inputs
        retained = backward.retained and bool(calls)
        context = PassContext(
            graph, plan, self.sampler, self.turn(), wants, known, inputs, names, self._spare,
            keep=retained or self._step.opened(calls) is not None,
        )  # fmt: skip
        recorder = Recorder(context)
        if recorder.wanted is not None and not recorder.wanted:
            self.calls.done(calls, backward.retained)
            return None
        reached = {name: graph.leaves[i] for name, i in plan.leaves.items()}
        return ObservedPass(self, recorder, calls, reached, retained)

    def _inspect(
        self, backward: Backward, calls: Sequence[Call], leaves: tuple[str | None, ...]
    ) -> tuple[Plan | None, dict[str, ParameterSums]]:
        """A graph that was not seen before: its plan, and sums that are known before the pass."""
        graph, reached = backward.graph, [name for name in leaves if name is not None]
        if reached or calls:
            refuse_hidden(graph)
        if not reached:
            return None, {}
        refuse_parallel(graph.leaves.values(), self._names.by_id)
        if not calls:
            raise NotObservable(
                f"a backward pass reached parameter {reached[0]!r}, but not through a call of the "
                "model inside the observed block that was still to be followed back. Call the "
                "model (or run the step through call()), and add up losses and penalties: "
                "(loss_a + loss_b).backward()"
            )
        if not any(len(call.candidates) > 1 for call in calls):
            if len({call.m for call in calls}) > 1:
                raise different_counts(calls)
            if calls[0].m == 1:
                if len(calls) > 1 and not self._several:
                    self.knowledge.warn_once("single calls", single_calls(len(calls)))
                return self._leaves_only(graph, 1), {}
        if any(not call.candidates for call in calls):
            return self._by_reference(backward, calls, calls[0].m)
        arguments, dim = self.calls.names, self._batch_dim
        once = runs_once(graph.nodes)
        roots = () if once or self._sharded else backward.roots
        option = decide(graph, self._names.by_id, calls, roots, arguments, dim)
        for call in calls:
            if len(call.candidates) > 1:
                self.calls.settle(call, option.count)
        if option.plan is None:
            return self._leaves_only(graph, 1), {}
        if option.coupled is not None:
            why = f"in {option.coupled} it depends on several of them jointly"
            self.knowledge.warn_mixed({"the loss": why})
        volatile = any(call.tracker is not None and call.tracker.volatile for call in calls)
        if not once and not volatile:
            self.knowledge.remember(calls, leaves, graph, option.plan)
        return option.plan, {}

    def _leaves_only(self, graph: Graph, m: int) -> Plan:
        names = self._names.by_id
        leaves = {names[id(p)]: i for i, p in graph.leaves.items() if id(p) in names}
        return Plan(m, leaves=leaves)

    # -- one backward pass per sample

    def _by_sample(
        self, backward: Backward, calls: Sequence[Call], plan: Plan
    ) -> Iterator[dict[str, Tensor]]:
        graph = backward.graph
        params = {name: graph.leaves[i] for name, i in plan.leaves.items()}
        outputs = exposed(graph, [pair for c in calls for pair in self.knowledge.outputs(c)])
        return replay(backward.roots, backward.seeds, outputs, params, plan.m)

    def _take_reference(self, backward: Backward, calls: Sequence[Call], plan: Plan) -> None:
        if self._sharded:
            raise NotObservable(
                "the truth takes backward passes of our own, which would disturb fully_shard; "
                "compare before the model is sharded"
            )
        self._truth.add(calls, self._by_sample(backward, calls, plan), backward.retained)

    def _by_reference(
        self, backward: Backward, calls: Sequence[Call], m: int
    ) -> tuple[Plan | None, dict[str, ParameterSums]]:
        """A known call has led to an unknown graph: one backward pass per sample, this once.

        That needs the model's outputs, and that all of the gradient comes through them; without
        them the pass is let go, with a warning, and the next calls are followed again.
        """
        self.knowledge.doubt(calls)
        if self._sharded:
            return self._let_go("backward passes of our own would disturb fully_shard")
        plan = self._leaves_only(backward.graph, m)
        found = summed(self._by_sample(backward, calls, plan))
        leaves = {name: backward.graph.leaves[i] for name, i in plan.leaves.items()}
        missed = partly_missed(backward.roots, backward.seeds, leaves, found)
        if missed is not None:
            return self._let_go(
                f"not all of {missed!r}'s gradient comes through outputs of the model in which the "
                "place of each sample is established. Return the same tensors from every call, "
                "without code between the model and the loss that uses parameters"
            )
        known = {}
        for name, (first, second) in found.items():
            block, weight = block_of(self.sampler, name, first, m)
            known[name] = ParameterSums(first[block], second[block], None, weight)
        return plan, known

    def _let_go(self, why: str) -> tuple[None, dict[str, ParameterSums]]:
        warnings.warn(
            "this backward pass is not observed: its graph differs from those that the same call "
            f"of the model has led to before, and {why}. The next calls are followed anew "
            + more("calls-that-are-not-observed"),
            HeldinWarning,
            stacklevel=2,
        )
        return None, {}
