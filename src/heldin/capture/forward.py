"""The forward passes of a model: how many samples each has; those that are new are followed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
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
from heldin.errors import NotObservable

from .arguments import Arguments, BatchDim, Count, Entry, Roles, names_of, read, readings, rows_of
from .eager import Eagerly
from .flat import is_packed, packed
from .graph import Graph, number_of
from .knowledge import Call, Candidate, Knowledge
from .layout import Layout
from .names import Names
from .ownership.numbers import Numbers
from .ownership.planes import is_mixed, is_nobody, tensors_in
from .ownership.tracker import Tracker
from .sizes import sizes_of

__all__ = ["Calls"]

T = TypeVar("T")
TRACED = "while it is traced, exported or compiled"
_is_trained = attrgetter("requires_grad")
LOOKS = 4  # calls in which positions are looked at: that takes a number from the device
RECENT = 8  # calls whose graphs are kept until their backward pass, or the end of the step


class Calls:
    """Watches the forward passes of a model, and follows those that are new."""

    def __init__(
        self, model: nn.Module, batch_dim: BatchDim, knowledge: Knowledge, names: Names
    ) -> None:
        self._names = names
        self.backward_depth = 0  # passes under way, in which checkpoints call forward again
        self._model: nn.Module | None = model
        self._batch_dim = batch_dim
        self.names = names_of(model, batch_dim)
        self.roles = Roles()
        self._knowledge = knowledge
        self.pending: list[Call] = []  # not followed back yet
        self._current: Call | None = None
        self._following: Any = None
        self._depth = 0
        self._looked = 0
        self._frame: Any = None  # from which the outermost call under way is made
        self._handles: list[Any] = []
        self._eagerly = Eagerly()

    def __reduce__(self) -> Any:
        """A copy of an observed model (for an average of weights, say) is not observed."""
        return _asleep, ()

    # -- opening and closing

    @property
    def watching(self) -> bool:
        return bool(self._handles)

    def attach(self) -> None:
        """Watch the model. Entered last, left first: several observations of a model nest."""
        assert self._model is not None
        if isinstance(self._model, torch.jit.ScriptModule):
            raise NotObservable(
                "heldin.observe: a ScriptModule cannot be looked into. Observe the module that it "
                'was made from, or pass estimator="microbatch"'
            )
        self._eagerly.attach(self._model)
        self._handles = [
            self._model.register_forward_pre_hook(self.before, with_kwargs=True),
            self._model.register_forward_hook(self.after, prepend=True, always_call=True),
        ]

    def detach(self) -> None:
        """Watch no more."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._depth and not _is_running(self._frame):
            self._abandon()
        if self._model is not None:
            self._eagerly.detach(self._model)
        self.drop()

    def close(self) -> None:
        """Let go of the model."""
        self.detach()
        self._model = None

    def drop(self) -> None:
        """Forget calls that no backward pass went through."""
        for call in self.pending:
            if not call.sealed:
                self._knowledge.note_idle(call)
            call.release()
        self.pending = []

    def within(self, graph: Graph) -> list[Call]:
        """The calls that a backward pass through the graph goes back through."""
        index = graph.index
        return [
            call
            for call in self.pending
            if (call.unseal(graph) if call.sealed else any(node in index for node, _ in call.ends))
        ]

    def done(self, calls: Sequence[Call], retained: bool = False) -> None:
        """These calls were followed back: let go of their graphs, unless they are retained."""
        for call in () if retained else calls:
            call.release()
            if call in self.pending:
                self.pending.remove(call)

    def settle(self, call: Call, count: Count | None) -> None:
        """A backward pass has shown how many samples a call has."""
        candidate = next(candidate for candidate in call.candidates if candidate.count == count)
        self._knowledge.settle(call, candidate)
        if call.given is not None and count is not None:
            self.roles.settle(call.given, count)

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
        """Count the samples of a call, and follow it if it is new."""
        if self._depth and not _is_running(self._frame):
            self._abandon()
        self._depth += 1
        if self._depth == 1:
            self._frame = sys._getframe(1)
        if self._depth > 1 or self.backward_depth or not torch.is_grad_enabled():
            return
        if tracing_state() is not None:  # sizes are no numbers then
            self._knowledge.warn_unobserved(TRACED)
            return
        self._eagerly.enter()
        given: Arguments | None = None
        counts: list[Count] = []
        alone = len(args) == 1 and type(args[0]) is Tensor and not args[0].is_nested
        shape = args[0].shape if alone else ()
        if shape and not kwargs and self._batch_dim == 0:  # the common case, in a hurry
            m = shape[0]
            signature: Any = (args[0].dtype, args[0].requires_grad)
            pattern, sizes = sizes_of((shape,))
        else:
            given = read(self._batch_dim, args, kwargs, self.names)
            if "position_ids" in kwargs and self._looked < LOOKS:
                self._looked += 1
                if is_packed(kwargs["position_ids"]):
                    self._knowledge.warn_once("packed", packed())
            counts, signature = self.roles.counts(given), given.signature
            m = counts[0].m
            pattern, sizes = sizes_of([entry.tensor.shape for entry in given.entries])
        assert self._model is not None
        # with the inputs, this decides which graph a forward pass builds
        trained = tuple(map(_is_trained, self._names.parameters))
        cast = any_autocast() and (
            torch.is_autocast_enabled("cpu"),
            torch.is_autocast_enabled("cuda"),
        )
        kind = (signature, pattern, self._model.training, cast, trained)
        self._current = call = Call(kind, sizes, m)
        if len(counts) < 2 and (m <= 1 or self._knowledge.knows(kind, sizes)):
            if self._knowledge.questions and kind in self._knowledge.questions:
                call.numbers = Numbers()
                self._enter(call.numbers)
            return
        transformed = _how_transformed()
        if transformed is not None:
            self._current = None
            self._knowledge.warn_unobserved(transformed)
            return
        entries = given.entries if given is not None else [Entry(args[0], 0, 0, None)]
        if given is not None:
            entries = self.roles.counting(given)
        call.given = given
        counts = counts or [Count(m)]
        call.candidates = [Candidate(count, self._tracker(entries, count)) for count in counts]
        if given is not None and given.unseen:
            call.distrust(f"an argument with a {given.unseen[0].__name__}")
        call.choose(call.candidates[0])
        self._enter(
            _all_of([r.tracker.following() for r in call.candidates if r.tracker is not None])
        )

    def _tracker(self, entries: Sequence[Entry], count: Count) -> Tracker | None:
        """What follows a call under one count of samples; a single sample need not be."""
        if count.m < 2:
            return None
        tracker = Tracker(count.m, self._model)
        if count.flat:
            tracker.volatile = "a flat batch"  # whose rows are shared out in another way next time
            tracker.rows = rows_of(entries)
        owned, tracker.ways = readings(entries, count)
        for tensor, planes in owned:
            tracker.own(tensor, self._earlier(tensor, planes))
        for entry in entries:
            if entry.rows == 1 and not entry.counts(count) and entry.tensor.numel() > 1:
                tracker.note_single(entry.tensor)
        return tracker

    def _enter(self, following: Any) -> None:
        self._following = following
        following.__enter__()

    def after(self, module: Any, args: Any, output: Any) -> None:
        """Note where the call's graph ends."""
        self._depth -= 1
        if self._depth == 0:
            self._frame = None
            self._eagerly.leave()
        if self._depth > 0 or self.backward_depth or not torch.is_grad_enabled():
            return
        if self._following is not None:
            self._following.__exit__(None, None, None)
            self._following = None
        call, self._current = self._current, None
        if call is None or output is None:  # an error was raised
            return
        if isinstance(output, Tensor):
            call.ends = ((output.grad_fn, output.output_nr),)
        else:
            call.ends = [(t.grad_fn, t.output_nr) for t in tensors_in(output)]
        self.pending.append(call)
        if len(self.pending) > RECENT:  # evaluation without no_grad: its graphs must not pile up
            self._knowledge.note_idle(self.pending[-1 - RECENT])
            self.pending[-1 - RECENT].seal()
        if call.candidates or call.numbers is not None:
            call.note_answers(self._knowledge.questions.get(call.kind))
        if call.candidates:
            outputs = [output] if isinstance(output, Tensor) else tensors_in(output)
            with without_modes(), DisableTorchFunction():
                for candidate in call.candidates:
                    if candidate.tracker is not None:
                        candidate.layouts = [_result(candidate.tracker, t) for t in outputs]
            if len(call.candidates) == 1:
                self._knowledge.settle(call, call.candidates[0])

    def _abandon(self) -> None:
        """A call was cut off without notice, by Ctrl-C for instance: nothing more comes of it."""
        call, self._current = self._current, None
        self._depth, self._frame = 0, None
        self._eagerly.leave()
        if self._following is not None and call is not None:
            above = []  # modes of other observations that were cut off in the same call
            own = [candidate.tracker for candidate in call.candidates]
            while (mode := current_mode()) not in (None, *own):
                above.append(pop_mode())
            if mode is not None or not call.candidates:
                self._following.__exit__(None, None, None)
            for other in reversed(above):
                push_mode(other)
        self._following = None

    def _earlier(self, tensor: Tensor, planes: Tensor) -> Tensor:
        """Owners that an earlier call of the same step has established for an input."""
        for call in self.pending:
            if call.tracker is not None and tensor.grad_fn is not None:
                node = number_of(tensor.grad_fn) if call.sealed else tensor.grad_fn
                known = call.tracker.nodes.get((node, tensor.output_nr))
                if known is not None and known.shape[0] == planes.shape[0]:
                    return known
        return planes


