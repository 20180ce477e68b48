"""Columns of a table: how each is read and encoded as numbers.

Everything learnt from the training table (formats, means, standard deviations, categories) is plain
data, which is stored as JSON and applied to other tables. A format of numbers or dates that are
written as text is assumed only if it fits a whole column and no other one does.

The encoders of skrub are made for exploring: where a date may be read in two ways, ToDatetime takes
the American one; what cannot be read later becomes a missing value without a word; numbers and
dates are in single precision, in which dates of this century are two minutes apart; and a fitted
TableVectorizer is stored by pickle, or by skops with two dozen types to trust. In Python,
`skrub.tabular_pipeline(MLPClassifier())` joins them with the networks of `heldin.sklearn`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas

from heldin.errors import HeldinError
from heldin.sklearn.data import category

from .reading import refuse_missing

__all__ = ["Column", "Columns", "Unusable", "as_numbers", "decimal_mark", "parse_number"]

CATEGORIES = 1000  # largest number of categories of a column
SINGLE = 2**22  # most numbers of a table in double precision
DAY = 86_400  # seconds
EPOCH = pandas.Timestamp(0, tz="UTC")
PERIODS = (365.2425 * DAY, 7 * DAY)  # seconds of a year and a week

MONEY = "[$€£¥₹]|AUD|BRL|CAD|CHF|CNY|CZK|DKK|EUR|GBP|INR|JPY|NOK|PLN|SEK|USD"
UNIT = re.compile(
    rf"\s*(?P<sign>[-+]?)\s*(?P<before>{MONEY})?\s*"
    rf"(?P<number>[-+]?[\d.,'\u2019 \u00a0\u202f]*\d)\s*(?P<after>%|{MONEY})?\s*"
)
GAPS = re.compile(r"['\u2019 \u00a0\u202f](?=\d{3}(?!\d))")  # between thousands
NUMBER = {  # by decimal mark
    ".": re.compile(r"[-+]?(\d{1,3}(,\d{3})+|\d+)(\.\d+)?"),
    ",": re.compile(r"[-+]?(\d{1,3}(\.\d{3})+|\d+)(,\d+)?"),
}
CLOCK = re.compile(r"\s*\d{1,2}:\d{2}(:\d{2}(\.\d+)?)?\s*([aApP][mM])?$")
DATE = re.compile(
    r"\s*(?:(?P<y>\d{4})[-/.](?P<m>\d{1,2})[-/.](?P<d>\d{1,2})"
    r"|(?P<a>\d{1,2})(?P<mark>[-/.])(?P<b>\d{1,2})[-/.](?P<year>\d{4}|\d{2}))"
    r"(?:[T ,]\s*(?P<time>\d{1,2}:\d{2}.*))?\s*"
)


class Unusable(HeldinError):
    """Columns that cannot become numbers, with a reason for each."""

    def __init__(self, reasons: Mapping[str, str]) -> None:
        self.reasons = dict(reasons)
        lines = [f"column {name!r} {reason}" for name, reason in reasons.items()]
        message = f"{lines[0]}; leave it out: --drop {next(iter(reasons))!r}"
        if len(lines) > 1:
            listed = "\n  ".join(lines)
            message = (
                f"{len(lines)} columns cannot be used:\n  {listed}\n--drop-unusable leaves them out"
            )
        super().__init__(message)


# -- numbers and dates written as text


def _split_unit(text: str) -> tuple[str, str] | None:
    """Return a number without unit and gaps, and the unit; None if the text is no number."""
    parts = UNIT.fullmatch(text)
    if parts is None or (parts["before"] and parts["after"]):
        return None
    return parts["sign"] + GAPS.sub("", parts["number"]), parts["before"] or parts["after"] or ""


def decimal_mark(texts: Sequence[str]) -> str | None:
    """Return the decimal mark that fits all texts, or "either"; None if they are not numbers."""
    pairs = [pair for pair in map(_split_unit, texts) if pair is not None]
    if not pairs or len(pairs) < len(texts) or len({unit for _, unit in pairs if unit}) > 1:
        return None
    point, comma = (all(NUMBER[mark].fullmatch(number) for number, _ in pairs) for mark in ".,")
    if point and comma:
        return "either" if any("," in n or "." in n for n, _ in pairs) else "."
    return "." if point else "," if comma else None


def parse_number(text: str, decimal: str) -> float:
    """Return a number, or nan if the text is none."""
    number, _ = _split_unit(text) or (text.strip(), "")
    if NUMBER[decimal].fullmatch(number):
        return float(number.replace("." if decimal == "," else ",", "").replace(decimal, "."))
    try:
        return float(text)  # 1e-3
    except ValueError:
        return math.nan


def as_numbers(values: Any, decimal: str | None = None) -> tuple[Any, str] | None:
    """Return a column of numbers, or of texts that are certainly numbers, and its decimal mark.

    In doubt the mark is the one that the user gave.
    """
    if values.dtype.kind in "iufc":
        return values, decimal or "."
    different = values.dropna().unique()
    mark = decimal_mark(different) if all(isinstance(v, str) for v in different) else None
    mark = decimal if mark == "either" else mark
    return None if mark is None else (_parse_numbers(values, mark), mark)


def _parse_numbers(values: Any, decimal: str) -> Any:
    parsed = values.astype(object).map(lambda v: parse_number(str(v), decimal), na_action="ignore")
    return parsed.astype(float)


def date_order(texts: Sequence[str]) -> str | None:
    """Return the order of day, month and year that fits all texts; None if they are no dates."""
    dates = [date for date in map(DATE.fullmatch, texts) if date is not None]
    if not dates or len(dates) < len(texts):
        return None
    year_first = [bool(date["y"]) for date in dates]
    if any(year_first):
        return "ymd" if all(year_first) else None
    first, second = (max(int(date[part]) for date in dates) for part in "ab")
    if first > 12 and second > 12:
        return None
    if first > 12 or all(date["mark"] == "." for date in dates):  # points: the day is first
        return "dmy" if second <= 12 else "mdy"
    return "mdy" if second > 12 else "either"


def _seconds(values: Any, order: str) -> Any:
    """Return dates as seconds since 1970, nan for missing ones; refuse what is no date."""
    texts = values if values.dtype.kind == "M" else values.astype("string").str.strip()
    reading: dict[str, Any] = {"format": "mixed", "dayfirst": order == "dmy", "errors": "coerce"}
    times = pandas.to_datetime(texts, utc=True, **reading)
    refused = values[times.isna() & values.notna()]
    if len(refused):
        row, value = refused.index[0] + 1, refused.iloc[0]
        raise HeldinError(f"row {row} has {value!r}, which is no date")
    return ((times - EPOCH).dt.total_seconds() // 1).to_numpy()


# -- columns


@dataclass(frozen=True)
class Column:
    """A column and its encoding."""

    name: str
    kind: str  # "number", "category" or "date"
    mean: float = 0.0  # of the numbers; of dates in seconds
    spread: float = 1.0  # their standard deviation
    categories: tuple[str, ...] = ()  # sorted
    missing: bool = False  # whether values were missing, which is then one more input
    decimal: str = "."  # mark of numbers that are written as text
    order: str = "ymd"  # of day, month and year in dates that are written as text
    clock: bool = False  # whether dates have times of day

    @property
    def width(self) -> int:
        """Number of inputs."""
        if self.kind == "date":
            return 1 + 2 * (len(PERIODS) + self.clock) + self.missing
        return (len(self.categories) if self.kind == "category" else 1) + self.missing

    @classmethod
    def learn(
        cls, name: str, values: Any, decimal: str | None = None, order: str = "auto"
    ) -> Column | None:
        """Return the encoding of a training column; None if it is constant.

        `decimal` and `order` are what the user says of numbers and dates that leave a doubt.
        """
        present = values.dropna()
        missing = len(present) < len(values)
        read = as_numbers(values, decimal)
        if read is not None:
            numbers = read[0].dropna().to_numpy(float)
            if not np.isfinite(numbers).all():
                raise Unusable({name: "has infinite values; clean them"})
            return cls._scaled(name, "number", numbers, missing, decimal=read[1])
        if values.dtype.kind == "m":
            text = str(present.iloc[0])
            raise Unusable({name: f"holds durations ({text!r}): make them numbers"})
        dates = _date_order(name, present, order)
        if dates is not None:
            seconds = _seconds(present, dates)
            clock = bool((seconds % DAY != 0).any())
            return cls._scaled(name, "date", seconds, missing, order=dates, clock=clock)
        for value in present:
            if not isinstance(value, (str, bool, int, float)) and not hasattr(value, "item"):
                what = f"values of type {type(value).__name__}"
                if hasattr(value, "isoformat"):
                    what = f"times ({str(value)!r}): make them numbers"
                raise Unusable({name: f"holds {what}"})
        texts = [category(value) for value in present]
        different = tuple(sorted(set(texts)))
        if len(different) + missing < 2:
            return None
        reason = _no_categories(name, texts, different)
        if reason:
            raise Unusable({name: reason})
        return cls(name, "category", categories=different, missing=missing)

    @classmethod
    def _scaled(
        cls, name: str, kind: str, numbers: Any, missing: bool, **more: Any
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
            raise Unusable({name: "has numbers too large or too close to scale"})
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
                return _seconds(values, self.order)
            except HeldinError as error:
                raise HeldinError(f"column {self.name!r} held dates, but {error}") from error
        if values.dtype.kind not in "iufc":
            texts, values = values, _parse_numbers(values, self.decimal)
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


def _date_order(name: str, present: Any, order: str) -> str | None:
    """Return the order of day, month and year; None if the column holds no dates."""
    if present.dtype.kind == "M":
        return "ymd"
    if len(present) and all(hasattr(v, "isoformat") and hasattr(v, "year") for v in present):
        return "ymd"
    if not all(isinstance(v, str) for v in present):
        return None
    written = date_order(present.unique())
    if written == "either" and order == "auto":
        raise Unusable(
            {
                name: f"holds dates ({present.iloc[0]!r}) in which day and month cannot be told "
                "apart; say --dates dmy or --dates mdy"
            }
        )
    return order if written == "either" else written


def _no_categories(name: str, texts: Sequence[str], different: Sequence[str]) -> str:
    """Return why texts are no categories; empty if they are.

    Times, free text, and numbers among which there is something else are none.
    """
    clocks = [t for t in different if CLOCK.match(t)]
    dated = clocks or [t for t in different if date_order([t]) is not None]
    if len(dated) > len(different) / 2:
        what = "times" if clocks else "dates, but not in all rows, or not in one order"
        return f"holds dates or times ({dated[0]!r}): {what}; make them numbers"
    first = different[0]
    if decimal_mark(different) == "either":
        return (
            f"holds numbers ({first!r}) that may have thousands or decimals; say --decimal , or "
            "--decimal ."
        )
    odd = [t for t in different if decimal_mark([t]) is None]
    if odd and len(odd) < len(different) / 2 and len(different) > 4:
        return (
            f"holds numbers, but also {odd[0]!r}; if that means missing, say --missing {odd[0]!r}, "
            "else clean it"
        )
    words = sum(len(t.split()) for t in different) / len(different)
    if len(different) == len(texts) > 10 and words < 2:
        return (
            f"is different in every row ({first[:30]!r} for instance), as IDs and names are; "
            f"--id {name!r} keeps it for the predictions"
        )
    many = len(different) > max(10, len(texts) / 2) or len(different) > CATEGORIES
    if many or (words >= 4 and len(different) > 10):
        return (
            f"holds free text or names ({len(different)} different values in {len(texts)} rows, "
            f"{first[:30]!r} for instance), not categories"
        )
    return ""


@dataclass(frozen=True)
class Columns:
    """The columns of a table, by their use."""

    used: tuple[Column, ...]  # become inputs
    constant: tuple[str, ...] = ()  # names: the same in all rows
    unusable: tuple[str, ...] = ()  # names: left out, as they cannot become numbers

    @classmethod
    def learn(
        cls,
        frame: Any,
        leave_out: Sequence[str] = (),
        decimal: str | None = None,
        dates: str = "auto",
        drop_unusable: bool = False,
    ) -> Columns:
        """Return the columns of a training table; one error names all that cannot be used."""
        names = [name for name in frame.columns if name not in leave_out]
        if not names:
            raise HeldinError("there is no column to predict from, only the target")
        learnt: dict[str, Column | None] = {}
        reasons: dict[str, str] = {}  # why a column cannot be used
        for name in names:
            try:
                learnt[name] = Column.learn(name, frame[name], decimal, dates)
            except Unusable as error:
                reasons |= error.reasons
        if reasons and not drop_unusable:
            raise Unusable(reasons)
        used = tuple(column for column in learnt.values() if column is not None)
        if not used:
            why = "cannot be used" if reasons else "has the same value in all rows"
            listed = ", ".join(map(repr, names[:8]))
            raise HeldinError(f"every column {why}, so there is nothing to learn from: {listed}")
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

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Columns:
        """Return the columns that `dataclasses.asdict` described."""
        used = [Column(**{**c, "categories": tuple(c["categories"])}) for c in data["used"]]
        return cls(tuple(used), tuple(data["constant"]), tuple(data["unusable"]))
