"""Charts are valid SVG inside of their frame, whatever the numbers are."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest

from heldin.pages.charts import HEIGHT, WIDTH, Axis, Series, chart

ODD = {
    "one": [0.5],
    "constant": [2.0, 2.0, 2.0],
    "zero": [0.0, 0.0],
    "missing": [1.0, math.nan, 3.0],
    "infinite": [1.0, math.inf, 3.0],
    "huge": [1e300, 1.0],
    "tiny": [1e-300, 1e-290],
    "negative": [-5.0, 3.0, -1e6],
    "usual": [2.0, 0.9, 0.4, 0.1, 0.2],
}


def places(svg: str) -> list[tuple[float, float]]:
    """Points of all paths and circles."""
    root = ElementTree.fromstring(svg)
    points = [(float(c.get("cx", 0)), float(c.get("cy", 0))) for c in root.iter("circle")]
    for path in root.iter("path"):
        pairs = re.findall(r"[ML](\S+?) ([-\d.]+)", path.get("d", ""))
        points += [(float(x), float(y)) for x, y in pairs]
    return points


@pytest.mark.parametrize("values", ODD.values(), ids=ODD)
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("points", [False, True])
def test_everything_is_inside(values: list[float], signed: bool, points: bool) -> None:
    x = [3.0 * i for i in range(len(values))]
    low, high = [v - 1 for v in values], [v + 1 for v in values]
    series = [Series("a < b", x, values, "a", low, high, points)]
    svg = chart(series, "t", "x", "y", steps=True, signed=signed, marks=[(x[-1], "end")])
    assert "a &lt; b" in svg
    drawn = places(svg)
    assert len(drawn) >= sum(map(math.isfinite, values))
    for left, top in drawn:
        assert 0 <= left <= WIDTH
        assert 0 <= top <= HEIGHT


def test_nothing_to_draw() -> None:
    assert chart([Series("a", [], [])], "t", "x", "y") == ""
    assert chart([Series("a", [1.0], [math.nan])], "t", "x", "y") == ""
    assert chart([Series("a", [1.0, 2.0], [1.7e308, -1.7e308])], "t", "x", "y") == ""


def test_a_wide_range_has_a_logarithmic_axis() -> None:
    def heights(values: list[float]) -> list[float]:
        return [y for _, y in places(chart([Series("", [0, 1, 2], values)], "t", "x", "y"))][-3:]

    first, middle, last = heights([100.0, 10.0, 1.0])
    assert middle - first == pytest.approx(last - middle, abs=0.2)
    first, middle, last = heights([3.0, 2.0, 1.0])
    assert middle - first == pytest.approx(last - middle, abs=0.2)


@pytest.mark.parametrize(
    ("axis", "ticks"),
    [
        (Axis(0, 1, 0, 100), [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (Axis(0.03, 2, 0, 100, "log"), [0.05, 0.1, 0.2, 0.5, 1.0, 2.0]),
        (Axis(0, 1000, 0, 100, "steps"), [0.0, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0]),
        (Axis(-20, 2, 0, 100, "steps"), [-20.0, -10.0, -5.0, -2.0, -1.0, 0.0, 1.0, 2.0]),
    ],
)
def test_ticks_are_round(axis: Axis, ticks: list[float]) -> None:
    assert axis.ticks() == pytest.approx(ticks)
