"""Tables from CSV and Parquet files; every problem is an error of one line."""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import io
import lzma
import re
import warnings
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pandas
from pandas.errors import EmptyDataError, ParserError, ParserWarning

from heldin.errors import HeldinError, did_you_mean

__all__ = ["find_separator", "read_table", "refuse_missing"]

BYTE_ORDER_MARKS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
GUESS = "cp1252"  # suggested for files that are not UTF-8
SEPARATORS = ",;\t|"
FIRST_LINES = 50  # lines from which the separator is found
OPENERS: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}


def read_table(
    path: str | Path,
    *,
    separator: str | None = None,
    missing: Sequence[str] = (),
    encoding: str | None = None,
    otherwise: str | None = None,
    decimal: str | None = None,
    texts: Sequence[str] = (),
) -> Any:
    """Read a CSV or Parquet file into a DataFrame.

    Args:
        path: the ending of its name says what is in it.
        separator, encoding, decimal: of a CSV file; None: found in it.
        missing: texts for a missing value, besides those of pandas ("", "NA", "nan", "null" ...).
        otherwise: encoding to try if that of the file is not the one found.
        texts: columns to read as texts, such as IDs with leading zeros.
    """
    path = Path(path)
    if not path.is_file():
        raise HeldinError(f"{path}: there is no such file")
    ending = next((s for s in reversed(path.suffixes) if s not in OPENERS), "")
    if ending in (".parquet", ".pq"):
        frame = _read_parquet(path)
    elif ending in (".csv", ".tsv", ".txt"):
        separator = "\t" if ending == ".tsv" and separator is None else separator
        options: dict[str, Any] = {"na_values": list(missing), "dtype": dict.fromkeys(texts, str)}
        if decimal is not None:
            options["decimal"] = decimal
        frame = _read_csv(path, separator, encoding, otherwise, options)
    else:
        raise HeldinError(
            f"{path}: the name must end in .csv, .csv.gz, .tsv, .parquet or .pq to say what is in "
            "the file"
        )
    frame.columns = frame.columns.map(str)
    duplicates = frame.columns[frame.columns.duplicated()]
    if len(duplicates):
        raise HeldinError(f"{path}: two columns are called {min(duplicates)!r}; rename one")
    if not len(frame):
        raise HeldinError(f"{path}: there are no rows")
    return frame.reset_index(drop=True)


def find_separator(lines: Sequence[str]) -> str:
    """Return the separator that gives the header most fields, and no line more than the header."""
    counts: dict[str, list[int]] = {}
    for mark in SEPARATORS:
        try:
            counts[mark] = [len(fields) for fields in csv.reader(lines, delimiter=mark)] or [0]
        except csv.Error:  # pandas will report it
            continue
    several = any(fields[0] > 1 for fields in counts.values())  # else there is one column
    fitting = [m for m, n in counts.items() if n[0] == max(n) and (n[0] > 1 or not several)]
    return max(fitting, key=lambda mark: counts[mark][0], default=",")


def _read_parquet(path: Path) -> Any:
    try:
        return pandas.read_parquet(path)
    except ImportError as error:
        raise HeldinError(f"{path}: Parquet: pip install 'heldin[parquet]'") from error
    except Exception as error:  # pyarrow's errors have no common class
        raise HeldinError(f"{path}: not a Parquet file ({_first_line(error)})") from error


def _open(path: Path) -> Any:
    """Open a file, which may be compressed, for its bytes."""
    return OPENERS.get(path.suffix, open)(path, "rb")


def _encoding(path: Path, encoding: str | None) -> str:
    if encoding is not None:
        try:
            codecs.lookup(encoding)
        except LookupError as error:
            raise HeldinError(
                f"--encoding: {encoding!r} is unknown; utf-8, cp1252, latin-1 and utf-16 are common"
            ) from error
        return encoding
    with _open(path) as file:
        start = file.read(4)
    marks = BYTE_ORDER_MARKS.items()
    return next((name for mark, name in marks if start.startswith(mark)), "utf-8")


def _not_utf8(path: Path) -> str:
    """Return a message that shows the file in the most common other encoding."""
    with _open(path) as file:
        for line in file:
            try:
                line.decode("utf-8")
            except UnicodeDecodeError:
                text = line.decode(GUESS, "replace").strip()
                word = next((w for w in re.split(r"[,;\t|]", text) if not w.isascii()), text)
                return (
                    f"{path}: not UTF-8 text. With --encoding {GUESS} it would read {word[:40]!r}; "
                    "if that is right, say so"
                )
    return f"{path}: not UTF-8 text; say --encoding NAME"


def _read_csv(
    path: Path,
    separator: str | None,
    encoding: str | None,
    otherwise: str | None,
    options: dict[str, Any],
) -> Any:
    try:
        found = _encoding(path, encoding)
        if separator is None:
            with _open(path) as file, io.TextIOWrapper(file, found, newline="") as texts:
                separator = find_separator(list(islice(texts, FIRST_LINES)))
        return _parse_csv(path, {"sep": separator, "encoding": found}, options)
    except EmptyDataError as error:
        raise HeldinError(f"{path}: the file is empty") from error
    except ParserWarning as error:
        raise HeldinError(
            f"{path}: rows have more fields than the header has names; is a field with "
            f"{separator!r} in it not in quotes, or does another --separator divide them?"
        ) from error
    except ParserError as error:
        raise HeldinError(f"{path}: malformed CSV: {_first_line(error)}") from error
    except UnicodeError as error:
        if encoding is None and otherwise is not None:
            return _read_csv(path, separator, otherwise, None, options)
        text = f"{path}: not {encoding} text" if encoding else _not_utf8(path)
        raise HeldinError(text) from error
    except (OSError, EOFError) as error:
        raise HeldinError(f"{path}: cannot be read ({_first_line(error)})") from error


def _parse_csv(path: Path, dialect: dict[str, Any], options: dict[str, Any]) -> Any:
    """Return the table, with the names of the header as they are written."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", ParserWarning)
        header = pandas.read_csv(path, header=None, nrows=1, dtype=str, **dialect)
        # in one piece, in which a column has one dtype
        frame = pandas.read_csv(path, index_col=False, low_memory=False, **dialect, **options)
    names = [str(name) for name in header.iloc[0]]
    if len(names) == len(frame.columns):
        frame.columns = names  # pandas numbers names that occur twice
    return frame


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines() or [type(error).__name__]
    return text[0].removeprefix("Error tokenizing data. C error: ")


def refuse_missing(frame: Any, names: Sequence[str], path: str | Path, what: str) -> None:
    """Refuse a table without these columns; `what` is one of them in words."""
    absent = [name for name in names if name not in frame.columns]
    if not absent:
        return
    shown = ", ".join(map(repr, frame.columns[:8])) + (", ..." if len(frame.columns) > 8 else "")
    if len(absent) > 1:
        listed = ", ".join(map(repr, absent))
        problem = f"{len(absent)} columns are not there: {listed}"
    else:
        hint = did_you_mean(absent[0], frame.columns)
        problem = f"{what} {absent[0]!r} is not there" + (f"; {hint}" if hint else "")
    raise HeldinError(f"{path}: {problem} (columns: {shown})")
