"""Record which rows a DataLoader's batches hold, and the items that they were collated from.

Batches leave a loader in the order of the sampler's lists, whatever its workers do in between. So
the n-th batch holds the n-th list. The user's dataset is read as often as without heldin, in the
same order; the loader only gets an attribute in place of the method that makes iterators.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from heldin._private_torch import ITERATOR_METHOD, pin_memory
from heldin.errors import HeldinError, refusal

from .batches import (
    Layout,
    addresses,
    bytes_in,
    find_layout,
    fingerprint,
    is_sliceable,
    repack,
    tensors_in,
)
from .copying import copied
from .events import LoaderBatch
from .items import joined, shallow, single_items
from .randomness import RandomState

__all__ = ["LoaderRecorder", "inner_loader", "is_followed"]

RECENT = 1024  # delivered batches that are remembered until one of them is used
RECENT_CALLS = 8  # delivered batches in which the tensors of a call are looked for
SIZES = 8  # numbers of rows in a batch of which the first step is checked
MEMORY = 256 * 2**20  # bytes of delivered batches whose contents are kept


def inner_loader(loader: Any) -> DataLoader[Any]:
    """Return the DataLoader itself, inside of Accelerate's wrapper; refuse anything else."""
    inner = getattr(loader, "base_dataloader", loader)
    if not isinstance(inner, DataLoader):
        raise HeldinError(
            f"data: expected a torch.utils.data.DataLoader, got a {type(inner).__name__}; pass the "
            "row numbers of every batch: stopping.note_batch(batch, indices)"
        )
    if isinstance(inner.dataset, IterableDataset):
        raise HeldinError(
            "data: an IterableDataset has no row numbers; give a map-style Dataset or a DataLoader "
            "over one, or use rule='evidence', which needs none"
        )
    if inner.batch_sampler is None:
        raise HeldinError(
            "data: a DataLoader with batch_size=None returns what the dataset has batched itself; "
            "give it a batch_size, or a batch_sampler and a collate_fn"
        )
    if not getattr(inner, "in_order", True):
        raise HeldinError(
            "data: a DataLoader with in_order=False returns its batches in another order than its "
            "sampler; use in_order=True"
        )
    return inner


def is_followed(loader: DataLoader[Any]) -> bool:
    return ITERATOR_METHOD in vars(loader)


class _Delivery:
    """A batch that a loader returned, and what it is recognised by."""

    def __init__(self, batch: LoaderBatch, returned: Any) -> None:
        self.batch, self.returned = batch, returned  # the record, and the object that the loop has
        tensors = list(tensors_in(batch.batch))
        self.storages = set[int]().union(*map(addresses, tensors))
        self.size = bytes_in(tensors)
        self._prints: list[tuple[Any, ...]] | None = None

    def fingerprints(self) -> list[tuple[Any, ...]]:
        if self._prints is None:
            self._prints = [fingerprint(tensor) for tensor in tensors_in(self.batch.batch)]
        return self._prints

    def release(self) -> None:
        """Free the batch; its fingerprints recognise it later."""
        self.fingerprints()
        self.batch, self.returned = LoaderBatch(self.batch.rows, None), None

    def count_same_storage(self, tensors: Sequence[Tensor]) -> int:
        if self.batch.batch is None:
            return 0
        return sum(not self.storages.isdisjoint(addresses(tensor)) for tensor in tensors)

    def count_same_values(self, prints: Sequence[tuple[Any, ...]]) -> int:
        return sum(one in self.fingerprints() for one in prints)

    def covers_part_only(self, calls: Sequence[Sequence[Tensor]]) -> bool:
        """Return whether calls that share memory with the batch have seen some of its rows only.

        A slice of the rows has fewer numbers, and its first dimension is shorter than the batch's;
        a sequence that was cut, or transposed, keeps a dimension as long as the batch.
        """
        if self.batch.batch is None:
            return False
        rows = len(self.batch.rows)
        plain = [t for t in tensors_in(self.batch.batch) if t.layout == torch.strided]
        whole = {t.untyped_storage().data_ptr(): t for t in plain}
        seen: dict[int, int] = {}
        for tensor in (t for call in calls for t in call if t.layout == torch.strided):
            place = tensor.untyped_storage().data_ptr()
            if place in whole:
                is_slice = tensor.dim() > 0 and tensor.shape[0] < len(whole[place])
                complete = rows in tensor.shape and not is_slice
                size = whole[place].numel()
                seen[place] = seen.get(place, 0) + (size if complete else tensor.numel())
        return any(seen[place] < whole[place].numel() for place in seen)


