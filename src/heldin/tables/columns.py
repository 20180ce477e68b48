"""Tables of numbers and categories: read, understood, turned into numbers.

What is learnt from the training table (means, spreads, categories) is plain data, so that it can be
stored as JSON and used on another table.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from heldin.errors import HeldinError

__all__ = ["Column", "Columns", "category", "named", "read_table"]

CATEGORIES = 1000  # different values beyond which a column is no category
DATE = re.compile(r"\s*(\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.]\d{2,4})([T ,].*)?$")
CLOCK = re.compile(r"\s*\d{1,2}:\d{2}(:\d{2}(\.\d+)?)?\s*([aApP][mM])?$")


# -- reading


def read_table(path: str | Path, *, separator: str = ",", missing: Sequence[str] = ()) -> Any:
    """A pandas DataFrame from a CSV or Parquet file; whatever is wrong with it is one line.

    Args:
        path: a file whose name ends in .csv (perhaps compressed, .csv.gz), .tsv, .parquet or .pq.
        separator: between the fields of a CSV file.
        missing: further texts that mean that a value is missing ("", "NA", "nan", "null" and such
            do anyway).
    """
    pandas = _pandas()
    path = Path(path)
    if not path.is_file():
        raise HeldinError(f"{path}: there is no such file")
    ending = next((s for s in reversed(path.suffixes) if s not in (".gz", ".bz2", ".xz")), "")
    if ending in (".parquet", ".pq"):
        frame = _read_parquet(pandas, path)
    elif ending in (".csv", ".tsv", ".txt"):
        frame = _read_csv(pandas, path, "\t" if ending == ".tsv" else separator, missing)
    else:
        raise HeldinError(
            f"{path}: the name must end in .csv, .csv.gz, .tsv, .parquet or .pq to say what is in "
            "the file"
        )
    frame.columns = [str(name) for name in frame.columns]
    twice = sorted({name for name in frame.columns if list(frame.columns).count(name) > 1})
    if twice:
        raise HeldinError(f"{path}: two columns are called {twice[0]!r}; rename one")
    if not len(frame):
        raise HeldinError(f"{path}: there are no rows")
    return frame.reset_index(drop=True)


def _pandas() -> Any:
    try:
        import pandas
    except ImportError as error:
        raise HeldinError("tables need pandas: pip install 'heldin[fit]'") from error
    return pandas


def _read_parquet(pandas: Any, path: Path) -> Any:
    try:
        return pandas.read_parquet(path)
    except ImportError as error:
        raise HeldinError(
            f"{path}: Parquet needs pyarrow: pip install 'heldin[parquet]'"
        ) from error
    except Exception as error:  # pyarrow's errors have no common class
        raise HeldinError(f"{path}: not a Parquet file ({_first_line(error)})") from error


def _read_csv(pandas: Any, path: Path, separator: str, missing: Sequence[str]) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pandas.errors.ParserWarning)
            options = {"sep": separator, "encoding": "utf-8-sig"}
            header = pandas.read_csv(path, header=None, nrows=1, dtype=str, **options)
            names = [str(name) for name in header.iloc[0]]
            frame = pandas.read_csv(
                path, index_col=False, low_memory=False, na_values=list(missing), **options
            )
    except pandas.errors.EmptyDataError as error:
        raise HeldinError(f"{path}: the file is empty") from error
    except pandas.errors.ParserWarning as error:
        raise HeldinError(f"{path}: rows have more fields than the header has names") from error
    except pandas.errors.ParserError as error:
        raise HeldinError(f"{path}: malformed CSV: {_first_line(error)}") from error
    except (UnicodeDecodeError, UnicodeError) as error:
        raise HeldinError(
            f"{path}: not UTF-8 text; convert it, or is it another format?"
        ) from error
    except (OSError, EOFError) as error:
        raise HeldinError(f"{path}: cannot be read ({_first_line(error)})") from error
    if len(names) == 1:
        for other in ";\t|":
            if other in names[0]:
                raise HeldinError(
                    f"{path}: there is only one column, {names[0]!r}; if {other!r} separates the "
                    f"fields, say --separator {other!r}"
                )
    if len(names) == len(frame.columns):
        frame.columns = names  # pandas would have numbered those that occur twice
    return frame


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines() or [type(error).__name__]
    return text[0].removeprefix("Error tokenizing data. C error: ")


def named(frame: Any, name: str, path: str | Path, what: str = "the target column") -> Any:
    """A column, or an error that lists what there is."""
    if name in frame.columns:
        return frame[name]
    near = get_close_matches(name, list(frame.columns), 1)
    shown = ", ".join(map(repr, frame.columns[:8])) + (", ..." if len(frame.columns) > 8 else "")
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise HeldinError(f"{path}: {what} {name!r} is not there{hint} (columns: {shown})")


# -- understanding


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
        kind: "number" or "category".
        mean, spread: of the numbers that are there.
        categories: the values of a category, sorted.
        missing: whether values were missing, which then is an input of its own.
    """

    name: str
    kind: Literal["number", "category"]
    mean: float = 0.0
    spread: float = 1.0
    categories: tuple[str, ...] = ()
    missing: bool = False

    @property
    def width(self) -> int:
        """Number of inputs that the column becomes."""
        return (len(self.categories) if self.kind == "category" else 1) + self.missing

    @classmethod
    def learn(cls, name: str, values: Any) -> Column | None:
        """From the training table; None if nothing varies."""
        pandas = _pandas()
        missing = bool(values.isna().any())
        there = values.dropna()
        if _is_number(values):
            numbers = there.to_numpy(float)
            if not all(map(math.isfinite, numbers)):
                raise HeldinError(
                    f"column {name!r} has infinite values; clean them, or {_drop(name)}"
                )
            varies = len(numbers) > 0 and numbers.min() < numbers.max()
            if not varies:
                return (
                    cls(name, "number", float(numbers[0]), 1.0, (), True)
                    if (missing and len(numbers))
                    else None
                )
            spread = float(numbers.std())
            if not math.isfinite(spread) or spread == 0.0:
                raise HeldinError(f"column {name!r} has numbers too large or too close to scale")
            return cls(name, "number", float(numbers.mean()), spread, (), missing)
        _refuse_times(pandas, name, values)
        texts = _texts(name, there)
        known = tuple(sorted(set(texts)))
        if len(known) + missing < 2:
            return None
        _refuse_text(name, texts, known)
        return cls(name, "category", 0.0, 1.0, known, missing)

    def encode(self, values: Any) -> tuple[Any, int]:
        """(n, width) numbers, and how many rows have a category that was not there in training."""
        import numpy as np

        absent = values.isna().to_numpy()
        if self.kind == "number":
            numbers = self._numbers(values)
            scaled = np.where(absent, 0.0, (numbers - self.mean) / self.spread)[:, None]
            unknown = 0
        else:
            place = {text: i for i, text in enumerate(self.categories)}
            texts = [None if gone else category(v) for v, gone in zip(values, absent, strict=True)]
            codes = np.array([-1 if t is None else place.get(t, -1) for t in texts])
            scaled = (codes[:, None] == np.arange(len(self.categories))).astype(float)
            unknown = int(((codes < 0) & ~absent).sum())
        if self.missing:
            scaled = np.hstack([scaled, absent[:, None].astype(float)])
        return scaled, unknown

    def _numbers(self, values: Any) -> Any:
        if not _is_number(values):
            found = _pandas().to_numeric(values, errors="coerce")
            wrong = values[found.isna() & values.notna()]
            if len(wrong):
                raise HeldinError(
                    f"column {self.name!r} held numbers in training, but row {wrong.index[0] + 1} "
                    f"has {wrong.iloc[0]!r}"
                )
            values = found
        numbers = values.to_numpy(float, na_value=math.nan)
        if any(map(math.isinf, numbers)):
            raise HeldinError(f"column {self.name!r} has infinite values")
        return numbers


