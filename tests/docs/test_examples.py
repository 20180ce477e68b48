"""Every example runs, and its training stops by evidence."""

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
    stopping = runpy.run_path(str(path), run_name="__main__")["stopping"]
    assert stopping.should_stop
    assert 20 < stopping.stopped_step < 300
    assert min(record.criterion for record in stopping.history) < -0.5
    assert f"stopped at step {stopping.stopped_step}: " in capsys.readouterr().out
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]
