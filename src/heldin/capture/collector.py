"""The per-sample sums of a model's backward passes, from one `clear` to the next."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from torch import Tensor, nn

from heldin.errors import HeldinError, NotObservable, more

from .arguments import BatchDim
from .call import Call
from .forward import Calls
from .gradient_ledger import GradientLedger, register_step_hook
from .graph import Backward
from .moments import Moments
from .names import Names
from .passes import ParameterSums, Recorder
from .plan_cache import PlanCache
from .planner import PassPlanner
from .reference import ReferenceSums, Sums
from .sampling import Sampler
from .sharding import unwrapped, watch_unsharded
from .step import Step

__all__ = ["COORDINATES", "Collector", "Estimator", "ObservedPass"]

Estimator = Literal["exact", "sampled", "microbatch"]
T = TypeVar("T")
COORDINATES = 4096  # coordinates per parameter of the sampled estimator


class Collector:
    """The sums of all backward passes of a model since the last `clear`.

    Args:
        model, batch_dim, parameters, estimator, coordinates, seed: see `heldin.observe`.
        per_sample: collect the contributions of single samples instead of their sums.
        real: refuse complex parameters, whose contributions do not have the parameter's shape.
        with_reference: also run one backward pass per sample, for comparison.
        reuses_memory: `clear` allows the next pass to overwrite the sums. Only for callers that
            keep no reference to them.
    """

    def __init__(
        self,
        model: nn.Module,
        batch_dim: BatchDim = 0,
        parameters: Callable[[str], bool] | None = None,
        estimator: Estimator = "exact",
        coordinates: int = COORDINATES,
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
        if coordinates < 1:
            raise HeldinError(f"heldin.observe: coordinates must be at least 1, got {coordinates}")
        self.estimator = estimator
        self.sampler = Sampler(coordinates, seed) if estimator == "sampled" else None
        # Give every sample the same weight when passes differ in size.
        self.weight_by_batch_size = False
        # Count a pass even if its gradients are set to None before the next one, for loops that
        # accumulate gradients outside `.grad`.
        self.keeps_all_passes = False
        self.per_sample: dict[str, Tensor] = {}  # contributions (m, ...) of the last pass
        # Functions that are called with every backward pass before it is analysed.
        self.before_backward: list[Callable[[Backward], None]] = []
        self._gradients = self._earlier_gradients = GradientLedger()
        self._failed_gradients = GradientLedger()  # gradients of a backward pass that failed
        self._has_zeroed_passes = False  # whether gradients of this step were zeroed before its end
        self._start()
        self._names = Names(model, parameters, real or per_sample)
        self.plan_cache = PlanCache()
        self.calls = Calls(model, batch_dim, self.plan_cache, self._names)
        self._traces = estimator != "microbatch"
        usual_dim = batch_dim if isinstance(batch_dim, int) else 0
        self._planner = PassPlanner(self.calls, self._names, self.sampler, usual_dim, self._traces)
        self._wants_samples, self._wants_reference = per_sample, with_reference
        self._reuses_memory = reuses_memory
        self._spare: dict[str, ParameterSums] = {}
        self._model: nn.Module | None = model
        self.watching = False
        self._handles: list[Any] = []

    # -- opening and closing

    @property
    def closed(self) -> bool:
        return self._model is None

    def open(self) -> None:
        if self._model is not None and not self.watching:
            self.watching = True
            self._handles = watch_unsharded(self._model, self._names.gathered)
            self._planner.is_sharded = bool(self._handles)
            self._handles.append(register_step_hook(self.on_optimizer_step))
            if self._traces:
                self.calls.attach()

    def pause(self) -> None:
        """Remove the hooks; sums and cached plans are kept."""
        self.watching = False
        self.calls.detach()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def close(self) -> None:
        """Remove the hooks and drop all references to the model."""
        self.pause()
        self.calls.close()
        self._model, self._spare = None, {}
        self._gradients = self._earlier_gradients = self._failed_gradients = GradientLedger()
        self._names.forget()

    def clear(self, redraw: bool = True) -> None:
        """Reset the sums and drop calls without a backward pass: see `Observation.clear`."""
        if self._reuses_memory and self.sampler is None:
            self._spare = self.sums
        self._start()
        self._has_zeroed_passes = False
        if self.calls.pending:
            self.calls.drop()
        if self.sampler is not None:
            self.sampler.close_step(redraw)

    def _start(self) -> None:
        self._step, self._reference_sums = Step(self.sampler), ReferenceSums()
        self._earlier_gradients = self._gradients or self._earlier_gradients
        self._gradients = GradientLedger()

    def call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        if self.calls.watching:
            return self.calls.run(function, args, kwargs)
        return function(*args, **kwargs)

    # -- results

    def parameters(self) -> dict[str, Tensor]:
        """Return the observed parameters by name, in the model's order."""
        assert self._model is not None
        order = self._names.order
        return {name: p for name, p in self._model.named_parameters() if name in order}

    def in_order(self, names: Iterable[str]) -> list[str]:
        """Sort parameter names by their order in the model; unknown names come first."""
        order = self._names.order
        return sorted(names, key=lambda name: order.get(name, -1))

    def trained(self) -> list[str]:
        """List the observed parameters that require a gradient, in the model's order."""
        return self._names.trained()

    def turn(self) -> frozenset[str] | None:
        """Return the parameters that are sampled until the next draw; None means all."""
        return None if self.sampler is None else self.sampler.turn(self.trained)

    @property
    def count(self) -> int:
        """Number of samples since the last `clear`."""
        return self._step.count

    @property
    def passes(self) -> int:
        """Number of backward passes since the last `clear`."""
        return self._step.passes

    @property
    def first_count(self) -> int:
        """Number of samples in the first backward pass."""
        return self._step.first_count

    @property
    def sums(self) -> dict[str, ParameterSums]:
        return self._step.sums

    @property
    def reference(self) -> Sums:
        return self._reference_sums.sums

    def moments(self, name: str) -> Moments:
        parameter_sums = self.sums[name]
        total, squares, shared = parameter_sums.total, parameter_sums.squares, parameter_sums.shared
        count = self._step.samples_of(name)
        if shared is not None and count:  # every sample has the same share of a penalty
            squares = squares + (2 * total + shared) * shared / count
            total = total + shared
        return Moments(total, squares, count, parameter_sums.weight)

    def on_optimizer_step(self, parameters: Sequence[Tensor]) -> None:
        """Mark gradients as used by an optimiser step, and close all retained graphs."""
        self._gradients.mark_used(parameters)
        self._failed_gradients.mark_used(parameters)
        self.calls.done(self._step.close_all())

    def externally_set_gradient(self) -> str | None:
        """Return a parameter whose `.grad` was set from outside after passes were zeroed.

        None if there is no such parameter, or if no pass of this step was zeroed.
        """
        return self._gradients.find_replaced() if self._has_zeroed_passes else None

    def _drop_zeroed_passes(self) -> None:
        """Remove passes from the step whose gradients have been set to None or zero."""
        gone = self._gradients.pop_zeroed()
        self._has_zeroed_passes |= bool(gone)
        if gone and gone >= set(self.sums):
            self._start()
        else:
            self._step.forget(gone)

    # -- around a pass

    def prepare(self, backward: Backward) -> ObservedPass | None:
        """Plan how to observe a backward pass; None if it reaches no observed parameter."""
        for notify in self.before_backward:
            notify(backward)
        graph = backward.graph
        names = self._names.for_leaves(graph.leaves.values())
        if self.passes and not (self._planner.is_sharded or self.keeps_all_passes):
            self._drop_zeroed_passes()
        if self._failed_gradients:
            self._failed_gradients.pop_zeroed()
            for name in self._failed_gradients.names[:1]:
                self.plan_cache.warn_once(
                    "broken off",
                    f"a backward pass has failed, and its part of the gradient of {name!r} is "
                    "still there, so that this step contains gradients that were not observed. "
                    "Call zero_grad() after such an error " + more("calls-that-are-not-observed"),
                )
            self._failed_gradients = GradientLedger()
        planned = self._planner.plan(backward, names)
        if planned is None:
            return None
        plan, calls, known = planned
        if self._wants_reference:
            if self._planner.is_sharded:
                raise NotObservable(
                    "heldin.verify runs one backward pass per sample, which fully_shard does not "
                    "allow; verify it before the model is sharded"
                )
            samples = self._planner.by_sample(backward, calls, plan)
            self._reference_sums.add(calls, samples, backward.retained)
        retained = backward.retained and bool(calls)
        keep = retained or self._step.open_pass(calls) is not None
        wanted = None if backward.inputs is None else _names_of(backward, names)
        if wanted is not None and not wanted:
            self.calls.done(calls, backward.retained)
            return None
        recorder = Recorder(
            graph, plan, known, self.sampler, self.turn(), wanted, self._wants_samples, keep,
            self._spare,
        )  # fmt: skip
        reached = {name: graph.leaves[i] for name, i in plan.leaves.items()}
        self.calls.backward_depth += 1
        return ObservedPass(self, recorder, calls, reached, retained)

    def finish(self, observed: ObservedPass) -> None:
        """Add the result of a backward pass to the sums of the step."""
        result = observed.recorder.result()
        self.per_sample.update(result.per_sample)
        self._planner.had_batches |= result.m > 1
        over = self._step.add(result, observed.calls, observed.retained, self.weight_by_batch_size)
        self.calls.done(over)
        self._gradients.record(observed.leaves)

    def on_backward_failed(self, leaves: Mapping[str, Tensor]) -> None:
        """Record the gradients that a failed backward pass has left in `.grad`."""
        self._failed_gradients.record(leaves, self._gradients, self._earlier_gradients)