def _drop(name: str) -> str:
    return f"leave it out: --drop {name!r}"


def _is_number(values: Any) -> bool:
    types = _pandas().api.types
    return bool(types.is_numeric_dtype(values.dtype)) and not types.is_bool_dtype(values.dtype)


def _refuse_times(pandas: Any, name: str, values: Any) -> None:
    types = pandas.api.types
    if types.is_datetime64_any_dtype(values.dtype) or types.is_timedelta64_dtype(values.dtype):
        example = str(values.dropna().iloc[0]) if values.notna().any() else ""
        raise HeldinError(_dates(name, example))


def _dates(name: str, example: str) -> str:
    return (
        f"column {name!r} holds dates or times ({example!r}), which are not understood; turn "
        f"them into numbers (days since ..., month), or {_drop(name)}"
    )


def _texts(name: str, there: Any) -> list[str]:
    for value in there:
        if not isinstance(value, (str, bool, int, float)) and not hasattr(value, "item"):
            if hasattr(value, "isoformat"):
                raise HeldinError(_dates(name, str(value)))
            raise HeldinError(
                f"column {name!r} holds values of type {type(value).__name__}; {_drop(name)}"
            )
    return [category(value) for value in there]


def _refuse_text(name: str, texts: Sequence[str], known: Sequence[str]) -> None:
    """Dates, free text and numbers with a blemish are not categories."""
    dated = [t for t in known if DATE.match(t) or CLOCK.match(t)]
    if len(dated) > len(known) / 2:
        raise HeldinError(_dates(name, dated[0]))
    odd = [t for t in known if not _reads_as_number(t)]
    if odd and len(odd) < len(known) / 2 and len(known) > 4:
        raise HeldinError(
            f"column {name!r} holds numbers, but also {odd[0]!r}; if that means missing, say "
            f"--missing {odd[0]!r}, else clean it, or {_drop(name)}"
        )
    wordy = sum(len(t.split()) for t in known) / len(known) >= 4
    many = len(known) > max(10, len(texts) / 2) or len(known) > CATEGORIES
    if many or (wordy and len(known) > 10):
        raise HeldinError(
            f"column {name!r} holds free text or names ({len(known)} different values in "
            f"{len(texts)} rows, {known[0][:30]!r} for instance), not categories; {_drop(name)}"
        )


