"""The forward passes of a model: how many samples each has; those that are new are followed."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode, _push_mode

from heldin.errors import HeldinError, NotObservable

from .graph import Graph
from .knowledge import Call, Knowledge
from .layout import Layout
from .names import Names
from .ownership.planes import is_mixed, is_nobody, tensors_in
from .ownership.tracker import Tracker
from .sizes import sizes_of

__all__ = ["BatchDim", "Calls"]

BatchDim = int | Mapping[str | int, int | None]
T = TypeVar("T")
_any_autocast: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)
_is_trained = attrgetter("requires_grad")


class Calls:
    """Watches the forward passes of a model, and follows those that are new."""

    def __init__(
        self, model: nn.Module, batch_dim: BatchDim, knowledge: Knowledge, names: Names
    ) -> None:
        self._names = names
        self.backward_depth = 0  # passes under way, in which checkpoints call forward again
        self._model: nn.Module | None = model
        self._batch_dim = batch_dim
        self._places = [] if isinstance(batch_dim, int) else _places(model, batch_dim)
        self._knowledge = knowledge
        self.pending: list[Call] = []  # not followed back yet
        self._current: Call | None = None
        self._following: Any = None
        self._depth = 0
        self._frame: Any = None  # from which the outermost call under way is made
        self._handles: list[Any] = []

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
        self.drop()

    def close(self) -> None:
        """Let go of the model."""
        self.detach()
        self._model = None

    def drop(self) -> None:
        """Forget calls that no backward pass went through."""
        for call in self.pending:
            call.release()
        self.pending = []

    def within(self, graph: Graph) -> list[Call]:
        """The calls that a backward pass through the graph goes back through."""
        index = graph.index
        return [call for call in self.pending if any(node in index for node, _ in call.ends)]

    def done(self, calls: Sequence[Call]) -> None:
        """These calls were followed back: let go of their graphs."""
        for call in calls:
            call.release()
            if call in self.pending:
                self.pending.remove(call)

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
        shape = args[0].shape if len(args) == 1 and type(args[0]) is Tensor else ()
        if shape and not kwargs and self._batch_dim == 0:  # the common case, in a hurry
            inputs, m = [(args[0], 0)], shape[0]
            signature: Any = (args[0].dtype, args[0].requires_grad)
            pattern, sizes = sizes_of((shape,))
        else:
            inputs, signature, m = _inputs(self._batch_dim, args, kwargs, self._places)
            pattern, sizes = sizes_of([tensor.shape for tensor in tensors_in([args, kwargs])])
        assert self._model is not None
        # with the inputs, this decides which graph a forward pass builds
        trained = tuple(map(_is_trained, self._names.parameters))
        cast = _any_autocast() and (
            torch.is_autocast_enabled("cpu"),
            torch.is_autocast_enabled("cuda"),
        )
        kind = (signature, pattern, self._model.training, cast, trained)
        self._current = Call(kind, sizes, m)
        if m > 1 and not self._knowledge.knows(kind, sizes):
            self._current.tracker = tracker = Tracker(m, self._model)
            for tensor, planes in _readings(inputs, m):
                tracker.own(tensor, self._earlier(tensor, planes))
            self._following = tracker.following()
            self._following.__enter__()

    def after(self, module: Any, args: Any, output: Any) -> None:
        """Note where the call's graph ends."""
        self._depth -= 1
        if self._depth == 0:
            self._frame = None
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
        if call.tracker is not None:
            outputs = [output] if isinstance(output, Tensor) else tensors_in(output)
            layouts = [_result(call.tracker, t) for t in outputs]
            self._knowledge.note_outputs(call, layouts)
            self._knowledge.warn_mixed(call.tracker.mixers)

    def _abandon(self) -> None:
        """A call was cut off without notice, by Ctrl-C for instance: nothing more comes of it."""
        call, self._current = self._current, None
        self._depth, self._frame = 0, None
        if self._following is not None and call is not None:
            above = []  # modes of other observations that were cut off in the same call
            while (mode := _get_current_dispatch_mode()) not in (None, call.tracker):
                above.append(_pop_mode())
            if mode is not None:
                self._following.__exit__(None, None, None)
            for other in reversed(above):
                _push_mode(other)
        self._following = None

    def _earlier(self, tensor: Tensor, planes: Tensor) -> Tensor:
        """Owners that an earlier call of the same step has established for an input."""
        for call in self.pending:
            if call.tracker is not None and tensor.grad_fn is not None:
                known = call.tracker.nodes.get((tensor.grad_fn, tensor.output_nr))
                if known is not None and known.shape[0] == planes.shape[0]:
                    return known
        return planes


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


