"""The training rows, and which of them a minibatch holds."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    TensorDataset,
    default_collate,
)

from heldin.errors import HeldinError, HeldinWarning, more

from .copying import copied
from .items import ItemStore
from .randomness import separate_random_stream

__all__ = ["WAY_OUT", "RowMatcher", "Rows", "are_columns", "rows_with_copies", "warn_of_copies"]

CPU = torch.device("cpu")
WAY_OUT = (
    "give the DataLoader of the loop as data, or announce the row numbers of every batch before "
    "the step: stopping.note_batch(batch, indices)"
)


@dataclass(frozen=True, eq=False)
class Rows:
    """All training rows: what the model is called with, and the targets."""

    inputs: tuple[Tensor, ...]  # each (n, ...)
    targets: Tensor  # (n, ...)
    loader: DataLoader[Any] | None = field(default=None)  # the rows came from, if they did

    @classmethod
    def of(cls, data: Any, device: torch.device, store: ItemStore | None = None) -> Rows:
        """Read the rows of tensors (..., y), of a map-style Dataset or of a DataLoader over one.

        store: takes the items that are read.
        """
        if isinstance(data, Rows):
            return data
        loader = data if isinstance(data, DataLoader) else None
        source = loader.dataset if loader is not None else data
        if isinstance(source, IterableDataset):
            raise HeldinError(
                "data: an IterableDataset has no row numbers; give the tensors (x, y), a map-style "
                "Dataset, or a DataLoader over one"
            )
        tensors: Sequence[Any]
        if isinstance(source, (tuple, list)) and any(
            hasattr(part, "__array__") and not isinstance(part, Tensor) for part in source
        ):
            raise HeldinError("data: expected tensors, got arrays; use torch.as_tensor for each")
        if isinstance(source, TensorDataset):
            tensors = source.tensors
        elif isinstance(source, (tuple, list)) and all(isinstance(t, Tensor) for t in source):
            tensors = source
        elif isinstance(source, Dataset) or hasattr(source, "__getitem__"):
            collate = default_collate if loader is None else loader.collate_fn
            # the loop's own random numbers are left alone, and those of the dataset
            with separate_random_stream(CPU, 0), copied((source, collate)) as (rows, collate):
                items = [rows[i] for i in range(len(source))]  # type: ignore[arg-type]
                if store is not None:
                    store.add(dict(enumerate(items)))
                tensors = collate(items)
        else:
            raise HeldinError(
                f"data: expected tensors (x, y), a Dataset or a DataLoader, got {type(data)!r}"
            )
        if (
            not isinstance(tensors, (tuple, list))
            or len(tensors) < 2
            or not all(isinstance(t, Tensor) for t in tensors)
        ):
            raise HeldinError(
                "data: a row must be tensors (inputs ..., target), at least two of them"
            )
        lengths = [len(t) for t in tensors]
        if len(set(lengths)) != 1 or lengths[0] < 2:
            raise HeldinError(
                f"data: the tensors must have one length, at least 2; theirs are {lengths}"
            )
        *inputs, targets = (t.detach().to(device) for t in tensors)
        return cls(tuple(inputs), targets, loader)

    def __len__(self) -> int:
        return len(self.targets)

    def order(
        self, size: int | None, shuffle: bool, generator: torch.Generator | None
    ) -> Sequence[Tensor]:
        n = len(self)
        size = n if size is None else size
        if size < 1:
            raise HeldinError(f"fit: batch_size must be at least 1, got {size}")
        order = torch.randperm(n, generator=generator) if shuffle else torch.arange(n)
        parts: Sequence[Tensor] = order.to(self.targets.device).split(size)
        return parts


def are_columns(value: Any) -> bool:
    """Return whether a value is tensors (inputs ..., targets) with one entry for each row."""
    if not isinstance(value, (tuple, list)) or len(value) < 2:
        return False
    if not all(isinstance(t, Tensor) and not t.is_sparse for t in value):
        return False
    return len({len(t) if t.dim() else 0 for t in value}) == 1


_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _words(tensor: Tensor) -> Tensor:
    """Return the bits of each row as integers, (n, k)."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    flat = tensor.reshape(len(tensor), -1).contiguous()
    return flat.view(_WORDS[flat.element_size()])


def _hashes(words: Tensor) -> tuple[Tensor, Tensor]:
    """(n,) a random linear form of each row, over the integers mod 2^64, and its factors."""
    generator = torch.Generator().manual_seed(0)
    limits = torch.iinfo(torch.int64)
    form = torch.randint(
        limits.min, limits.max, (words.shape[1],), generator=generator, dtype=torch.int64
    ).to(words.device)
    return (words * form).sum(1), form


IF_COPIES = (
    ". If copies are one observation (a class that was drawn again, files or tables put together), "
    "shadows are tested on rows that they were trained on, and the estimate is too low: leave the "
    "copies out, or give groups=, the same number for all copies of a row " + more("copies-of-rows")
)
MANY_COPIES = 0.05  # share of the rows that may have one without a warning
LOOKED_AT = 4096  # rows at a time, so that large tables take no memory
COLUMNS = 64  # of the inputs, in which different values are counted