def _reads_as_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


@dataclass(frozen=True)
class Columns:
    """All columns that become inputs, in their order, and those that never vary."""

    used: tuple[Column, ...]
    constant: tuple[str, ...] = ()

    @classmethod
    def learn(cls, frame: Any, leave_out: Sequence[str] = ()) -> Columns:
        """From the training table."""
        names = [name for name in frame.columns if name not in leave_out]
        if not names:
            raise HeldinError("there is no column to predict from, only the target")
        learnt = {name: Column.learn(name, frame[name]) for name in names}
        used = tuple(column for column in learnt.values() if column is not None)
        constant = tuple(name for name, column in learnt.items() if column is None)
        if not used:
            raise HeldinError(
                "every column has the same value in all rows, so there is nothing to learn from: "
                + ", ".join(map(repr, constant[:8]))
            )
        return cls(used, constant)

    def encode(self, frame: Any, path: str | Path) -> tuple[Any, dict[str, int]]:
        """(n, inputs) numbers, and by column how many rows have an unknown category."""
        import numpy as np

        parts, unknown = [], {}
        for column in self.used:
            values = named(frame, column.name, path, "the column")
            try:
                part, count = column.encode(values)
            except HeldinError as error:
                raise HeldinError(f"{path}: {error}") from error
            parts.append(part)
            if count:
                unknown[column.name] = count
        return np.hstack(parts), unknown

    def to_json(self) -> dict[str, Any]:
        """Lists, texts and numbers."""
        return {"used": [asdict(c) for c in self.used], "constant": list(self.constant)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Columns:
        """What `to_json` gave."""
        used = [Column(**{**c, "categories": tuple(c["categories"])}) for c in data["used"]]
        return cls(tuple(used), tuple(data["constant"]))
