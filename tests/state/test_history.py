"""The history of a run: bounded, and written to tables and plots."""

from __future__ import annotations

import csv
import math
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import heldin
from tests.support.states import through_a_file


def record(step: int) -> heldin.state.Record:
    return heldin.state.Record(step, 8, -1.0 / step, -2.0 / step, {"a": 0.5, "b": -float(step)})


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 9), st.integers(1, 200), st.integers(1, 200))
def test_history_is_bounded_even_and_complete_at_its_ends(
    limit: int, checks: int, stop: int
) -> None:
    history = heldin.state.History(limit=limit)
    for step in range(1, checks + 1):
        history.append(record(step), stopped=step == stop)
    steps = [r.step for r in history]
    assert len(history) == len(steps) <= limit + 2
    assert steps == sorted(set(steps))
    assert steps[0] == 1
    assert steps[-1] == checks == history.checks
    assert (stop in steps) or stop > checks
    even = [s for s in steps if s not in (stop, checks)]
    gaps = {b - a for a, b in pairwise(even)}
    assert not gaps or max(gaps) <= 2 * min(gaps)
    if checks <= limit:
        assert steps == list(range(1, checks + 1))
    other = heldin.state.History(limit=99)
    other.load_state_dict(through_a_file(history.state_dict()))
    assert list(other) == list(history)
    for step in range(checks + 1, checks + 9):
        history.append(record(step))
        other.append(record(step))
    assert list(other) == list(history)


def example() -> heldin.state.History:
    history = heldin.state.History()
    history.append(record(1))
    history.append(heldin.state.Record(2, 8, math.nan, -2.0, {}, ("w", "v")))
    history.append(record(3), stopped=True)
    history.append(heldin.state.Record(4, 8, 0.5, 0.25, {"c": 1.0}))
    return history


def test_history_to_csv(tmp_path: Path) -> None:
    example().to_csv(tmp_path / "history.csv")
    with open(tmp_path / "history.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    names = ["step", "count", "raw", "criterion", "nonfinite", "group/a", "group/b", "group/c"]
    assert list(rows[0]) == names
    assert [row["step"] for row in rows] == ["1", "2", "3", "4"]
    assert rows[1]["nonfinite"] == "w v"
    assert float(rows[2]["group/b"]) == -3.0
    assert rows[2]["raw"] == repr(-1.0 / 3)
    assert math.isnan(float(rows[1]["raw"]))


def test_history_to_dataframe() -> None:
    pytest.importorskip("pandas")
    frame = example().to_dataframe()
    assert list(frame.columns[:4]) == ["step", "count", "raw", "criterion"]
    assert frame["criterion"].tolist() == [-2.0, -2.0, -2.0 / 3, 0.25]
    assert frame["group/c"].isna().tolist() == [True, True, True, False]


def test_history_to_dataframe_without_pandas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(heldin.HeldinError, match=r"heldin\[frame\]"):
        example().to_dataframe()


def test_history_plot_draws_the_criterion_zero_and_the_stop() -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    axes = example().plot(groups=True)
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert list(lines["criterion"].get_ydata()) == [-2.0, -2.0, -2.0 / 3, 0.25]
    assert list(lines["criterion"].get_xdata()) == [1, 2, 3, 4]
    assert list(lines["stop"].get_xdata()) == [3, 3]
    assert any(list(line.get_ydata()) == [0, 0] for line in axes.get_lines())
    assert example().plot(axes) is axes
    pyplot.close("all")


def test_history_plot_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(heldin.HeldinError, match=r"heldin\[plot\]"):
        example().plot()
