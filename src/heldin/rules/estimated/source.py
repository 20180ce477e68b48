"""Where the rows of general batches come from, and which of them a batch holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from heldin.errors import HeldinError

from .batches import Layout, layout_of, layout_of_rows, rows_in, select, tensors_in
from .order import RowOrder, print_of
from .randomness import own_random_stream
from .rows import RowMatcher, Rows

__all__ = ["Source", "same_rows"]


class Source:
    """Rows of a DataLoader, a map-style Dataset, or tensors with a row for each sample.

    Attributes:
        count: number of rows.
        layout: where the samples lie in a batch.
        order: of the loader, if the data is one.

    >>> source = Source({"x": torch.arange(4.0), "y": torch.arange(4)}, seed=0)
    >>> source.batch(torch.tensor([3, 1]))
    {'x': tensor([3., 1.]), 'y': tensor([3, 1])}
    """

    def __init__(self, data: Any, seed: int, listen: bool = True) -> None:
        self.order: RowOrder | None = None
        self._seed = seed
        self._rows: Any = None
        self._find: RowMatcher | None = None
        loader = getattr(data, "base_dataloader", data)
        if isinstance(loader, DataLoader):
            self._dataset: Any = loader.dataset
            self._collate: Callable[[list[Any]], Any] = (
                loader.collate_fn if loader.batch_sampler is not None else _only_one
            )
        elif isinstance(data, (Dataset, IterableDataset)):
            self._dataset, self._collate = data, default_collate
        else:
            self._dataset = None
            self._rows = data
            self.count = _rows_of(data)
            self.layout: Layout = layout_of_rows(data, self.count)
            self._make_finder(data)
            return
        if isinstance(self._dataset, IterableDataset) or not hasattr(self._dataset, "__getitem__"):
            raise HeldinError(
                "data: an IterableDataset has no row numbers; give a map-style Dataset or a "
                "DataLoader over one"
            )
        self.count = len(self._dataset)
        if self.count < 2:
            raise HeldinError(f"data: at least 2 rows are needed, there are {self.count}")
        with own_random_stream(seed, 0, torch.device("cpu")):
            self.layout = layout_of(self._collate, self._dataset[0])
        if isinstance(self._dataset, TensorDataset):
            self._make_finder(self._dataset.tensors)
        if listen and isinstance(loader, DataLoader):
            self.order = RowOrder(loader)

    def _make_finder(self, tensors: Any) -> None:
        if isinstance(tensors, (tuple, list)) and all(isinstance(t, Tensor) for t in tensors):
            if len(tensors) > 1 and len({len(t) for t in tensors}) == 1:
                self._find = RowMatcher(Rows(tuple(tensors[:-1]), tensors[-1]))

    def batch(self, index: Tensor) -> Any:
        """A batch of these rows, made as the loader makes it."""
        if self._dataset is None:
            return select(self._rows, self.layout, index)
        numbers = index.tolist()
        with own_random_stream(self._seed, 1 + numbers[0], torch.device("cpu")):
            return self._collate([self._dataset[i] for i in numbers])

    def digest(self) -> int | None:
        """A number that tells these rows from others; None if they look different each time."""
        some = torch.arange(min(8, self.count))
        first, again = ([print_of(t) for t in tensors_in(self.batch(some))] for _ in range(2))
        return crc32(repr(first).encode()) if first == again else None

    def micro_batches(
        self, given: Sequence[tuple[Any, Tensor | None]], calls: Sequence[Sequence[Tensor]]
    ) -> list[tuple[Any, Tensor]]:
        """The batches of an optimiser step with the numbers of their rows.

        Args:
            given: batches and row numbers that the user has passed, as far as he has.
            calls: tensors that the model was called with.
        """
        if given:
            return [self._checked(*self._completed(batch, index)) for batch, index in given]
        if self.order is not None:
            return [self._checked(*pair) for pair in self.order.called_with(calls)]
        if self._find is not None and calls:
            found = []
            for call in calls:
                index = self._find(call)
                batch = [*call, self._find.rows.targets[index]]
                found.append((batch, index.cpu()))
            return found
        raise HeldinError(
            "step: it is not known which rows the optimiser's step was taken on; pass the batch "
            "and its row numbers, stopping.step(batch=batch, indices=...), or give the DataLoader "
            "as data"
        )

    def _completed(self, batch: Any, index: Tensor | None) -> tuple[Any, Tensor]:
        if batch is None and index is not None:
            if self._dataset is not None:
                raise HeldinError(
                    "step: the data is a Dataset, so its batches cannot be made again from their "
                    "row numbers (they may be augmented); pass the batch too: "
                    "stopping.step(batch=batch, indices=...)"
                )
            return self.batch(index), index
        if index is not None:
            return batch, index
        if self.order is None:
            raise HeldinError(
                "step: the rows of this batch are not known; pass stopping.step(batch=batch, "
                "indices=...), or give the DataLoader as data"
            )
        return batch, self.order.rows_of(batch)

    def _checked(self, batch: Any, index: Tensor) -> tuple[Any, Tensor]:
        rows = rows_in(batch, self.layout)
        if rows is None:
            raise HeldinError(
                "step: the batch has another structure than those that the collate function of "
                "the data makes; pass it as the loader gave it"
            )
        if rows != len(index):
            raise HeldinError(
                f"step: the batch has {rows} samples and {len(index)} row numbers; the collate "
                "function must neither drop nor add samples, and each needs its number"
            )
        return batch, index

    def close(self) -> None:
        """Leave the loader as it was."""
        if self.order is not None:
            self.order.close()


def same_rows(one: DataLoader[Any], other: DataLoader[Any]) -> bool:
    """Whether two loaders draw from the same rows, as far as the first ones tell.

    >>> loaders = [DataLoader(range(n)) for n in (9, 9, 8)]
    >>> same_rows(loaders[0], loaders[1]), same_rows(loaders[0], loaders[2])
    (True, False)
    """
    mine, theirs = one.dataset, other.dataset
    if mine is theirs or type(mine).__getitem__ is Dataset.__getitem__:  # whole batches only
        return True
    if len(mine) != len(theirs):  # type: ignore[arg-type]
        return False
    digests = [Source(loader, seed=0, listen=False).digest() for loader in (one, other)]
    return None in digests or digests[0] == digests[1]


def _only_one(samples: list[Any]) -> Any:
    raise HeldinError(
        "data: a DataLoader with batch_size=None hands out what the dataset has batched itself; "
        "give it a batch_size, or a batch_sampler and a collate_fn"
    )


def _rows_of(data: Any) -> int:
    """Number of rows of tensors in tuples, lists, dictionaries."""
    lengths = [len(tensor) if tensor.dim() else 0 for tensor in tensors_in(data)]
    if not lengths:
        raise HeldinError(
            f"data: expected a DataLoader, a map-style Dataset or tensors, got {type(data)!r}"
        )
    if len(set(lengths)) != 1 or lengths[0] < 2:
        raise HeldinError(
            f"data: the tensors must have one length, at least 2; theirs are {lengths}"
        )
    return lengths[0]
