"""Which rows a DataLoader's batches hold, written down as its sampler hands the numbers out.

Batches leave a loader in the order of the sampler's lists, whatever its workers do in between. So
the n-th batch holds the n-th list. Neither dataset nor batches are touched, and no random number is
drawn; the loader only gets an attribute of its own in place of the method that makes iterators.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from heldin._private_torch import ITERATOR_METHOD
from heldin.errors import HeldinError

from .batches import tensors_in

__all__ = ["RowOrder", "print_of"]

KEPT = 1024  # batches that were delivered and not yet used, the oldest forgotten first
HELD = 256 * 2**20  # bytes of them that are held on to
PROBED = 16  # numbers of a tensor by which it is recognised on another device

Print = tuple[Any, ...]


@dataclass(eq=False)
class Delivery:
    """A batch that a loader has handed out.

    Attributes:
        index: the numbers of its rows.
        batch: itself.
        places: where its tensors lie in memory.
        size: in bytes.
    """

    index: Tensor
    batch: Any
    places: set[int]
    size: int
    known: list[Print] | None = None

    @property
    def prints(self) -> list[Print]:
        """What its tensors are recognised by on another device."""
        if self.known is None:
            self.known = [print_of(tensor) for tensor in tensors_in(self.batch)]
        return self.known

    def let_go(self) -> None:
        """Free the batch, and remember what it is recognised by."""
        _ = self.prints
        self.batch = None

    @classmethod
    def of(cls, index: Sequence[int], batch: Any) -> Delivery:
        """What is to be known of a batch."""
        tensors = list(tensors_in(batch))
        return cls(
            torch.tensor(index, dtype=torch.long),
            batch,
            {tensor.untyped_storage().data_ptr() for tensor in tensors},
            sum(tensor.numel() * tensor.element_size() for tensor in tensors),
        )

    def here(self, tensors: Sequence[Tensor]) -> int:
        """How many of the tensors lie where those of the batch do."""
        if self.batch is None:
            return 0
        return sum(tensor.untyped_storage().data_ptr() in self.places for tensor in tensors)

    def misses_rows(self, calls: Sequence[Sequence[Tensor]]) -> bool:
        """Whether calls that share memory with the batch have seen a part of its rows only.

        A slice of the rows has fewer numbers, and no dimension as long as the batch; a sequence
        that was cut, or turned round, has one.
        """
        if self.batch is None:
            return False
        rows = len(self.index)
        sizes = {t.untyped_storage().data_ptr(): t.numel() for t in tensors_in(self.batch)}
        seen: dict[int, int] = {}
        for tensor in (tensor for call in calls for tensor in call):
            place = tensor.untyped_storage().data_ptr()
            if place in sizes:
                whole = rows in tensor.shape
                seen[place] = seen.get(place, 0) + (sizes[place] if whole else tensor.numel())
        return any(seen[place] < sizes[place] for place in seen)

    def alike(self, prints: Sequence[Print]) -> int:
        """How many of the tensors with these marks are like tensors of the batch."""
        return sum(one in self.prints for one in prints)


class RowOrder:
    """The row numbers of the batches of a loader.

    >>> from torch.utils.data import TensorDataset
    >>> loader = DataLoader(TensorDataset(torch.arange(6)), batch_size=2, sampler=[5, 3, 1, 0])
    >>> order = RowOrder(loader)
    >>> for batch in loader:
    ...     print(order.rows_of(batch).tolist())
    [5, 3]
    [1, 0]
    >>> order.close()
    """

    def __init__(self, loader: Any) -> None:
        self._delivered: deque[Delivery] = deque(maxlen=KEPT)
        self._used: deque[Delivery] = deque(maxlen=1)  # a second step may be taken on it
        self._followed: list[tuple[DataLoader[Any], Any]] = []
        self.follow(loader)

    def follow(self, loader: Any) -> None:
        """Listen to a loader; also to another one over the same rows, as for a resumed epoch."""
        inner = getattr(loader, "base_dataloader", loader)  # accelerate wraps the real one
        if not isinstance(inner, DataLoader):
            raise HeldinError(
                f"data: expected a torch.utils.data.DataLoader, got {type(inner)!r}; pass the row "
                "numbers of every batch: stopping.step(batch=batch, indices=...)"
            )
        if isinstance(inner.dataset, IterableDataset):
            raise HeldinError(
                "data: an IterableDataset has no row numbers; give a map-style Dataset or a "
                "DataLoader over one"
            )
        if not getattr(inner, "in_order", True):
            raise HeldinError(
                "data: a DataLoader with in_order=False hands its batches out in another order "
                "than its sampler; use in_order=True"
            )
        if any(known is inner for known, _ in self._followed):
            return
        if ITERATOR_METHOD in vars(inner):
            raise HeldinError(
                "data: this DataLoader is followed by another rule already; close() that one first"
            )
        me, it = weakref.ref(self), weakref.ref(inner)  # a cycle would outlive both

        def get_iterator() -> Any:
            order, loader = me(), it()
            assert loader is not None
            plain = getattr(type(loader), ITERATOR_METHOD)
            return plain(loader) if order is None else order._iterate(loader, plain)

        self._followed.append((inner, get_iterator))
        vars(inner)[ITERATOR_METHOD] = get_iterator

    def _iterate(self, loader: DataLoader[Any], plain: Any) -> Any:
        """An iterator of the loader whose sampler is listened to."""
        handed = deque[list[int]]()
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        sampler = getattr(loader, name)
        batched = loader.batch_sampler is not None
        vars(loader)[name] = _Listened(sampler, handed, batched)  # while the iterator is made
        try:
            inner = plain(loader)
        finally:
            vars(loader)[name] = sampler
        return _Delivering(inner, handed, weakref.ref(self))

    def deliver(self, index: list[int], batch: Any) -> None:
        """Take down that a batch was handed out."""
        self._delivered.append(Delivery.of(index, batch))
        held = 0
        for delivery in reversed(self._delivered):
            held += delivery.size
            if held > HELD and delivery is not self._delivered[-1]:
                delivery.let_go()

    def rows_of(self, batch: Any) -> Tensor:
        """(b,) row numbers of a batch that the loader handed out, here or moved elsewhere."""
        found = next((d for d in (*self._delivered, *self._used) if d.batch is batch), None)
        if found is None:
            tensors = list(tensors_in(batch))
            found = self._alike(tensors, len(tensors))
        if found is None:
            raise HeldinError(
                "step: this batch is not one of those that the loader given as data has just "
                "handed out (was it changed on the way, or does it come from another loader?); "
                "pass its row numbers: stopping.step(batch=batch, indices=...)"
            )
        self._forget(found)
        return found.index

    def called_with(self, calls: Sequence[Sequence[Tensor]]) -> list[tuple[Any, Tensor]]:
        """The batches, with their rows, that the model's calls since the last step came from.

        Args:
            calls: the tensors that the model was called with.
        """
        if not calls:
            raise HeldinError(
                "step: the optimiser stepped, but no call of the model with a backward pass was "
                "seen since the last step (was it model.forward, a method of its own, or a "
                "compiled model that was called?); pass the batch: stopping.step(batch=batch)"
            )
        chosen: list[Delivery] = []
        for call in calls:
            match = self._alike(call, 1)
            if match is None or match.batch is None:
                raise HeldinError(
                    "step: it is not certain which batch of the loader given as data the model was "
                    "called with since the last step; pass it: stopping.step(batch=batch)"
                )
            if match not in chosen:
                chosen.append(match)
        for delivery in chosen:
            if delivery.misses_rows(calls):
                raise HeldinError(
                    "step: the model was called with a part of the batch only, and shadows would "
                    "be trained on all of it; pass the part and its row numbers: "
                    "stopping.step(batch=part, indices=...)"
                )
            self._forget(delivery)
        return [(d.batch, d.index) for d in chosen]

    def _alike(self, tensors: Sequence[Tensor], least: int) -> Delivery | None:
        """The one batch that shares most tensors with these; None if it is not certain."""
        for known in (self._delivered, self._used):
            counts = [delivery.here(tensors) for delivery in known]
            if max(counts, default=0) < max(1, least):
                prints = [print_of(tensor) for tensor in tensors]
                counts = [delivery.alike(prints) for delivery in known]
            best = max(counts, default=0)
            if best >= max(1, least):
                return known[counts.index(best)] if counts.count(best) == 1 else None
        return None

    def _forget(self, used: Delivery) -> None:
        """Batches that were handed out before a used one were skipped."""
        while used in self._delivered and self._delivered.popleft() is not used:
            pass
        self._used.append(used)

    def close(self) -> None:
        """Leave the loaders as they were."""
        for loader, installed in self._followed:
            if vars(loader).get(ITERATOR_METHOD) is installed:  # not a later rule's
                del vars(loader)[ITERATOR_METHOD]
        self._followed = []
        self._delivered.clear()
        self._used.clear()

    def __del__(self) -> None:
        if hasattr(self, "_followed"):
            self.close()


class _Listened:
    """A sampler that writes down what it hands out."""

    def __init__(self, inner: Any, handed: deque[list[int]], batched: bool) -> None:
        self.inner, self.handed, self.batched = inner, handed, batched

    def __iter__(self) -> Iterator[Any]:
        self.handed.clear()
        for numbers in self.inner:
            try:
                self.handed.append([int(i) for i in (numbers if self.batched else [numbers])])
            except (TypeError, ValueError):
                raise HeldinError(
                    f"data: the sampler of the DataLoader hands out {numbers!r}, and rows are held "
                    "out by their numbers; let it hand out whole numbers, and the dataset look up "
                    "the rest"
                ) from None
            yield numbers

    def __len__(self) -> int:
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class _Delivering:
    """A loader's iterator that says which rows each batch holds."""

    def __init__(self, inner: Any, handed: deque[list[int]], order: weakref.ref[RowOrder]) -> None:
        self._inner, self._handed, self._order = inner, handed, order

    def __iter__(self) -> _Delivering:
        return self

    def __next__(self) -> Any:
        batch = next(self._inner)
        index, order = self._handed.popleft(), self._order()
        if order is not None:
            order.deliver(index, batch)
        return batch

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":
            raise AttributeError(name)
        return getattr(self._inner, name)


def print_of(tensor: Tensor) -> Print:
    """Shape, type and some numbers, spread over the tensor."""
    flat = tensor.detach().reshape(-1)
    some = flat[:: max(1, len(flat) // PROBED)][: PROBED + 1]
    if some.is_floating_point():
        some = some.nan_to_num(nan=0.25)  # or it would differ from itself
    return tuple(tensor.shape), tensor.dtype, tuple(some.tolist())
