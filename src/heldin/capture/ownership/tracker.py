"""The trace of one forward pass: the owners of every tensor in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.utils.weak import WeakTensorKeyDictionary

from heldin._private_torch import (
    TorchDispatchMode,
    dispatch_depth,
    storage_number,
    viewed_by,
    without_modes,
)

from . import flows as flows  # registers how each op passes owners on
from .flow import Op, OpCall, flow, op_of
from .numbers import Numbers
from .planes import Key, canonical, is_mixed, is_ownerless, ownerless, reshape, tensors_in

__all__ = ["Tracker"]

# Levels of variation from batch to batch: none, random or slow (random numbers, buffers), or with
# the data.
SETTLED, CHANGING, DATA = range(3)
PLAIN = (Tensor, nn.Parameter)
_VIEWS = {"view", "_unsafe_view", "_reshape_alias", "unsqueeze", "squeeze"}
_SPLITTING = {"clone", "split", "split_with_sizes", "chunk", "unsafe_chunk", "unsafe_split"}


class _Part(NamedTuple):
    """A record that one tensor is a piece, a view or a copy of another, the whole."""

    whole: Key  # not the tensor, which need not stay in memory
    dim: int | None  # the dimension of its planes along which it was split; None: a copy
    above: _Part | None  # the record of the whole, if it is a part itself
    shapes: tuple[torch.Size, torch.Size] | None = None  # of a view, and of the whole


@dataclass(slots=True)
class _Record:
    """The properties of a tensor in a forward pass."""

    planes: Tensor | None = None  # its owners; None: it holds no data
    stamp: int = -1  # writes to its storage that the planes include; -1: the planes were not set
    level: int | None = None  # how its values vary; None: it comes from outside
    cause: str | None = None  # the op that has mixed its samples
    part: _Part | None = None
    is_shared_row: bool = False  # whether it depends on an argument with one row, and on no batch


def _memory_of(tensor: Tensor) -> Any:
    return (storage_number(tensor), tensor.storage_offset(), tensor.shape, tensor.stride())


def _part_of(storage: Tensor, tensor: Tensor) -> Tensor:
    """Return the view of a storage's planes that belongs to a tensor in it."""
    shape, strides = (storage.shape[0], *tensor.shape), (storage.stride(0), *tensor.stride())
    return storage.as_strided(shape, strides, tensor.storage_offset())


