"""Data of the estimators: rows, copies of rows, categories, missing values, scales."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import sparse
from scipy.sparse.csgraph import connected_components
from sklearn.compose import make_column_transformer
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from torch import Tensor, nn

from heldin.errors import HeldinError

__all__ = ["Data", "InvalidParameter", "Targets"]

BY_CHANCE = 10  # equal pairs of rows per expected pair up to which chance explains them
FEW_CATEGORIES = 10  # categories that a column of any length may have
ROWS = 2**14  # rows per call of scikit-learn's scaler, which makes several copies


class InvalidParameter(HeldinError, ValueError):
    """Parameters or data that an estimator cannot be fitted with."""


class SparseRows:
    """Rows of a sparse matrix, made dense on access."""

    def __init__(self, matrix: Any) -> None:
        self.matrix = matrix.tocsr()

    def __len__(self) -> int:
        return int(self.matrix.shape[0])

    def __getitem__(self, index: Any, /) -> Tensor:
        rows = index.numpy() if isinstance(index, Tensor) else index
        return torch.from_numpy(self.matrix[rows].toarray())


def as_rows(X: Any) -> Any:
    """Return a tensor, or the rows of a sparse matrix."""
    if sparse.issparse(X):
        return SparseRows(X)
    return torch.from_numpy(X) if X.flags.writeable and X.flags.c_contiguous else torch.tensor(X)


class Copies(NamedTuple):
    """Rows of a table that equal each other in every input and in the target."""

    first: Any  # (m,) for each different row, the first row that equals it, ordered by contents
    which: Any  # (n,) for each row, the number of its different row
    by_chance: bool  # whether rows drawn at random would repeat as often

    @property
    def extra(self) -> int:
        """Number of rows that repeat another."""
        return len(self.which) - len(self.first)


def find_copies(X: Any, y: Any, splits: Any = None) -> Copies:
    """Find rows that are equal in every input and in the target (and in the splits they are in).

    Rows repeat by chance if their columns have few values. The share of pairs of different rows
    that agree in a column, multiplied over the columns, estimates how often two rows are equal; if
    that explains a tenth of the equal pairs, they are put down to chance.
    """
    table = np.column_stack([X, y] if splits is None else [X, y, splits])
    table = table.astype(np.float64, copy=False) + 0.0  # -0 becomes 0
    keys = np.ascontiguousarray(table).view(np.dtype((np.void, table.shape[1] * 8))).ravel()
    _, first, which, counts = np.unique(
        keys, return_index=True, return_inverse=True, return_counts=True
    )
    n, m = len(table), len(first)
    if m in (1, n):
        return Copies(first, which, by_chance=m < n)
    log_agree = 0.0
    for column in table[first].T:
        same = np.unique(column, return_counts=True)[1].astype(float)
        pairs = float((same * (same - 1)).sum())
        log_agree += np.log(pairs / (m * (m - 1))) if pairs else -np.inf
    expected = n * (n - 1) * np.exp(log_agree)
    equal = float((counts * (counts - 1.0)).sum())
    return Copies(first, which, by_chance=bool(BY_CHANCE * expected >= equal))


def join_groups(groups: Any, copies: Any) -> Any:
    """Return (n,) groups in which rows are linked by a group or as copies of each other."""
    size = int(groups.max()) + 1
    nodes = size + int(copies.max()) + 1
    links = sparse.coo_matrix((np.ones(len(groups)), (groups, size + copies)), (nodes, nodes))
    labels = connected_components(links, directed=False)[1][groups]
    return np.unique(labels, return_inverse=True)[1]


class Scaler:
    """Scaler to mean 0 and standard deviation 1 that cuts off inputs far out."""

    def __init__(self, clip: float | None, X: Any, weights: Any) -> None:
        self.clip, self.standard = clip, StandardScaler(with_mean=not sparse.issparse(X))
        for start in range(0, X.shape[0], ROWS):
            part = slice(start, start + ROWS)
            with np.errstate(over="ignore", invalid="ignore"):
                self.standard.partial_fit(X[part], None, None if weights is None else weights[part])
        columns = np.flatnonzero(~np.isfinite(self.standard.scale_))
        if len(columns):
            raise InvalidParameter(
                f"input column {columns[0]} has numbers whose squares are out of range; divide them"
            )

    def __call__(self, X: Any) -> Any:
        """Scale other rows."""
        if self.standard.with_mean and sparse.issparse(X):
            raise InvalidParameter("the first rows were dense, so these must be")
        scaled = self.standard.transform(X)
        if self.clip is None or sparse.issparse(scaled):
            return scaled
        return np.clip(scaled, -self.clip, self.clip, out=scaled)


def largest_input(X: Any) -> tuple[int, float]:
    """Return the column with the largest root mean square, and that."""
    squares = np.asarray((X.multiply(X) if sparse.issparse(X) else np.square(X)).mean(0)).ravel()
    column = int(squares.argmax())
    return column, float(np.sqrt(squares[column]))


def category(value: Any) -> str:
    """Return the text of a category; 1.0 and 1 are the same."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value).strip()


