"""Resolve which rows a step was taken on, and make batches of some of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from heldin.errors import HeldinError, refusal

from .batches import (
    Layout,
    find_layout,
    fingerprint,
    layout_of_tensors,
    rows_in,
    select,
    tensors_in,
)
from .copying import copied, copy_sharing_data
from .events import LoaderBatch, ModelCall
from .generators import generator_state, generators_in, left_alone, set_generator
from .items import ItemStore, joined, single_items
from .loaders import LoaderRecorder, inner_loader
from .matching import RowMatcher, Rows, are_columns
from .randomness import separate_random_stream

__all__ = ["RowSource", "TrainingRows", "has_same_rows", "repeated_rows", "undrawn_rows"]

CPU = torch.device("cpu")
Prepare = Callable[[Any], Any]


@dataclass(frozen=True, eq=False)
class TrainingRows:
    """The rows of a framework's run."""

    loader: DataLoader[Any]  # knows the dataset and the collate function; not iterated over
    recorder: LoaderRecorder | None  # of the framework's loaders; None: rows are announced
    prepare: Prepare | None  # what the framework does with a batch before the model sees it
    owner: str = "step"  # the name of its class, for errors


class RowSource:
    """Rows of a DataLoader, a map-style Dataset, or tensors with one entry per row.

    The user's dataset object is never read: heldin reads a copy that shares its data, so that a
    random generator of the dataset continues as without heldin.

    seed: of the random numbers that reading rows draws; records: whether to record the batches of a
    loader; store: items that were read before, and takes those that are read; None: nothing is
    kept.
    """

    def __init__(
        self, data: Any, seed: int, records: bool = True, store: ItemStore | None = None
    ) -> None:
        self.recorder: LoaderRecorder | None = None
        self._owner = "step"
        self.batch_size: int | None = None  # of the loop, if the loader knows it
        self._seed = seed
        self._prepare: Prepare | None = None
        self.store = ItemStore(memory=0) if store is None else store
        self._tensors: Any = None
        self._matcher: RowMatcher | None = None
        self.dataset: Any = None  # the user's; None for tensors
        self._collate: Callable[[list[Any]], Any] = default_collate
        self._layout: Layout | None = None
        if isinstance(data, TrainingRows):
            records, self.recorder, self._prepare = False, data.recorder, data.prepare
            self._owner = data.owner
            data = data.loader
        inner = getattr(data, "base_dataloader", data)
        if isinstance(inner, DataLoader):
            inner = inner_loader(inner)
            self.dataset, self._collate = inner.dataset, inner.collate_fn
            self.batch_size = getattr(inner.batch_sampler, "batch_size", None)
        elif isinstance(data, IterableDataset):
            inner_loader(DataLoader(data, batch_size=2))
        elif isinstance(data, Dataset) or _is_list_of_rows(data):
            self.dataset = data
        else:
            self._tensors = data
            self.count = _count_rows(data)
            self._layout = layout_of_tensors(data, self.count)
            self._make_matcher(data)
            return
        if not hasattr(self.dataset, "__getitem__"):
            raise HeldinError("data: the dataset has no row numbers (__getitem__)")
        self.count = len(self.dataset)
        if self.count < 2:
            raise HeldinError(f"data: at least 2 rows are needed, there are {self.count}")
        if isinstance(self.dataset, TensorDataset):
            self._make_matcher(self.dataset.tensors)
        if records and isinstance(inner, DataLoader):
            self.recorder = LoaderRecorder(inner)
        self._copy: Any = None
        self._shared: list[Any] = []
        self._streams: dict[int, list[Any]] = {}
        self._first_states = [generator_state(each) for each in generators_in(self._collate)]

    def _make_matcher(self, tensors: Any) -> None:
        if are_columns(tensors):
            self._matcher = RowMatcher(Rows(tuple(tensors[:-1]), tensors[-1]))

    # -- reading rows

    def refresh(self) -> None:
        """Copy the dataset again before rows are read: it may change from epoch to epoch."""
        if self.dataset is None:
            return
        if len(self.dataset) != self.count:
            raise HeldinError(
                f"data: the dataset has {len(self.dataset)} rows now and had {self.count} when "
                "the stopping object was made, so that new rows are in no fold; make it again when "
                "the dataset has grown"
            )
        self._copy, self._shared = None, []

    def items(self, index: Sequence[int], fresh: bool = False) -> list[Any]:
        """Return samples of the dataset, from the store (unless `fresh`), or read from a copy."""
        if fresh or not self.store.is_fixed:
            with self._copied() as (dataset, _):
                if callable(getattr(dataset, "__getitems__", None)):  # as torch reads rows
                    return single_items(dataset.__getitems__(list(index)))
                return [dataset[i] for i in index]
        missing = [i for i in index if i not in self.store]
        items = dict(zip(missing, self.items(missing, fresh=True), strict=True))
        self.store.add(items)
        return [items[i] if i in items else self.store[i] for i in index]

    def collate(self, items: Sequence[Any]) -> Any:
        """Return the batch that the user's function makes of items."""
        with self._copied() as (_, collate):
            return collate(joined(items))

    @contextmanager
    def _copied(self) -> Iterator[tuple[Any, Callable[[Any], Any]]]:
        """Copy dataset and collate function, and restore generators that a copy may share."""
        if self._copy is None:
            self._copy = copy_sharing_data((self.dataset, self._collate))
            self._shared = generators_in(self.dataset, self._collate)
        with left_alone(self._shared):
            yield self._copy

    def read(self, index: Tensor, stream: int = 0) -> Any:
        """Return a batch of these rows, collated and prepared as the loop's batches are.

        stream: number of the random stream that reading draws from.
        """
        (batch,) = self.read_parts(index, [slice(None)], stream)
        return batch

    def read_parts(self, index: Tensor, parts: Sequence[slice], stream: int = 0) -> list[Any]:
        """Return batches of some of the rows, at places in index; the rows are read once."""
        if self.dataset is None:
            assert self._layout is not None
            rows = (index[part] for part in parts)
            return [self._prepared(select(self._tensors, self._layout, each)) for each in rows]
        numbers = index.tolist()
        with separate_random_stream(CPU, self._seed, stream, 1 + numbers[0]):
            items = self.items(numbers)
            return [self._prepared(self.collate(items[part])) for part in parts]

    def _prepared(self, batch: Any) -> Any:
        return batch if self._prepare is None else self._prepare(batch)

    def digest(self) -> int | None:
        """Return a fingerprint of these rows; None if they are random."""
        some = torch.arange(min(8, self.count))
        first, again = ([fingerprint(t) for t in tensors_in(self.read(some))] for _ in range(2))
        return crc32(repr(first).encode()) if first == again else None

    # -- batches of the loop

    @property
    def layout(self) -> Layout | None:
        """Where samples lie in a batch; None where batches must be collated from items."""
        if self.recorder is not None:
            return self.recorder.layout
        return self._layout

    def part(self, batch: LoaderBatch, positions: Tensor, stream: int = 0) -> Any:
        """Return the batch that the user's loader would make of the rows at some positions.

        stream: number of the shadow, which has its own states of the generators that the collate
        function keeps.
        """
        if batch.items is not None and not self._is_whole(batch):
            items = joined([batch.items[i] for i in positions.tolist()])
            with copied(self._collate) as collate:
                generators = generators_in(collate)
                states = self._streams.get(stream, self._first_states)
                for generator, state in zip(generators, states, strict=False):
                    set_generator(generator, state)
                part = collate(items)
                self._streams[stream] = [generator_state(each) for each in generators]
                return self._prepared(part)
        announced = batch.batch is None  # as the model saw it
        layout = (None if announced else self.layout) or self._find_layout(announced)
        if layout is None:
            raise HeldinError(
                "step: the samples of this batch cannot be told apart, and the items that it was "
                "collated from are not at hand; give the DataLoader of the loop as data"
            )
        seen = batch.prepared if announced else batch.batch
        samples = rows_in(seen, layout)
        if samples is not None and samples != len(batch.rows):
            raise HeldinError(
                f"step: the batch has {samples} samples and {len(batch.rows)} row numbers; every "
                "sample needs its number"
            )
        part = select(seen, layout, positions)
        return part if announced else self._prepared(part)

    def _is_whole(self, batch: LoaderBatch) -> bool:
        """Return whether a batch can be sliced: the collate function may have dropped rows."""
        if self.layout is None:
            return False
        return rows_in(batch.batch, self.layout) in (None, len(batch.rows))

    def whole(self, batch: LoaderBatch) -> Any:
        """Return the batch as the model saw it."""
        return batch.prepared if batch.prepared is not None else self._prepared(batch.batch)

    def _find_layout(self, prepared: bool) -> Layout | None:
        """Find the layout of batches that no recorder knows, here as the model sees them."""
        if self._layout is None and self.dataset is not None:
            with separate_random_stream(CPU, self._seed, 0):
                (item,) = self.items([0])
                self._layout = find_layout(
                    lambda items: (
                        self._prepared(self.collate(items)) if prepared else self.collate(items)
                    ),
                    item,
                )
        return self._layout

    def micro_batches(
        self,
        announced: Sequence[tuple[Any, Tensor | None]],
        calls: Sequence[ModelCall],
    ) -> list[LoaderBatch]:
        """Return the batches of an optimiser step with the numbers of their rows.

        announced: batches and row numbers that the user or a framework has passed; calls: of the
        model since the last step.
        """
        if announced:
            if len(announced) == 1 and announced[0][0] is None and announced[0][1] is not None:
                seen = self._as_called(announced[0][1], calls)
                if seen:
                    return seen
            return [self._complete(batch, index) for batch, index in announced]
        if self.recorder is not None:
            return self.recorder.find_by_calls([call.tensors for call in calls])
        if self._matcher is not None and calls:
            batches = []
            for call in calls:
                index = self._matcher(call.tensors)
                batch = [*call.tensors, self._matcher.rows.targets[index]]
                batches.append(LoaderBatch(index.cpu(), batch))
            return batches
        raise refusal(
            self._owner,
            "the rows of the optimiser's step are unknown;",
            "announce the batch and its row numbers before the step, "
            "stopping.note_batch(batch, indices), or give the DataLoader as data",
        )

    def _as_called(self, index: Tensor, calls: Sequence[ModelCall]) -> list[LoaderBatch]:
        """Return batches of what the model was called with, and the targets of the rows.

        The loop may have changed the inputs on their way to the model (augmentation). Empty if data
        are not tensors (inputs ..., targets), or the rows do not fit.
        """
        if self._matcher is None:
            return []
        inputs, targets = self._matcher.rows.inputs, self._matcher.rows.targets
        sizes = [len(call.tensors[0]) for call in calls if call.tensors]
        if sum(sizes) != len(index) or any(len(c.tensors) != len(inputs) for c in calls):
            return []
        return [
            LoaderBatch(
                part.cpu(), None, prepared=[*call.tensors, targets[part.to(targets.device)]]
            )
            for part, call in zip(index.split(sizes), calls, strict=True)
        ]

    def _complete(self, batch: Any, index: Tensor | None) -> LoaderBatch:
        if isinstance(batch, LoaderBatch):
            return batch
        if batch is None and index is not None:
            if self.dataset is not None:
                raise HeldinError(
                    "step: data is a Dataset, whose batches cannot be made again from their row "
                    "numbers (they may be augmented); pass the batch too: "
                    "stopping.note_batch(batch, indices)"
                )
            assert self._layout is not None
            return LoaderBatch(index.cpu(), select(self._tensors, self._layout, index))
        if index is not None:
            layout = self._find_layout(prepared=True)
            if layout is not None:  # whether or not a shadow may see all of its rows
                select(batch, layout, torch.zeros(1, dtype=torch.long))
            return LoaderBatch(index.cpu(), None, prepared=batch)
        if self.recorder is None:
            raise refusal(
                self._owner,
                "the rows of this batch are unknown;",
                "pass stopping.note_batch(batch, indices), or give the DataLoader as data",
            )
        return replace(self.recorder.find(batch), prepared=batch)

    def close(self) -> None:
        """Leave the loader as it was, and release the dataset."""
        if self.recorder is not None:
            self.recorder.close()
        self._copy, self._shared = None, []


