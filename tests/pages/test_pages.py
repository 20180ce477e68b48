"""Pages, their files and the lines of a run in progress."""

from __future__ import annotations

import pytest

from heldin.pages import Section, Table, csv_link, render
from heldin.pages.charts import is_wide
from heldin.pages.live import sparkline
from heldin.pages.predictions import Predictions, prediction_sections


def test_values_are_escaped() -> None:
    pytest.importorskip("jinja2")
    sections = [Section("Rows", tables=[Table([], [["a < b", "80"]])])]
    page = render("page.html", title="a", verdict="", sections=sections, advice=[])
    assert '<th scope="row">a &lt; b</th><td>80</td>' in page


def test_columns_are_a_link() -> None:
    assert csv_link({"a": [1], "b": [2.5]}) == "data:text/csv;base64,YSxiDQoxLDIuNQ0K"


def test_sections_of_predictions() -> None:
    probabilities, classes = [[0.9, 0.1], [0.9, 0.1]], ["no", "yes"]
    seen = Predictions([0, 1], [0, 1], [0.1, 2.3], probabilities, (), classes)
    confusion, worst = prediction_sections(seen)
    assert [confusion.title, worst.title] == ["Confusion matrix", "Worst rows"]
    (table,) = confusion.tables
    assert table.rows == [["no", "1", "0", "1", "100%"], ["yes", "1", "0", "1", "0%"]]
    assert worst.tables[0].rows[0] == ["1", "yes", "no", "0.1", "2.3"]
    assert prediction_sections(Predictions([0, 1])) == []


def test_calibration_has_as_many_rows_in_every_bin() -> None:
    shares = [i / 40 for i in range(40)]
    seen = Predictions(
        list(range(40)),
        [i % 2 for i in range(40)],
        (),
        [[1 - p, p] for p in shares],
        (),
        ["a", "b"],
    )
    titles = [section.title for section in prediction_sections(seen)]
    assert titles == ["Confusion matrix", "Calibration"]


def test_numbers_beside_the_truth() -> None:
    seen = Predictions([0, 1, 2], [1.0, 2.0, 3.0], [0.0, 1.0, 0.25], (), [1.0, 1.0, 2.5])
    against, worst = prediction_sections(seen)
    assert against.title == "Predicted against true"
    assert worst.tables[0].rows[0] == ["1", "2", "1", "1"]
    assert list(worst.files) == ["out-of-fold.csv"]


def test_wide_numbers() -> None:
    assert [is_wide(pair) for pair in ([0.1, 2.0], [1.0, 2.0], [0.0, 2.0])] == [True, False, False]


def test_a_course_in_a_few_characters() -> None:
    assert sparkline([8, 4, 2, 1, 1.2, 2]) == "█▆▃▁▂▃"
