"""The coverage of confidence intervals: a small run, and what is stored of the large one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from heldin.crossval import intervals, mean_interval
from heldin_lab.study import interval_coverage as study

STORED = Path(__file__).parents[2] / "docs/results/interval-coverage.json"


def test_a_small_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("DEVELOPMENT", "FRESH"):
        monkeypatch.setattr(study, name, {"exponential": study.exponential()})
    monkeypatch.setattr(study, "SIZES", (20,))
    monkeypatch.setattr(study, "truth", lambda draw, generator: (1.0, 1.0))
    out = tmp_path / "coverage.json"
    monkeypatch.setattr("sys.argv", ["interval_coverage", "--samples", "40", "--out", str(out)])
    study.main()
    assert "| heldin | n = 20 |" in capsys.readouterr().out
    fresh = json.loads(out.read_text(encoding="utf-8"))["fresh"]
    assert 0.8 <= float(fresh["heldin"]["exponential"]) <= 1


def test_the_study_measures_the_interval_in_use() -> None:
    losses = study.lognormal(1.0)(1, 20, torch.Generator().manual_seed(0))
    low, high = study.METHODS["heldin"](losses)
    interval = mean_interval(losses[0])
    assert (float(low), float(high)) == pytest.approx((interval.low, interval.high))


def test_draws_have_their_moments() -> None:
    generator = torch.Generator().manual_seed(0)
    assert study.truth(study.exponential(0.5), generator) == pytest.approx((2, 20**0.5), rel=0.02)
    assert study.truth(study.student(6, 2), generator)[0] == pytest.approx(1.5, rel=0.01)
    assert study.truth(study.mixture(0.1, 15.0), generator)[0] == pytest.approx(2.4, rel=0.01)


def test_the_narrowest_of_the_honest_is_chosen() -> None:
    def entry(method: str, coverage: float, width: float) -> dict[str, Any]:
        return {"method": method, "coverage": coverage, "width": width}

    entries = [entry("narrow", 0.9, 1.0), entry("good", 0.945, 1.2), entry("wide", 0.99, 2.0)]
    assert study.choose(entries)[0] == "good"


def test_what_is_stored_holds() -> None:
    """The constants are those that were chosen; coverage on fresh draws, long tails, n = 20."""
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    assert stored["chosen"] == f"reach {intervals.REACH}, floor {intervals.FLOOR}"
    heldin = {
        name: [float(number) for number in text.split()]
        for name, text in stored["fresh"]["heldin"].items()
    }
    assert set(heldin) == set(study.FRESH)
    everywhere = [number for numbers in heldin.values() for number in numbers]
    assert sum(everywhere) / len(everywhere) > 0.93
    assert sum(number < 0.9 for number in everywhere) <= 5
