"""Numbers as people write them."""

from __future__ import annotations

import pytest

pytest.importorskip("pandas")

from heldin.tables.number_formats import decimal_mark, parse_number


@pytest.mark.parametrize(
    ("texts", "mark", "numbers"),
    [
        (["1.234,50 €", "7,00 €"], ",", [1234.5, 7.0]),
        (["$1,234.50", "$7.00"], ".", [1234.5, 7.0]),
        (["1'234.50 CHF", "7 CHF"], ".", [1234.5, 7.0]),
        (["1 234,5", "-7,25"], ",", [1234.5, -7.25]),
        (["12 %", "3.5 %"], ".", [12.0, 3.5]),
        (["12.345.678", "1"], ",", [12345678.0, 1.0]),
        (["1,234", "5,678"], "either", None),
        (["1.5 EUR", "2.5 USD"], None, None),  # not the same thing
        (["1,2,3"], None, None),
        (["KLM 12", "KLM 13"], None, None),
    ],
)
def test_numbers(texts: list[str], mark: str | None, numbers: list[float] | None) -> None:
    assert decimal_mark(texts) == mark
    if numbers is not None:
        assert mark in (".", ",")
        assert [parse_number(text, mark) for text in texts] == numbers
