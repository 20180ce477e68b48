"""The benchmark: what it measures is right, and its report says what was measured."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from heldin_lab.bench import WORKLOADS, Workload, shadows, write_report
from heldin_lab.bench import methods as _methods
from heldin_lab.bench import run as _run
from heldin_lab.bench.workloads import mlp
from heldin_lab.cli import main as _cli


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> str:
    work = Workload("tiny", lambda: mlp((6, 5, 3), 8), {"exact": 9.0}, {}, repeats=2)
    monkeypatch.setitem(WORKLOADS, "tiny", work)
    return "tiny"


def test_every_workload_has_the_size_that_its_title_says() -> None:
    def parameters(name: str) -> int:
        model, _, _ = WORKLOADS[name].make()
        return sum(p.numel() for p in model.parameters())

    assert parameters("mlp") == 11_972_510
    assert parameters("logistic") == 496 * 2 + 2
    assert set(WORKLOADS) >= {"mlp", "cnn", "encoder", "gpt2", "logistic"}


@pytest.mark.filterwarnings("ignore:Full backward hook:UserWarning")  # of peers
def test_all_methods_that_are_installed_agree_on_the_second_moment(tiny: str) -> None:
    result = _run.measure(tiny, list(_methods.METHODS))
    assert set(result.seconds) | set(result.skipped) == set(_methods.METHODS)
    assert {"plain", "heldin exact", "torch.func"} <= set(result.seconds)
    assert all("not installed" in why for why in result.skipped.values())
    assert result.ratios["plain"] == 1


def test_a_method_with_another_second_moment_is_left_out(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> _methods.Way:
        way = _methods.vmap(model, x, y)
        assert way.squares is not None
        right = way.squares
        return _methods.Way(way.step, lambda: {n: 1.01 * s for n, s in right().items()})

    monkeypatch.setitem(_methods.METHODS, "wrong", wrong)
    result = _run.measure(tiny, ["wrong"])
    assert "wrong second moment" in result.skipped["wrong"]
    assert "wrong" not in result.seconds


def test_slope_is_that_of_a_power() -> None:
    assert _run.slope([1, 2, 4, 8], [3 * n**1.5 for n in (1, 2, 4, 8)]) == pytest.approx(1.5)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_is_that_of_the_child_and_not_of_its_parent() -> None:
    held = bytearray(1 << 29)  # as the benchmark itself may hold
    program = "from heldin_lab.bench.run import peak_bytes; before = peak_bytes(); "
    program += "held = bytearray(100_000_000); print(before, peak_bytes() - before)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    before, grown = map(int, done.stdout.split())
    assert _run.peak_bytes() > before + len(held) // 2
    assert 90e6 < grown < 120e6


def test_report(tiny: str, tmp_path: Path) -> None:
    result = _run.measure(tiny, ["heldin exact", "heldin sampled"])
    result.seconds = {"plain": 0.010, "heldin exact": 0.014, "heldin sampled": 0.0102}
    result.memory = {"plain": 1.0, "heldin exact": 1.2}
    text = write_report([result], {}, tmp_path)
    assert "| tiny | 10.0 ms | 1.40 | 1.02 |" in text
    assert "| tiny | 1.20 |" in text
    data = json.loads((tmp_path / "cost.json").read_text())
    assert data["workloads"][0]["ratios"]["heldin exact"] == pytest.approx(1.4)
    assert data["machine"]["torch"] == torch.__version__
    if find_spec("matplotlib"):
        assert (tmp_path / "cost.png").stat().st_size > 1000


def test_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = ["--methods", "heldin exact", "--no-memory", "--no-growth", "--steady-heap"]
    options += ["--processes", "2", "--out", str(tmp_path)]
    assert _cli.main(["bench", "logistic", *options]) == 0
    printed = capfd.readouterr()
    assert "| logistic |" in printed.out
    assert "in process 2" in printed.err
    assert (tmp_path / "cost.md").exists()
    (found,) = json.loads((tmp_path / "cost.json").read_text())["workloads"]
    (one, other) = found["apart"]["heldin exact"]
    assert found["ratios"]["heldin exact"] == pytest.approx((one + other) / 2)
    assert _cli.main(["bench", "--list"]) == 0
    assert "mlp" in capfd.readouterr().out
    assert _cli.main(["bench", "none-such"]) == 2
    assert "none-such" in capfd.readouterr().err


@pytest.mark.parametrize("way", ["split", "folds, refit", "light", "one shadow", "auto"])
@pytest.mark.parametrize("fits", [False, True])
def test_whole_runs_until_they_stop(way: str, fits: bool) -> None:
    """A run ends before its epochs are over, and what it keeps is better than guessing."""
    setting = shadows.Setting(
        lambda: shadows.network(20, 16, 4), shadows.vectors, 300, epochs=200, fits=fits, rate=0.02
    )
    outcome = shadows.run(setting, way, seed=0)
    assert 0 < outcome.steps < 200 * 10 * (6 if way == "folds, refit" else 1)
    assert outcome.seconds > 0
    assert outcome.test_loss < math.log(4)


def test_time_is_that_of_the_clock_that_is_given(tiny: str) -> None:
    ticks = itertools.count()
    result = _run.measure(tiny, ["heldin exact"], clock=lambda: float(next(ticks)))
    assert result.seconds == {"plain": 1.0, "heldin exact": 1.0}  # a tick from start to end