def has_categories(X: Any) -> bool:
    """Return whether X is a DataFrame of pandas with columns that are not numbers."""
    return hasattr(X, "select_dtypes") and not X.select_dtypes(exclude="number").empty


class Categories:
    """Encoder of the columns of a DataFrame that are not numbers as inputs of 0 and 1.

    Values of a later frame are compared as texts, so that their dtype does not matter.
    """

    def __init__(self, X: Any, owner: str) -> None:
        self.names = list(X.select_dtypes(exclude="number").columns)
        for name in self.names:
            categories, count = X[name].nunique(), int(X[name].notna().sum())
            problem = ""
            if X[name].dtype.kind in "mM":
                problem = "dates or times"
            elif categories > max(FEW_CATEGORIES, count / 2):
                problem = f"free text or names ({categories} different values in {count} rows)"
            if problem:
                raise InvalidParameter(
                    f"{owner}: column {name!r} holds {problem}, not categories; leave it out, or "
                    f"encode it before: skrub.tabular_pipeline({owner}())"
                )
        encoder = OneHotEncoder(handle_unknown="ignore", sparse_output=False)
        columns = (encoder, self.names)
        self.transformer = make_column_transformer(columns, remainder="passthrough")
        self.transformer.fit(self._texts(X))

    def __call__(self, X: Any) -> Any:
        """Return the (n, inputs) numbers of a frame."""
        return self.transformer.transform(self._texts(X))

    def _texts(self, X: Any) -> Any:
        """Return a frame of texts and floats without pandas' missing value."""
        columns = {name: X[name].map(category, na_action="ignore") for name in self.names}
        texts = {n: c.astype(object).where(c.notna(), None) for n, c in columns.items()}
        numbers = X.drop(columns=self.names).astype(float)
        return numbers.assign(**texts)[list(X.columns)]


def missing_labels(y: Any) -> Any:
    """Return the numbers of the rows without a label, among texts or objects."""
    y = np.asarray(y)
    if y.dtype != object or y.ndim != 1:
        return np.arange(0)
    return np.flatnonzero([v is None or type(v).__name__ == "NAType" or v != v for v in y])


class Targets(NamedTuple):
    """Targets as a network learns them."""

    y: Any  # (n,) class numbers, or (n, outputs) numbers
    loss: nn.Module
    single: bool = False  # whether each row belongs to one class


@dataclass(frozen=True, eq=False)
class Data:
    """Rows with a weight, as arrays."""

    X: Any
    y: Any
    weights: Any
    groups: Any = None  # whole numbers
    row_of: Any = None  # for each row given, its number among these; -1 if its weight is zero
    splits: Any = None  # (n, 2 K) booleans: in the training, then in the test part of K splits
    times: Any = None  # whole numbers in the order of time
    copies: int = 0  # number of given rows that equal another and share its fold
    counts: Any = None  # sample weights without weights of classes

    def take(self, index: Any) -> Data:
        """Return the rows with these numbers, each at most once."""
        place = np.full(len(self.weights) + 1, -1)  # the last entry serves row_of = -1
        place[index] = np.arange(len(index))
        names = ("X", "y", "weights", "groups", "splits", "times")
        rows: Any = {name: getattr(self, name) for name in names}
        taken: Any = {name: None if each is None else each[index] for name, each in rows.items()}
        return replace(self, row_of=place[self.row_of], **taken)

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
