"""Batches of any structure: their tensors, their device, and some of their samples.

A layout has the structure of a batch. Its leaves say along which dimension of a tensor the samples
lie, that a list has one entry per sample, or that all samples share a value. heldin uses a layout
only where collating other samples gives the same rows (`is_sliceable`); otherwise the collate
function of the user makes the smaller batch.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from heldin.errors import HeldinError

from .randomness import RandomState

__all__ = [
    "Along",
    "Layout",
    "Listed",
    "Shared",
    "addresses",
    "bytes_in",
    "equal",
    "find_layout",
    "fingerprint",
    "is_sliceable",
    "layout_of_tensors",
    "parts_of",
    "repack",
    "rows_in",
    "select",
    "strided",
    "tensors_in",
    "to_device",
]

Collate = Callable[[list[Any]], Any]

FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType, partial)  # graphs can be called, too
DEPTH = 5  # nested objects that are searched for tensors
PROBES = 16  # values of a tensor in its fingerprint


@dataclasses.dataclass(frozen=True)
class Along:
    """A tensor or array with the samples along a dimension."""

    dim: int


@dataclasses.dataclass(frozen=True)
class Listed:
    """A list or tuple with one entry per sample."""


@dataclasses.dataclass(frozen=True)
class Shared:
    """A value that does not grow with the number of samples."""


Layout = Along | Listed | Shared | dict[Any, Any]  # a dict of layouts by key, number or field


# --- layouts ---------------------------------------------------------------------------------


def find_layout(collate: Collate, sample: Any) -> Layout | None:
    """Return where samples lie in the batches of a collate function; None if that is unclear.

    The function collates one sample two and three times: whatever grows from 2 to 3 belongs to the
    samples, and padding does not change.
    """
    try:
        two, three = (collate([copy.copy(sample) for _ in range(n)]) for n in (2, 3))
        return _compare(two, three)
    except (_Unclear, TypeError, ValueError, RuntimeError, KeyError, IndexError, AttributeError):
        return None


class _Unclear(Exception):
    """Raised where the samples of a batch cannot be separated."""


def _compare(two: Any, three: Any) -> Layout:
    if type(two) is not type(three):
        raise _Unclear
    if _is_array(two):
        return _growing_dimension(tuple(two.shape), tuple(three.shape))
    parts = parts_of(two)
    if parts is None:
        if _is_plain(two) and two == three:
            return Shared()
        raise _Unclear
    if isinstance(two, (list, tuple)) and (len(two), len(three)) == (2, 3):
        return Listed()
    others = parts_of(three) or {}
    if parts.keys() != others.keys():
        raise _Unclear
    return {key: _compare(part, others[key]) for key, part in parts.items()}


def _growing_dimension(two: tuple[int, ...], three: tuple[int, ...]) -> Layout:
    if two == three:
        return Shared()
    changed = [d for d, (a, b) in enumerate(zip(two, three, strict=False)) if a != b]
    if len(two) == len(three) and len(changed) == 1:
        (dim,) = changed
        if (two[dim], three[dim]) == (2, 3):
            return Along(dim)
    raise _Unclear


def layout_of_tensors(data: Any, rows: int) -> Layout:
    """Return the layout of a structure of tensors with `rows` rows each."""
    if _is_array(data):
        return Along(0) if data.ndim and len(data) == rows else Shared()
    if isinstance(data, list) and len(data) == rows and not any(map(_is_array, data)):
        return Listed()
    parts = parts_of(data)
    if parts is None:
        if _is_plain(data):
            return Shared()
        raise HeldinError(
            f"data: which part of a {type(data).__name__} belongs to which row is unclear; use "
            "tensors in tuples, lists, dictionaries or dataclasses, or a DataLoader"
        )
    return {key: layout_of_tensors(part, rows) for key, part in parts.items()}


def is_sliceable(collate: Collate, items: Sequence[Any], batch: Any, layout: Layout | None) -> bool:
    """Return whether collating some of the items gives the same rows as the whole batch.

    The function collates the items in another order, without one of them, and each half, with the
    random numbers that the batch was made with: those of the present random state.
    """
    if layout is None or rows_in(batch, layout) not in (None, len(items)):
        return False
    rows = len(items)
    backwards = [i for i in range(rows - 1, -1, -1) if rows < 3 or i != rows // 2]
    state = RandomState.current()
    try:
        for order in (backwards, [*range(rows // 2)], [*range(rows // 2, rows)]):
            if order:
                state.restore()
                again = collate([copy.copy(items[i]) for i in order])
                if not equal(again, select(batch, layout, torch.tensor(order))):
                    return False
    except Exception:  # whatever a smaller batch makes impossible, slicing is not established
        return False
    finally:
        state.restore()
    return True


def rows_in(batch: Any, layout: Layout) -> int | None:
    """Return the number of samples in a batch; None if nothing in it shows it."""
    if isinstance(layout, Along):
        return int(batch.shape[layout.dim]) if _is_array(batch) else None
    if isinstance(layout, Listed):
        return len(batch)
    if isinstance(layout, Shared):
        return None
    parts = parts_of(batch) or {}
    if parts.keys() != layout.keys():
        return None
    counts = (rows_in(parts[key], inner) for key, inner in layout.items())
    return next((count for count in counts if count is not None), None)


def select(batch: Any, layout: Layout, index: Tensor, place: str = "batch") -> Any:
    """Return some samples of a batch, in a new batch of the same kind."""
    if isinstance(layout, Shared):
        return batch
    if isinstance(layout, Along):
        if not _is_array(batch) or batch.ndim <= layout.dim:
            raise _other_structure(batch, place)
        if isinstance(batch, Tensor):
            return batch.index_select(layout.dim, index.to(batch.device))
        return batch.take(index.numpy(), axis=layout.dim)
    if isinstance(layout, Listed):
        if not isinstance(batch, (list, tuple)):
            raise _other_structure(batch, place)
        return type(batch)([batch[i] for i in index.tolist()])
    parts = parts_of(batch)
    if parts is None or parts.keys() != layout.keys():
        raise _other_structure(batch, place)
    return _rebuild(
        batch,
        {k: select(part, layout[k], index, f"{place}[{k!r}]") for k, part in parts.items()},
    )


def _other_structure(batch: Any, place: str) -> HeldinError:
    return HeldinError(
        f"{place}: the batch of this step has another structure here ({type(batch).__name__}) than "
        "earlier batches; pass the batch as the loader returned it"
    )


# --- contents --------------------------------------------------------------------------------


def equal(one: Any, other: Any, objects: bool = False) -> bool:
    """Return whether two batches have the same structure and values; nan equals nan.

    objects: whether objects that are neither tensors nor containers equal themselves; they may have
    changed.
    """
    if type(one) is not type(other):
        return False
    if _is_plain(one):
        return bool(one == other or (one != one and other != other))
    if isinstance(one, Tensor):
        if one.dtype != other.dtype or one.layout != other.layout:
            return False
        if one.layout != torch.strided or one.is_nested:
            return equal(strided(one), strided(other))
        one, other = _plain(one), _plain(other)
        if torch.equal(one, other):
            return True
        floats = one.is_floating_point() or one.is_complex()
        return one.shape == other.shape and floats and _equal_but_nan(one, other)
    if _is_array(one):
        return one.shape == other.shape and _equal_but_nan(one, other)
    parts, others = parts_of(one), parts_of(other)
    if parts is None or others is None:
        return objects and one is other
    same_keys = parts.keys() == others.keys()
    return same_keys and all(equal(part, others[key], objects) for key, part in parts.items())


def _equal_but_nan(one: Any, other: Any) -> bool:
    return bool(((one == other) | ((one != one) & (other != other))).all())


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield all tensors of a batch: in containers, and in the attributes of other objects."""
    yield from _tensors_in(value, DEPTH, set())


