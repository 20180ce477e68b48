"""Tables from files: CSV in any encoding, Parquet. Whatever is wrong with one is one line."""

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
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Any

from heldin.errors import HeldinError

__all__ = ["found_separator", "named", "pandas_module", "read_table", "refuse_missing"]

MARKS = {  # at the beginning of a file
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
GUESS = "cp1252"  # shown as an example where a file is not UTF-8
SEPARATORS = ",;\t|"
FIRST_LINES = 50  # in which the separator is looked for
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
    """A pandas DataFrame from a CSV or Parquet file; whatever is wrong with it is one line.

    Args:
        path: a file whose name ends in .csv (perhaps compressed, .csv.gz), .tsv, .parquet or .pq.
        separator: between the fields of a CSV file; by default found in its first lines.
        missing: further texts that mean that a value is missing ("", "NA", "nan", "null" and such
            do anyway).
        encoding: of a CSV file. By default UTF-8, or what its first bytes say.
        otherwise: the encoding if it is neither.
        decimal: "," or "." before the decimals; by default found out, column by column.
        texts: columns that are kept as they are written, as IDs with leading zeros.
    """
    pandas = pandas_module()
    path = Path(path)
    if not path.is_file():
        raise HeldinError(f"{path}: there is no such file")
    ending = next((s for s in reversed(path.suffixes) if s not in OPENERS), "")
    if ending in (".parquet", ".pq"):
        frame = _read_parquet(pandas, path)
    elif ending in (".csv", ".tsv", ".txt"):
        separator = "\t" if ending == ".tsv" and separator is None else separator
        options: dict[str, Any] = {"na_values": list(missing), "dtype": dict.fromkeys(texts, str)}
        if decimal is not None:
            options |= {"decimal": decimal, "thousands": "." if decimal == "," else ","}
        frame = _read_csv(pandas, path, separator, encoding, otherwise, options)
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


def found_separator(lines: Sequence[str]) -> str:
    """The mark that makes most fields of a header, and no more of any line after it.

    >>> found_separator(["name;price", "Genève;1,50"]), found_separator(["a,b", "x;y,2"])
    (';', ',')
    """
    counts: dict[str, list[int]] = {}
    for mark in SEPARATORS:
        try:
            counts[mark] = [len(fields) for fields in csv.reader(lines, delimiter=mark)] or [0]
        except csv.Error:  # what is wrong is said when the file is read
            continue
    divides = any(fields[0] > 1 for fields in counts.values())  # else there is one column
    fitting = [m for m, n in counts.items() if n[0] == max(n) and (n[0] > 1 or not divides)]
    return max(fitting, key=lambda mark: counts[mark][0], default=",")


def pandas_module() -> Any:
    """Of pandas, or an error that names the extra."""
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


def _open(path: Path) -> Any:
    """The bytes of a file that may be compressed."""
    return OPENERS.get(path.suffix, open)(path, "rb")


def _encoding(path: Path, given: str | None) -> str:
    if given is not None:
        try:
            codecs.lookup(given)
        except LookupError as error:
            raise HeldinError(
                f"--encoding: {given!r} is unknown; utf-8, cp1252, latin-1 and utf-16 are common"
            ) from error
        return given
    with _open(path) as file:
        start = file.read(4)
    return next((name for mark, name in MARKS.items() if start.startswith(mark)), "utf-8")


def _not_utf8(path: Path) -> str:
    """How a file that is not UTF-8 would read in the most common other encoding."""
    with _open(path) as file:
        for line in file:
            try:
                line.decode("utf-8")
            except UnicodeDecodeError:
                text = line.decode(GUESS, "replace").strip()
                odd = next((w for w in re.split(r"[,;\t|]", text) if not w.isascii()), text)
                return (
                    f"{path}: not UTF-8 text. With --encoding {GUESS} it would read {odd[:40]!r}; "
                    "if that is right, say so"
                )
    return f"{path}: not UTF-8 text; say --encoding NAME"


def _read_csv(
    pandas: Any,
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
                separator = found_separator(list(islice(texts, FIRST_LINES)))
        names, frame = _parsed_csv(pandas, path, {"sep": separator, "encoding": found}, options)
    except pandas.errors.EmptyDataError as error:
        raise HeldinError(f"{path}: the file is empty") from error
    except pandas.errors.ParserWarning as error:
        raise HeldinError(
            f"{path}: rows have more fields than the header has names; is a field with "
            f"{separator!r} in it not in quotes, or does another --separator divide them?"
        ) from error
    except pandas.errors.ParserError as error:
        raise HeldinError(f"{path}: malformed CSV: {_first_line(error)}") from error
    except (UnicodeDecodeError, UnicodeError) as error:
        if encoding is None and otherwise is not None:
            return _read_csv(pandas, path, separator, otherwise, None, options)
        text = f"{path}: not {encoding} text" if encoding else _not_utf8(path)
        raise HeldinError(text) from error
    except (OSError, EOFError) as error:
        raise HeldinError(f"{path}: cannot be read ({_first_line(error)})") from error
    if len(names) == len(frame.columns):
        frame.columns = names  # pandas would have numbered those that occur twice
    return frame


def _parsed_csv(
    pandas: Any, path: Path, way: dict[str, Any], options: dict[str, Any]
) -> tuple[list[str], Any]:
    """The names in the header, and the table."""
    errors = pandas.errors
    with warnings.catch_warnings():
        warnings.simplefilter("error", errors.ParserWarning)
        warnings.simplefilter("error", errors.DtypeWarning)
        header = pandas.read_csv(path, header=None, nrows=1, dtype=str, **way)
        try:  # in pieces, of which each finds out for itself what a column holds
            frame = pandas.read_csv(path, index_col=False, **way, **options)
        except errors.DtypeWarning:  # the pieces disagree
            frame = pandas.read_csv(path, index_col=False, low_memory=False, **way, **options)
    return [str(name) for name in header.iloc[0]], frame


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines() or [type(error).__name__]
    return text[0].removeprefix("Error tokenizing data. C error: ")


def named(frame: Any, name: str, path: str | Path, what: str = "the target column") -> Any:
    """A column, or an error that lists what there is."""
    refuse_missing(frame, [name], path, what)
    return frame[name]


def refuse_missing(frame: Any, names: Sequence[str], path: str | Path, what: str) -> None:
    """Name all columns that are not there in one error."""
    gone = [name for name in names if name not in frame.columns]
    if not gone:
        return
    shown = ", ".join(map(repr, frame.columns[:8])) + (", ..." if len(frame.columns) > 8 else "")
    if len(gone) > 1:
        listed = ", ".join(map(repr, gone))
        raise HeldinError(f"{path}: {len(gone)} columns are not there: {listed} (columns: {shown})")
    near = get_close_matches(gone[0], list(frame.columns), 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise HeldinError(f"{path}: {what} {gone[0]!r} is not there{hint} (columns: {shown})")
