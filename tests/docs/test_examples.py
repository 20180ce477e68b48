"""Every example runs, and its trainings stop: by an estimated loss first, then by evidence."""

from __future__ import annotations

import importlib
import runpy
from pathlib import Path

import pytest

from tests.support import plain

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("in_*.py"))


@plain.foreign
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_runs(
    path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = path.stem.removeprefix("in_")
    pytest.importorskip(name)
    try:
        importlib.import_module(f"heldin.{name}" if name != "torch" else "heldin")
    except ImportError as error:
        pytest.skip(str(error))
    monkeypatch.chdir(tmp_path)
    found = runpy.run_path(str(path), run_name="__main__")
    auto, evidence = found["auto"], found["evidence"]
    told = capsys.readouterr().out
    for rule in (auto, evidence):
        assert rule.should_stop
        assert f"stopped at step {rule.stopped_step}: " in told
    assert 0 < auto.best_step < auto.stopped_step < 1000
    estimate = auto.metrics()["heldin/best_estimate"]
    assert 0.3 < estimate < 0.7
    assert f"expected test loss {estimate:.2f}" in told
    assert 20 < evidence.stopped_step < 300
    assert min(record.criterion for record in evidence.history) < -0.5
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]
