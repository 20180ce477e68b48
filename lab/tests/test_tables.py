"""The bench of small tables: problems, results that go on, and the table."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sklearn")

import numpy as np

from heldin.rules import inputs
from heldin_lab import tables as lab
from heldin_lab.cli.main import main
from heldin_lab.study.data import tables
from heldin_lab.tables import (
    METHODS,
    SETTINGS,
    SmallProblem,
    against,
    compare,
    compared,
    covered,
    problems,
    write_comparison,
)
from heldin_lab.tables.rivals import Method, fitted


def row(table: str, method: str, loss: float, **more: Any) -> dict[str, Any]:
    """A result."""
    kind = {"table": table, "n": 50, "seed": 0, "method": method}
    return {**kind, "loss": loss, "constant": 1.0, "seconds": 1.0, "test_error": 0.1, **more}


def test_problems_are_of_a_role_and_leave_enough_to_test() -> None:
    found = list(problems(tables(None), "confirmation", [50, 100], [3, 4]))
    assert {table.name for table, _, _ in found} == {"sk_wdbc", "sk_wine"}
    assert [(n, seed) for table, n, seed in found if table.name == "sk_wine"] == [(50, 3), (50, 4)]
    everything = {table.name for table, _, _ in problems(tables(None), "all", [50], [0])}
    assert "sk_diabetes" in everything


def test_a_problem_has_no_row_twice_and_no_unknown_class() -> None:
    table = next(t for t in tables(None) if t.name == "sk_digits")
    problem = SmallProblem.cut(table, 12, 0)
    assert set(problem.y) == set(range(problem.classes))
    assert set(problem.y_test) <= set(problem.y)
    together = np.vstack([problem.x, problem.x_test])
    assert len(np.unique(together, axis=0)) == len(together)
    sure = np.zeros((len(problem.y_test), problem.classes))
    sure[:, 0] = 1.0  # zeros count as a thousandth
    wrong = problem.losses(sure)[problem.y_test != 0]
    assert wrong == pytest.approx(-np.log(1e-3 / (1 + 1e-3 * (problem.classes - 1))))
    assert problem.score(np.eye(problem.classes)[problem.y_test]) == 1


def test_methods_of_scikit_learn_run_and_go_on(tmp_path: Path) -> None:
    names = ["constant", "linear CV"]
    cases = list(problems(tables(None), "all", [50], [0]))[:3]
    rows = compare(cases, {name: METHODS[name] for name in names}, tmp_path)
    assert len(rows) == 6
    assert not any("error" in each for each in rows)
    for each in rows:
        if each["method"] == "constant":
            assert each["loss"] == pytest.approx(each["constant"])
    told: list[str] = []
    again = compare(cases, {name: METHODS[name] for name in names}, tmp_path, told.append)
    assert (again, told) == (rows, [])

    def fails(classes: bool, seed: int) -> Any:
        raise RuntimeError("no")

    broken = compare(cases, {"broken": Method(fails, "trees")}, tmp_path)
    assert broken[-1]["error"] == "RuntimeError: no"
    lines = {line["method"]: line for line in compared(broken, [*names, "broken"])}
    assert lines["broken"]["failed"] == 3


def test_ratios_ranks_and_wins() -> None:
    rows = [
        row("a", "one", 0.5),
        row("a", "two", 0.25),
        row("b", "one", 0.5),
        row("b", "two", 1.1),
        row("c", "one", 0.1),  # two has no result there
        *({"table": "d", "n": 50, "seed": 0, "method": m, "error": "no"} for m in ("one", "two")),
    ]
    one, two = compared(rows, ["one", "two"])
    assert one["problems"] == 2
    assert (one["rank"], two["rank"]) == (1.5, 1.5)
    assert one["ratio"] == pytest.approx(2**0.5)
    assert two["ratio"] == pytest.approx(2.2**0.5)
    assert (one["wins"], two["wins"]) == (1, 1)
    assert (one["worse_than_constant"], two["worse_than_constant"]) == (0, 1)
    assert two["worst_of_constant"] == pytest.approx(1.1)
    to_one = compared(rows, ["one", "two"], best_of=["one"])[1]
    assert to_one["ratio"] == pytest.approx((0.5 * 2.2) ** 0.5)


def test_heldin_beside_the_best_of_its_rivals(tmp_path: Path) -> None:
    rows = [
        row("a", "heldin", 0.5),
        row("a", "one", 0.25),
        row("a", "two", 0.4),
        row("b", "heldin", 0.5),
        row("b", "one", 1.0),
        row("b", "two", 0.8),
    ]
    text = write_comparison(rows, ["heldin", "one", "two"], tmp_path, rivals=["one", "two"])
    ratio = (2 * 0.5 / 0.8) ** 0.5
    assert f"heldin: {ratio:.3f} [" in text
    assert f"({ratio:.3f} at n = 50); better than all of them in 1 of 2 problems." in text


def test_coverage_counts_the_error_of_the_test_as_well() -> None:
    error = {"estimate_error": 0.1 * 3**0.5}  # with the test's 0.1: 0.2
    rows = [
        row("a", "one", 1.0, estimate=1.19, **error),
        row("b", "one", 1.0, estimate=1.39, **error),
        row("c", "one", 1.0, estimate=1.41, **error),
    ]
    found = covered(rows, "one")
    assert found["within_1"] == pytest.approx(1 / 3)
    assert found["within_2"] == pytest.approx(2 / 3)
    assert found["bias"] == pytest.approx(1.39)


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "bench"
    code = main(
        ["bench", "tables", "--n", "60", "--methods", "constant,linear CV", "--out", str(out)]
    )
    assert code == 0
    assert "| linear CV | 1.00 | 1.000 [1.00, 1.00] |" in capsys.readouterr().out
    lines = (out / "results.jsonl").read_text().splitlines()
    assert {json.loads(line)["method"] for line in lines} == {"constant", "linear CV"}
    assert (out / "table.md").is_file()
    for wrong, said in (
        (["--methods", "magic"], "'magic' is unknown"),
        (["--n", "many"], "--n: expected numbers"),
        (["--n", "100000"], "no problem is left"),
    ):
        assert main(["bench", "tables", "--out", str(out), *wrong]) == 2
        assert said in capsys.readouterr().err
    assert main(["study", "tables", "--n", "100000"]) == 2
    capsys.readouterr()
    assert main(["bench", "tables", "--table", "--methods", "constant", "--out", str(out)]) == 0
    assert "2 problems" in capsys.readouterr().out
    assert (out / "results.jsonl").read_text().splitlines() == lines  # nothing was fitted


# -- settings


def test_a_setting_beside_the_default() -> None:
    rows = [
        row("a", "default", 1.0, classes=2),
        row("a", "new", 0.5, classes=2),
        row("b", "default", 1.0, classes=0),
        row("b", "new", 0.8, classes=0),
        row("c", "default", 1.0, classes=0),  # new has no result there
    ]
    found = against(rows, "new")
    assert found["problems"] == 2
    assert found["ratio"] == pytest.approx(0.4**0.5)
    assert (found["better"], found["worst"]) == (1.0, pytest.approx(0.8))
    assert found["parts"] == {
        50: pytest.approx(0.4**0.5),
        "classes": pytest.approx(0.5),
        "numbers": pytest.approx(0.8),
    }
    assert against(rows, "default")["ratio"] == 1
    assert against(rows, "unknown") == {"problems": 0}


def test_constants_are_others_in_a_fit_and_the_same_after_it() -> None:
    before, seen = inputs.PATIENCE, []

    def make(classes: bool, seed: int) -> Any:
        seen.append(inputs.PATIENCE)
        raise RuntimeError("no")

    problem = SmallProblem.cut(tables(None)[0], 30, 0)
    method = Method(make, "network", constants={"heldin.rules.inputs.PATIENCE": 7})
    with pytest.raises(RuntimeError, match="no"):
        fitted(method, problem)
    assert (seen, inputs.PATIENCE) == ([7], before)
    for setting in SETTINGS.values():  # constants that are gone would not be noticed
        for name in setting.constants:
            where, _, what = name.rpartition(".")
            assert hasattr(importlib.import_module(where), what)


def test_study_of_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = {"default": METHODS["constant"], "linear": METHODS["linear CV"], "x": METHODS["TabM"]}
    monkeypatch.setattr(lab, "SETTINGS", quick)
    start = ["study", "tables", "--out", str(tmp_path), "--n", "60"]
    assert main([*start, "--settings", "linear"]) == 0
    told = capsys.readouterr()
    assert "2 settings, the default among them, on 2 tables." in told.out
    assert (
        "| default | 2 | 1.000 [1.00, 1.00] | 1.000 | 1.00 | 0% | 1.000 | 1.000 | 1.000 |"
        in told.out
    )
    assert "sk_digits, n = 60, seed 1000: linear" in told.err
    assert main([*start, "--settings", "linear"]) == 0
    assert capsys.readouterr().err == ""  # all is there
    assert main([*start, "--settings", "magic"]) == 2
    assert "'magic' is unknown; there are default, linear, x" in capsys.readouterr().err
    assert main([*start, "--list"]) == 0
    assert capsys.readouterr().out.splitlines() == list(quick)