def bytes_in(value: Any) -> int:
    """Return the size of all tensors of a batch."""
    return sum(t.numel() * t.element_size() for t in tensors_in(value))


def _tensors_in(value: Any, depth: int, seen: set[int]) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
        return
    if depth == 0 or _is_plain(value) or isinstance(value, (type, nn.Module, *FUNCTIONS)):
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    parts = parts_of(value)
    if parts is None:
        parts = getattr(value, "__dict__", {})  # graphs, molecules: objects of other libraries
    for part in list(parts.values()):
        yield from _tensors_in(part, depth - 1, seen)


def strided(tensor: Tensor) -> list[Tensor]:
    """Return the tensors that hold the contents of a sparse or nested one; else itself."""
    if tensor.layout == torch.strided:
        return list(tensor.unbind()) if tensor.is_nested else [tensor]
    if tensor.layout == torch.sparse_coo:
        sparse = tensor.detach().coalesce()
        return [sparse.indices(), sparse.values()]
    if tensor.layout == torch.jagged:
        nested: Any = tensor
        return [nested.values(), nested.offsets()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        names = ("crow_indices", "col_indices", "values")
    else:
        names = ("ccol_indices", "row_indices", "values")
    return [getattr(tensor, name)() for name in names]


def addresses(tensor: Tensor) -> set[int]:
    """Return where the contents of a tensor lie."""
    return {part.untyped_storage().data_ptr() for part in strided(tensor)}


def to_device(batch: Any, device: torch.device) -> Any:
    """Return the batch with all its tensors on a device; itself if they are there already."""
    if isinstance(batch, Tensor):
        return batch.to(device)
    parts = parts_of(batch)
    if parts is None:
        if not _is_plain(batch) and callable(getattr(batch, "to", None)):
            if any(tensor.device != device for tensor in tensors_in(batch)):
                return batch.to(device)
        return batch
    moved = {key: to_device(part, device) for key, part in parts.items()}
    if all(moved[key] is part for key, part in parts.items()):
        return batch
    return _rebuild(batch, moved)


def repack(batch: Any) -> Any:
    """Return the same tensors in new containers, from which a loss may take parts out."""
    if isinstance(batch, Tensor):
        return batch
    parts = parts_of(batch)
    if parts is None:
        return batch if _is_plain(batch) else _shallow_copy(batch)
    return _rebuild(batch, {key: repack(part) for key, part in parts.items()})


def _shallow_copy(value: Any) -> Any:
    try:
        return copy.copy(value)
    except Exception:  # an object that cannot be copied is passed on as it is
        return value


def _plain(tensor: Tensor) -> Tensor:
    """Return the values of a tensor without what a subclass does in operations (MONAI's)."""
    return tensor.detach().as_subclass(Tensor)


def fingerprint(tensor: Tensor) -> tuple[Any, ...]:
    """Return shape, type and some values of a tensor, to recognise it on another device."""
    if tensor.layout != torch.strided or tensor.is_nested:
        return tensor.layout, *map(fingerprint, strided(tensor))
    flat = _plain(tensor).reshape(-1)
    values = flat[:: max(1, len(flat) // PROBES)][: PROBES + 1]
    if values.is_floating_point():
        values = values.nan_to_num(nan=0.25)  # nan differs from itself
    return tuple(tensor.shape), tensor.dtype, tuple(values.tolist())


# --- containers ------------------------------------------------------------------------------


def parts_of(batch: Any) -> dict[Any, Any] | None:
    """Return the parts of a container by key, number or field; None for any other object."""
    if isinstance(batch, Mapping):
        return dict(batch)
    if isinstance(batch, (list, tuple)):
        return dict(enumerate(batch))
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return {field.name: getattr(batch, field.name, None) for field in dataclasses.fields(batch)}
    return None


def _rebuild(batch: Any, parts: Mapping[Any, Any]) -> Any:
    """Return a container of the same kind with other parts."""
    if isinstance(batch, Mapping):
        rebuilt = copy.copy(batch)  # keeps what else it carries (BatchEncoding, UserDict)
        for key, part in parts.items():
            rebuilt[key] = part  # type: ignore[index]
        return rebuilt
    if isinstance(batch, Sequence):
        values = list(parts.values())
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)  # type: ignore[call-arg]
    rebuilt = copy.copy(batch)
    for name, part in parts.items():
        object.__setattr__(rebuilt, name, part)  # frozen dataclasses too
    return rebuilt


def _is_array(value: Any) -> bool:
    return isinstance(value, Tensor) or (
        type(value).__module__ == "numpy" and hasattr(value, "take")
    )


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, complex, str, bytes))