def _result(tracker: Tracker, tensor: Tensor) -> Layout | None:
    """The layout of an output, if each of its elements has one owner."""
    planes = tracker.owners(tensor)
    tracker.record_use(tensor, planes)
    if planes is None or bool((is_mixed(planes[:2]) | is_nobody(planes[:2])).any()):
        return None
    return Layout.of(planes[0], tensor.shape, tracker.m)


def _places(model: nn.Module, batch_dim: Mapping[str | int, int | None]) -> list[str]:
    """The names of the positional arguments; refuses a name that no argument has."""
    found = inspect.signature(model.forward).parameters.values()
    names = [p.name for p in found if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    known = {p.name for p in found}
    for name in batch_dim:
        if isinstance(name, str) and name not in known:
            if not any(p.kind == p.VAR_KEYWORD for p in found):
                raise HeldinError(
                    f"heldin.observe: batch_dim names {name!r}, which is no argument of the "
                    f"model's forward ({', '.join(known)})"
                )
    return names


def _inputs(
    batch_dim: BatchDim,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    names: Sequence[str] = (),
) -> tuple[list[tuple[Tensor, int]], Any, int]:
    """The tensors that may count samples, each with the dimension; a signature; the samples."""
    found: list[tuple[Tensor, int]] = []
    signature: list[Any] = []
    places: list[tuple[str | int, Any]] = [*enumerate(args), *kwargs.items()]
    for place, value in places:
        if isinstance(batch_dim, int):
            dim: int | None = batch_dim
        elif isinstance(place, int) and place not in batch_dim and place < len(names):
            dim = batch_dim.get(names[place], 0)
        else:
            dim = batch_dim.get(place, 0)
        if isinstance(value, PackedSequence):
            raise NotObservable(
                f"heldin.observe: argument {place!r} of the model is a packed sequence, whose rows "
                "are not samples; call the model with padded sequences and pack them in forward()"
            )
        tensors = [value] if isinstance(value, Tensor) else tensors_in(value)
        for tensor in tensors:
            shape = tensor.shape
            signature.append((place, tensor.dtype, tensor.requires_grad))
            if dim is not None and -len(shape) <= dim < len(shape):
                found.append((tensor, dim % len(shape)))
        if not tensors:
            plain = isinstance(value, (int, float, str, bool, type(None)))
            signature.append((place, value if plain else type(value)))
    if not found:
        raise NotObservable(
            "heldin.observe: no argument of the model is a tensor with a batch dimension, so "
            "samples cannot be counted; pass batch_dim=..., or run the step through call()"
        )
    m = next((tensor.shape[dim] for tensor, dim in found if tensor.shape[dim] != 1), 1)
    return found, tuple(signature), m


def _readings(inputs: Sequence[tuple[Tensor, int]], m: int) -> list[tuple[Tensor, Tensor]]:
    """The owners of the inputs, read in several ways.

    All tensors with m entries count samples; or all but one, which only looks like it (a mask of
    shape (T, T) where T = m); or only the first.
    """
    batched = [(tensor, dim) for tensor, dim in inputs if tensor.shape[dim] == m]
    everyone = set(range(len(batched)))
    ways = [everyone]
    if len(batched) > 1:
        ways += [everyone - {i} for i in range(1, len(batched))]
        ways += [{0}] if len(batched) > 2 else []
    line = torch.arange(m, dtype=torch.float32)
    owned = []
    for i, (tensor, dim) in enumerate(batched):
        shape = [1] * tensor.dim()
        shape[dim] = m
        planes = []
        for way in ways:
            planes.append((line if i in way else torch.full((m,), -1.0)).reshape(shape))
            planes.append((-line if i in way else torch.full((m,), -float(m))).reshape(shape))
        owned.append((tensor, torch.stack(planes)))
    return owned
