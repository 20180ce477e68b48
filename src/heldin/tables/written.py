"""Numbers and dates as people write them: 1.234,50 EUR, 12 %, 31.12.2024.

A way of writing is only taken where a whole column leaves no doubt; else it is asked for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

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
    "parse_numbers",
    "parsed",
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
            (name,) = self.reasons
            super().__init__(f"{lines[0]}; leave it out: --drop {name!r}")
        else:
            each = "\n  ".join(lines)
            super().__init__(
                f"{len(lines)} columns cannot be used:\n  {each}\n--drop-unusable leaves them out"
            )


def _bare(text: str) -> tuple[str, str] | None:
    """A number without its unit and gaps, and the unit; None if it is no number."""
    found = UNIT.fullmatch(text)
    if found is None or (found["before"] and found["after"]):
        return None
    return found["sign"] + GAPS.sub("", found["number"]), found["before"] or found["after"] or ""


def decimal_mark(texts: Sequence[str]) -> Decimal | Literal["either"] | None:
    """What stands before the decimals in all of some texts; None if they are not numbers.

    >>> decimal_mark(["1.234,50 €", "7,00 €"]), decimal_mark(["$1,234.50"]), decimal_mark(["a"])
    (',', '.', None)
    >>> decimal_mark(["1,234", "5,678"])                 # thousands, or three decimals?
    'either'
    """
    bare = [_bare(text) for text in texts]
    if not bare or None in bare or len({unit for _, unit in bare if unit}) > 1:  # type: ignore[misc]
        return None
    numbers = [number for number, _ in bare]  # type: ignore[misc]
    point, comma = (all(FORMS[m].fullmatch(n) for n in numbers) for m in (".", ","))
    if point and comma:
        return "either" if any("," in n or "." in n for n in numbers) else "."
    return "." if point else "," if comma else None


def parse_numbers(texts: Sequence[str], decimal: Decimal) -> list[float | None]:
    """The numbers, None where a text is none.

    >>> parse_numbers(["1'234,5 CHF", "-3,25", "x"], ",")
    [1234.5, -3.25, None]
    """
    thousands = "." if decimal == "," else ","
    found: list[float | None] = []
    for text in texts:
        bare = _bare(text)
        number = bare[0] if bare is not None else text.strip()
        fits = FORMS[decimal].fullmatch(number)
        if not fits:
            try:
                found.append(float(text))  # 1e-3, nan: as Python writes them
            except ValueError:
                found.append(None)
            continue
        found.append(float(number.replace(thousands, "").replace(decimal, ".")))
    return found


def is_number(values: Any) -> bool:
    """Whether a column of pandas holds numbers, as such."""
    import pandas

    types = pandas.api.types
    return bool(types.is_numeric_dtype(values.dtype)) and not types.is_bool_dtype(values.dtype)


def parsed(values: Any, decimal: Decimal) -> Any:
    """A column of texts as one of numbers, nan where a text is none."""
    import pandas

    texts = [None if gone else str(v) for v, gone in zip(values, values.isna(), strict=True)]
    numbers = iter(parse_numbers([t for t in texts if t is not None], decimal))
    found = [math.nan if t is None else next(numbers) for t in texts]
    plain = [math.nan if number is None else number for number in found]
    return pandas.Series(plain, index=values.index, name=values.name, dtype=float)


def with_numbers(
    frame: Any, leave: Sequence[str] = (), known: Mapping[str, Decimal] | None = None
) -> tuple[Any, dict[str, Decimal]]:
    """A table in which columns that surely hold numbers, though written as texts, are numbers.

    Args:
        frame: the table.
        leave: columns that stay as they are.
        known: by column what stands before the decimals, where that was said.

    Returns:
        The table, and by column what stood before the decimals.
    """
    known = known or {}
    found = {name: mark for name, mark in known.items() if is_number(frame[name])}
    numbers: dict[str, Any] = {}
    for name in frame.columns:
        values = frame[name]
        if name in leave or is_number(values):
            continue
        there = values.dropna()
        if not len(there) or not all(isinstance(v, str) for v in there):
            continue
        mark = decimal_mark([str(v) for v in there.unique()])
        if mark == "either":
            mark = known.get(name)
        if mark in (".", ","):
            found[name] = mark
            numbers[name] = parsed(values, found[name])
    return (frame.assign(**numbers) if numbers else frame), found


def looks_like_id(name: str, values: Any) -> bool:
    """Whole numbers, different in every row, that are counted up or whose column is called an ID.

    >>> import pandas
    >>> looks_like_id("customer_id", pandas.Series(range(0, 60, 2)))
    True
    >>> looks_like_id("height", pandas.Series(range(0, 60, 2)))
    False
    """
    import pandas

    there = values.dropna()
    if len(there) < 20 or not pandas.api.types.is_integer_dtype(there) or not there.is_unique:
        return False
    counted = (there.diff().dropna() == 1).all()
    return bool(counted) or ID_NAME.search(name) is not None


def date_order(texts: Sequence[str]) -> Order | Literal["either"] | None:
    """How days are written in all of some texts; None if they are not days.

    >>> date_order(["2024-01-31"]), date_order(["31.12.2024"]), date_order(["12/31/2024"])
    ('ymd', 'dmy', 'mdy')
    >>> date_order(["01/02/2024"])                         # January or February?
    'either'
    """
    found = [DAY.fullmatch(text) for text in texts]
    if not found or not all(found):
        return None
    years_first = [bool(f["y"]) for f in found if f]
    if any(years_first):
        return "ymd" if all(years_first) else None
    first = max(int(f["a"]) for f in found if f)
    second = max(int(f["b"]) for f in found if f)
    if first > 12 and second > 12:
        return None
    if first > 12 or all(f["mark"] == "." for f in found if f):  # points: the day is first
        return "dmy" if second <= 12 else "mdy"
    return "mdy" if second > 12 else "either"


def parse_dates(values: Any, order: Order) -> Any:
    """A pandas Series of times; what is no date in this order is an error."""
    import pandas

    if pandas.api.types.is_datetime64_any_dtype(values.dtype):
        return pandas.to_datetime(values, utc=True).dt.tz_localize(None)
    texts = values.astype("string").str.strip()
    found = pandas.to_datetime(
        texts, format="mixed", dayfirst=order == "dmy", errors="coerce", utc=True
    ).dt.tz_localize(None)
    wrong = values[found.isna() & values.notna()]
    if len(wrong):
        raise HeldinError(f"row {wrong.index[0] + 1} has {wrong.iloc[0]!r}, which is no date")
    return found
