"""Readings of many seeds at once, shares of readings, and the page that shows them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from heldin_lab.cli.main import main
from heldin_lab.reproduce import EXPERIMENTS, fullsize, spread
from heldin_lab.reproduce import planned as planned_module
from heldin_lab.reproduce import survey as survey_module
from heldin_lab.reproduce.collected import collect
from heldin_lab.reproduce.descents import toy_paths, wdbc_paths
from heldin_lab.reproduce.experiment import Claim
from heldin_lab.reproduce.experiments import quadratic
from heldin_lab.reproduce.fullsize import ELEMENTWISE, PLAN, TENTHS, make, tasks
from heldin_lab.reproduce.ledger import criteria
from heldin_lab.reproduce.multiverse import (
    Universe,
    judge,
    read_universe,
    universe,
    write_universe,
)
from heldin_lab.reproduce.page import universes, write_page
from heldin_lab.reproduce.readings import (
    Choice,
    Value,
    readings,
)
from heldin_lab.reproduce.run import Run
from heldin_lab.reproduce.runner import work
from heldin_lab.reproduce.spread import _every_step, toy_values, wdbc_values
from heldin_lab.reproduce.tables import at, least
from small_data import TINY, data

pandas = pytest.importorskip("pandas")
for package in ("joblib", "matplotlib", "sklearn", "rich"):
    pytest.importorskip(package)

__all__ = ["data"]
_Quadratic = quadratic.Settings


# --- all seeds at once, and the page ---------------------------------------------------------


def test_descents_are_the_experiments() -> None:
    """All seeds at once against one after the other with heldin's rule, stops included."""
    s = replace(EXPERIMENTS["wdbc"].settings["quick"], steps=240)
    paths = {
        method: wdbc_paths(
            method,
            scaling="both",
            by="train",
            settings=[(0.1, 0.001), (0.0, s.rate)],
            steps=240,
            seeds=2,
            dtype=torch.float64,
        )[1]
        for method in ("validation", "evidence")
    }
    values = wdbc_values(
        paths["validation"], paths["evidence"], _every_step(paths["evidence"], 0.9, 0.0, "out"), 240
    )
    tables: dict[int, dict[str, Any]] = {}
    for seed in range(2):
        for method in paths:
            run = Run(seed, s)
            EXPERIMENTS["wdbc"].run(run, method=method)
            tables.setdefault(seed, {})[method] = pandas.DataFrame(run.rows)
    claims = EXPERIMENTS["wdbc"].claims(s)
    for place, claim in enumerate(claims):
        expected = [claim.value(tables[seed]) for seed in range(2)]
        assert values[place] == pytest.approx(expected, rel=2e-3, nan_ok=True), claim.text
    t = replace(EXPERIMENTS["toy"].settings["quick"], steps=150, test=500)
    toys = []
    for seed in range(2):
        run = Run(seed, EXPERIMENTS["toy"].settings["quick"].__class__(steps=150))
        EXPERIMENTS["toy"].run(run)
        toys.append(pandas.DataFrame(run.rows))
    path = toy_paths(reach=t.reach, frequency=0.5, noise=1.0, initial=0.0, steps=150, seeds=2)
    for claim, found in zip(EXPERIMENTS["toy"].claims(t), toy_values(path, 150), strict=True):
        expected = [claim.value({"descent": table}) for table in toys]
        assert found == pytest.approx(expected, rel=1e-4), claim.text


def test_quadratics_in_closed_form(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"dimension": 30, "steps": 60}
    monkeypatch.setattr(quadratic, "Settings", lambda: _Quadratic(**small))  # type: ignore[arg-type]
    first = next(spread.quadratic(2))
    assert first[0] == {"start": "opposite", "eigenvalues": "ours"}
    for place, kind in enumerate(quadratic.SPECTRA):
        expected = []
        for seed in range(2):
            run = Run(seed, _Quadratic(**small))  # type: ignore[arg-type]
            quadratic.descend(run, kind, "opposite")
            table = pandas.DataFrame(run.rows)
            expected.append(at(table, "test_loss") / least(table, "test_loss"))
        assert first[1][place] == pytest.approx(expected, rel=1e-3)