class LoaderRecorder:
    """The rows, and where needed the items, of the batches that loaders return.

    rows_only: whether to record rows without items, for rules that have all rows in tensors.
    """

    def __init__(self, loader: Any, rows_only: bool = False, owner: str = "step") -> None:
        self._owner, self._rows_only = owner, rows_only
        # where samples lie in a batch; None where slices of a batch are not established, and
        # smaller batches are collated from items
        self.layout: Layout | None = None
        self.epochs = 0  # iterators that were made
        self._records_random_state: Callable[[], bool] = lambda: False
        self.has_new_size = False  # whether the latest batch has a number of rows not seen before
        self._sizes: set[int] = set()
        self._sliceable = True
        self._count = 0  # batches that were delivered
        self._delivered: deque[_Delivery] = deque(maxlen=RECENT)
        self._used: deque[_Delivery] = deque(maxlen=1)  # a second step may be taken on it
        self._followed: list[tuple[DataLoader[Any], Any]] = []
        self._plain = False  # whether batches are known to be plain slices of tensors
        self.drawn: set[int] = set()
        self.follow(loader)

    def follow(self, loader: Any) -> None:
        """Record a loader; also another one over the same rows, as for a resumed epoch."""
        inner = inner_loader(loader)
        if any(followed is inner for followed, _ in self._followed):
            return
        if is_followed(inner):
            raise HeldinError(
                "data: another stopping object follows this DataLoader; close() that one first"
            )
        self._plain = isinstance(inner.dataset, TensorDataset) and (
            inner.collate_fn is default_collate
        )
        recorder_ref, loader_ref = weakref.ref(self), weakref.ref(inner)  # no reference cycle

        def get_iterator() -> Any:
            recorder, followed = recorder_ref(), loader_ref()
            assert followed is not None
            plain = getattr(type(followed), ITERATOR_METHOD)
            return plain(followed) if recorder is None else recorder._iterate(followed, plain)

        self._followed.append((inner, get_iterator))
        vars(inner)[ITERATOR_METHOD] = get_iterator

    def _iterate(self, loader: DataLoader[Any], plain: Any) -> Any:
        """Return an iterator of the loader whose sampler, dataset and collation are recorded."""
        handed_out = deque[list[int]]()
        sampler = _RecordedSampler(loader.batch_sampler, handed_out)
        changes: dict[str, Any] = {"batch_sampler": sampler}
        if self._rows_only:
            pass
        elif self._plain:
            tensors = loader.dataset.tensors  # type: ignore[attr-defined]
            self.layout = find_layout(loader.collate_fn, tuple(t[0] for t in tensors))
        else:
            ships_items = loader.num_workers == 0 or not self._sliceable
            changes["collate_fn"] = _RecordedCollate(loader.collate_fn, ships_items, self._count)
        before = {key: vars(loader)[key] for key in changes if key in vars(loader)}
        vars(loader).update(changes)  # only while the iterator is made
        try:
            inner = plain(loader)
        finally:
            for key in changes:
                vars(loader).pop(key, None)
            vars(loader).update(before)
        self.epochs += 1
        return _RecordedIterator(inner, handed_out, weakref.ref(self))

    def record_random_state(self, is_wanted: Callable[[], bool]) -> None:
        """Record the random state at batches for which a function returns true."""
        self._records_random_state = is_wanted

    def shares_storage(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether tensors lie in a batch that was returned lately."""
        recent = (*islice(reversed(self._delivered), RECENT_CALLS), *self._used)
        return any(delivery.count_same_storage(tensors) for delivery in recent)

    def take_new_size(self) -> bool:
        """Return `has_new_size`, once for each batch."""
        is_new, self.has_new_size = self.has_new_size, False
        return is_new

    def deliver(self, rows: list[int], returned: Any) -> Any:
        """Remember a batch that the loader is about to return; return the user's part of it."""
        batch, items = returned, None
        self._count += 1
        if isinstance(returned, _Collated):
            batch, items = returned.batch, returned.items
            self._sliceable = self._sliceable and returned.sliceable
            self.layout = returned.layout if self._sliceable else None
        self.has_new_size = len(rows) not in self._sizes and len(self._sizes) < SIZES
        self._sizes.add(len(rows))
        state = RandomState.current(torch_only=not self._records_random_state())
        kept = repack(batch)  # the loop may take parts out of its batch
        record = LoaderBatch(torch.tensor(rows, dtype=torch.long), kept, items, state)
        self._delivered.append(_Delivery(record, batch))
        self.drawn.update(rows)
        held = 0
        for delivery in reversed(self._delivered):
            held += delivery.size
            if held > MEMORY and delivery is not self._delivered[-1]:
                delivery.release()
        return batch

    # -- looking batches up

    def find(self, batch: Any) -> LoaderBatch:
        """Return the record of a batch that the loader returned, here or moved elsewhere."""
        match = next((d for d in (*self._delivered, *self._used) if d.returned is batch), None)
        if match is None:
            tensors = list(tensors_in(batch))
            match = self._most_alike(tensors, len(tensors))
        if match is None or match.batch.batch is None:
            raise refusal(
                self._owner,
                "this batch is not one of those that the loader given as data has just returned "
                "(was it changed on the way, or does it come from another loader?);",
                "pass its row numbers: stopping.note_batch(batch, indices)",
            )
        self._mark_used(match)
        return match.batch

    def rows_of_call(self, tensors: Sequence[Tensor], certain: bool = True) -> Tensor | None:
        """Return the rows of the batch that the model was called with; None if that is not known.

        certain: whether the call must have the values of the batch. Else the only batch since the
        last step will do, whose values the loop may have changed.
        """
        match = self._most_alike(tensors, 1) if certain else self._only_delivery()
        if match is None or len(match.batch.rows) != len(tensors[0]):
            return None
        self._mark_used(match)
        return match.batch.rows

    def take_rows(self) -> Tensor:
        """Return the rows of the batch that the loader has just returned."""
        rows = self._delivered[-1].batch.rows
        self.forget()
        return rows

    def find_by_calls(self, calls: Sequence[Sequence[Tensor]]) -> list[LoaderBatch]:
        """Return the batches of the calls of the model (their tensors) since the last step."""
        matches: list[_Delivery] = []
        for call in calls:
            match = self._most_alike(call, 1)
            if match is None or match.batch.batch is None:
                match = self._only_delivery()
            if match is None and not self._delivered:
                raise refusal(
                    self._owner,
                    "the model was called with a batch that the loader given as data has not just "
                    "returned. The loop iterates over another DataLoader than the one given as "
                    "data (made anew in every epoch?), or keeps batches (a list, itertools.cycle); "
                    "make one DataLoader, give it as data, and iterate over it in every epoch, or",
                    "announce the batch and its row numbers before the step: "
                    "stopping.note_batch(batch, indices)",
                )
            if match is None:
                raise refusal(
                    self._owner,
                    "it is not certain which batch of the loader given as data the model was "
                    "called with since the last step;",
                    "announce it before the step: stopping.note_batch(batch), or pass train_step= "
                    "and call stopping.train(batch)",
                )
            if match not in matches:
                matches.append(match)
        if not calls:  # a method of the model was called in place of the model
            matches = list(self._delivered)
            if any(delivery.batch.batch is None for delivery in matches):
                matches = []
        for delivery in matches:
            if delivery.covers_part_only(calls):
                raise refusal(
                    self._owner,
                    "the model was called with a part of the batch only, and shadows would be "
                    "trained on all of it;",
                    "announce the part and its row numbers before the step: "
                    "stopping.note_batch(part, indices)",
                )
            self._mark_used(delivery)
        if not matches:
            raise refusal(
                self._owner,
                "the optimiser stepped, but the loader given as data has returned no batch since "
                "the last step (are batches kept, or those of another loader?);",
                "announce the batch before the step: stopping.note_batch(batch, indices)",
            )
        return [delivery.batch for delivery in matches]

    def _only_delivery(self) -> _Delivery | None:
        """Return the batch since the last step, if there is one only."""
        waiting = [d for d in self._delivered if d.batch.batch is not None]
        return waiting[0] if len(waiting) == len(self._delivered) == 1 else None

    def _most_alike(self, tensors: Sequence[Tensor], least: int) -> _Delivery | None:
        """Return the one batch that shares most tensors with these; None if it is not certain."""
        for deliveries in (self._delivered, self._used):
            counts = [delivery.count_same_storage(tensors) for delivery in deliveries]
            if max(counts, default=0) < max(1, least):
                prints = [fingerprint(tensor) for tensor in tensors]
                counts = [delivery.count_same_values(prints) for delivery in deliveries]
            best = max(counts, default=0)
            if best >= max(1, least):
                return deliveries[counts.index(best)] if counts.count(best) == 1 else None
        return None

    def _mark_used(self, used: _Delivery) -> None:
        """Forget the batches that were returned before a used one: the loop has skipped them."""
        while used in self._delivered and self._delivered.popleft() is not used:
            pass
        self._used.append(used)

    def forget(self) -> None:
        self._delivered.clear()
        self._used.clear()

    def close(self) -> None:
        """Leave the loaders as they were."""
        for loader, installed in self._followed:
            if vars(loader).get(ITERATOR_METHOD) is installed:  # not a later recorder's
                del vars(loader)[ITERATOR_METHOD]
        self._followed, self._records_random_state = [], lambda: False
        self.forget()

    def __del__(self) -> None:
        if hasattr(self, "_followed"):
            self.close()


class _Wrapper:
    """Has the length and the attributes of another object."""

    inner: Any

    def __len__(self) -> int:
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)