def _is_list_of_rows(data: Any) -> bool:
    """Return whether data is a list of rows: tuples, dictionaries, or tensors of other lengths."""
    if not isinstance(data, list) or len(data) < 2:
        return False
    if all(isinstance(row, Tensor) for row in data):
        return len(data) > 16 or len({len(row) if row.dim() else 0 for row in data}) > 1
    return all(isinstance(row, (tuple, dict)) for row in data)


def has_same_rows(one: DataLoader[Any], other: DataLoader[Any]) -> bool:
    """Return whether two loaders draw from the same rows, as far as the first ones show."""
    mine, theirs = one.dataset, other.dataset
    if mine is theirs or type(mine).__getitem__ is Dataset.__getitem__:  # whole batches only
        return True
    if len(mine) != len(theirs):  # type: ignore[arg-type]
        return False
    digests = [RowSource(loader, seed=0, records=False).digest() for loader in (one, other)]
    return None in digests or digests[0] == digests[1]


def repeated_rows(dataset: Any) -> int:
    """Return how many rows of nested Subsets and ConcatDatasets point to the same source row."""
    if not isinstance(dataset, (Subset, ConcatDataset)):
        return 0
    return sum(count for count in Counter(_source_rows(dataset)).values() if count > 1)


def _source_rows(dataset: Any) -> list[tuple[int, int]]:
    """Return the identity of the innermost dataset and the row number there, for every row."""
    if isinstance(dataset, Subset):
        inner = _source_rows(dataset.dataset)
        return [inner[int(i)] for i in dataset.indices]
    if isinstance(dataset, ConcatDataset):
        return [row for part in dataset.datasets for row in _source_rows(part)]
    return [(id(dataset), i) for i in range(len(dataset))]


