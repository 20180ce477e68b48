"""Data of the estimators: targets of a network, and rows without copies."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import nn

from .inputs import find_copies, join_groups

__all__ = ["Data", "Targets"]


@dataclass(frozen=True, eq=False)
class Targets:
    """Targets as a network learns them.

    Attributes:
        y: (n,) class numbers, or (n, outputs) numbers.
        outputs: number of outputs of the network.
        loss: function of outputs and targets.
        single: whether each row belongs to one class.
    """

    y: Any
    outputs: int
    loss: nn.Module
    single: bool = False


@dataclass(frozen=True, eq=False)
class Data:
    """Rows with a weight, as arrays.

    Attributes:
        X, y, weights, groups: of these rows; groups are whole numbers, or None.
        row_of: (given,) for each row that the user gave, its number among these rows; -1 if its
            weight is zero.
        splits: (n, 2 K) booleans for K splits of the user: whether a row is in each training part,
            then whether it is in each test part; or None.
        times: (n,) whole numbers in the order of time, or None.
        copies: number of given rows that equal another and share its fold.
        counts: sample weights of these rows, without weights of classes.
    """

    X: Any
    y: Any
    weights: Any
    groups: Any
    row_of: Any
    splits: Any = None
    times: Any = None
    copies: int = 0
    counts: Any = None

    def take(self, index: Any) -> Data:
        """Return the rows with these numbers, each at most once."""
        place = np.full(len(self.weights) + 1, -1)  # the last entry serves row_of = -1
        place[index] = np.arange(len(index))
        return replace(
            self,
            X=self.X[index],
            y=self.y[index],
            weights=self.weights[index],
            groups=None if self.groups is None else self.groups[index],
            splits=None if self.splits is None else self.splits[index],
            times=None if self.times is None else self.times[index],
            row_of=place[self.row_of],
        )

    def split_masks(self) -> tuple[Any, Any]:
        """Return (K, n) booleans of the rows to train on, and of those to test."""
        train, test = np.split(self.splits.T, 2)
        return train, test

    def without_copies(self, shuffle: bool) -> Data:
        """Make equal rows one row with the sum of their weights, or put them into one group.

        A copy in another fold would give a network the answer. Equal rows that chance explains (few
        categories) stay as they are. Rows are sorted by contents if their order is free, so that it
        does not matter in which order they were given.
        """
        fixed = self.splits if self.times is None else self.times  # copies that differ in it stay
        copies = find_copies(self.X, self.y, fixed)
        if shuffle and (self.groups is None or self.splits is not None):
            if copies.by_chance:
                return self.take(np.argsort(copies.which, kind="stable"))
            weights = np.bincount(copies.which, self.weights)
            row_of = np.append(copies.which, -1)[self.row_of]
            merged = replace(self.take(copies.first), weights=weights, row_of=row_of)
            return replace(merged, copies=copies.extra)
        if copies.by_chance or not copies.extra or fixed is not None:
            return self
        groups = np.arange(len(self.weights)) if self.groups is None else self.groups
        return replace(self, groups=join_groups(groups, copies.which), copies=copies.extra)