class _RecordedSampler(_Wrapper):
    """A batch sampler that records the numbers that it yields."""

    def __init__(self, inner: Any, handed_out: deque[list[int]]) -> None:
        self.inner, self.handed_out = inner, handed_out

    def __iter__(self) -> Iterator[Any]:
        self.handed_out.clear()
        for numbers in self.inner:
            try:
                rows = [int(i) for i in numbers]
            except (TypeError, ValueError):
                raise HeldinError(
                    f"data: the sampler of the DataLoader yields {numbers!r}, and rows are held "
                    "out by their numbers; let it yield whole numbers, and the dataset look up the "
                    "rest"
                ) from None
            self.handed_out.append(rows)
            yield numbers


@dataclass(eq=False)
class _Collated:
    """A batch on its way from a collate function to the recorder, perhaps from a worker."""

    batch: Any
    items: tuple[Any, ...] | None
    layout: Layout | None
    sliceable: bool

    def pin_memory(self) -> _Collated:
        """Pin the user's batch, as the loader does."""
        return _Collated(pin_memory(self.batch), self.items, self.layout, self.sliceable)


class _RecordedCollate:
    """A collate function that also returns the items, and whether its batches can be sliced.

    The user's function is called once with the items, as without heldin. Batches of a function that
    draws random numbers are never sliced. Those of others are at batches 1, 2, 4, 8, ... collated a
    second time, from copies of the items, to see whether slices of a batch are established.
    """

    def __init__(self, collate: Callable[[list[Any]], Any], ships_items: bool, count: int) -> None:
        self.collate, self.ships_items = collate, ships_items
        self.count, self.sliceable = count, True
        self.layout: Layout | None = None

    def __call__(self, items: list[Any]) -> _Collated:
        """Collate a batch."""
        self.count += 1
        checks = self.layout is None and self.sliceable  # the first batch of an iterator
        checks = checks or (self.sliceable and self.count & (self.count - 1) == 0)
        before = RandomState.current()
        # a collate function may take parts out
        copies = tuple(shallow(item) for item in single_items(items))
        batch = self.collate(items)
        if before.has_moved():  # it may mix samples at random, at other batches than those checked
            self.sliceable = False
        elif checks:
            after = RandomState.current()
            before.restore()
            try:
                with copied(self.collate) as copied_collate:

                    def collate(items: Any) -> Any:
                        return copied_collate(joined(items))

                    if self.layout is None:
                        self.layout = find_layout(collate, copies[0])
                    before.restore()
                    self.sliceable = is_sliceable(collate, copies, batch, self.layout)
            finally:
                after.restore()
        ships = self.ships_items or not self.sliceable
        return _Collated(batch, copies if ships else None, self.layout, self.sliceable)


class _RecordedIterator(_Wrapper):
    """A loader's iterator that reports the rows of each batch to the recorder."""

    def __init__(
        self, inner: Any, handed_out: deque[list[int]], recorder: weakref.ref[LoaderRecorder]
    ) -> None:
        self.inner, self._handed_out, self._recorder = inner, handed_out, recorder

    def __iter__(self) -> _RecordedIterator:
        return self

    def __next__(self) -> Any:
        batch = next(self.inner)
        rows, recorder = self._handed_out.popleft(), self._recorder()
        if recorder is not None:
            return recorder.deliver(rows, batch)
        return batch.batch if isinstance(batch, _Collated) else batch
