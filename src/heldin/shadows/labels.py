"""Which rows a shadow may see, and on which it is tested: folds, groups, classes, time."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from heldin.errors import HeldinError

__all__ = [
    "LOOKED_AT",
    "fold_labels",
    "given_folds",
    "keep_first_folds",
    "numbered",
    "split_labels",
    "stretches",
    "subsample_held_out",
    "time_labels",
    "visible",
]

LOOKED_AT = 4096  # held-out rows of all shadows that are evaluated at a check


def fold_labels(
    n: int, folds: int, seed: int, groups: Tensor | None = None, stratify: Tensor | None = None
) -> Tensor:
    """(n,) fold numbers at random, of sizes as equal as can be.

    groups: (n,) whole numbers; rows with the same one get the same fold; stratify: (n,) classes;
    each fold gets its share of every class.
    """
    generator = torch.Generator().manual_seed(seed)
    if groups is not None:
        return _grouped(groups, folds, generator)
    order = torch.randperm(n, generator=generator)
    if stratify is not None:  # in the same random order, but class after class
        order = order[stratify[order].argsort(stable=True)]
    return torch.empty(n, dtype=torch.long).index_copy(0, order, torch.arange(n) % folds)


def _grouped(groups: Tensor, folds: int, generator: torch.Generator) -> Tensor:
    """Put groups, the largest first, into the fold that has the fewest rows."""
    _, member, sizes = groups.unique(return_inverse=True, return_counts=True)
    if len(sizes) < folds:
        raise HeldinError(
            f"groups: there are {len(sizes)} groups for {folds} folds; use folds={len(sizes)} or "
            "fewer"
        )
    order = torch.randperm(len(sizes), generator=generator)
    order = order[sizes[order].argsort(descending=True, stable=True)]
    filled, fold_of = [0] * folds, torch.empty(len(sizes), dtype=torch.long)
    for group in order.tolist():
        emptiest = min(range(folds), key=lambda fold: filled[fold])
        fold_of[group] = emptiest
        filled[emptiest] += int(sizes[group])
    return fold_of[member]


def time_labels(owner: str, times: Tensor, folds: int, shadows: int) -> Tensor:
    """(n,) labels of rows in time: each shadow is tested on the block after those it sees.

    As scikit-learn's TimeSeriesSplit(folds), except that rows of the same time share a block. The
    first block is never tested. With fewer shadows than folds, the last ones, which see most.
    """
    size = len(times) // (folds + 1)
    first = len(times) - folds * size  # row in time of the first that is tested
    place = torch.searchsorted(times.sort().values, times, right=True) - 1  # last of equal times
    labels: Tensor = ((place - first) // max(1, size)).clamp(min=-1)
    if not size or len(labels.unique()) < folds + 1:
        raise HeldinError(
            f"{owner}: the {len(times)} rows have {len(times.unique())} different times, which do "
            f"not fill {folds + 1} blocks; use fewer folds"
        )
    return (labels - (folds - shadows)).clamp(min=-1)


def stretches(times: Tensor) -> Tensor:
    """(m,) numbers of stretches of time whose losses are dependent, for a bootstrap over them.

    A stretch has about m^(1/3) rows, the usual length for a bootstrap over blocks.
    """
    length = max(1, round(len(times) ** (1 / 3)))
    numbers: Tensor = torch.searchsorted(times.sort().values, times) // length
    return numbers


def visible(labels: Tensor, shadow: int | Tensor, in_time: bool) -> Tensor:
    """Return which rows a shadow may see, as booleans; labels: which is tested on each, or -1.

    in_time: the shadows are tested one after the other, so that each may see the rows before those
    it is tested on, and not the rows after them.
    """
    return labels < shadow if in_time else labels != shadow


def given_folds(owner: str, folds: Tensor | Sequence[int], n: int) -> Tensor:
    """Fold numbers 0, 1, ... from whatever numbers the user has given."""
    given = torch.as_tensor(folds)
    if given.shape != (n,) or given.is_floating_point():
        raise HeldinError(
            f"{owner}: folds must be a number or one whole number for each of the {n} rows"
        )
    known, labels = given.unique(return_inverse=True)
    if len(known) < 2:
        raise HeldinError(f"{owner}: folds must name at least two folds")
    return torch.as_tensor(labels)


def split_labels(owner: str, splits: Sequence[Any], n: int) -> tuple[Tensor, Tensor]:
    """Return which split tests each row, and which rows are trained on in each split.

    splits: pairs of row numbers (train, test), as scikit-learn's splitters yield them. Returns (n,)
    numbers of splits, -1 for rows that none tests; and (splits, n) booleans.
    """
    labels = torch.full((n,), -1)
    sees = torch.zeros(len(splits), n, dtype=torch.bool)
    for number, (train, test) in enumerate(splits):
        trained, tested = (torch.as_tensor(rows, dtype=torch.long) for rows in (train, test))
        sees[number, trained] = True
        if bool((labels[tested] >= 0).any()):
            row = int(tested[labels[tested] >= 0][0])
            raise HeldinError(
                f"{owner}: row {row} is tested by two splits; each row may be tested once, as in "
                "scikit-learn's cross_val_predict"
            )
        if not len(tested) or not len(trained) or bool(sees[number, tested].any()):
            raise HeldinError(
                f"{owner}: split {number} must train on some rows and test others, got "
                f"{len(trained)} to train on and {len(tested)} to test"
            )
        labels[tested] = number
    return labels, sees


def keep_first_folds(labels: Tensor, shadows: int) -> Tensor:
    """Return the labels of the first folds, and -1 (seen by all) for the rest."""
    return torch.where(labels < shadows, labels, -1)


def subsample_held_out(labels: Tensor, most: int) -> list[Tensor]:
    """Return held-out rows of every shadow, evenly spread and not more than `most` in all."""
    shadows = int(labels.max()) + 1
    total = int((labels >= 0).sum())
    stride = max(1, -(-total // most))
    return [(labels == k).nonzero().flatten()[::stride] for k in range(shadows)]


def numbered(
    name: str, argument: str, values: Any, n: int, in_order: bool = False
) -> Tensor | None:
    """(n,) whole numbers in place of values of whatever kind; in_order: in that of the values."""
    if values is None:
        return None
    given = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(given, Iterable) or len(given := [*given]) != n:
        raise HeldinError(
            f"{name}: {argument} must be a list or tensor that names one for each of the {n} rows, "
            f"got {type(values).__name__}"
        )
    for row, value in enumerate(given):
        if value is None or value != value or not isinstance(value, Hashable):
            raise HeldinError(
                f"{name}: {argument} must be one name or number for each row; row {row} has "
                f"{value!r}. A row that belongs to no other gets a name of its own"
            )
    numbers: dict[Any, int] = {}
    if in_order:
        if any(isinstance(value, str) for value in given):
            raise HeldinError(
                f"{name}: {argument} must be numbers or dates, not text, whose order may be "
                "another; convert it, with pandas.to_datetime for instance"
            )
        numbers = {value: number for number, value in enumerate(sorted(set(given)))}
    return torch.tensor([numbers.setdefault(value, len(numbers)) for value in given])
