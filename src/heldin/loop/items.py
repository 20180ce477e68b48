"""Items of a dataset that were read while a rule is made, so that they are read once."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from typing import Any

from .batches import parts_of, tensors_in

__all__ = ["ItemStore", "shallow"]

MEMORY = 256 * 2**20  # bytes of items that are kept


def shallow(item: Any) -> Any:
    """Return a copy of an item from which a collate function may take parts out."""
    return copy.copy(item) if isinstance(item, (dict, list)) else item


class ItemStore:
    """Items by the number of the row, within a memory.

    Args:
        memory: bytes that may be kept.

    Attributes:
        is_fixed: whether rows are the same whenever they are read; only then are they looked up.

    >>> store = ItemStore()
    >>> store.add({3: "three", 5: "five"})
    >>> store[5], 4 in store
    ('five', False)
    """

    def __init__(self, memory: int = MEMORY) -> None:
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
    """Return the bytes of an item, about."""
    parts = parts_of(item)
    if parts is not None:
        return sys.getsizeof(parts) + sum(map(_size, parts.values()))
    tensors = list(tensors_in(item))
    bytes_of_tensors = sum(t.numel() * t.element_size() for t in tensors)
    return sys.getsizeof(item) + bytes_of_tensors + int(getattr(item, "nbytes", 0))
