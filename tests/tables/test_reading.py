"""Files of tables are read: encodings, separators, types."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

for needed in ("sklearn", "pandas", "safetensors"):
    pytest.importorskip(needed)

import numpy as np
import pandas

from heldin.errors import HeldinError
from heldin.tables.reading import find_separator, read_table


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(columns: dict[str, list[Any]], name: str = "t.csv", **options: Any) -> str:
    pandas.DataFrame(columns).to_csv(name, index=False, **options)
    return name


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_encodings_that_say_what_they_are(encoding: str) -> None:
    write({"Straße": ["Zürich", "Genève"], "y": [1, 2]}, encoding=encoding)
    frame = read_table("t.csv")
    assert list(frame.columns) == ["Straße", "y"]
    assert frame["Straße"].tolist() == ["Zürich", "Genève"]


def test_another_encoding_is_asked_for_with_an_example() -> None:
    write({"city": ["Bern", "Zürich"], "y": [1, 2]}, encoding="cp1252")
    with pytest.raises(HeldinError, match="--encoding cp1252 it would read 'Zürich'"):
        read_table("t.csv")
    assert read_table("t.csv", encoding="cp1252")["city"].tolist() == ["Bern", "Zürich"]
    with pytest.raises(HeldinError, match="--encoding: 'klingon' is unknown"):
        read_table("t.csv", encoding="klingon")
    with pytest.raises(HeldinError, match="not ascii text"):
        read_table("t.csv", encoding="ascii")


@pytest.mark.parametrize(
    ("text", "mark"),
    [
        ("a;b\n1,5;2,5\n", ";"),
        ("a,b\n1;5,2\n", ","),
        ("a\tb\n1,5\t2,5\n", "\t"),
        ("a|b|c\n1,5|2|3\n", "|"),
        ('"a;b;c",d\n1,2\n', ","),
        ("name, first;age\nx;1\ny, z, w;2\n", ";"),  # a comma would make too many fields
        ("a\n1\n", ","),
        ("a\n1,5\n", ";"),  # one column
        ("", ","),
    ],
)
def test_separators_are_found(text: str, mark: str) -> None:
    assert find_separator(text.splitlines(keepends=True)) == mark


def test_pieces_of_a_file_that_disagree_are_read_again() -> None:
    """Numbers for a long time, and then a text: all of the column are texts."""
    n = 200_000
    Path("t.csv").write_text("a,b\n" + "1,0.5\n" * n + "x,0.5\n")
    frame = read_table("t.csv")
    assert len(frame) == n + 1
    assert {type(value) for value in frame["a"].unique()} == {str}
    assert frame["b"].dtype == np.float64
