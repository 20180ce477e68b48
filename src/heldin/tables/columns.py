"""Columns of a table: understood, and turned into numbers.

What is learnt from the training table (means, spreads, categories) is plain data, so that it can be
stored as JSON and used on another table.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from heldin.errors import HeldinError

from .reading import pandas_module, refuse_missing
from .written import (
    Decimal,
    Order,
    Unusable,
    date_order,
    decimal_mark,
    is_number,
    parse_dates,
    parsed,
)

__all__ = ["Column", "Columns", "category"]

CATEGORIES = 1000  # different values beyond which a column is no category
CLOCK = re.compile(r"\s*\d{1,2}:\d{2}(:\d{2}(\.\d+)?)?\s*([aApP][mM])?$")
SINGLE = 2**22  # numbers beyond which a table is kept in single precision, for the room
DAY = 86_400  # seconds
TURNS = (365.2425 * DAY, 7 * DAY)  # of a year and a week; a day's where there are times of day


def category(value: Any) -> str:
    """How a value is written as a category: 1.0 and 1 are the same.

    >>> category(1.0), category(True), category("a ")
    ('1', 'True', 'a')
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value).strip()


@dataclass(frozen=True)
class Column:
    """A column and what was learnt of it.

    Attributes:
        name: in the table.
        kind: "number", "category" or "date".
        mean, spread: of the numbers that are there; of a date in seconds.
        categories: the values of a category, sorted.
        missing: whether values were missing, which then is an input of its own.
        decimal: what stands before the decimals, in numbers that are written as texts.
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
        """Number of inputs that the column becomes."""
        if self.kind == "date":
            return 1 + 2 * (len(TURNS) + self.clock) + self.missing
        return (len(self.categories) if self.kind == "category" else 1) + self.missing

    @classmethod
    def learn(
        cls,
        name: str,
        values: Any,
        decimal: Decimal = ".",
        order: Literal["auto", "dmy", "mdy"] = "auto",
    ) -> Column | None:
        """From the training table; None if nothing varies. What cannot be used is `Unusable`."""
        missing = bool(values.isna().any())
        there = values.dropna()
        if is_number(values):
            return cls._number(name, there, missing, decimal)
        if pandas_module().api.types.is_timedelta64_dtype(values.dtype):
            raise _unusable(name, f"holds durations ({str(there.iloc[0])!r}): make them numbers")
        found = _date(name, values, order)
        if found is not None:
            return cls._day(name, parse_dates(there, found), missing, found)
        texts = _texts(name, there)
        known = tuple(sorted(set(texts)))
        if len(known) + missing < 2:
            return None
        _refuse_text(name, texts, known)
        return cls(name, "category", 0.0, 1.0, known, missing)

    @classmethod
    def _number(cls, name: str, there: Any, missing: bool, decimal: Decimal) -> Column | None:
        import numpy as np

        numbers = there.to_numpy(float)
        if not np.isfinite(numbers).all():
            raise _unusable(name, "has infinite values; clean them")
        if not (len(numbers) and numbers.min() < numbers.max()):
            gaps = missing and len(numbers)
            return cls(name, "number", float(numbers[0]), 1.0, (), True) if gaps else None
        spread = float(numbers.std())
        if not math.isfinite(spread) or spread == 0.0:
            raise _unusable(name, "has numbers too large or too close to scale")
        return cls(name, "number", float(numbers.mean()), spread, (), missing, decimal)

    @classmethod
    def _day(cls, name: str, times: Any, missing: bool, order: Order) -> Column | None:
        seconds = _seconds(times)
        if not len(seconds) or (seconds.min() == seconds.max() and not missing):
            return None
        clock = bool((seconds % DAY != 0).any())
        spread = float(seconds.std()) or 1.0
        return cls(
            name, "date", float(seconds.mean()), spread, (), missing, order=order, clock=clock
        )

    def encode(self, values: Any) -> tuple[Any, int]:
        """(n, width) numbers, and how many rows have a category that was not there in training."""
        import numpy as np

        absent = values.isna().to_numpy()
        unknown = 0
        if self.kind == "number":
            numbers = self._numbers(values)
            scaled = np.where(absent, 0.0, (numbers - self.mean) / self.spread)[:, None]
        elif self.kind == "date":
            scaled = np.where(absent[:, None], 0.0, self._turns(values))
        else:
            codes = self._codes(values, absent)
            scaled = (codes[:, None] == np.arange(len(self.categories))).astype(float)
            unknown = int(((codes < 0) & ~absent).sum())
        if self.missing:
            scaled = np.hstack([scaled, absent[:, None].astype(float)])
        return scaled, unknown

    def _codes(self, values: Any, absent: Any) -> Any:
        """Numbers of the categories, -1 for none of them: one look-up for each different value."""
        import numpy as np

        place = {text: i for i, text in enumerate(self.categories)}
        inverse, different = pandas_module().factorize(values)
        codes = np.array([place.get(category(v), -1) for v in different] + [-1])
        return codes[np.where(absent, len(different), inverse)]

    def _turns(self, values: Any) -> Any:
        """How long ago, and the hands of a clock for year and week (and day)."""
        import numpy as np

        try:
            seconds = _seconds(parse_dates(values, self.order))
        except HeldinError as error:
            raise HeldinError(f"column {self.name!r} held dates, but {error}") from error
        hands = [*TURNS, DAY] if self.clock else TURNS
        angles = [2 * np.pi * seconds / turn for turn in hands]
        parts = [f(angle) for angle in angles for f in (np.sin, np.cos)]
        return np.column_stack([(seconds - self.mean) / self.spread, *parts])

    def _numbers(self, values: Any) -> Any:
        import numpy as np

        if not is_number(values):
            found = parsed(values, self.decimal)
            wrong = values[found.isna() & values.notna()]
            if len(wrong):
                raise HeldinError(
                    f"column {self.name!r} held numbers in training, but row {wrong.index[0] + 1} "
                    f"has {wrong.iloc[0]!r}"
                )
            values = found
        numbers = values.to_numpy(float, na_value=math.nan)
        if np.isinf(numbers).any():
            raise HeldinError(f"column {self.name!r} has infinite values")
        return numbers


def _seconds(times: Any) -> Any:
    """Since 1970; nan where a time is missing."""
    import numpy as np

    raw = times.to_numpy("datetime64[s]")
    return np.where(np.isnat(raw), np.nan, raw.astype("int64"))


def _unusable(name: str, reason: str) -> Unusable:
    return Unusable({name: f"column {name!r} {reason}"})


def _date(name: str, values: Any, order: str) -> Order | None:
    """How dates are written in a column; None if it holds none."""
    there = values.dropna()
    if pandas_module().api.types.is_datetime64_any_dtype(values.dtype):
        return "ymd"
    if len(there) and all(hasattr(v, "isoformat") and hasattr(v, "year") for v in there):
        return "ymd"
    if not len(there) or not all(isinstance(v, str) for v in there):
        return None
    found = date_order([str(v) for v in there.unique()])
    if found == "either":
        if order == "auto":
            raise _unusable(
                name,
                f"holds dates ({there.iloc[0]!r}) in which day and month cannot be told apart; say "
                "--dates dmy or --dates mdy",
            )
        return order  # type: ignore[return-value]
    return found


def _texts(name: str, there: Any) -> list[str]:
    for value in there:
        if not isinstance(value, (str, bool, int, float)) and not hasattr(value, "item"):
            if hasattr(value, "isoformat"):
                raise _unusable(name, f"holds times ({str(value)!r}): make them numbers")
            raise _unusable(name, f"holds values of type {type(value).__name__}")
    return [category(value) for value in there]


def _refuse_text(name: str, texts: Sequence[str], known: Sequence[str]) -> None:
    """Times, free text and numbers with a blemish are not categories."""
    clocks = [t for t in known if CLOCK.match(t)]
    dated = clocks or [t for t in known if date_order([t]) is not None]
    if len(dated) > len(known) / 2:
        what = "times" if clocks else "dates, but not in all rows, or not in one order"
        raise _unusable(name, f"holds dates or times ({dated[0]!r}): {what}; make them numbers")
    if decimal_mark(known) == "either":
        raise _unusable(
            name,
            f"holds numbers ({known[0]!r}) that may have thousands or decimals; say --decimal , or "
            "--decimal .",
        )
    odd = [t for t in known if decimal_mark([t]) is None]
    if odd and len(odd) < len(known) / 2 and len(known) > 4:
        raise _unusable(
            name,
            f"holds numbers, but also {odd[0]!r}; if that means missing, say --missing {odd[0]!r}, "
            "else clean it",
        )
    words = sum(len(t.split()) for t in known) / len(known)
    if len(known) == len(texts) > 10 and words < 2:
        raise _unusable(
            name,
            f"is different in every row ({known[0][:30]!r} for instance), as IDs and names are; "
            f"--id {name!r} keeps it for the predictions",
        )
    wordy = words >= 4
    many = len(known) > max(10, len(texts) / 2) or len(known) > CATEGORIES
    if many or (wordy and len(known) > 10):
        raise _unusable(
            name,
            f"holds free text or names ({len(known)} different values in {len(texts)} rows, "
            f"{known[0][:30]!r} for instance), not categories",
        )


@dataclass(frozen=True)
class Columns:
    """All columns that become inputs, in their order, and those that never vary.

    Attributes:
        used: they become inputs.
        constant: names of those that are the same in all rows.
        unusable: names of those that were left out because they cannot become numbers.
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
        """From the training table; all columns that cannot be used are named in one error.

        Args:
            frame: the table.
            leave_out: names of columns that are no inputs.
            decimals: what stands before the decimals, by column, where it is not a point.
            dates: the order of day and month where the dates themselves do not tell.
            drop_unusable: leave out what cannot be used.
        """
        names = [name for name in frame.columns if name not in leave_out]
        if not names:
            raise HeldinError("there is no column to predict from, only the target")
        learnt: dict[str, Column | None] = {}
        wrong: dict[str, str] = {}
        for name in names:
            decimal: Decimal = (decimals or {}).get(name, ".")
            try:
                learnt[name] = Column.learn(name, frame[name], decimal, dates)
            except Unusable as error:
                wrong |= error.reasons
        if wrong and not drop_unusable:
            raise Unusable(wrong)
        used = tuple(column for column in learnt.values() if column is not None)
        constant = tuple(name for name, column in learnt.items() if column is None)
        if not used:
            why = "cannot be used" if wrong else "has the same value in all rows"
            raise HeldinError(
                f"every column {why}, so there is nothing to learn from: "
                + ", ".join(map(repr, names[:8]))
            )
        return cls(used, constant, tuple(wrong))

    @property
    def decimal_commas(self) -> list[str]:
        """Names of those with a comma before decimals: 1.500 is no number like others there."""
        return [column.name for column in self.used if column.decimal == ","]

    def encode(self, frame: Any, path: str | Path) -> tuple[Any, dict[str, int]]:
        """(n, inputs) numbers, and by column how many rows have an unknown category.

        Tables with more than four million numbers are in single precision.
        """
        import numpy as np

        refuse_missing(frame, [column.name for column in self.used], path, "the column")
        unknown = {}
        width = sum(column.width for column in self.used)
        precise = len(frame) * width <= SINGLE
        inputs = np.empty((len(frame), width), np.float64 if precise else np.float32)
        at = 0
        for column in self.used:
            try:
                part, count = column.encode(frame[column.name])
            except HeldinError as error:
                raise HeldinError(f"{path}: {error}") from error
            inputs[:, at : at + column.width] = part
            at += column.width
            if count:
                unknown[column.name] = count
        return inputs, unknown

    def to_json(self) -> dict[str, Any]:
        """Lists, texts and numbers."""
        return {
            "used": [asdict(c) for c in self.used],
            "constant": list(self.constant),
            "unusable": list(self.unusable),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Columns:
        """What `to_json` gave."""
        used = [Column(**{**c, "categories": tuple(c["categories"])}) for c in data["used"]]
        return cls(tuple(used), tuple(data["constant"]), tuple(data.get("unusable", ())))
