"""The calls of a model: how many samples each has, and what was learnt by following them."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.nn.utils.rnn import PackedSequence
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode, _push_mode

from ._errors import HeldinError, MixedSamplesWarning, NotObservable
from ._graph import Graph, Plan
from ._layout import Layout
from ._owners import Tracker, is_mixed, is_nobody, tensors_in
from ._replay import Output

__all__ = ["BatchDim", "Call", "Calls", "Knowledge"]

BatchDim = int | Mapping[str | int, int | None]
T = TypeVar("T")
_any_autocast: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)
_is_trained = attrgetter("requires_grad")
SHAPES = 512  # kinds of steps (by shapes and structure) that are remembered


@dataclass
class Knowledge:
    """What was found out about a model. It depends on shapes and structure, not on a batch."""

    plans: dict[Any, Plan] = field(default_factory=dict)  # by signature of calls and graph
    familiar: set[Any] = field(default_factory=set)  # signatures of calls not to follow again
    results: dict[Any, list[Layout | None]] = field(default_factory=dict)  # layouts of outputs
    surprises: Counter[Any] = field(default_factory=Counter)  # unknown graphs of familiar calls
    warned: set[str] = field(default_factory=set)

    def remember(self, key: Any, plan: Plan, calls: Sequence[Call]) -> None:
        """A plan that holds for the next graph of this kind; models that keep changing aside."""
        self.plans[key] = plan
        self.familiar.update(call.key for call in calls if self.surprises[call.key] < 3)
        if len(self.plans) > SHAPES:  # a call whose plan is gone has to be followed again
            oldest = next(iter(self.plans))
            del self.plans[oldest]
            self.familiar.difference_update(oldest[0])

    def note_results(self, key: Any, layouts: list[Layout | None]) -> None:
        """The layouts of a call's outputs."""
        self.results.pop(key, None)
        self.results[key] = layouts
        if len(self.results) > 2 * SHAPES:  # those of familiar calls are needed
            for old in [k for k in self.results if k not in self.familiar][: SHAPES // 2]:
                del self.results[old]

    def doubt(self, calls: Sequence[Call]) -> None:
        """These calls led to a graph that was not known: follow the next ones again."""
        if len(self.surprises) > SHAPES:
            self.surprises.clear()
        for call in calls:
            self.surprises[call.key] += 1
            self.familiar.discard(call.key)

    def warn_mixed(self, mixers: Mapping[str, str]) -> None:
        """Say once where samples are mixed."""
        for place, why in mixers.items():
            if place not in self.warned:
                self.warned.add(place)
                warnings.warn(
                    f"{place} mixes the samples of a batch ({why}): there is no per-sample "
                    "gradient as such. The contributions of each sample's rows are taken instead",
                    MixedSamplesWarning,
                    stacklevel=2,
                )


@dataclass(eq=False, slots=True)
class Call:
    """A forward pass under observation."""

    key: Any
    m: int
    tracker: Tracker | None = None
    ends: Sequence[tuple[Any, int]] = ()  # node and number of each output

    def outputs(self, layouts: Sequence[Layout | None]) -> list[Output]:
        """The outputs whose rows have known owners."""
        pairs = zip(self.ends, layouts, strict=False)
        return [
            (GradientEdge(node, number), layout)
            for (node, number), layout in pairs
            if node is not None and layout is not None
        ]

    def release(self) -> None:
        """Let go of the graph."""
        self.ends = ()
        if self.tracker is not None:
            self.tracker.release()


class Calls:
    """Watches the forward passes of a model, and follows those that are not familiar."""

    def __init__(self, model: nn.Module, batch_dim: BatchDim, knowledge: Knowledge) -> None:
        self.parameters = list(model.parameters())
        self.passing = 0  # backward passes under way, in which checkpoints call forward again
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
        self.parameters = []

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
        """These calls were followed back."""
        for call in calls:
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
        if self._depth > 1 or self.passing or not torch.is_grad_enabled():
            return
        shape = args[0].shape if len(args) == 1 and type(args[0]) is Tensor else ()
        if shape and not kwargs and self._batch_dim == 0:  # the common case, in a hurry
            inputs, m = [(args[0], 0)], shape[0]
            signature: Any = (shape, args[0].dtype, args[0].requires_grad)
        else:
            inputs, signature, m = _inputs(self._batch_dim, args, kwargs, self._places)
        assert self._model is not None
        # with the inputs, this decides which graph a forward pass builds
        trained = tuple(map(_is_trained, self.parameters))
        cast = _any_autocast() and (
            torch.is_autocast_enabled("cpu"),
            torch.is_autocast_enabled("cuda"),
        )
        key = (signature, self._model.training, cast, trained)
        self._current = Call(key, m)
        if m > 1 and key not in self._knowledge.familiar:
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
        if self._depth > 0 or self.passing or not torch.is_grad_enabled():
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
            self._knowledge.note_results(call.key, layouts)
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
    calls = Calls(nn.Module(), 0, Knowledge())
    calls.passing = 1  # lets every call go by
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
            signature.append((place, shape, tensor.dtype, tensor.requires_grad))
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
