"""The arguments of a forward pass: what may count samples in them, and whose each element is.

The order of arguments decides nothing. Each size that a batch dimension has, and the length of each
list of tensors, is a *count*: a number of samples that the call may have. If there are several, the
call is followed under each of them, and the backward pass decides (see `counting`).
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

from .flat import index_of, is_flat_batch, owners_beside, owners_in, owners_in_fields
from .ownership.planes import tensors_in

__all__ = [
    "Arguments",
    "BatchDim",
    "Count",
    "Entry",
    "Roles",
    "names_of",
    "read",
    "readings",
    "rows_of",
]

BatchDim = int | Mapping[str | int, int | Literal["owner"] | None]
INPUTS = 8  # up to which each is left out in turn
ENTRIES = 4096  # of an array among the arguments that are compared one by one


@dataclass(frozen=True)
class Count:
    """A number of samples that a call may have.

    Attributes:
        m: the number.
        listed: the samples are the entries of a list; else rows along a dimension.
        flat: samples lie one after the other, and an index says whose each row is.
    """

    m: int
    listed: bool = False
    flat: bool = False


@dataclass(frozen=True, eq=False)
class Entry:
    """A tensor among the arguments.

    Attributes:
        place: number or name of its argument.
        dim: the dimension that may count samples; None: none does.
        at: its number in a list that may be one of samples, and the length of that list.
        owner: in a flat batch, whose each element is, broadcastable to the tensor.
    """

    tensor: Tensor
    place: str | int
    dim: int | None
    at: tuple[int, int] | None
    owner: Tensor | None = None

    @property
    def rows(self) -> int | None:
        return None if self.dim is None else self.tensor.shape[self.dim]

    def counts(self, count: Count) -> bool:
        """Whether the tensor has the rows of so many samples, or is one of them."""
        if count.flat:
            return self.owner is not None
        if count.listed and self.at is not None:
            return self.at[1] == count.m
        return self.rows == count.m


@dataclass(frozen=True)
class Arguments:
    """What is known about the arguments before the pass.

    Attributes:
        entries: the tensors.
        signature: all that decides which graph is built, but for shapes.
        structure: the arguments that have tensors; the same for batches of any size.
        flat: the number of samples of a flat batch, if there may be one, and whether it is sure.
        unseen: what among the arguments cannot be looked into.
    """

    entries: Sequence[Entry]
    signature: Any
    structure: Any
    flat: tuple[int, bool] | None = None
    unseen: Sequence[type] = ()

    def named(self, count: Count, names: Sequence[str], chosen: Sequence[Entry]) -> str:
        """Which arguments would count so many samples, for messages."""
        places = dict.fromkeys(e.place for e in chosen)
        each = [_name_of(p, names) for p in places]
        how = "entries" if count.listed else "samples in one" if count.flat else "rows"
        return f"{count.m} {how} of {' and '.join(repr(name) for name in each)}"


class Roles:
    """Which arguments count samples, as backward passes have shown."""

    def __init__(self) -> None:
        self._counting: dict[Any, tuple[Count, set[str | int]]] = {}  # by structure

    def counts(self, given: Arguments) -> list[Count]:
        """The numbers of samples that a call may have."""
        known, places = self._counting.get(given.structure, (None, None))
        listed = None if known is None else known.listed
        found: dict[Count, None] = {}
        if given.flat is not None and (known is None or known.flat):
            found[Count(given.flat[0], flat=True)] = None
            if given.flat[1] or known is not None:
                return list(found)
        rows: dict[Any, set[int | None]] = {}
        for entry in given.entries:
            if entry.at is not None:
                rows.setdefault((entry.place, entry.at[1]), set()).add(entry.rows)
        uneven = {length for (_, length), found_rows in rows.items() if len(found_rows) > 1}
        for entry in given.entries:
            if places is not None and entry.place not in places:
                continue
            of_samples = entry.at is not None and entry.at[1] in uneven  # surely, or beside such
            if entry.rows is not None and not listed and not of_samples:
                found[Count(entry.rows)] = None
            if entry.at is not None and listed is not False:
                found[Count(entry.at[1], True)] = None
        if places is not None and len(found) == 2 and Count(1) in found:
            del found[Count(1)]  # broadcast over the samples
        return list(found)

    def counting(self, given: Arguments) -> list[Entry]:
        """The tensors of the arguments that may count samples."""
        _, places = self._counting.get(given.structure, (None, None))
        return [e for e in given.entries if places is None or e.place in places]

    def settle(self, given: Arguments, count: Count) -> None:
        """A backward pass has shown how many samples there are."""
        places = {e.place for e in given.entries if e.counts(count)}
        self._counting[given.structure] = (count, places)


def names_of(model: nn.Module, batch_dim: BatchDim) -> list[str]:
    """The names of the positional arguments; refuses a batch_dim for one that there is not."""
    try:
        found = inspect.signature(model.forward).parameters.values()
    except ValueError:  # not a function of Python's
        return []
    names = [p.name for p in found if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    known = {p.name for p in found}
    for name in () if isinstance(batch_dim, int) else batch_dim:
        if isinstance(name, str) and name not in known:
            if not any(p.kind == p.VAR_KEYWORD for p in found):
                raise HeldinError(
                    f"heldin.observe: batch_dim names {name!r}, which is no argument of the "
                    f"model's forward ({', '.join(known)})"
                )
    return names


def read(
    batch_dim: BatchDim, args: Sequence[Any], kwargs: Mapping[str, Any], names: Sequence[str]
) -> Arguments:
    """The tensors among the arguments, and all the rest by value."""
    entries: list[Entry] = []
    signature: list[Any] = []
    structure: list[Any] = []
    index, sure = None, False
    unseen: list[type] = []
    places: list[tuple[str | int, Any]] = [*enumerate(args), *kwargs.items()]
    for place, value in places:
        if isinstance(value, PackedSequence):
            raise NotObservable(
                f"heldin.observe: argument {place!r} of the model is a packed sequence, whose rows "
                "are not samples; call the model with padded sequences and pack them in forward()"
            )
        dim, told = _dim_of(batch_dim, place, names)
        if dim is not None and not sure:
            found_index = index_of(value, _name_of(place, names), dim == "owner")
            if found_index is not None:
                index, sure = found_index, dim == "owner"
        if dim == "owner":
            dim = None
        owned = list(owners_in(value)) if is_flat_batch(value) else []
        if not owned and not told and not isinstance(value, Tensor):
            owned = owners_in_fields(value)
        if owned:
            entries += [Entry(tensor, place, None, None, owner) for tensor, owner in owned]
            signature.append((place, values_in(value, unseen)))
            structure.append((place, "flat"))
            continue
        if isinstance(value, Tensor):
            groups: list[tuple[list[Tensor], tuple[int, int] | None]] = [([value], None)]
        else:
            groups = [(tensors_in(value), None)]
            if isinstance(value, (list, tuple)) and value and not told:
                each = [tensors_in(entry) for entry in value]
                kinds = {tuple([(t.dtype, t.dim()) for t in found]) for found in each}
                if len(kinds) == 1 and all(each):  # perhaps a list of samples
                    groups = [(found, (i, len(each))) for i, found in enumerate(each)]
            signature.append((place, values_in(value, unseen)))
        for tensors, at in groups:
            for tensor in tensors:
                if tensor.is_nested:
                    raise NotObservable(
                        f"heldin.observe: argument {_name_of(place, names)!r} of the model is a "
                        "nested tensor, in which rows cannot be followed; use padded sequences, or "
                        "a list of tensors"
                    )
                fits = dim is not None and -tensor.dim() <= dim < tensor.dim()
                own = dim % tensor.dim() if dim is not None and fits else None
                signature.append((place, tensor.dtype, tensor.requires_grad))
                entries.append(Entry(tensor, place, own, at if dim is not None else None))
        if groups[0][0]:
            structure.append((place, groups[0][1] is None))
    entries, flat = _flat(entries, index, sure, names)
    if flat is None and all(entry.dim is None and entry.at is None for entry in entries):
        raise NotObservable(
            "heldin.observe: no argument of the model is a tensor with a batch dimension, so "
            "samples cannot be counted; pass batch_dim=..., or run the step through call()"
        )
    return Arguments(entries, tuple(signature), tuple(structure), flat, unseen)


def _flat(
    entries: list[Entry], index: Tensor | None, sure: bool, names: Sequence[str]
) -> tuple[list[Entry], tuple[int, bool] | None]:
    """The entries with their owners in a flat batch, if there may be one (see `Arguments.flat`)."""
    owners = [entry.owner for entry in entries if entry.owner is not None]
    known = [int(owner.max()) for owner in owners if owner.numel()]
    if known:
        return entries, (max(known) + 1, True)
    if index is None:
        return entries, None
    called = [_name_of(entry.place, names) for entry in entries]
    found = owners_beside(index, [entry.tensor for entry in entries], called)
    pairs = zip(entries, found, strict=True)
    return [replace(entry, owner=own) for entry, own in pairs], (int(index.max()) + 1, sure)


def _name_of(place: str | int, names: Sequence[str]) -> str:
    return names[place] if isinstance(place, int) and place < len(names) else str(place)


def _dim_of(
    batch_dim: BatchDim, place: str | int, names: Sequence[str]
) -> tuple[int | Literal["owner"] | None, bool]:
    """The batch dimension of an argument, and whether it was told for this one."""
    if isinstance(batch_dim, int):
        return batch_dim, False
    if isinstance(place, int) and place not in batch_dim and place < len(names):
        place = names[place]
    return batch_dim.get(place, 0), place in batch_dim


def values_in(value: Any, unseen: list[type], depth: int = 4) -> Any:
    """All that is not a tensor in an argument, by value.

    What cannot be looked into, or lies too deep, joins `unseen`. Functions are taken for the same
    from call to call.
    """

    def inside(values: Iterable[Any]) -> list[Any]:
        return [values_in(each, unseen, depth - 1) for each in values]

    if isinstance(value, Tensor):
        return None
    if value is None or isinstance(value, (int, float, complex, str, bytes, Enum, type)):
        return value
    if isinstance(value, (torch.dtype, torch.device, torch.layout, range, slice)):
        return str(value)
    if hasattr(value, "tobytes") and hasattr(value, "dtype"):  # an array of numpy's
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
        return value  # a date, say
    if fields or not hasattr(value, "__dict__"):
        unseen.append(type(value))
    return type(value)


def _fields(value: Any) -> dict[str, Any]:
    """The attributes of an object."""
    slots = [getattr(kind, "__slots__", ()) for kind in type(value).__mro__]
    names = {name for each in slots for name in ((each,) if isinstance(each, str) else each)}
    names -= {"__dict__", "__weakref__"}
    found = {name: getattr(value, name) for name in names if hasattr(value, name)}
    return dict(sorted({**found, **getattr(value, "__dict__", {})}.items()))


def readings(
    entries: Sequence[Entry], count: Count
) -> tuple[list[tuple[Tensor, Tensor]], list[frozenset[int]]]:
    """The owners of the inputs, read in several ways, and which inputs have owners in each.

    All tensors with m entries count samples; or all but one, which only looks like it (a mask of
    shape (T, T) where T = m); or only one.
    """
    m = count.m
    batched = [e for e in entries if e.counts(count)]
    everyone = frozenset(range(len(batched)))
    ways = [everyone]
    if 1 < len(batched) <= INPUTS and not count.listed and not count.flat:
        ways += [everyone - {i} for i in sorted(everyone, reverse=True)]
        ways += [frozenset([i]) for i in sorted(everyone)] if len(batched) > 2 else []
    line = torch.arange(m, dtype=torch.float32)
    owned = []
    for i, entry in enumerate(batched):
        shape = [1] * entry.tensor.dim()
        own = line
        if count.flat and entry.owner is not None:
            own, shape = entry.owner.float(), list(entry.owner.shape)
        elif count.listed and entry.at is not None:
            own = line[entry.at[0]].reshape(1)
        elif entry.dim is not None:
            shape[entry.dim] = m
        planes = []
        for way in ways:
            planes.append((own if i in way else torch.full_like(own, -1.0)).reshape(shape))
            planes.append((-own if i in way else torch.full_like(own, -float(m))).reshape(shape))
        owned.append((entry.tensor, torch.stack(planes)))
    return owned, ways


def rows_of(entries: Sequence[Entry]) -> dict[int, list[Tensor]]:
    """Whose the rows of a flat batch may be, as planes, by their number."""
    found: dict[int, list[Tensor]] = {}
    for entry in entries:
        if entry.owner is not None and entry.owner.numel() == entry.owner.shape[0]:
            own = entry.owner.flatten().float()
            known = found.setdefault(len(own), [])
            if not any(torch.equal(each[0], own) for each in known):
                known.append(torch.stack([own, -own]))
    return found
