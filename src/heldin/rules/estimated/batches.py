"""Batches of any structure: where their samples lie, and some samples of one.

A layout has the structure of a batch. Its leaves say along which dimension of a tensor the samples
lie, that a list has one entry for each sample, or that all samples share what is there. It is found
by collating one sample two and three times: whatever grows from 2 to 3 belongs to the samples, and
padding does not change.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from heldin._private_torch import version_of
from heldin.errors import HeldinError

__all__ = [
    "Along",
    "Layout",
    "Listed",
    "Shared",
    "cloned",
    "layout_of",
    "layout_of_rows",
    "refused_if_changed",
    "repacked",
    "rows_in",
    "select",
    "tensors_in",
    "to_device",
]


@dataclasses.dataclass(frozen=True)
class Along:
    """A tensor or array with the samples along a dimension."""

    dim: int


@dataclasses.dataclass(frozen=True)
class Listed:
    """A list or tuple with an entry for each sample."""


@dataclasses.dataclass(frozen=True)
class Shared:
    """Something that does not grow with the number of samples."""


Layout = Along | Listed | Shared | dict[Any, Any]  # a dict of layouts by key, number or field


def layout_of(collate: Callable[[list[Any]], Any], sample: Any) -> Layout:
    """Where samples lie in the batches of a collate function.

    >>> from torch.utils.data import default_collate
    >>> layout_of(default_collate, {"x": torch.ones(4), "name": "a", "y": 1.0})
    {'x': Along(dim=0), 'name': Listed(), 'y': Along(dim=0)}
    """
    two, three = (collate([copy.copy(sample) for _ in range(n)]) for n in (2, 3))
    return _compared(two, three, "batch")


def _compared(two: Any, three: Any, place: str) -> Layout:
    if type(two) is not type(three):
        raise HeldinError(
            f"{place}: two samples are collated to a {type(two).__name__} and three to a "
            f"{type(three).__name__}, so it is not known which part belongs to which sample; let "
            "the collate function return one structure"
        )
    if _is_array(two):
        return _grown(tuple(two.shape), tuple(three.shape), place)
    parts = _parts(two)
    if parts is None:
        return Shared() if _is_plain(two) else _unknown(two, place)
    others = _parts(three) or {}
    if isinstance(two, (list, tuple)) and (len(two), len(three)) == (2, 3):
        return Listed()
    if parts.keys() != others.keys():
        raise HeldinError(
            f"{place}: its parts change with the number of samples ({list(parts)} and "
            f"{list(others)}), so it is not known which of them belongs to which sample; let the "
            "collate function return the same parts for every batch"
        )
    return {key: _compared(part, others[key], f"{place}[{key!r}]") for key, part in parts.items()}


def _grown(two: tuple[int, ...], three: tuple[int, ...], place: str) -> Layout:
    changed = [d for d, (a, b) in enumerate(zip(two, three, strict=False)) if a != b]
    if len(two) == len(three):
        if not changed:
            return Shared()
        if len(changed) == 1 and (two[changed[0]], three[changed[0]]) == (2, 3):
            return Along(changed[0])
    raise HeldinError(
        f"{place}: a tensor of shape {two} for two equal samples and {three} for three has no "
        "dimension with one entry for each sample (are samples packed into one row, or compared "
        "with each other?); collate them so that each has its own row"
    )


def layout_of_rows(rows: Any, count: int) -> Layout:
    """The layout of a structure of tensors with `count` rows each.

    >>> layout_of_rows((torch.ones(3, 2), torch.ones(5, 5)), 3)
    {0: Along(dim=0), 1: Shared()}
    """
    if _is_array(rows):
        return Along(0) if rows.ndim and len(rows) == count else Shared()
    if isinstance(rows, list) and len(rows) == count and not any(map(_is_array, rows)):
        return Listed()
    parts = _parts(rows)
    if parts is None:
        return Shared() if _is_plain(rows) else _unknown(rows, "data")
    return {key: layout_of_rows(part, count) for key, part in parts.items()}


def rows_in(batch: Any, layout: Layout) -> int | None:
    """The number of samples in a batch; None if nothing in it tells.

    >>> rows_in((torch.ones(7, 4),), {0: Along(1)})
    4
    """
    if isinstance(layout, Along):
        return int(batch.shape[layout.dim])
    if isinstance(layout, Listed):
        return len(batch)
    if isinstance(layout, Shared):
        return None
    parts = _parts(batch) or {}
    if parts.keys() != layout.keys():
        return None
    counts = (rows_in(parts[key], inner) for key, inner in layout.items())
    return next((count for count in counts if count is not None), None)


def select(batch: Any, layout: Layout, index: Tensor, place: str = "batch") -> Any:
    """Some samples of a batch, in a new batch of the same kind.

    >>> batch = {"ids": torch.arange(6).view(3, 2), "mask": torch.ones(2, 2)}
    >>> select(batch, {"ids": Along(0), "mask": Shared()}, torch.tensor([2]))["ids"]
    tensor([[4, 5]])
    """
    if isinstance(layout, Shared):
        return batch
    if isinstance(layout, Along):
        if not _is_array(batch) or batch.ndim <= layout.dim:
            raise _another(batch, place)
        if isinstance(batch, Tensor):
            return batch.index_select(layout.dim, index.to(batch.device))
        return batch.take(index.numpy(), axis=layout.dim)
    if isinstance(layout, Listed):
        if not isinstance(batch, (list, tuple)):
            raise _another(batch, place)
        return type(batch)([batch[i] for i in index.tolist()])
    parts = _parts(batch)
    if parts is None or parts.keys() != layout.keys():
        raise _another(batch, place)
    return _rebuilt(
        batch,
        {k: select(part, layout[k], index, f"{place}[{k!r}]") for k, part in parts.items()},
    )


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with all its tensors on a device; itself if they are there already."""
    if isinstance(batch, Tensor):
        return batch.to(device)
    parts = _parts(batch)
    if parts is None:
        return batch
    moved = {key: to_device(part, device) for key, part in parts.items()}
    if all(moved[key] is part for key, part in parts.items()):
        return batch
    return _rebuilt(batch, moved)


