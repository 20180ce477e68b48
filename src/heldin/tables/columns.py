"""Columns of a table: how each is encoded as numbers.

Everything learnt from the training table (means, standard deviations, categories) is plain data,
which is stored as JSON and applied to other tables.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas
from pandas.api.types import is_datetime64_any_dtype, is_timedelta64_dtype

from heldin.errors import HeldinError
from heldin.sklearn.data import category

from .number_formats import (
    Decimal,
    Order,
    Unusable,
    date_order,
    decimal_mark,
    is_number,
    parse_dates,
    parse_numbers,
)
from .reading import refuse_missing

__all__ = ["Column", "Columns"]

CATEGORIES = 1000  # largest number of categories of a column
CLOCK = re.compile(r"\s*\d{1,2}:\d{2}(:\d{2}(\.\d+)?)?\s*([aApP][mM])?$")
SINGLE = 2**22  # most numbers of a table in double precision
DAY = 86_400  # seconds
PERIODS = (365.2425 * DAY, 7 * DAY)  # seconds of a year and a week


@dataclass(frozen=True)
class Column:
    """A column and its encoding.

    Attributes:
        name: in the table.
        kind: "number", "category" or "date".
        mean, spread: mean and standard deviation of the numbers; of dates in seconds.
        categories: the values of a category, sorted.
        missing: whether values were missing, which is then one more input.
        decimal: decimal mark of numbers that are written as texts.
        order: of day, month and year, in dates that are written as texts.
        clock: whether dates have times of day.
    """

    name: str
    kind: Literal["number", "category", "date"]
    mean: float = 0.0
    spread: float = 1.0
    categories: tuple[str, ...] = ()
    missing: bool = False
    decimal: Decimal = "."
    order: Order = "ymd"
    clock: bool = False

    @property
    def width(self) -> int:
        """Number of inputs."""
        if self.kind == "date":
            return 1 + 2 * (len(PERIODS) + self.clock) + self.missing
        return (len(self.categories) if self.kind == "category" else 1) + self.missing

    @classmethod
    def learn(
        cls,
        name: str,
        values: Any,
        decimal: Decimal = ".",
        order: Literal["auto", "dmy", "mdy"] = "auto",
    ) -> Column | None:
        """Return the encoding of a training column; None if it is constant.

        Raises `Unusable` for columns that cannot become numbers.
        """
        present = values.dropna()
        missing = len(present) < len(values)
        if is_number(values):
            numbers = present.to_numpy(float)
            if not np.isfinite(numbers).all():
                raise _unusable(name, "has infinite values; clean them")
            return cls._scaled(name, "number", numbers, missing, decimal=decimal)
        if is_timedelta64_dtype(values.dtype):
            raise _unusable(name, f"holds durations ({str(present.iloc[0])!r}): make them numbers")
        dates = _date_order(name, values, present, order)
        if dates is not None:
            seconds = _seconds(parse_dates(present, dates))
            clock = bool((seconds % DAY != 0).any())
            return cls._scaled(name, "date", seconds, missing, order=dates, clock=clock)
        texts = _texts(name, present)
        different = tuple(sorted(set(texts)))
        if len(different) + missing < 2:
            return None
        _refuse_text(name, texts, different)
        return cls(name, "category", categories=different, missing=missing)

    @classmethod
    def _scaled(
        cls, name: str, kind: Any, numbers: Any, missing: bool, **more: Any
    ) -> Column | None:
        """Return a column with the mean and standard deviation of its numbers."""
        if not len(numbers):
            return None
        if numbers.min() == numbers.max():
            mean = float(numbers[0])
            return cls(name, kind, mean, missing=True, **more) if missing else None
        with np.errstate(over="ignore"):
            spread = float(numbers.std())
        if not np.isfinite(spread) or spread == 0.0:
            raise _unusable(name, "has numbers too large or too close to scale")
        return cls(name, kind, float(numbers.mean()), spread, missing=missing, **more)

    def encode(self, values: Any) -> tuple[Any, int]:
        """Return (n, width) numbers, and the number of rows with an unknown category."""
        absent = values.isna().to_numpy()
        unknown = 0
        if self.kind == "category":
            texts = values.astype(object).map(category, na_action="ignore")
            codes = pandas.Index(self.categories).get_indexer(texts)
            inputs = (codes[:, None] == np.arange(len(self.categories))).astype(float)
            unknown = int(((codes < 0) & ~absent).sum())
        else:
            numbers = self.measure(values)
            parts = [(numbers - self.mean) / self.spread]
            if self.kind == "date":
                periods = [*PERIODS, DAY] if self.clock else PERIODS
                angles = [2 * np.pi * numbers / period for period in periods]
                parts += [f(angle) for angle in angles for f in (np.sin, np.cos)]
            inputs = np.where(absent[:, None], 0.0, np.column_stack(parts))
        if self.missing:
            inputs = np.hstack([inputs, absent[:, None].astype(float)])
        return inputs, unknown

    def measure(self, values: Any) -> Any:
        """Return the numbers of a column, or its dates as seconds since 1970."""
        if self.kind == "date":
            try:
                return _seconds(parse_dates(values, self.order))
            except HeldinError as error:
                raise HeldinError(f"column {self.name!r} held dates, but {error}") from error
        if not is_number(values):
            texts, values = values, parse_numbers(values, self.decimal)
            refused = texts[values.isna() & texts.notna()]
            if len(refused):
                raise HeldinError(
                    f"column {self.name!r} held numbers in training, but row "
                    f"{refused.index[0] + 1} has {refused.iloc[0]!r}"
                )
        numbers = values.to_numpy(float, na_value=np.nan)
        if np.isinf(numbers).any():
            raise HeldinError(f"column {self.name!r} has infinite values")
        return numbers


def _seconds(times: Any) -> Any:
    """Return seconds since 1970; nan for missing times."""
    raw = times.to_numpy("datetime64[s]")
    return np.where(np.isnat(raw), np.nan, raw.astype("int64"))


def _unusable(name: str, reason: str) -> Unusable:
    return Unusable({name: f"column {name!r} {reason}"})


def _date_order(name: str, values: Any, present: Any, order: str) -> Order | None:
    """Return the order of day, month and year; None if the column holds no dates."""
    if is_datetime64_any_dtype(values.dtype):
        return "ymd"
    if not len(present):
        return None
    if all(hasattr(v, "isoformat") and hasattr(v, "year") for v in present):
        return "ymd"
    if not all(isinstance(v, str) for v in present):
        return None
    written = date_order([str(v) for v in present.unique()])
    if written != "either":
        return written
    if order == "auto":
        raise _unusable(
            name,
            f"holds dates ({present.iloc[0]!r}) in which day and month cannot be told apart; say "
            "--dates dmy or --dates mdy",
        )
    return order  # type: ignore[return-value]


def _texts(name: str, present: Any) -> list[str]:
    for value in present:
        if not isinstance(value, (str, bool, int, float)) and not hasattr(value, "item"):
            if hasattr(value, "isoformat"):
                raise _unusable(name, f"holds times ({str(value)!r}): make them numbers")
            raise _unusable(name, f"holds values of type {type(value).__name__}")
    return [category(value) for value in present]


def _refuse_text(name: str, texts: Sequence[str], different: Sequence[str]) -> None:
    """Refuse times, free text, and numbers among which there is something else."""
    clocks = [t for t in different if CLOCK.match(t)]
    dated = clocks or [t for t in different if date_order([t]) is not None]
    if len(dated) > len(different) / 2:
        what = "times" if clocks else "dates, but not in all rows, or not in one order"
        raise _unusable(name, f"holds dates or times ({dated[0]!r}): {what}; make them numbers")
    if decimal_mark(different) == "either":
        raise _unusable(
            name,
            f"holds numbers ({different[0]!r}) that may have thousands or decimals; say --decimal "
            ", or --decimal .",
        )
    odd = [t for t in different if decimal_mark([t]) is None]
    if odd and len(odd) < len(different) / 2 and len(different) > 4:
        raise _unusable(
            name,
            f"holds numbers, but also {odd[0]!r}; if that means missing, say --missing {odd[0]!r}, "
            "else clean it",
        )
    words = sum(len(t.split()) for t in different) / len(different)
    if len(different) == len(texts) > 10 and words < 2:
        raise _unusable(
            name,
            f"is different in every row ({different[0][:30]!r} for instance), as IDs and names "
            f"are; --id {name!r} keeps it for the predictions",
        )
    many = len(different) > max(10, len(texts) / 2) or len(different) > CATEGORIES
    if many or (words >= 4 and len(different) > 10):
        raise _unusable(
            name,
            f"holds free text or names ({len(different)} different values in {len(texts)} rows, "
            f"{different[0][:30]!r} for instance), not categories",
        )


@dataclass(frozen=True)
class Columns:
    """The columns of a table, by their use.

    Attributes:
        used: columns that become inputs.
        constant: names of the columns that are the same in all rows.
        unusable: names of the columns that were left out because they cannot become numbers.
    """

    used: tuple[Column, ...]
    constant: tuple[str, ...] = ()
    unusable: tuple[str, ...] = ()

    @classmethod
    def learn(
        cls,
        frame: Any,
        leave_out: Sequence[str] = (),
        decimals: Mapping[str, Decimal] | None = None,
        dates: Literal["auto", "dmy", "mdy"] = "auto",
        drop_unusable: bool = False,
    ) -> Columns:
        """Return the columns of a training table; one error names all that cannot be used.

        Args:
            frame: the table.
            leave_out: names of columns that are no inputs.
            decimals: decimal marks by column; the default is a point.
            dates: order of day and month in ambiguous dates.
            drop_unusable: leave out the columns that cannot be used.
        """
        names = [name for name in frame.columns if name not in leave_out]
        if not names:
            raise HeldinError("there is no column to predict from, only the target")
        learnt: dict[str, Column | None] = {}
        reasons: dict[str, str] = {}  # why a column cannot be used
        for name in names:
            decimal: Decimal = (decimals or {}).get(name, ".")
            try:
                learnt[name] = Column.learn(name, frame[name], decimal, dates)
            except Unusable as error:
                reasons |= error.reasons
        if reasons and not drop_unusable:
            raise Unusable(reasons)
        used = tuple(column for column in learnt.values() if column is not None)
        if not used:
            why = "cannot be used" if reasons else "has the same value in all rows"
            raise HeldinError(
                f"every column {why}, so there is nothing to learn from: "
                + ", ".join(map(repr, names[:8]))
            )
        constant = tuple(name for name, column in learnt.items() if column is None)
        return cls(used, constant, tuple(reasons))

    @property
    def decimal_commas(self) -> list[str]:
        """Names of the columns with a decimal comma, in which 1.500 means 1500."""
        return [column.name for column in self.used if column.decimal == ","]

    def encode(self, frame: Any, path: str | Path) -> tuple[Any, dict[str, int]]:
        """Return (n, inputs) numbers, and by column the number of rows with an unknown category.

        Tables with more than four million numbers are in single precision.
        """
        refuse_missing(frame, [column.name for column in self.used], path, "the column")
        unknown = {}
        width = sum(column.width for column in self.used)
        precision = np.float64 if len(frame) * width <= SINGLE else np.float32
        inputs = np.empty((len(frame), width), precision)
        start = 0
        for column in self.used:
            try:
                inputs[:, start : start + column.width], count = column.encode(frame[column.name])
            except HeldinError as error:
                raise HeldinError(f"{path}: {error}") from error
            start += column.width
            if count:
                unknown[column.name] = count
        return inputs, unknown

    def to_json(self) -> dict[str, Any]:
        """Return lists, texts and numbers."""
        return {
            "used": [asdict(column) for column in self.used],
            "constant": list(self.constant),
            "unusable": list(self.unusable),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Columns:
        """Return the columns that `to_json` described."""
        used = [Column(**{**c, "categories": tuple(c["categories"])}) for c in data["used"]]
        return cls(tuple(used), tuple(data["constant"]), tuple(data["unusable"]))
