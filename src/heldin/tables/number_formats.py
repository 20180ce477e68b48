"""Numbers and dates written as text: 1.234,50 EUR, 12 %, 31.12.2024.

A format is assumed only if it fits a whole column and no other one does.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import pandas
from pandas.api.types import (
    is_bool_dtype,
    is_datetime64_any_dtype,
    is_integer_dtype,
    is_numeric_dtype,
)

from heldin.errors import HeldinError

__all__ = [
    "Decimal",
    "Order",
    "Unusable",
    "date_order",
    "decimal_mark",
    "is_number",
    "looks_like_id",
    "parse_dates",
    "parse_number",
    "parse_numbers",
    "with_numbers",
]

Decimal = Literal[".", ","]
Order = Literal["ymd", "dmy", "mdy"]

MONEY = "[$€£¥₹]|AUD|BRL|CAD|CHF|CNY|CZK|DKK|EUR|GBP|INR|JPY|NOK|PLN|SEK|USD"
UNIT = re.compile(
    rf"\s*(?P<sign>[-+]?)\s*(?P<before>{MONEY})?\s*"
    rf"(?P<number>[-+]?[\d.,'\u2019 \u00a0\u202f]*\d)\s*(?P<after>%|{MONEY})?\s*"
)
ID_NAME = re.compile(r"(^|[_\W])(id|uuid|guid|key|index|nr|number)$|Id$|ID$")
GAPS = re.compile(r"['\u2019 \u00a0\u202f](?=\d{3}(?!\d))")  # between thousands
FORMS = {
    ".": re.compile(r"[-+]?(\d{1,3}(,\d{3})+|\d+)(\.\d+)?"),
    ",": re.compile(r"[-+]?(\d{1,3}(\.\d{3})+|\d+)(,\d+)?"),
}
DAY = re.compile(
    r"\s*(?:(?P<y>\d{4})[-/.](?P<m>\d{1,2})[-/.](?P<d>\d{1,2})"
    r"|(?P<a>\d{1,2})(?P<mark>[-/.])(?P<b>\d{1,2})[-/.](?P<year>\d{4}|\d{2}))"
    r"(?:[T ,]\s*(?P<time>\d{1,2}:\d{2}.*))?\s*"
)


class Unusable(HeldinError):
    """Columns that cannot become numbers.

    Attributes:
        reasons: by the names of the columns.
    """

    def __init__(self, reasons: Mapping[str, str]) -> None:
        self.reasons = dict(reasons)
        lines = list(self.reasons.values())
        if len(lines) == 1:
            super().__init__(f"{lines[0]}; leave it out: --drop {next(iter(reasons))!r}")
        else:
            listed = "\n  ".join(lines)
            super().__init__(
                f"{len(lines)} columns cannot be used:\n  {listed}\n--drop-unusable leaves them out"
            )


def _split_unit(text: str) -> tuple[str, str] | None:
    """Return a number without unit and gaps, and the unit; None if the text is no number."""
    parts = UNIT.fullmatch(text)
    if parts is None or (parts["before"] and parts["after"]):
        return None
    return parts["sign"] + GAPS.sub("", parts["number"]), parts["before"] or parts["after"] or ""


def decimal_mark(texts: Sequence[str]) -> Decimal | Literal["either"] | None:
    """Return the decimal mark that fits all texts; None if they are not numbers.

    >>> decimal_mark(["1.234,50 €", "7,00 €"]), decimal_mark(["$1,234.50"]), decimal_mark(["a"])
    (',', '.', None)
    >>> decimal_mark(["1,234", "5,678"])                 # thousands, or three decimals?
    'either'
    """
    pairs = [pair for pair in map(_split_unit, texts) if pair is not None]
    if not pairs or len(pairs) < len(texts) or len({unit for _, unit in pairs if unit}) > 1:
        return None
    point, comma = (all(FORMS[mark].fullmatch(number) for number, _ in pairs) for mark in ".,")
    if point and comma:
        return "either" if any("," in n or "." in n for n, _ in pairs) else "."
    return "." if point else "," if comma else None


def parse_number(text: str, decimal: Decimal) -> float:
    """Return a number, or nan if the text is none.

    >>> [parse_number(text, ",") for text in ("1'234,5 CHF", "-3,25", "x")]
    [1234.5, -3.25, nan]
    """
    number, _ = _split_unit(text) or (text.strip(), "")
    if FORMS[decimal].fullmatch(number):
        return float(number.replace("." if decimal == "," else ",", "").replace(decimal, "."))
    try:
        return float(text)  # 1e-3
    except ValueError:
        return math.nan


def parse_numbers(values: Any, decimal: Decimal) -> Any:
    """Return a column of texts as numbers, with nan for texts that are none."""
    parsed = values.astype(object).map(lambda v: parse_number(str(v), decimal), na_action="ignore")
    return parsed.astype(float)


def is_number(values: Any) -> bool:
    """Return whether the dtype of a column is a number."""
    return bool(is_numeric_dtype(values.dtype)) and not is_bool_dtype(values.dtype)


def with_numbers(
    frame: Any, leave: Sequence[str] = (), marks: Mapping[str, Decimal] | None = None
) -> tuple[Any, dict[str, Decimal]]:
    """Convert columns of texts that are certainly numbers.

    Args:
        frame: the table.
        leave: columns to leave as they are.
        marks: decimal marks that the user gave, by column.

    Returns:
        The table, and the decimal marks by column.
    """
    marks = marks or {}
    used = {name: mark for name, mark in marks.items() if is_number(frame[name])}
    numbers: dict[str, Any] = {}
    for name in frame.columns:
        present = frame[name].dropna()
        if name in leave or is_number(present) or not all(isinstance(v, str) for v in present):
            continue
        mark = decimal_mark([str(v) for v in present.unique()])
        mark = marks.get(name) if mark == "either" else mark
        if mark in (".", ","):
            used[name] = mark
            numbers[name] = parse_numbers(frame[name], mark)
    return frame.assign(**numbers), used


def looks_like_id(name: str, values: Any) -> bool:
    """Return whether a column has unique whole numbers that count up, or the name of an ID.

    >>> looks_like_id("customer_id", pandas.Series(range(0, 60, 2)))
    True
    >>> looks_like_id("height", pandas.Series(range(0, 60, 2)))
    False
    """
    present = values.dropna()
    if len(present) < 20 or not is_integer_dtype(present) or not present.is_unique:
        return False
    return bool((present.diff().dropna() == 1).all()) or ID_NAME.search(name) is not None


def date_order(texts: Sequence[str]) -> Order | Literal["either"] | None:
    """Return the order of day, month and year that fits all texts; None if they are no dates.

    >>> date_order(["2024-01-31"]), date_order(["31.12.2024"]), date_order(["12/31/2024"])
    ('ymd', 'dmy', 'mdy')
    >>> date_order(["01/02/2024"])                         # January or February?
    'either'
    """
    dates = [date for date in map(DAY.fullmatch, texts) if date is not None]
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


def parse_dates(values: Any, order: Order) -> Any:
    """Return a column as times without a zone; refuse values that are no dates."""
    if is_datetime64_any_dtype(values.dtype):
        return pandas.to_datetime(values, utc=True).dt.tz_localize(None)
    times = pandas.to_datetime(
        values.astype("string").str.strip(),
        format="mixed",
        dayfirst=order == "dmy",
        errors="coerce",
        utc=True,
    ).dt.tz_localize(None)
    texts = values[times.isna() & values.notna()]
    if len(texts):
        raise HeldinError(f"row {texts.index[0] + 1} has {texts.iloc[0]!r}, which is no date")
    return times
