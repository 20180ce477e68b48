"""What `heldin fit` says of a table and of a model."""

from __future__ import annotations

import pytest

for needed in ("sklearn", "pandas", "jinja2"):
    pytest.importorskip(needed)

import pandas

from heldin.tables.report import interval, looks_like_id, number


@pytest.mark.parametrize(
    ("name", "step", "expected"),
    [("customer_id", 2, True), ("height", 2, False), ("height", 1, True), ("paid", 2, False)],
)
def test_ids_are_recognised(name: str, step: int, expected: bool) -> None:
    assert looks_like_id(name, pandas.Series(range(0, 30 * step, step))) is expected


def test_numbers_are_short() -> None:
    assert [number(23970.4), number(0.39861)] == ["23,970", "0.3986"]
    assert interval([23970.4, 20111.0, 31000.0]) == "23,970 [20,111, 31,000]"
    assert interval([0.4, 0.31, 0.53]) == "0.40 [0.31, 0.53]"