def repacked(batch: Any) -> Any:
    """The same tensors in containers of their own: whoever takes a part out of them may do so."""
    parts = None if isinstance(batch, Tensor) else _parts(batch)
    return batch if parts is None else _rebuilt(batch, {k: repacked(v) for k, v in parts.items()})


def cloned(batch: Any) -> Any:
    """The batch with copies of all its tensors."""
    if isinstance(batch, Tensor):
        return batch.clone()
    parts = _parts(batch)
    return batch if parts is None else _rebuilt(batch, {k: cloned(v) for k, v in parts.items()})


@contextmanager
def refused_if_changed(batch: Any) -> Iterator[None]:
    """Refuse a loss that changes the values of a batch in place when it is called again.

    The first call is to be made before: whoever writes the same values a second time (labels of
    padding, say) does no harm.
    """
    tensors = list(tensors_in(batch))
    versions, before = [version_of(t) for t in tensors], [t.clone() for t in tensors]
    yield
    for tensor, version, values in zip(tensors, versions, before, strict=True):
        if version_of(tensor) != version and not torch.equal(tensor, values):
            raise HeldinError(
                "batch_loss: it, or the model, changes the batch in place, so that shadows would "
                "see it changed more than once; let it work on a copy (x = x / 255, not x /= 255)"
            )


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """All tensors of a batch, in its order."""
    if isinstance(batch, Tensor):
        yield batch
    for part in (_parts(batch) or {}).values():
        yield from tensors_in(part)


def _parts(batch: Any) -> dict[Any, Any] | None:
    """The parts of a container by key, number or field; None for what is none."""
    if isinstance(batch, Mapping):
        return dict(batch)
    if isinstance(batch, (list, tuple)):
        return dict(enumerate(batch))
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    return None


def _rebuilt(batch: Any, parts: Mapping[Any, Any]) -> Any:
    """A container of the same kind with other parts."""
    if isinstance(batch, Mapping):
        made = copy.copy(batch)  # keeps what else it carries (BatchEncoding, UserDict)
        for key, part in parts.items():
            made[key] = part  # type: ignore[index]
        return made
    if isinstance(batch, Sequence):
        values = list(parts.values())
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)  # type: ignore[call-arg]
    made = copy.copy(batch)
    for name, part in parts.items():
        object.__setattr__(made, name, part)  # frozen dataclasses too
    return made


def _is_array(value: Any) -> bool:
    return isinstance(value, Tensor) or (
        type(value).__module__ == "numpy" and hasattr(value, "take")
    )


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, complex, str, bytes))


def _unknown(value: Any, place: str) -> Layout:
    raise HeldinError(
        f"{place}: it is not known which part of a {type(value).__name__} belongs to which sample; "
        "use tensors in tuples, lists, dictionaries or dataclasses"
    )


def _another(batch: Any, place: str) -> HeldinError:
    return HeldinError(
        f"{place}: the batch of this step has another structure here ({type(batch).__name__}) than "
        "the batches that the data's collate function makes; pass the batch as the loader gave it"
    )