def _how_transformed() -> str | None:
    """In which way a call is not an ordinary one; such calls are let go by."""
    if "torch._dynamo" in sys.modules:  # which may compile hooks, and must not compile this
        found: str | None = torch.compiler.disable(_transformed)()
        return found
    return _transformed()


def _transformed() -> str | None:
    if transform_stack() is not None:
        return "inside a transform of torch.func (vmap, grad, jvp, ...)"
    return TRACED if torch.compiler.is_compiling() else None


def _is_running(frame: Any) -> bool:
    at: Any = sys._getframe(1)
    while at is not None and at is not frame:
        at = at.f_back
    return at is not None


def _asleep() -> Calls:
    nothing = nn.Module()
    calls = Calls(nothing, 0, Knowledge(), Names(nothing, None))
    calls.backward_depth = 1  # lets every call go by
    return calls


@contextmanager
def _all_of(contexts: Sequence[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def _result(tracker: Tracker, tensor: Tensor) -> Layout | None:
    """The layout of an output, if each of its elements has one owner."""
    planes = tracker.owners(tensor)
    tracker.record_use(tensor, planes)
    if planes is None or bool((is_mixed(planes[:2]) | is_nobody(planes[:2])).any()):
        return None
    return Layout.of(planes[0], tensor.shape, tracker.m)
