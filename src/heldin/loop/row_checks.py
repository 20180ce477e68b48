"""Examine a few rows for signs that they are not independent observations."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from heldin.errors import HeldinError, HeldinWarning, more

from .batches import equal, fingerprint, tensors_in
from .matching import IF_COPIES, MANY_COPIES
from .randomness import separate_random_stream
from .rows import CPU, RowSource, repeated_rows

__all__ = ["check_rows", "keep_items", "refuse_other_order"]

LOOKED_AT = 12  # pairs of neighbouring rows
DRAWN = 64  # rows that are read twice, if they are random
COMPARED = 256  # rows that are compared with each other
FEWEST = 8  # numbers in a sequence that may overlap with the next one
STILL_SEEN = (
    "still seen in the rows of others, and the estimate is too low; draw such partners in the "
    "collate function, or from the rows of the same group and give groups= "
    + more("rows-that-draw-rows")
)


def check_rows(owner: str, source: RowSource, grouped: bool, compares: bool = True) -> None:
    """Warn of rows that are copies of others, overlap with others, or are random.

    grouped: whether the user has given groups, or the order of the rows; compares: whether to
    compare the contents of rows, to find copies.
    """
    if source.dataset is None:
        return
    copies = 0 if grouped else repeated_rows(source.dataset)
    if copies:
        _warn(
            f"{owner}: {copies} rows of the dataset (a Subset or ConcatDataset) are the same row "
            f"of another one{IF_COPIES}"
        )
    pairs, again = _read_pairs_twice(source)
    is_fixed = _same_when_read_again(pairs, again)
    if not grouped and not is_fixed and _show_other_rows(source):
        _warn(
            f"{owner}: rows of the dataset contain inputs of other rows, drawn at random (pairs, "
            f"triplets). A row that is held out is then {STILL_SEEN}"
        )
    elif _drawn_anew(pairs, again):
        _warn(
            f"{owner}: a row of the dataset has nothing in common with itself when it is read "
            "again, not even its target. Do rows draw other rows (pairs, triplets, mixtures)? "
            f"Then a row that is held out is {STILL_SEEN}"
        )
    elif not grouped and _overlap(pairs):
        _warn(
            f"{owner}: neighbouring rows overlap (windows of one sequence), so that shadows are "
            "tested on what they were trained on and the estimate is too low; give time=, so that "
            "shadows see the past only, or groups=, one number for a stretch of windows, much "
            "longer than a window " + more("overlapping-windows")
        )
    elif compares and not grouped and not copies and is_fixed:
        _warn_of_copies(owner, source)


def keep_items(source: RowSource) -> None:
    """Let a source keep the items that it reads, if they are the same whenever they are read."""
    if source.dataset is not None:
        _read_pairs_twice(source)


def _read_pairs_twice(source: RowSource) -> tuple[list[list[Any]], list[list[Any]]]:
    """Return pairs of neighbouring rows, read twice; keep items from then on, if both agree.

    A collate function may change items in place, and is tried on them.
    """
    rows = [[i, i + 1] for i in _spread(source.count - 1, LOOKED_AT)]
    pairs = [
        [source.store[i] for i in pair]
        if all(i in source.store for i in pair)
        else _read(source, pair, stream=1)
        for pair in rows
    ]
    if source.store.is_fixed:  # as it has turned out before
        return pairs, pairs
    again = [_read(source, pair, stream=2, fresh=True) for pair in rows]
    if _same_when_read_again(pairs, again):
        try:
            with separate_random_stream(CPU, 1):
                for pair in pairs:
                    source.collate(pair)
        except Exception:  # rows of different sizes, for instance
            return pairs, again
        source.store.is_fixed = _same_when_read_again(pairs, again)
        for numbers, pair in zip(rows, pairs, strict=True):
            source.store.add(dict(zip(numbers, pair, strict=True)))
    return pairs, again


def _warn_of_copies(owner: str, source: RowSource) -> None:
    """Warn if many rows of a dataset are the same; tensors are examined elsewhere."""
    if isinstance(source.dataset, TensorDataset):
        return
    order = torch.randperm(source.count, generator=torch.Generator().manual_seed(0))
    items = _read(source, order[:COMPARED].tolist(), stream=1)
    groups: dict[Any, list[Any]] = {}
    for item in items:
        if parts := tuple(fingerprint(tensor) for tensor in tensors_in(item)):
            groups.setdefault(parts, []).append(item)
    pairs = sum(equal(first, other) for first, *others in groups.values() for other in others)
    # Of two copies, only a share of COMPARED / count is among the rows that are compared.
    if pairs > 1 and pairs * source.count > MANY_COPIES * len(items) ** 2 / 2:
        _warn(
            f"{owner}: {pairs} of {len(items)} rows of the dataset are exact copies of others of "
            f"them{IF_COPIES}"
        )


def _spread(count: int, most: int) -> range:
    """Return row numbers, evenly spread."""
    return range(0, count, max(1, -(-count // most)))


def _same_when_read_again(pairs: list[list[Any]], again: list[list[Any]]) -> bool:
    return all(equal(one, other) for one, other in zip(pairs, again, strict=True))


def refuse_other_order(owner: str, source: RowSource, view: RowSource) -> None:
    """Refuse evaluation rows whose targets are not those of the training rows, row for row.

    Targets that are whole numbers, or text, must be the same. Others may be transformed; they are
    in another order if they are found at other rows.
    """
    numbers = list(_spread(source.count, COMPARED))
    mine, theirs = ([_last(_item(each, i)) for i in numbers] for each in (source, view))
    other = [
        place
        for place, (one, two) in enumerate(zip(mine, theirs, strict=True))
        if one is not None and two is not None and not equal(one, two)
    ]
    if not other:
        return
    discrete = [p for p in other if not _is_measured(mine[p]) and not _is_measured(theirs[p])]
    moved = 0
    if not discrete:
        moved = sum(any(equal(mine[p], two) for two in theirs) for p in other)
    if discrete or (moved > 1 and moved * 10 > len(other)):
        row = numbers[(discrete or other)[0]]
        raise HeldinError(
            f"{owner}: row {row} of eval_data has another target than row {row} of data, so that "
            "shadows would be tested on rows that they were trained on; give the same rows in "
            "the same order"
        )


def _is_measured(target: Any) -> bool:
    """Return whether a target is no class and no text."""
    return isinstance(target, float) or (isinstance(target, Tensor) and target.is_floating_point())


def _item(source: RowSource, row: int) -> Any:
    return _read(source, [row], stream=1)[0]


def _read(source: RowSource, rows: list[int], stream: int, fresh: bool = False) -> list[Any]:
    with separate_random_stream(CPU, stream):
        if source.dataset is None:
            return [source.read(torch.tensor([row])) for row in rows]
        return source.items(rows, fresh)


def _last(item: Any) -> Any:
    """Return the last part of a row, which is its target as a rule."""
    if isinstance(item, dict):
        for name in ("labels", "label", "y", "target", "targets"):
            if name in item:
                return item[name]
        return None
    return item[-1] if isinstance(item, (tuple, list)) and len(item) > 1 else None


def _show_other_rows(source: RowSource) -> bool:
    """Return whether inputs that a row draws at random are those of other rows, too.

    Augmented inputs are those of one row only. Inputs from a small set that is none of rows (texts
    of a few templates, for instance) have few different values.
    """
    numbers = list(_spread(source.count, DRAWN))
    reads = [_read(source, numbers, stream) for stream in (1, 2)]
    rows_of: dict[int, set[int]] = {}  # by a number for the contents
    drawn: list[int] = []
    for row, *items in zip(numbers, *reads, strict=True):
        one, other = (list(_contents(item)) for item in items)
        for contents in {*one, *other}:
            rows_of.setdefault(contents, set()).add(row)
        drawn += {*one} ^ {*other}
    different = len(set(drawn))
    if different < min(source.count, len(drawn)) / 4:
        return False
    return any(len(rows_of[contents]) > 1 for contents in drawn)


def _contents(item: Any) -> Iterator[int]:
    """Yield a number for each tensor of a row whose values are hardly equal by chance."""
    parts = [torch.as_tensor(part) if _is_numeric(part) else part for part in _parts(item)]
    for tensor in tensors_in(parts):
        values = tensor.detach().as_subclass(Tensor).cpu()
        if values.numel() < 2 * FEWEST or values.layout != torch.strided:
            continue
        if len(values.unique()) >= FEWEST:
            yield crc32(values.contiguous().view(torch.uint8).numpy().tobytes())


def _is_numeric(part: Any) -> bool:
    """Return whether a part of a row is a NumPy array of numbers."""
    return type(part).__module__ == "numpy" and part.dtype.kind in "iuf"


def _drawn_anew(pairs: list[list[Any]], again: list[list[Any]]) -> bool:
    """Return whether most rows share no part with themselves when they are read again.

    Targets with the shape of an image (segmentation) change with the crop or rotation of it.
    """
    changed = 0
    for first, second in zip(pairs, again, strict=True):
        parts = list(zip(_parts(first[0]), _parts(second[0]), strict=False))
        if len(parts) > 1 and not any(equal(a, b) for a, b in parts[:-1]):
            is_image = any(tensor.dim() > 1 for tensor in tensors_in(parts[-1]))
            changed += not is_image and not equal(*parts[-1])
    return changed > len(pairs) / 4


def _parts(item: Any) -> list[Any]:
    values = item.values() if isinstance(item, dict) else item
    return list(values) if isinstance(item, (dict, tuple, list)) else [item]


def _overlap(pairs: list[list[Any]]) -> bool:
    """Return whether most rows are the row before, moved by less than half of its length."""
    overlapping = 0
    for items in pairs:
        first, second = (
            [t for t in tensors_in(item) if t.dim() and len(t) >= FEWEST] for item in items
        )
        overlapping += any(map(_moved, first, second))
    return len(pairs) > 2 and overlapping > len(pairs) / 2


def _moved(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or torch.equal(one, other) or bool((one == one[:1]).all()):
        return False
    for shift in range(1, len(one) // 2 + 1):
        part = one[shift:]
        if torch.equal(part, other[: len(part)]) and not bool((part == part[:1]).all()):
            return True
    return False


def _warn(message: str) -> None:
    warnings.warn(message, HeldinWarning, stacklevel=6)