class Tracker(TorchDispatchMode):
    """A dispatch mode that records the owners of every tensor in a forward pass."""

    def __init__(self, m: int, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.m = m  # number of samples
        # By autograd node and number of the output: its planes (None: it holds no data), the owners
        # of the elements into which a data-free tensor was put, and the op that mixed samples.
        self.nodes: dict[Key, Tensor | None] = {}
        self.slots: dict[Key, Tensor | None] = {}
        self.causes: dict[Key, str] = {}
        # Why samples were mixed though rows keep their owners, by place in the model.
        self.mixing_ops: dict[str, str] = {}
        self.volatile_reason: str | None = None  # why owners may differ on the next batch
        self.rows: dict[int, list[Tensor]] = {}  # planes of rows of a flat batch, by their number
        self.input_subsets = [frozenset[int]()]  # the inputs that have owners in each hypothesis
        # Whether a parameter met an argument with one row before it met any batch.
        self.param_met_broadcast_row = False
        self._records: MutableMapping[Tensor, _Record] = WeakTensorKeyDictionary()
        self._numbers = Numbers(self._asked, self._copied)
        self._buffers = {id(b) for b in model.buffers()}
        self._names = {id(sub): name for name, sub in model.named_modules()}
        self._whole: dict[int, tuple[Tensor, int]] = {}  # storage -> planes of all its elements
        self._held: list[Any] = []  # storages with an entry in `_whole`
        self._memory: dict[Any, Tensor | None] = {}  # planes by memory location, for subclasses
        self._stack: list[nn.Module] = []

    def _of(self, tensor: Tensor) -> _Record:
        record = self._records.get(tensor)
        if record is None:
            record = self._records[tensor] = _Record()
        return record

    # -- entering and leaving

    @contextmanager
    def recording(self) -> Iterator[Tracker]:
        """Record the ops in this block, and the modules that they run in."""
        handles = [
            module_hooks.register_module_forward_pre_hook(lambda sub, _: self._stack.append(sub)),
            module_hooks.register_module_forward_hook(self._left, always_call=True),
        ]
        try:
            with self, self._numbers:
                yield self
        finally:
            for handle in handles:
                handle.remove()
            self._stack.clear()

    def _left(self, *_: Any) -> None:
        if self._stack:
            self._stack.pop()

    def release(self) -> None:
        """Drop all references to tensors and nodes, so that the graph can be freed."""
        self.nodes, self.slots, self.causes, self._memory = {}, {}, {}, {}
        self._whole, self._held, self._records = {}, [], WeakTensorKeyDictionary()

    def rename(self, renamed: Callable[[Any], Any]) -> None:
        """Replace the nodes in all tables; entries whose node becomes None are dropped."""
        tables: list[dict[Key, Any]] = [self.nodes, self.slots, self.causes]
        for table in tables:
            entries = [((renamed(node), number), v) for (node, number), v in table.items()]
            table.clear()
            table.update((key, v) for key, v in entries if key[0] is not None)

    def place(self, op: str) -> str:
        """Return the place in the model where an op runs, for messages."""
        names = [self._names[id(mod)] for mod in self._stack if id(mod) in self._names]
        return f"{op} in module {names[-1]!r}" if names and names[-1] else op

    def mark_volatile(self, reason: str) -> None:
        """Mark the trace as valid for this batch only; the first reason is kept."""
        self.volatile_reason = self.volatile_reason or reason

    # -- reading and writing owners

    def own(self, tensor: Tensor, planes: Tensor) -> None:
        record = self._of(tensor)
        record.planes, record.stamp = planes, 0
        if tensor.layout is torch.strided:
            self._whole.pop(storage_number(tensor), None)

    def mark_broadcast_row(self, tensor: Tensor) -> None:
        """Mark an argument with one row: all samples share it, or it is the only sample."""
        self._of(tensor).is_shared_row = True

    def owners(self, tensor: Tensor) -> Tensor | None:
        record = self._of(tensor)
        if tensor.layout is not torch.strided:
            return record.planes
        if type(tensor) not in PLAIN and record.planes is None:  # a subclass wraps its memory
            return self._memory.get(_memory_of(tensor))
        whole = self._whole.get(storage_number(tensor)) if self._whole else None
        if whole is None or record.stamp == whole[1]:
            return record.planes
        storage, stamp = whole
        planes = canonical(_part_of(storage, tensor))
        if bool(is_ownerless(planes).all()):
            return None
        record.planes, record.stamp = planes, stamp
        return planes

    def varies_per_batch(self, tensor: Tensor) -> bool:
        """Return whether values may differ from batch to batch (data, random, or from outside)."""
        return self._level(tensor) > SETTLED

    def _level(self, tensor: Tensor) -> int:
        level = self._of(tensor).level
        if level is not None:
            return level
        if isinstance(tensor, nn.Parameter):
            return SETTLED
        return CHANGING if id(tensor) in self._buffers else DATA

    # -- numbers that leave tensors

    @property
    def answers(self) -> list[tuple[bool, bool]]:
        """The answers that Python has read, each with whether it depends on data."""
        return self._numbers.answers

    def _asked(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether a question is about the data of the whole batch."""
        if all(self._level(t) < DATA for t in tensors):
            return False
        if any(t.dtype is not torch.bool and t.numel() == 1 for t in tensors):
            return False  # item() of a number
        with without_modes():
            owned_planes = [p for t in tensors if (p := self.owners(t)) is not None]
            return all(bool(is_mixed(p[:2]).all()) for p in owned_planes)

    def _copied(self, tensors: Sequence[Tensor]) -> None:
        """Mark the trace as volatile if Python reads values that depend on data."""
        if any(self._level(t) >= DATA for t in tensors):
            self.mark_volatile(self.place("a number taken out of a tensor"))

    def record_use(self, tensor: Tensor, planes: Tensor | None) -> None:
        node = tensor.grad_fn
        if node is not None and (tensor.is_floating_point() or tensor.is_complex()):
            self.nodes[node, tensor.output_nr] = planes
            cause = self._of(tensor).cause
            if cause is not None:
                self.causes[node, tensor.output_nr] = cause
            if type(tensor) not in PLAIN and type(node).__name__ == "AliasBackward0":
                self.nodes[node.next_functions[0]] = planes  # the op, before it is wrapped
            base = viewed_by(tensor)  # after a write through a view, the op is in the base's graph
            if base is not None and type(base.grad_fn).__name__ == "CopySlices":
                self.nodes[base.grad_fn, base.output_nr] = self.owners(base)

    # -- the dispatch

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        op = op_of(func)
        if op.turns:  # an in-place view: owners move with the tensor, its memory is unchanged
            tensor = args[0]
            planes, old, strides = self.owners(tensor), tensor.shape, tensor.stride()
            out = func(*args, **kwargs)
            if planes is not None:
                moved_planes = []
                for plane in planes.expand(-1, *old).unbind():
                    laid = torch.empty_strided(old, strides, dtype=plane.dtype).copy_(plane)
                    moved_planes.append(func(laid, *args[1:], **kwargs))
                self._of(tensor).planes = canonical(torch.stack(moved_planes))
            return out
        out = func(*args, **kwargs)
        if dispatch_depth():  # hide the tracker's ops from other active modes
            with without_modes():
                self._follow(op, func, args, kwargs, out)
        else:
            self._follow(op, func, args, kwargs, out)
        return out

    def _follow(
        self, op: Op, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any
    ) -> None:
        inputs = tensors_in((args, kwargs))
        owned = False
        for tensor in inputs:
            planes = self.owners(tensor)
            owned = owned or planes is not None
            self.record_use(tensor, planes)
        outs = tensors_in(out)
        if not outs:
            if isinstance(out, (bool, int, float, complex)) and not self._numbers.asking:
                self._copied(inputs)
            return
        if not owned and any(self._of(t).is_shared_row for t in inputs):
            self.param_met_broadcast_row |= any(
                t.requires_grad and not self._of(t).is_shared_row for t in inputs
            )
            for tensor in outs:
                self._of(tensor).is_shared_row = True
        variability = max([self._level(t) for t in inputs], default=SETTLED)
        if op.random or op.base in ("lift_fresh", "lift_fresh_copy"):
            variability = max(variability, CHANGING)
        if owned:
            variability = DATA
        bound = op.bind(args, kwargs)
        results: Sequence[Tensor | None]
        results = [None] * len(outs)
        if owned:
            output_planes = flow(OpCall(self, func, op, bound, outs, (args, kwargs)))
            results = [p if t.numel() else None for t, p in zip(outs, output_planes, strict=True)]
            if op.base in _SPLITTING:
                self._note_parts(inputs[0], bound.get("dim"), outs)
            elif op.base in _VIEWS and inputs[0].numel() == outs[0].numel():
                self._note_parts(inputs[0], None, outs, (outs[0].shape, inputs[0].shape))
            else:
                self._note_slots(op, bound, inputs, outs[0], results[0])
            cause = next((c for t in inputs if (c := self._of(t).cause) is not None), None)
            for tensor, planes in zip(outs, results, strict=True):
                if planes is not None and bool(is_mixed(planes[:2]).any()):
                    self._of(tensor).cause = cause or self.place(op.name)
        written = {id(t) for name in op.written for t in tensors_in(bound.get(name))}
        for tensor, planes in zip(outs, results, strict=True):
            record, is_strided = self._of(tensor), tensor.layout is torch.strided
            record.level = variability
            if is_strided and not tensor.is_nested:
                self._memory[_memory_of(tensor)] = planes
            if id(tensor) in written:
                record.part = None
                self._overwrite(tensor, planes)
                if (base := viewed_by(tensor)) is not None:
                    self._of(base).level = variability
                continue
            whole = None
            if self._whole and is_strided:  # only strided tensors share memory
                if not op.is_view:
                    self._whole.pop(storage_number(tensor), None)
                whole = self._whole.get(storage_number(tensor))
            if planes is not None:
                record.planes, record.stamp = planes, whole[1] if whole else 0

    def _overwrite(self, tensor: Tensor, planes: Tensor | None) -> None:
        """Set new owners after an in-place op, for all tensors that share the memory."""
        before, record = self.owners(tensor), self._of(tensor)
        like = before if planes is None else planes
        if like is None:
            return
        if before is not None and planes is not None and before.shape == planes.shape:
            if torch.equal(before, planes):
                return
        if tensor.layout is not torch.strided:
            record.planes = like
            return
        key = storage_number(tensor)
        elements = tensor.untyped_storage().nbytes() // tensor.element_size()
        storage, stamp = self._whole.get(key, (None, 0))
        if storage is None:
            storage = ownerless((elements,), like, self.m).contiguous()
            for alias, other in list(self._records.items()):
                if other.planes is not None and alias.layout is torch.strided:
                    if storage_number(alias) == key:
                        self._paint(storage, alias, other.planes)
        new_planes = planes if planes is not None else ownerless(tensor.shape, like, self.m)
        self._paint(storage, tensor, new_planes)
        self._whole[key] = (storage, stamp + 1)
        self._held.append(tensor.untyped_storage())  # prevents reuse of its address
        if planes is not None:
            record.planes, record.stamp = planes, stamp + 1

    @staticmethod
    def _paint(storage: Tensor, tensor: Tensor, planes: Tensor) -> None:
        view = _part_of(storage, tensor)
        view.copy_(planes.expand_as(view))

    def _note_slots(
        self,
        op: Op,
        bound: dict[str, Any],
        inputs: Sequence[Tensor],
        out: Tensor,
        planes: Tensor | None,
    ) -> None:
        """Record the owners of the slots that a data-free tensor fills in an op's output."""
        offset = 0
        for tensor in inputs:
            joined = op.base == "cat" and tensor.dim() == out.dim()
            width = tensor.shape[bound["dim"]] if joined else 0
            tensor_planes = self.owners(tensor) if tensor.grad_fn is not None else None
            if tensor.grad_fn is not None and (
                tensor_planes is None or bool(is_ownerless(tensor_planes).any())
            ):
                place: Tensor | None = None
                if planes is not None and not bool(is_mixed(planes).any()):
                    if joined:
                        dim = bound["dim"] % out.dim() + 1
                        constant = planes.shape[dim] == 1
                        place = planes if constant else planes.narrow(dim, offset, width)
                    elif op.pointwise and tensor.shape == out.shape:
                        place = planes
                self._note_slot(_key(tensor), self._of(tensor).part, place)
            offset += width

    def _note_slot(self, key: Key, part: _Part | None, place: Tensor | None) -> None:
        """Record the slot of a tensor and of its whole; conflicting slots are dropped."""
        if key in self.slots:
            recorded = self.slots[key]
            same = recorded is not None and place is not None and torch.equal(recorded, place)
            place = place if same else None
        self.slots[key] = place
        if part is not None:
            if place is not None and part.dim is not None and place.shape[part.dim] > 1:
                place = None
            if place is not None and part.shapes is not None:
                place = reshape(place, *part.shapes)
            self._note_slot(part.whole, part.above, place)

    def _note_parts(
        self,
        whole: Tensor,
        dim: int | None,
        parts: Sequence[Tensor],
        shapes: tuple[torch.Size, torch.Size] | None = None,
    ) -> None:
        """Record that tensors are pieces (gates, say) or copies of a tensor."""
        if whole.grad_fn is not None:
            along = None if dim is None else dim % whole.dim() + 1
            part = _Part(_key(whole), along, self._of(whole).part, shapes)
            for tensor in parts:
                self._of(tensor).part = part


def _key(tensor: Tensor) -> Key:
    return tensor.grad_fn, tensor.output_nr
