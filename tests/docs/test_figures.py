"""The figures of the documentation can be drawn."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

np = pytest.importorskip("numpy")

from heldin.lab.study.data import Problem
from heldin.lab.study.tables import coverage, read
from heldin.state.estimates import COVERAGE

SCRIPT = Path(__file__).parents[2] / "docs" / "figures" / "when_to_trust.py"


def load(script: Path) -> Any:
    spec = importlib.util.spec_from_file_location(script.stem, script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[script.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["path", "tiny"])
def test_when_to_trust(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    module = load(SCRIPT)
    module.main([name, "--out", str(tmp_path)])
    assert (tmp_path / f"when-to-trust-{name}.png").stat().st_size > 5000
    printed = capsys.readouterr().out
    text = (SCRIPT.parent.parent / "when-to-trust.md").read_text()
    quoted = {"path": ["2.03", "2.01", "7.67"], "tiny": ["-0.012", "-0.152", "-0.681"]}[name]
    assert all(number in printed and number in text for number in quoted)


def test_every_figure_is_in_the_text() -> None:
    text = (SCRIPT.parent.parent / "when-to-trust.md").read_text()
    for image in SCRIPT.parent.glob("when-to-trust-*.png"):
        assert f"figures/{image.name}" in text


RULES = SCRIPT.with_name("which_rule.py")
WHICH = SCRIPT.parent.parent / "which-rule.md"


def test_the_page_on_rules_has_the_numbers_of_the_study() -> None:
    pytest.importorskip("joblib")
    module = load(RULES)
    text = WHICH.read_text(encoding="utf-8")
    assert module.filled(text) == text
    assert all(f"<!-- begin {name} -->\n" in text for name in module.BLOCKS)
    result = WHICH.parent / "results" / "quality.md"
    assert result.read_text(encoding="utf-8") == module.quality()
    for image in RULES.parent.glob("which-rule-*.png"):
        assert f"figures/{image.name}" in text


def test_the_band_states_the_coverage_that_the_study_found() -> None:
    study = WHICH.parent / "study"
    rows = read(study / "errors.csv")
    found = {rule: coverage([r for r in rows if r["rule"] == rule]) for rule in ("folds", "shadow")}
    before = {row["rule"]: row for row in read(study / "small-coverage.csv")}
    found["leave-one-out"] = before["leave-one-out bagged patience"]  # with a plain standard error
    for rule, shares in COVERAGE.items():
        for width, share in shares.items():
            assert share == round(found[rule][f"within_{width}"], 2)


def test_the_outlier_is_a_row_that_is_trained_on(tmp_path: Path) -> None:
    module = load(RULES)
    x = np.random.default_rng(0).standard_normal((150, 3))
    np.savez(tmp_path / "t.npz", X=x, y=x[:, 0], task="reg")
    table = module.WithOutlier("t", 150, tmp_path / "t.npz", seed=7)
    problem = Problem.cut(table, 40, 0.0, 1, 7)
    assert float(problem.y.max()) > 5  # of standard deviations that it is part of
    assert float(problem.y_test.abs().max()) < 3
