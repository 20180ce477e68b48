"""The arguments of a forward pass: possible numbers of samples, and the owner of each element.

The order of arguments decides nothing. Each size of a batch dimension, and the length of each list
of tensors, is a *count*: a number of samples that the call may have. If there are several, the call
is traced under each of them, and the backward pass decides (see `counting`).
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from enum import Enum
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from heldin.errors import HeldinError, NotObservable

from .flat import index_of, is_flat_batch, owners_from_index, owners_in, owners_in_fields
from .ownership.planes import ownerless, tensors_in

__all__ = [
    "Arguments", "BatchDim", "Count", "Entry", "Roles", "name_of", "names_of", "owner_hypotheses",
    "read", "rows_of",
]  # fmt: skip

BatchDim = int | Mapping[str | int, int | Literal["owner"] | None]
INPUTS = 8  # maximum number of inputs for hypotheses that leave one of them out
ENTRIES = 4096  # size of a NumPy argument from which it is compared by its hash


@dataclass(frozen=True)
class Count:
    """A number of samples that a call may have."""

    m: int
    is_list: bool = False  # the samples are the entries of a list; else rows along a dimension
    flat: bool = False  # rows of all samples are concatenated, an index gives the owner of each


@dataclass(frozen=True, eq=False)
class Entry:
    """A tensor among the arguments."""

    tensor: Tensor
    place: str | int  # position or name of its argument
    dim: int | None  # the dimension that may be the batch dimension
    list_position: tuple[int, int] | None  # index in a possible list of samples, and its length
    owner: Tensor | None = None  # of each element of a flat batch, broadcastable to the tensor

    @property
    def rows(self) -> int | None:
        return None if self.dim is None else self.tensor.shape[self.dim]

    def counts(self, count: Count) -> bool:
        """Return whether the tensor holds rows of this number of samples, or is one of them."""
        if count.flat:
            return self.owner is not None
        if count.is_list and self.list_position is not None:
            return self.list_position[1] == count.m
        return self.rows == count.m


@dataclass(frozen=True)
class Arguments:
    """The arguments of a call, as read before the pass."""

    entries: Sequence[Entry]
    signature: Any  # everything that decides which graph is built, except shapes
    structure: Any  # the arguments that hold tensors; the same for batches of any size
    flat: tuple[int, bool] | None  # samples of a possible flat batch, and whether it is certain
    opaque_types: Sequence[type]  # types of arguments whose contents cannot be compared


class Roles:
    """The arguments that are batches, as backward passes have confirmed."""

    def __init__(self) -> None:
        self._counting: dict[Any, tuple[Count, set[str | int]]] = {}  # by structure

    def counts(self, arguments: Arguments) -> list[Count]:
        """List the numbers of samples that a call may have."""
        confirmed, places = self._counting.get(arguments.structure, (None, None))
        is_list = None if confirmed is None else confirmed.is_list
        counts: dict[Count, None] = {}
        if arguments.flat is not None and (confirmed is None or confirmed.flat):
            counts[Count(arguments.flat[0], flat=True)] = None
            if arguments.flat[1] or confirmed is not None:
                return list(counts)
        rows: dict[Any, set[int | None]] = {}
        for entry in arguments.entries:
            if entry.list_position is not None:
                rows.setdefault((entry.place, entry.list_position[1]), set()).add(entry.rows)
        uneven = {length for (_, length), row_counts in rows.items() if len(row_counts) > 1}
        for entry in arguments.entries:
            if places is not None and entry.place not in places:
                continue
            # A list of tensors with different numbers of rows is a list of samples, and so are
            # other lists of its length.
            of_samples = entry.list_position is not None and entry.list_position[1] in uneven
            if entry.rows is not None and not is_list and not of_samples:
                counts[Count(entry.rows)] = None
            if entry.list_position is not None and is_list is not False:
                counts[Count(entry.list_position[1], True)] = None
        if places is not None and len(counts) == 2 and Count(1) in counts:
            del counts[Count(1)]  # broadcast over the samples
        return list(counts)

    def counting(self, arguments: Arguments) -> list[Entry]:
        """List the tensors of the arguments that may be batches."""
        _, places = self._counting.get(arguments.structure, (None, None))
        return [e for e in arguments.entries if places is None or e.place in places]

    def confirm(self, arguments: Arguments, count: Count) -> None:
        """Store which arguments are batches, once a backward pass has decided the count."""
        places = {e.place for e in arguments.entries if e.counts(count)}
        self._counting[arguments.structure] = (count, places)


def names_of(model: nn.Module, batch_dim: BatchDim) -> list[str]:
    """Return the names of the positional arguments; refuse a `batch_dim` for an unknown one."""
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except ValueError:  # not a Python function
        return []
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    all_names = {p.name for p in parameters}
    for name in () if isinstance(batch_dim, int) else batch_dim:
        if isinstance(name, str) and name not in all_names:
            if not any(p.kind == p.VAR_KEYWORD for p in parameters):
                raise HeldinError(
                    f"heldin.observe: batch_dim names {name!r}, but the model's forward has no "
                    f"argument of this name ({', '.join(all_names)})"
                )
    return names


def read(
    batch_dim: BatchDim, args: Sequence[Any], kwargs: Mapping[str, Any], names: Sequence[str]
) -> Arguments:
    """Read the tensors among the arguments, and everything else by value."""
    entries: list[Entry] = []
    signature: list[Any] = []
    structure: list[Any] = []
    index, sure = None, False
    opaque_types: list[type] = []
    places: list[tuple[str | int, Any]] = [*enumerate(args), *kwargs.items()]
    for place, value in places:
        if isinstance(value, PackedSequence):
            raise NotObservable(
                f"heldin.observe: argument {place!r} of the model is a packed sequence, whose rows "
                "are not samples; call the model with padded sequences and pack them in forward()"
            )
        dim, is_declared = _dim_of(batch_dim, place, names)
        if dim is not None and not sure:
            candidate = index_of(value, name_of(place, names), dim == "owner")
            if candidate is not None:
                index, sure = candidate, dim == "owner"
        if dim == "owner":
            dim = None
        if not isinstance(value, Tensor):
            signature.append((place, values_in(value, opaque_types)))
        owned = list(owners_in(value)) if is_flat_batch(value) else []
        if not owned and not is_declared and not isinstance(value, Tensor):
            owned = owners_in_fields(value)
        if owned:
            entries += [Entry(tensor, place, None, None, owner) for tensor, owner in owned]
            structure.append((place, "flat"))
            continue
        tensors: list[tuple[Tensor, tuple[int, int] | None]]
        tensors = [(tensor, None) for tensor in tensors_in(value)]
        if isinstance(value, (list, tuple)) and value and not is_declared:
            lists = [tensors_in(entry) for entry in value]
            kinds = {tuple([(t.dtype, t.dim()) for t in entry]) for entry in lists}
            if len(kinds) == 1 and all(lists):  # possibly a list of samples
                tensors = [(t, (i, len(lists))) for i, entry in enumerate(lists) for t in entry]
        for tensor, list_position in tensors:
            if tensor.is_nested:
                raise NotObservable(
                    f"heldin.observe: argument {name_of(place, names)!r} of the model is a nested "
                    "tensor, whose rows cannot be assigned to samples; use padded sequences, or a "
                    "list of tensors"
                )
            signature.append((place, tensor.dtype, tensor.requires_grad))
            fits = dim is not None and -tensor.dim() <= dim < tensor.dim()
            entry_dim = dim % tensor.dim() if dim is not None and fits else None
            list_position = list_position if dim is not None else None
            entries.append(Entry(tensor, place, entry_dim, list_position))
        if tensors:
            structure.append((place, tensors[0][1] is None))
    owners = [entry.owner for entry in entries if entry.owner is not None]
    last_owners = [int(owner.max()) for owner in owners if owner.numel()]
    flat = None
    if last_owners:
        flat = (max(last_owners) + 1, True)
    elif index is not None:
        named = [(name_of(entry.place, names), entry.tensor) for entry in entries]
        by_index = owners_from_index(index, named)
        entries = [replace(e, owner=owner) for e, owner in zip(entries, by_index, strict=True)]
        flat = (int(index.max()) + 1, sure)
    if flat is None and all(entry.dim is None and entry.list_position is None for entry in entries):
        raise NotObservable(
            "heldin.observe: no argument of the model is a tensor with a batch dimension, so "
            "samples cannot be counted; pass batch_dim (1 for sequences whose first dimension is "
            "time, or one for each argument), or run the step through call()"
        )
    return Arguments(entries, tuple(signature), tuple(structure), flat, opaque_types)


def name_of(place: str | int, names: Sequence[str]) -> str:
    return names[place] if isinstance(place, int) and place < len(names) else str(place)


def _dim_of(
    batch_dim: BatchDim, place: str | int, names: Sequence[str]
) -> tuple[int | Literal["owner"] | None, bool]:
    """Return the batch dimension of an argument, and whether the user gave it for this one."""
    if isinstance(batch_dim, int):
        return batch_dim, False
    if isinstance(place, int) and place not in batch_dim and place < len(names):
        place = names[place]
    return batch_dim.get(place, 0), place in batch_dim


def values_in(value: Any, opaque_types: list[type], depth: int = 4) -> Any:
    """Return everything in an argument that is not a tensor, by value.

    Types of objects that cannot be compared, or are nested too deeply, are added to `opaque_types`.
    Functions are assumed to be the same in every call.
    """

    def inside(values: Iterable[Any]) -> list[Any]:
        return [values_in(item, opaque_types, depth - 1) for item in values]

    if isinstance(value, Tensor):
        return None
    if value is None or isinstance(value, (int, float, complex, str, bytes, Enum, type)):
        return value
    if isinstance(value, (torch.dtype, torch.device, torch.layout, range, slice)):
        return str(value)
    if hasattr(value, "tobytes") and hasattr(value, "dtype"):  # a NumPy array
        size = getattr(value, "size", 0)
        raw = value.tobytes()
        return str(value.dtype), getattr(value, "shape", ()), raw if size < ENTRIES else hash(raw)
    if depth and isinstance(value, (list, tuple, deque)):
        return (type(value), *inside(value))
    if depth and isinstance(value, Mapping):
        return (type(value), *zip(map(str, value), inside(value.values()), strict=True))
    if callable(value) or isinstance(value, (torch.Generator, ModuleType)):
        return type(value)
    fields = _fields(value)
    if fields and depth:
        return (type(value), *zip(fields, inside(fields.values()), strict=True))
    if isinstance(value, AbstractSet):
        return (type(value), frozenset(map(repr, value)))
    by_value: Any = getattr(type(value), "__hash__", None)
    if not fields and by_value is not None and by_value is not object.__hash__:
        return value  # for instance a date
    if fields or not hasattr(value, "__dict__"):
        opaque_types.append(type(value))
    return type(value)


def _fields(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, sorted by name."""
    slots = [getattr(kind, "__slots__", ()) for kind in type(value).__mro__]
    names = {name for slot in slots for name in ((slot,) if isinstance(slot, str) else slot)}
    names -= {"__dict__", "__weakref__"}
    slot_values = {name: getattr(value, name) for name in names if hasattr(value, name)}
    return dict(sorted({**slot_values, **getattr(value, "__dict__", {})}.items()))


