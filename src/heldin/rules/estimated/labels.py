"""Which rows a shadow must not see: folds, a share of the rows, groups and classes."""

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
    "hidden_labels",
    "numbered",
    "only_first",
    "thinned",
]

LOOKED_AT = 4096  # held-out rows of all shadows that are evaluated at a check


def fold_labels(
    n: int, folds: int, seed: int, groups: Tensor | None = None, stratify: Tensor | None = None
) -> Tensor:
    """(n,) fold numbers at random, of sizes as equal as can be.

    Args:
        n: number of rows.
        folds: number of folds.
        seed: of the order.
        groups: (n,) whole numbers; rows with the same one get the same fold.
        stratify: (n,) classes; each fold gets its share of every class.

    >>> fold_labels(6, 3, seed=0).bincount()
    tensor([2, 2, 2])
    >>> fold_labels(6, 2, seed=0, groups=torch.tensor([7, 7, 7, 7, 1, 2]))
    tensor([0, 0, 0, 0, 1, 1])
    >>> fold_labels(6, 2, seed=0, stratify=torch.tensor([0, 0, 0, 0, 1, 1]))[4:].sort().values
    tensor([0, 1])
    """
    generator = torch.Generator().manual_seed(seed)
    if groups is not None:
        return _grouped(groups, folds, generator)
    order = torch.randperm(n, generator=generator)
    if stratify is not None:  # in the same random order, but class after class
        order = order[stratify[order].argsort(stable=True)]
    return torch.empty(n, dtype=torch.long).index_copy(0, order, torch.arange(n) % folds)


def _grouped(groups: Tensor, folds: int, generator: torch.Generator) -> Tensor:
    """Groups one by one, the largest first, into the fold that has the fewest rows."""
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


def hidden_labels(n: int, fraction: float, seed: int, groups: Tensor | None = None) -> Tensor:
    """(n,) 0 for a share of the rows (or of the groups' rows), -1 for the others.

    >>> int((hidden_labels(10, 0.2, seed=0) == 0).sum())
    2
    """
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    hidden = torch.zeros(n, dtype=torch.bool)
    if groups is None:
        count = min(n - 1, max(1, round(fraction * n)))
        hidden[order[:count]] = True
    else:
        for row in order.tolist():  # whole groups, until there are enough
            if not hidden[row] and int(hidden.sum()) < fraction * n:
                hidden |= groups == groups[row]
        if bool(hidden.all()):
            raise HeldinError("groups: all rows are in the groups to hide; there must be others")
    return hidden.long() - 1


def only_first(labels: Tensor, shadows: int) -> Tensor:
    """The same labels for the first so many folds, -1 (seen by all) for the rest.

    >>> only_first(torch.tensor([0, 1, 2, 1]), 2)
    tensor([ 0,  1, -1,  1])
    """
    return torch.where(labels < shadows, labels, -1)


def thinned(labels: Tensor, most: int) -> list[Tensor]:
    """The held-out rows of every shadow, no more than so many in all, evenly spread.

    >>> thinned(torch.tensor([0, 1, 0, -1, 1, 0, 0]), 4)
    [tensor([0, 5]), tensor([1])]
    """
    shadows = int(labels.max()) + 1
    total = int((labels >= 0).sum())
    stride = max(1, -(-total // most))
    return [(labels == k).nonzero().flatten()[::stride] for k in range(shadows)]


def numbered(name: str, argument: str, values: Any, n: int) -> Tensor | None:
    """(n,) whole numbers in place of names of whatever kind."""
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
    return torch.tensor([numbers.setdefault(value, len(numbers)) for value in given])
