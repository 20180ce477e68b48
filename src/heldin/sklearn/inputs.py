"""From what users have to what a network takes: rows, gaps, categories, scales."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from scipy import sparse
from sklearn.compose import make_column_transformer
from sklearn.impute import SimpleImputer
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from torch import Tensor

from heldin.tables.columns import category
from heldin.tables.mlp import Inputs

from .parameters import InvalidParameter

__all__ = [
    "Categories",
    "Gaps",
    "Scaler",
    "as_rows",
    "check_names",
    "has_categories",
    "largest_input",
    "missing_labels",
    "observations",
    "sorted_rows",
]

MOST_COPIES, MOST_ROWS = 20, 10_000  # up to which a weight is taken for a number of rows
CLIP = 4.0  # standard deviations beyond which an input is cut off
FEW = 10  # different texts that a column of categories may have in any case
AT_ONCE = 8  # columns by which rows are sorted in one go
ROWS = 2**14  # that are looked at in one go, where the table has more


class SparseRows:
    """Rows of a sparse matrix, made dense when they are asked for."""

    def __init__(self, matrix: Any) -> None:
        self.matrix = matrix.tocsr()

    def __len__(self) -> int:
        return int(self.matrix.shape[0])

    def __getitem__(self, index: Any, /) -> Tensor:
        rows = index.numpy() if isinstance(index, Tensor) else index
        return torch.from_numpy(self.matrix[rows].toarray())


def as_rows(X: Any) -> Inputs:
    """A tensor, or a sparse matrix that is one row by row."""
    if sparse.issparse(X):
        return SparseRows(X)
    return torch.from_numpy(X) if X.flags.writeable and X.flags.c_contiguous else torch.tensor(X)


def observations(X: Any, y: Any, weights: Any) -> tuple[Any, Any]:
    """Numbers of the rows, once for each observation, and the weights of these.

    A row whose weight is a whole number is so many observations, so that a row given twice is the
    same as a row of weight 2, for every rule. Equal rows stay apart: in a table with few distinct
    rows a fold would else take every copy of one away. Weights are left as they are if one of them
    is not a whole number, or if the rows would become too many. The order depends on contents only.

    >>> X, y, w = np.array([[2.0], [1.0]]), np.array([0, 1]), np.array([2.0, 1.0])
    >>> index, weights = observations(X, y, w)
    >>> sorted(index.tolist()), weights.tolist()
    ([0, 0, 1], [1.0, 1.0, 1.0])
    """
    index = np.arange(len(weights))
    whole = bool((weights == np.floor(weights)).all())
    if whole and weights.sum() <= max(MOST_COPIES * len(weights), MOST_ROWS):
        index = np.repeat(index, weights.astype(np.int64))
        weights = np.ones(len(index))
    order = sorted_rows(X[index], y[index], weights)
    return index[order], weights[order]


def sorted_rows(*parts: Any) -> Any:
    """(n,) numbers of the rows in the order of the bytes of their float64 numbers.

    The same as a sort of whole rows, in a few columns at a time: most often the first ones settle
    it, and a second copy of a large table is spared.

    >>> sorted_rows(np.array([[2.0, 1.0], [2.0, 0.0], [0.0, 5.0]]), np.zeros(3)).tolist()
    [2, 1, 0]
    """
    columns = [part.reshape(len(part), -1) for part in parts]
    rank = np.zeros(len(columns[0]), ">i8")  # equal where the columns so far are equal
    order = np.arange(len(rank))
    for part in columns:
        for start in range(0, part.shape[1], AT_ONCE):
            values = np.ascontiguousarray(part[:, start : start + AT_ONCE], np.float64) + 0.0
            rows = np.hstack([rank[:, None].view(np.uint8), values.view(np.uint8)])
            keys = rows.view(np.dtype((np.void, rows.shape[1]))).ravel()
            order = np.argsort(keys, kind="stable")
            ordered = keys[order]
            rank[order[1:]] = np.cumsum(ordered[1:] != ordered[:-1])
            if len(rank) < 2 or rank[order[-1]] == len(rank) - 1:  # all are different
                return order
    return order


class Scaler:
    """Inputs with mean 0 and standard deviation 1; those far out are cut off, constant ones are 0.

    >>> scaler = Scaler(clip=4.0).fit(np.array([[0.0, 5.0], [2.0, 5.0]]), None)
    >>> scaler(np.array([[1.0, 5.0], [100.0, 5.0]]))
    array([[0., 0.],
           [4., 0.]])
    """

    def __init__(self, clip: float | None = None, with_mean: bool = True) -> None:
        self.clip = clip
        self.standard = StandardScaler(with_mean=with_mean)

    def fit(self, X: Any, weights: Any) -> Scaler:
        """Learn means and spreads."""
        for start in range(0, X.shape[0], ROWS):  # scikit-learn makes several copies
            part = slice(start, start + ROWS)
            self.standard.partial_fit(X[part], None, None if weights is None else weights[part])
        return self

    def __call__(self, X: Any) -> Any:
        """The same for other rows."""
        found = self.standard.transform(X)
        if self.clip is None or sparse.issparse(found):
            return found
        return np.clip(found, -self.clip, self.clip, out=found)


def largest_input(X: Any) -> tuple[int, float]:
    """The column whose numbers are largest, and their root mean square.

    >>> largest_input(np.array([[1.0, -30.0], [1.0, 40.0]]))
    (1, 35.3...)
    """
    squares = np.asarray((X.multiply(X) if sparse.issparse(X) else np.square(X)).mean(0)).ravel()
    column = int(squares.argmax())
    return column, float(np.sqrt(squares[column]))


class Gaps:
    """Missing numbers become means; where some were missing in training, an input says so."""

    def __init__(self) -> None:
        self.imputer = SimpleImputer(add_indicator=True, keep_empty_features=True)

    def fit(self, X: Any) -> Gaps:
        """Learn means, and in which columns values are missing."""
        self.imputer.fit(X)
        return self

    def __call__(self, X: Any) -> Any:
        """The same for other rows."""
        indicator = self.imputer.indicator_
        missing = np.flatnonzero(np.isnan(X).any(0))
        if not len(missing) and not len(indicator.features_):
            return X
        # a gap where there was none in training is a mean, and no more
        unknown = np.setdiff1d(missing, indicator.features_)
        if len(unknown):
            X = X.copy()
            X[:, unknown] = self.imputer.statistics_[unknown]
        return self.imputer.transform(X)


def missing_labels(y: Any) -> Any:
    """Numbers of the rows without a label, among texts or objects; scikit-learn checks numbers.

    >>> missing_labels(np.array(["a", None, "b", float("nan")], object)).tolist()
    [1, 3]
    """
    y = np.asarray(y)
    if y.dtype != object or y.ndim != 1:
        return np.arange(0)
    return np.flatnonzero([v is None or type(v).__name__ == "NAType" or v != v for v in y])


def has_categories(X: Any) -> bool:
    """Whether it is a DataFrame of pandas with columns that are not numbers."""
    return hasattr(X, "select_dtypes") and not X.select_dtypes(exclude="number").empty


def check_names(X: Any, owner: str) -> None:
    """Refuse a DataFrame in which a name stands for several columns."""
    twice = X.columns[X.columns.duplicated()]
    if len(twice):
        raise InvalidParameter(
            f"{owner}: several columns are named {twice[0]!r}; give each a name of its own"
        )


class Categories:
    """A DataFrame as numbers, by scikit-learn's encoder: one input for each category.

    A category that was not there in training is none of those known. Which columns have
    categories is settled in training; of later frames only values count, not dtypes.

    Args:
        X: the frame to learn from.
        owner: whose columns they are, for errors.
    """

    def __init__(self, X: Any, owner: str) -> None:
        self.names = list(X.select_dtypes(exclude="number").columns)
        for name in self.names:
            values = X[name].dropna()
            if X[name].dtype.kind in "mM":
                raise InvalidParameter(
                    f"{owner}: column {name!r} holds dates or times; turn them into numbers (days "
                    "since ..., month), or leave it out"
                )
            if values.nunique() > max(FEW, len(values) / 2):
                raise InvalidParameter(
                    f"{owner}: column {name!r} holds free text or names ({values.nunique()} "
                    f"different values in {len(values)} rows), not categories; leave it out"
                )
        encoder = OneHotEncoder(handle_unknown="ignore", sparse_output=False)
        self.transformer = make_column_transformer(
            (encoder, self.names), remainder="passthrough"
        ).fit(self._plain(X))

    def __call__(self, X: Any) -> Any:
        """(n, inputs)."""
        return self.transformer.transform(self._plain(X))

    def _plain(self, X: Any) -> Any:
        """Categories are texts, and gaps None or nan.

        The encoder takes neither pandas' own missing value nor numbers beside texts.
        """
        import pandas

        columns = {}
        for name in X.columns:
            values, gaps = X[name], X[name].isna()
            if name in self.names:
                texts = [None if gap else category(v) for v, gap in zip(values, gaps, strict=True)]
                columns[name] = pandas.Series(texts, values.index, dtype=object)
            else:
                columns[name] = pandas.Series(values.to_numpy(float, na_value=np.nan), values.index)
        return pandas.DataFrame(columns, index=X.index)
