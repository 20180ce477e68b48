"""The forward passes of a model: counts the samples of each, and traces calls of a new kind."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from heldin._private_torch import (
    DisableTorchFunction,
    any_autocast,
    current_mode,
    pop_mode,
    push_mode,
    tracing_state,
    transform_stack,
    without_modes,
)
from heldin.errors import NotObservable, more
from heldin.model_hook import ModelHook
from heldin.pause import is_paused

from .arguments import (
    Arguments,
    BatchDim,
    Count,
    Entry,
    Roles,
    names_of,
    owner_hypotheses,
    read,
    rows_of,
)
from .call import Call, Candidate
from .eager import EagerExecution
from .flat import is_packed
from .graph import Graph, number_of
from .layout import Layout
from .names import Names
from .ownership.numbers import Numbers
from .ownership.planes import is_mixed, is_ownerless, tensors_in
from .ownership.tracker import Tracker
from .plan_cache import PlanCache
from .sizes import sizes_of

__all__ = ["Calls"]

T = TypeVar("T")
TRACED = "while it is traced, exported or compiled"
_is_trained = attrgetter("requires_grad")
POSITION_CHECKS = 4  # calls whose `position_ids` are checked, which synchronises with the device
RECENT = 8  # calls whose graphs are kept until their backward pass or the end of the step


class Calls:
    """An observer of a model's forward passes that traces calls of a new kind."""

    def __init__(
        self, model: nn.Module, batch_dim: BatchDim, plan_cache: PlanCache, names: Names
    ) -> None:
        self._model: nn.Module | None = model
        self._batch_dim, self._names, self.plan_cache = batch_dim, names, plan_cache
        self.argument_names = names_of(model, batch_dim)
        self.backward_depth = 0  # backward passes in progress; checkpoints call forward in them
        self.pending: list[Call] = []  # calls without a backward pass so far
        self._roles = Roles()
        self._current: Call | None = None
        self._recording = ExitStack()  # the modes of the call in progress
        self._depth = 0
        self._position_checks = 0
        self._frame: Any = None  # frame of the outermost call in progress
        self._handles: list[Any] = []
        self._eager = EagerExecution()

    # -- opening and closing

    @property
    def watching(self) -> bool:
        return bool(self._handles)

    def attach(self) -> None:
        """Register hooks on the model, so that several observations of one model nest."""
        assert self._model is not None
        if isinstance(self._model, torch.jit.ScriptModule):
            raise NotObservable(
                "heldin.observe: a ScriptModule cannot be traced. Observe the module that it was "
                'made from, or pass estimator="microbatch"'
            )
        self._eager.attach(self._model)
        self._handles = [
            self._model.register_forward_pre_hook(ModelHook(self.before), with_kwargs=True),
            self._model.register_forward_hook(
                ModelHook(self.after), prepend=True, always_call=True
            ),
        ]

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._depth and not _is_running(self._frame):
            self._clean_up()
        if self._model is not None:
            self._eager.detach(self._model)
        self.drop()

    def close(self) -> None:
        self.detach()
        self._model = None

    def drop(self) -> None:
        """Drop all calls without a backward pass."""
        for call in self.pending:
            if not call.sealed:
                self.plan_cache.record_idle(call)
            call.release()
        self.pending = []

    def within(self, graph: Graph) -> list[Call]:
        """Return the pending calls that are part of a graph."""
        index = graph.index
        return [
            call
            for call in self.pending
            if (call.unseal(graph) if call.sealed else any(node in index for node, _ in call.ends))
        ]

    def done(self, calls: Sequence[Call], retained: bool = False) -> None:
        """Release calls after their backward pass, unless their graph is retained."""
        for call in () if retained else calls:
            call.release()
            if call in self.pending:
                self.pending.remove(call)

    def confirm(self, call: Call, count: Count | None) -> None:
        """Set the number of samples of a call, as decided by its backward pass."""
        candidate = next(candidate for candidate in call.candidates if candidate.count == count)
        self.plan_cache.confirm(call, candidate)
        if call.arguments is not None and count is not None:
            self._roles.confirm(call.arguments, count)

    # -- around a forward pass

    def run(self, function: Callable[..., T], args: Sequence[Any], kwargs: Mapping[str, Any]) -> T:
        """Run a function as if it were the model's forward pass."""
        self.before(None, args, kwargs)
        result = None
        try:
            result = function(*args, **kwargs)
            return result
        finally:
            self.after(None, args, result)

    def before(self, module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Count the samples of a call, and start tracing it if it is of a new kind."""
        if is_paused():
            return
        if self._depth and not _is_running(self._frame):
            self._clean_up()
        self._depth += 1
        if self._depth == 1:
            self._frame = sys._getframe(1)
        if self._depth > 1 or self.backward_depth or not torch.is_grad_enabled():
            return
        if tracing_state() is not None:  # sizes are symbols, not numbers
            self.plan_cache.warn_unobserved(TRACED)
            return
        self._eager.enter()
        arguments: Arguments | None = None
        counts: list[Count] = []
        is_single_tensor = len(args) == 1 and type(args[0]) is Tensor and not args[0].is_nested
        shape = args[0].shape if is_single_tensor else ()
        if shape and not kwargs and self._batch_dim == 0:  # fast path: one tensor
            m = shape[0]
            signature: Any = (args[0].dtype, args[0].requires_grad)
            size_pattern, sizes = sizes_of((shape,))
        else:
            arguments = read(self._batch_dim, args, kwargs, self.argument_names)
            if "position_ids" in kwargs and self._position_checks < POSITION_CHECKS:
                self._position_checks += 1
                if is_packed(kwargs["position_ids"]):
                    self.plan_cache.warn_once(
                        "packed",
                        "the argument 'position_ids' restarts within a row: several samples lie in "
                        "one row, as with packing=True or padding_free=True, and each row counts "
                        "as one sample. To observe single samples, put each sample into a separate "
                        "row " + more("calls-that-are-not-observed"),
                    )
            counts, signature = self._roles.counts(arguments), arguments.signature
            m = counts[0].m
            size_pattern, sizes = sizes_of([entry.tensor.shape for entry in arguments.entries])
        assert self._model is not None
        # With the inputs, these settings decide which graph a forward pass builds.
        trained = tuple(map(_is_trained, self._names.parameters))
        cast = any_autocast() and tuple(map(torch.is_autocast_enabled, ("cpu", "cuda")))
        kind = (signature, size_pattern, self._model.training, cast, trained)
        self._current = call = Call(kind, sizes, m)
        if len(counts) < 2 and (m <= 1 or self.plan_cache.covers(kind, sizes)):
            if self.plan_cache.branch_questions and kind in self.plan_cache.branch_questions:
                call.numbers = Numbers()
                self._recording.enter_context(call.numbers)
            return
        is_dynamo_loaded = "torch._dynamo" in sys.modules
        # Dynamo may compile hooks, but must not compile this question.
        reason = (torch.compiler.disable(_transformed) if is_dynamo_loaded else _transformed)()
        if reason is not None:
            self._current = None
            self.plan_cache.warn_unobserved(reason)
            return
        if arguments is None:
            entries = [Entry(args[0], 0, 0, None)]
        else:
            entries = self._roles.counting(arguments)
        call.arguments = arguments
        counts = counts or [Count(m)]
        call.candidates = [Candidate(count, self._tracker(entries, count)) for count in counts]
        call.choose(call.candidates[0])
        for tracker in call.trackers:
            if arguments is not None and arguments.opaque_types:
                tracker.mark_volatile(f"an argument with a {arguments.opaque_types[0].__name__}")
            self._recording.enter_context(tracker.recording())

    def _tracker(self, entries: Sequence[Entry], count: Count) -> Tracker | None:
        """Make the tracker for one number of samples; None for a single sample."""
        if count.m < 2:
            return None
        assert self._model is not None
        tracker = Tracker(count.m, self._model)
        if count.flat:
            tracker.mark_volatile("a flat batch")  # the next one assigns rows differently
            tracker.rows = rows_of(entries)
        owned, tracker.input_subsets = owner_hypotheses(entries, count)
        for tensor, planes in owned:
            tracker.own(tensor, self._established_owners(tensor, planes))
        for entry in entries:
            if entry.rows == 1 and not entry.counts(count) and entry.tensor.numel() > 1:
                tracker.mark_broadcast_row(entry.tensor)
        return tracker

    def after(self, module: Any, args: Any, output: Any) -> None:
        """Record the outputs of a call, and stop tracing it."""
        if is_paused():
            return
        self._depth -= 1
        if self._depth == 0:
            self._frame = None
            self._eager.leave()
        if self._depth > 0 or self.backward_depth or not torch.is_grad_enabled():
            return
        self._recording.close()
        call, self._current = self._current, None
        if call is None or output is None:  # an error was raised
            return
        outputs = tensors_in(output)
        call.ends = [(t.grad_fn, t.output_nr) for t in outputs]
        self.pending.append(call)
        if len(self.pending) > RECENT:  # do not accumulate graphs in evaluation without no_grad
            self.plan_cache.record_idle(self.pending[-1 - RECENT])
            self.pending[-1 - RECENT].seal()
        if call.candidates or call.numbers is not None:
            call.record_branches(self.plan_cache.branch_questions.get(call.kind))
        if call.candidates:
            with without_modes(), DisableTorchFunction():
                for candidate in call.candidates:
                    if candidate.tracker is not None:
                        candidate.layouts = [_layout_of(candidate.tracker, t) for t in outputs]
            if len(call.candidates) == 1:
                self.plan_cache.confirm(call, call.candidates[0])

    def _clean_up(self) -> None:
        """Clean up after a call that ended without its hook (Ctrl-C, for instance)."""
        call, self._current = self._current, None
        self._depth, self._frame = 0, None
        self._eager.leave()
        recording, self._recording = self._recording, ExitStack()
        if call is None or not (call.candidates or call.numbers is not None):
            return
        above = []  # modes of other observations that the same call has left behind
        while (mode := current_mode()) not in (None, *call.trackers):
            above.append(pop_mode())
        if mode is not None or not call.candidates:
            recording.close()
        else:
            recording.pop_all()  # has been left already
        for other in reversed(above):
            push_mode(other)

    def _established_owners(self, tensor: Tensor, planes: Tensor) -> Tensor:
        """Return the owners that an earlier call has established for an input, else `planes`."""
        for call in self.pending:
            if call.tracker is not None and tensor.grad_fn is not None:
                node = number_of(tensor.grad_fn) if call.sealed else tensor.grad_fn
                owners = call.tracker.nodes.get((node, tensor.output_nr))
                if owners is not None and owners.shape[0] == planes.shape[0]:
                    return owners
        return planes


def _transformed() -> str | None:
    """Return why a call cannot be observed (transformed or compiled); None if it can."""
    if transform_stack() is not None:
        return "inside a transform of torch.func (vmap, grad, jvp, ...)"
    return TRACED if torch.compiler.is_compiling() else None


def _is_running(frame: Any) -> bool:
    at: Any = sys._getframe(1)
    while at is not None and at is not frame:
        at = at.f_back
    return at is not None


def _layout_of(tracker: Tracker, tensor: Tensor) -> Layout | None:
    """Return the layout of an output, if each of its elements has exactly one owner."""
    planes = tracker.owners(tensor)
    tracker.record_use(tensor, planes)
    if planes is None or bool((is_mixed(planes[:2]) | is_ownerless(planes[:2])).any()):
        return None
    return Layout.from_owners(planes[0], tensor.shape, tracker.m)