def rows_with_copies(rows: Rows) -> int:
    """How many rows have a copy, targets included, that is hardly another observation.

    Rows of a few categories are equal by chance, and are not counted. A column with many different
    values (a fifth of the rows, and at least 20) makes that unlikely.
    """
    parts, n = (*rows.inputs, rows.targets), len(rows)

    def words(some: slice) -> Tensor:
        return torch.cat([_words(part[some]).long() for part in parts], dim=1)

    hashes = [_hashes(words(slice(i, i + LOOKED_AT)))[0] for i in range(0, n, LOOKED_AT)]
    _, member, counts = torch.cat(hashes).unique(return_inverse=True, return_counts=True)
    found = int((counts[member] > 1).sum())
    if not found:
        return 0
    some = words(slice(0, n, -(-n // LOOKED_AT)))
    columns = some[:, :: max(1, some.shape[1] // COLUMNS)].T
    different = max(len(column.unique()) for column in columns)
    return found if different >= max(20, len(some) / 5) else 0


def warn_of_copies(owner: str, data: Any) -> None:
    """Say so if many rows lie in tensors twice: shadows must not be tested on what they saw."""
    source = data.dataset if isinstance(data, DataLoader) else data
    if isinstance(data, Rows):
        source = (*data.inputs, data.targets)
    tensors = source.tensors if isinstance(source, TensorDataset) else source
    if isinstance(data, DataLoader) and tensors is source:
        return  # a list of rows, not of columns
    if not are_columns(tensors):
        return
    rows = Rows(tuple(tensors[:-1]), tensors[-1])
    found = rows_with_copies(rows)
    if found > MANY_COPIES * len(rows):
        warnings.warn(
            f"{owner}: {found} of the {len(rows)} rows of data have an exact copy{IF_COPIES}",
            HeldinWarning,
            stacklevel=4,
        )


class RowMatcher:
    """Finds the row numbers of a minibatch by its inputs, bit for bit.

    Rows are searched by a hash (a random linear form over the integers mod 2^64) and then
    compared. Equal rows take turns, which is exact only where their targets agree too.
    """

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.turns: dict[int, int] = {}  # group of equal rows -> how often one was used
        self._tables: dict[tuple[torch.dtype, ...], _Table] = {}

    def __call__(self, inputs: Sequence[Tensor]) -> Tensor:
        """(b,) row numbers of the minibatch that the model was called with."""
        if len(inputs) != len(self.rows.inputs):
            raise HeldinError(
                f"the model was called with {len(inputs)} tensors and a row of data has "
                f"{len(self.rows.inputs)} inputs; {WAY_OUT}"
            )
        if all(a is b for a, b in zip(inputs, self.rows.inputs, strict=True)):
            return torch.arange(len(self.rows), device=self.rows.targets.device)
        kinds = tuple(x.dtype for x in inputs)
        if kinds not in self._tables:
            self._tables[kinds] = _Table(self.rows, kinds)
        return self._tables[kinds].find(inputs, self.turns)


class _Table:
    def __init__(self, rows: Rows, kinds: Sequence[torch.dtype]) -> None:
        pairs = zip(rows.inputs, kinds, strict=True)
        self.words = torch.cat([_words(x.to(kind)).long() for x, kind in pairs], dim=1)
        n = len(self.words)
        hashes, self.form = _hashes(self.words)
        self.sorted, self.order = hashes.sort(stable=True)
        first = torch.searchsorted(self.sorted, hashes)
        self.copies = torch.searchsorted(self.sorted, hashes, right=True) - first
        twin = self.order[first]
        bits = _words(rows.targets)
        differs = (bits != bits[twin]).any(1)
        self.ambiguous = torch.zeros(n, dtype=torch.bool, device=differs.device)
        self.ambiguous[twin[differs]] = True
        self.any_copies = bool((self.copies > 1).any())
        self.shapes = [x.shape[1:] for x in rows.inputs]

    def find(self, inputs: Sequence[Tensor], turns: dict[int, int]) -> Tensor:
        for x, shape in zip(inputs, self.shapes, strict=True):
            if x.shape[1:] != shape:
                raise HeldinError(
                    f"the model was called with rows of shape {tuple(x.shape[1:])} and those of "
                    f"data have {tuple(shape)}; {WAY_OUT}"
                )
        words = torch.cat([_words(x.detach()).long() for x in inputs], dim=1).to(self.words.device)
        if words.shape == self.words.shape and torch.equal(words, self.words):
            return torch.arange(len(words), device=words.device)
        place = torch.searchsorted(self.sorted, (words * self.form).sum(1))
        found = self.order[place.clamp(max=len(self.order) - 1)]
        if not torch.equal(self.words[found], words):
            missing = (self.words[found] != words).any(1).nonzero().flatten()
            raise HeldinError(
                f"{len(missing)} of the {len(words)} rows that the model was called with are not "
                f"rows of data (row {int(missing[0])} of the minibatch is the first). Were they "
                f"augmented or scaled after data was given? Then {WAY_OUT}. Was the model called "
                "to evaluate other rows? Then do that under torch.no_grad()"
            )
        if not self.any_copies:
            return found
        if bool(self.ambiguous[found].any()):
            row = int(found[self.ambiguous[found]][0])
            raise HeldinError(
                f"row {row} of data has copies with the same inputs and other targets, so the "
                f"inputs do not tell which of them a minibatch holds: {WAY_OUT}"
            )
        result = found.clone()
        for position in (self.copies[found] > 1).nonzero().flatten().tolist():
            group = int(found[position])
            turn = turns.get(group, 0)
            turns[group] = turn + 1
            shift = turn % int(self.copies[group])
            result[position] = self.order[int(place[position]) + shift]
        return result