def undrawn_rows(data: Any, count: int) -> Tensor:
    """Return a mask of the rows that the sampler of a loader never draws, as far as it shows."""
    mask = torch.zeros(count, dtype=torch.bool)
    loader = getattr(data, "base_dataloader", data)
    sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    if isinstance(sampler, WeightedRandomSampler) and len(sampler.weights) == count:
        mask = torch.as_tensor(sampler.weights) == 0
    elif isinstance(sampler, SubsetRandomSampler):
        mask[:] = True
        mask[[int(i) for i in sampler.indices]] = False
    return mask


def _count_rows(data: Any) -> int:
    """Return the number of rows of tensors in tuples, lists, dictionaries."""
    lengths = [len(tensor) if tensor.dim() else 0 for tensor in tensors_in(data)]
    if not lengths:
        raise HeldinError(
            f"data: expected a DataLoader, a map-style Dataset or tensors, got {type(data)!r}"
        )
    if len(set(lengths)) != 1 or lengths[0] < 2:
        shown = ", ".join(map(str, lengths[:6])) + (", ..." if len(lengths) > 6 else "")
        raise HeldinError(
            f"data: the tensors must have one length, at least 2; theirs are [{shown}]. A list of "
            "rows of different sizes is fine as the dataset of a DataLoader"
        )
    return lengths[0]
