"""Items of a dataset that were read while a rule is made, so that they are read once."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .batches import bytes_in, layout_of_tensors, parts_of, select, tensors_in

__all__ = ["ItemStore", "joined", "shallow", "single_items"]

MEMORY = 256 * 2**20  # bytes of items that are kept


def shallow(item: Any) -> Any:
    """Return a copy of an item from which a collate function may take parts out."""
    return copy.copy(item) if isinstance(item, (dict, list)) else item


@dataclass(frozen=True, eq=False)
class _Row:
    """One row of what a dataset returned in columns for several."""

    columns: Any


def single_items(items: Any) -> list[Any]:
    """Return what a dataset has read as a list with one item for each row."""
    if isinstance(items, (list, tuple)):
        return list(items)
    count = len(next(tensors_in(items)))
    layout = layout_of_tensors(items, count)
    return [_Row(select(items, layout, torch.tensor([row]))) for row in range(count)]


def joined(items: Sequence[Any]) -> Any:
    """Return the argument of the collate function: a list of items, or columns."""
    if not items or not isinstance(items[0], _Row):
        return [shallow(item) for item in items]
    return _concatenated([row.columns for row in items])


def _concatenated(parts: list[Any]) -> Any:
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(parts)
    if isinstance(first, Mapping):
        return {key: _concatenated([part[key] for part in parts]) for key in first}
    return [value for part in parts for value in part]


class ItemStore:
    """Items by the number of the row, within a memory in bytes."""

    def __init__(self, memory: int = MEMORY) -> None:
        # whether rows are the same whenever they are read; only then are they looked up
        self.is_fixed = False
        self._items: dict[int, Any] = {}
        self._memory = memory

    def add(self, items: Mapping[int, Any]) -> None:
        """Keep items, as long as there is room."""
        for row, item in items.items():
            if row not in self._items and (size := _size(item)) <= self._memory:
                self._memory -= size
                self._items[row] = shallow(item)

    def __contains__(self, row: int) -> bool:
        return row in self._items

    def __getitem__(self, row: int) -> Any:
        return self._items[row]

    def close(self) -> None:
        """Release the items, and keep none from now on."""
        self._items, self._memory = {}, 0


def _size(item: Any) -> int:
    parts = parts_of(item)
    if parts is not None:
        return sys.getsizeof(parts) + sum(map(_size, parts.values()))
    return sys.getsizeof(item) + bytes_in(item) + int(getattr(item, "nbytes", 0))
