"""Tables from files: CSV in any encoding, Parquet. Whatever is wrong with one is one line."""

from __future__ import annotations

import codecs
import re
import warnings
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from heldin.errors import HeldinError

__all__ = ["named", "pandas_module", "read_table"]

MARKS = {  # at the beginning of a file
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
GUESS = "cp1252"  # shown as an example where a file is not UTF-8


def read_table(
    path: str | Path,
    *,
    separator: str = ",",
    missing: Sequence[str] = (),
    encoding: str | None = None,
    decimal: str | None = None,
    texts: Sequence[str] = (),
) -> Any:
    """A pandas DataFrame from a CSV or Parquet file; whatever is wrong with it is one line.

    Args:
        path: a file whose name ends in .csv (perhaps compressed, .csv.gz), .tsv, .parquet or .pq.
        separator: between the fields of a CSV file.
        missing: further texts that mean that a value is missing ("", "NA", "nan", "null" and such
            do anyway).
        encoding: of a CSV file. By default UTF-8, or what its first bytes say.
        decimal: "," or "." before the decimals; by default found out, column by column.
        texts: columns that are kept as they are written, as IDs with leading zeros.
    """
    pandas = pandas_module()
    path = Path(path)
    if not path.is_file():
        raise HeldinError(f"{path}: there is no such file")
    ending = next((s for s in reversed(path.suffixes) if s not in (".gz", ".bz2", ".xz")), "")
    if ending in (".parquet", ".pq"):
        frame = _read_parquet(pandas, path)
    elif ending in (".csv", ".tsv", ".txt"):
        frame = _read_csv(
            pandas, path, "\t" if ending == ".tsv" else separator, missing, encoding, decimal, texts
        )
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


def _encoding(path: Path, given: str | None) -> str:
    if given is not None:
        try:
            codecs.lookup(given)
        except LookupError as error:
            raise HeldinError(
                f"--encoding: {given!r} is unknown; utf-8, cp1252, latin-1 and utf-16 are common"
            ) from error
        return given
    with open(path, "rb") as file:
        start = file.read(4)
    return next((name for mark, name in MARKS.items() if start.startswith(mark)), "utf-8")


def _not_utf8(path: Path) -> str:
    """How a file that is not UTF-8 would read in the most common other encoding."""
    with open(path, "rb") as file:
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
    separator: str,
    missing: Sequence[str],
    encoding: str | None,
    decimal: str | None,
    texts: Sequence[str],
) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pandas.errors.ParserWarning)
            options: dict[str, Any] = {"sep": separator, "encoding": _encoding(path, encoding)}
            header = pandas.read_csv(path, header=None, nrows=1, dtype=str, **options)
            names = [str(name) for name in header.iloc[0]]
            if decimal is not None:
                options |= {"decimal": decimal, "thousands": "." if decimal == "," else ","}
            options["dtype"] = dict.fromkeys(texts, str)
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
        text = f"{path}: not {encoding} text" if encoding else _not_utf8(path)
        raise HeldinError(text) from error
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