def _universe() -> Universe:
    """A claim that depends on one of two choices."""
    choices = (
        Choice("a", "?", (Value("x", "", 0), Value("y", "", 1))),
        Choice("b", "?", (Value("u", "", 0), Value("v", "", 1))),
    )
    claim = Claim("low", "low", lambda tables: 0.0, most=1.32, beside=1.1)
    values = [
        (reading, [[1.2 if reading["a"] == "x" else 1.4, 1.0, float("nan")]])
        for reading in readings(choices)
    ]
    return universe("toy", "", [claim], choices, values)


def test_shares_of_readings(tmp_path: Path) -> None:
    found = _universe()
    judged = judge(found, 0)
    assert (judged.share, judged.beside) == (0.5, 0.0)  # 2 of 3 seeds with x, 1 of 3 with y
    assert (judged.choice, judged.spread) == ("a", (0.0, 1.0))
    assert judged.verdict == "holds under some readings"
    assert judged.ours == (2, 1, pytest.approx(1.1))
    write_universe(tmp_path / "u.csv", found)
    again = read_universe(tmp_path / "u.csv")
    assert again.by_choice(0) == found.by_choice(0)
    assert judge(again, 0).ours == judged.ours


@pytest.fixture
def surveyed(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The store of a survey of tiny runs, all sizes among them."""
    rates = {"rates": (0.1, 0.05)}
    plain = {"travel": None, "budget": None}
    plan = (
        replace(PLAN[0], changes={**TINY["mnist-sgd"], **plain, **rates, "budget": 2048},
                parts=("rate 0.1, validation", "rate 0.1, evidence")),
        replace(PLAN[2], changes={**TINY["greedy"], **plain, "rates": (0.1,)},
                parts=("rate 0.1, greedy",)),
        replace(PLAN[3], changes={**TINY["rmsprop"], "travel": None, "smoothing": 0.99,
                                  "rates": (0.1,)},
                parts=("SGD", "SGD with stopping", "RMSprop")),
        replace(PLAN[5], changes={**TINY["mnist-gd"], "rates": (0.1,), "flow": True}),
    )  # fmt: skip
    tenths = tuple(
        replace(t, seeds=1, changes={**TINY["mnist-sgd"], **t.changes, **plain, "every": 4,
                                     "widths": (784, 12, 10)})
        for t in TENTHS
    )  # fmt: skip
    alone = tuple(
        replace(e, changes={**TINY[e.experiment], "travel": None, "smoothing": 0.99, "every": 4,
                            "rates": (0.03,), "widths": (784, 12, 10)})
        for e in ELEMENTWISE
    )  # fmt: skip
    monkeypatch.setattr(planned_module, "PLAN", plan)
    monkeypatch.setattr(planned_module, "ELEMENTWISE", alone)
    monkeypatch.setattr(planned_module, "TENTHS", tenths)
    monkeypatch.setattr(fullsize, "ALL", (*plan, *tenths, *alone))
    runs = tmp_path / "runs"
    make((*plan, *tenths, *alone), runs, data, tell=lambda line: None)
    for name in survey_module.REPLAYED:
        tiny = replace(EXPERIMENTS[name].settings["quick"], **TINY[name])
        if name == "rmsprop":
            tiny = replace(tiny, smoothing=0.99)  # one of the readings
        monkeypatch.setitem(
            EXPERIMENTS, name, replace(EXPERIMENTS[name], settings={"quick": tiny, "full": tiny})
        )
    for name in ("runs", "checkpoints"):
        (runs / "quick" / name).mkdir(parents=True)
    for task in survey_module.quick_tasks(runs / "quick", seeds=1):
        work(replace(task, data=str(data)))
    store = tmp_path / "docs" / "results" / "page"
    survey_module.survey(survey_module.REPLAYED, runs, store)
    return store


def test_a_survey_becomes_a_page(surveyed: Path) -> None:
    found = universes(surveyed)
    sizes = {(u.experiment, u.size) for u in found}
    assert ("mnist-sgd", "full size") in sizes
    assert ("mnist-sgd", "a tenth of the width") in sizes
    assert ("mnist-sgd", "a tenth of the width, pixels and initial weights varied") in sizes
    assert ("mnist-sgd", "full size, length varied") in sizes
    assert ("mnist-gd", "a fifth of the width") in sizes
    assert {("sector", "quick preset"), ("rmsprop", "quick preset")} <= sizes
    for size in ("full size", "a tenth of the width", "quick preset"):
        assert ("rmsprop", f"{size}, factors of RMSprop") in sizes
    real = {(u.experiment, u.size.split(",")[0]): u for u in found if u.size.endswith("real runs")}
    for size in ("a tenth of the width", "quick preset"):
        assert [len(real[name, size].claims) for name in ("greedy", "rmsprop")] == [1, 2]
    assert ("rmsprop", "a tenth of the width") in sizes
    assert len(real["greedy", "full size"].claims) == 5  # shares, too
    assert len(real["rmsprop", "full size"].claims) == 6
    varied = next(u for u in found if u.size.endswith("weights varied"))
    assert len(varied.rows) == 40 * 4
    page = surveyed.parent.parent / "page.md"
    write_page(page, surveyed, "the command")
    text = page.read_text()
    for heading in ("Four figures", "Every claim", "What the paper does not say", "misread"):
        assert heading in text
    assert "full-sgd | rate 0.1, evidence | 0 | 24 | 24" in text
    assert "(correlation" in text  # of sampled and exact
    assert "| greedy, full size, real runs | rate 0.1: a test loss comparable" in text
    assert "Added later, after first results were known: length." in text
    for image in ("mnist-sgd-full-rate-0.1.png", "greedy-full.png"):
        assert f"figures/page/{image})" in text
    for image in re.findall(r"!\[.*?\]\((figures/page/readings.*?)\)", text):
        assert (page.parent / image).stat().st_size < 200_000
    for line in text.splitlines():
        if line.startswith("| mnist-sgd"):
            assert len(re.findall(r"(?<!\\)\|", line)) == 8


def test_a_survey_without_the_runs_keeps_what_is_stored(surveyed: Path, tmp_path: Path) -> None:
    """Runs of many hours lie on one machine; others may add theirs to the page."""

    def stored() -> dict[str, list[str]]:
        files = [*surveyed.glob("*.csv"), *surveyed.glob("*.json")]
        return {path.name: sorted(path.read_text().splitlines()) for path in files}

    before = stored()
    assert any("full-sgd" in line for line in before["progress.csv"])
    assert "tenth" in json.loads((surveyed / "facts.json").read_text())
    survey_module.survey(["mnist-sgd"], tmp_path / "nothing", surveyed)
    assert stored() == before


def test_an_unfinished_run_is_looked_at(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = (
        replace(
            PLAN[0],
            changes={**TINY["mnist-sgd"], "travel": None, "rates": (0.03,)},
            parts=("rate 0.03, evidence",),
        ),
    )
    (task,) = (replace(task, pause=0.0) for _, task in tasks(plan, tmp_path, data))
    for name in ("runs", "checkpoints"):
        (task.folder / name).mkdir(parents=True)
    tick = Run.tick

    def dies(self: Run, step: int, parts: Any) -> None:
        tick(self, step, parts)
        if step == 22:
            raise KeyboardInterrupt

    monkeypatch.setattr(Run, "tick", dies)
    with pytest.raises(KeyboardInterrupt):
        work(task)
    found = collect([task])[0]["rate 0.03, evidence"]
    assert (found.finished, found.steps, found.total) == (False, 22, 24)
    assert len(criteria(found.log, "out")) == 22
    assert len(criteria(found.log, "out", exact=True)) == 20
    assert "test_loss" in found.table


def test_readings_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    arguments = ["reproduce", "--readings", "--docs", str(page)]
    assert main(arguments) == 2
    assert "no readings are stored" in capsys.readouterr().err
    assert main(["reproduce", "sketch", *arguments[1:]]) == 2
    assert "'sketch' has no readings" in capsys.readouterr().err
    (tmp_path / "results" / "page").mkdir(parents=True, exist_ok=True)
    write_universe(tmp_path / "results" / "page" / "readings-toy-seeds.csv", _universe())
    assert main(arguments) == 0
    assert "Made by `heldin-lab reproduce --readings --docs page.md`" in page.read_text()
