"""Small training sets, cut from real tables, and what a prediction of the other rows loses."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from heldin_lab.study.data import LEAST_TEST, MOST_TEST, Table, role

__all__ = ["FLOOR", "SmallProblem", "problems"]

FLOOR = 1e-3  # least probability that counts, for every method: forests give zeros


@dataclass(frozen=True, eq=False)
class SmallProblem:
    """Rows to learn from, and rows to be judged by.

    Attributes:
        name: of the table.
        seed: of the draw.
        x, y: training rows on their raw scale; classes are 0, 1, ..., without a gap.
        x_test, y_test: other rows; none of a class that was not drawn for training.
        classes: their number, 0 for regression.
    """

    name: str
    seed: int
    x: Any
    y: Any
    x_test: Any
    y_test: Any
    classes: int

    @classmethod
    def cut(cls, table: Table, n: int, seed: int) -> SmallProblem:
        """Draw n training rows and up to 2,000 test rows."""
        x, y, classes = table.load()
        generator = np.random.default_rng([seed, n, zlib.crc32(table.name.encode())])
        order = generator.permutation(len(x))
        train, test = order[:n], order[n : n + MOST_TEST]
        if not classes:
            return cls(table.name, seed, x[train], y[train], x[test], y[test], 0)
        known, codes = np.unique(y[train], return_inverse=True)
        test = test[np.isin(y[test], known)]
        found = np.searchsorted(known, y[test])
        return cls(table.name, seed, x[train], codes, x[test], found, len(known))

    def losses(self, predicted: Any) -> Any:
        """(m,) log losses of (m, classes) probabilities, or squared errors of (m,) numbers."""
        if not self.classes:
            return (np.asarray(predicted, float).ravel() - self.y_test) ** 2
        shares = np.clip(np.asarray(predicted, float), FLOOR, None)
        shares = shares / shares.sum(1, keepdims=True)
        return -np.log(shares[np.arange(len(shares)), self.y_test])

    def score(self, predicted: Any) -> float:
        """Accuracy, or R2."""
        if self.classes:
            return float((np.asarray(predicted).argmax(1) == self.y_test).mean())
        return float(1 - self.losses(predicted).mean() / self.y_test.var())

    def constant(self) -> Any:
        """What knows nothing of the inputs predicts: shares of the classes, or the mean."""
        if not self.classes:
            return np.full(len(self.y_test), self.y.mean())
        shares = np.bincount(self.y, minlength=self.classes) / len(self.y)
        return np.tile(shares, (len(self.y_test), 1))


def problems(
    tables: Sequence[Table], wanted: str, sizes: Sequence[int], seeds: Sequence[int]
) -> Iterator[tuple[Table, int, int]]:
    """Table, number of training rows and seed of every problem, seed by seed.

    Tables with fewer than 100 rows left for the test are left out.
    """
    for seed in seeds:
        for n in sizes:
            for table in tables:
                if wanted in ("all", role(table.name)) and table.rows - n >= LEAST_TEST:
                    yield table, n, seed