def owner_hypotheses(
    entries: Sequence[Entry], count: Count
) -> tuple[list[tuple[Tensor, Tensor]], list[frozenset[int]]]:
    """Return the owners of the inputs under several hypotheses, and the batches in each.

    The hypotheses are: all tensors with m rows are batches; all but one are, which only looks like
    a batch (a mask of shape (T, T) where T = m); only one is.
    """
    m = count.m
    batched = [e for e in entries if e.counts(count)]
    all_batches = frozenset(range(len(batched)))
    input_subsets = [all_batches]
    if 1 < len(batched) <= INPUTS and not count.is_list and not count.flat:
        input_subsets += [all_batches - {i} for i in sorted(all_batches, reverse=True)]
        input_subsets += [frozenset([i]) for i in sorted(all_batches)] if len(batched) > 2 else []
    line = torch.arange(m, dtype=torch.float32)
    owned = []
    for i, entry in enumerate(batched):
        shape = [1] * entry.tensor.dim()
        owner = line
        if count.flat and entry.owner is not None:
            owner, shape = entry.owner.float(), list(entry.owner.shape)
        elif count.is_list and entry.list_position is not None:
            owner = line[entry.list_position[0]]
        elif entry.dim is not None:
            shape[entry.dim] = m
        planes = torch.stack([owner, -owner]).reshape(2, *shape)
        none = ownerless(shape, planes, m)
        by_subset = [planes if i in subset else none for subset in input_subsets]
        owned.append((entry.tensor, torch.cat(by_subset)))
    return owned, input_subsets


def rows_of(entries: Sequence[Entry]) -> dict[int, list[Tensor]]:
    """Return the possible owners of the rows of a flat batch as planes, by number of rows."""
    planes_by_count: dict[int, list[Tensor]] = {}
    for entry in entries:
        if entry.owner is not None and entry.owner.numel() == entry.owner.shape[0]:
            owner = entry.owner.flatten().float()
            same_count = planes_by_count.setdefault(len(owner), [])
            if not any(torch.equal(planes[0], owner) for planes in same_count):
                same_count.append(torch.stack([owner, -owner]))
    return planes_by_count
