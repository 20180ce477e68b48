"""Columns of a table become inputs of a network."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

pytest.importorskip("sklearn")
pytest.importorskip("pandas")
pytest.importorskip("safetensors")

import numpy as np
import pandas

from heldin.errors import HeldinError
from heldin.tables.columns import Column, Columns, date_order, decimal_mark, parse_number


def test_columns_become_numbers() -> None:
    frame = pandas.DataFrame(
        {
            "a": [1.0, None, 3.0, 5.0],
            "b": ["x", "y", None, "x"],
            "c": [7, 7, 7, 7],
            "d": [0, 1, 1, 0],
        }
    )
    columns = Columns.learn(frame)
    assert columns.constant == ("c",)
    found, unknown = columns.encode(frame, "t")
    spread = float(np.std([1.0, 3.0, 5.0]))
    expected: list[list[float]] = [
        # a, a missing, b = x, b = y, b missing, d
        [-2 / spread, 0, 1, 0, 0, -1],
        [0, 1, 0, 1, 0, 1],
        [0, 0, 0, 0, 1, 1],
        [2 / spread, 0, 1, 0, 0, -1],
    ]
    np.testing.assert_allclose(found, expected)
    assert unknown == {}
    again = Columns.from_json(json.loads(json.dumps(asdict(columns))))
    assert again == columns
    other = pandas.DataFrame({"a": [None, "2"], "b": ["z", None], "d": [None, 1]})
    found, unknown = again.encode(other, "t")
    assert found[0].tolist() == [0, 1, 0, 0, 0, 0]
    assert unknown == {"b": 1}
    only_gaps = Column.learn("g", pandas.Series([2.0, None, 2.0]))
    assert only_gaps is not None
    assert only_gaps.encode(pandas.Series([2.0, None]))[0].tolist() == [[0, 0], [0, 1]]


def test_a_column_keeps_its_way_of_writing() -> None:
    frame = pandas.DataFrame({"price": ["1.234,50 €", "7,5 €", None]})
    columns = Columns.learn(frame)
    assert columns.decimal_commas == ["price"]
    columns = Columns.from_json(json.loads(json.dumps(asdict(columns))))
    assert columns.used[0].measure(frame["price"]).tolist()[:2] == [1234.5, 7.5]
    new = pandas.DataFrame({"price": ["7,500 €"]})  # by itself it might be thousands
    middle, spread = np.mean([1234.5, 7.5]), np.std([1234.5, 7.5])
    assert columns.encode(new, "new.csv")[0][0, 0] == pytest.approx((7.5 - middle) / spread)
    with pytest.raises(HeldinError, match="held numbers in training, but row 1 has 'dear'"):
        columns.encode(pandas.DataFrame({"price": ["dear"]}), "new.csv")


@pytest.mark.parametrize("form", ["%Y-%m-%d", "%d.%m.%Y", "%m/%d/%Y"])
def test_dates_become_features(form: str) -> None:
    days = pandas.date_range("2023-01-05", periods=40, freq="5D")
    columns = Columns.learn(pandas.DataFrame({"d": days.strftime(form)}))
    plain = Columns.learn(pandas.DataFrame({"d": days}))
    found = columns.encode(pandas.DataFrame({"d": days.strftime(form)}), "t")[0]
    np.testing.assert_allclose(found, plain.encode(pandas.DataFrame({"d": days}), "t")[0])
    assert found.shape == (40, 5)  # how long ago; sine and cosine of year and week
    assert found[:, 0].mean() == pytest.approx(0, abs=1e-9)
    angle = 2 * np.pi * (days - pandas.Timestamp(0)).days / 7
    np.testing.assert_allclose(found[:, 3], np.sin(angle), atol=1e-9)
    with pytest.raises(HeldinError, match="column 'd' held dates, but row 1 has 'soon'"):
        columns.encode(pandas.DataFrame({"d": ["soon"]}), "t")


def test_times_of_day_and_gaps() -> None:
    times = ["2024-01-01 06:00", "2024-01-02 12:00", None]
    columns = Columns.learn(pandas.DataFrame({"d": times}))
    found = columns.encode(pandas.DataFrame({"d": times}), "t")[0]
    assert found.shape == (3, 8)  # also of the day; and whether it is missing
    assert found[0, 5] == pytest.approx(1)  # six o'clock: a quarter of the day
    assert found[2].tolist() == [0] * 7 + [1]


@pytest.mark.parametrize(
    ("texts", "mark", "numbers"),
    [
        (["1.234,50 €", "7,00 €"], ",", [1234.5, 7.0]),
        (["$1,234.50", "$7.00"], ".", [1234.5, 7.0]),
        (["1'234.50 CHF", "7 CHF"], ".", [1234.5, 7.0]),
        (["1 234,5", "-7,25"], ",", [1234.5, -7.25]),
        (["1'234,5 CHF", "-3,25"], ",", [1234.5, -3.25]),
        (["12 %", "3.5 %"], ".", [12.0, 3.5]),
        (["12.345.678", "1"], ",", [12345678.0, 1.0]),
        (["1,234", "5,678"], "either", None),
        (["1.5 EUR", "2.5 USD"], None, None),  # not the same thing
        (["1,2,3"], None, None),
        (["KLM 12", "KLM 13"], None, None),
    ],
)
def test_numbers_as_people_write_them(
    texts: list[str], mark: str | None, numbers: list[float] | None
) -> None:
    assert decimal_mark(texts) == mark
    if numbers is not None:
        assert mark in (".", ",")
        assert [parse_number(text, mark) for text in texts] == numbers
    assert np.isnan(parse_number("x", ","))


@pytest.mark.parametrize(
    ("texts", "order"),
    [
        (["2024-01-31"], "ymd"),
        (["31.12.2024"], "dmy"),
        (["12/31/2024"], "mdy"),
        (["01/02/2024"], "either"),  # January or February?
        (["2024-01-31", "31.12.2024"], None),
        (["soon"], None),
    ],
)
def test_order_of_dates(texts: list[str], order: str | None) -> None:
    assert date_order(texts) == order