@dataclass(eq=False)
class ObservedPass:
    """A backward pass that one collector observes: attach, (the pass), finish, close."""

    collector: Collector
    recorder: Recorder
    calls: Sequence[Call]  # the calls of the model that it goes through
    leaves: Mapping[str, Tensor]  # the observed parameters that it reaches, by name
    retained: bool  # whether another pass may go through the same graph
    is_attached: bool = False
    is_finished: bool = False

    def attach(self) -> None:
        self.is_attached = True
        self.recorder.attach()

    def finish(self) -> None:
        self.is_finished = True
        self.collector.finish(self)

    def close(self) -> None:
        """Remove the hooks and release the graph, also after an error."""
        self.recorder.close()
        self.collector.calls.backward_depth -= 1
        if not self.is_finished:
            self.collector.calls.done(self.calls)
            if self.is_attached:
                self.collector.on_backward_failed(self.leaves)


def _names_of(backward: Backward, names: Mapping[int, str]) -> set[str]:
    """Return the observed parameters among the inputs of a backward pass."""
    inputs, graph = backward.inputs, backward.graph
    targets = inputs if isinstance(inputs, Sequence) else [inputs]
    nodes = [edge.node for edge in targets if not isinstance(edge, Tensor)]
    ids = {id(tensor) for tensor in targets if isinstance(tensor, Tensor)}
    ids |= {id(leaf) for i, leaf in graph.leaves.items() if graph.nodes[i] in nodes}
    return {names[key] for key in ids if key in names}
