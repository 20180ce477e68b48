"""Runs that are killed and long runs, in short; heldin_lab.bench.{faults,soak} do it at length."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import heldin
from heldin_lab.bench import faults, soak
from tests.support import runs
from tests.support.loops import close

# --- kills -----------------------------------------------------------------------------------


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks processes and kills them")
def test_killed_runs_are_the_run_that_was_left_alone() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "heldin_lab.bench.faults", "--kills", "8"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["kills"] == 8
    assert report["runs that differ"] == 0


def run(rule: str, folder: Path) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        made = faults.Run(rule, folder)
        result = made.go(log)
    finally:
        os.close(log)
    for part in (made.stopping, made.optimizer):
        close(part)
    return result


@pytest.mark.parametrize("rule", faults.RULES)
def test_every_rule_goes_on_from_its_checkpoint(
    rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "LAST", 31)
    expected = run(rule, tmp_path / "plain")
    for last in (9, 12, 20, 31):  # the second and third end between two checkpoints
        monkeypatch.setattr(faults, "LAST", last)
        found = run(rule, tmp_path / "killed")
    args = (tmp_path / "plain", tmp_path / "killed", expected, found)
    assert faults.differences(*args) == []


def test_the_harness_notices_what_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "LAST", 20)
    expected = run("window", tmp_path / "plain")
    monkeypatch.setattr(faults, "LAST", 9)
    run("window", tmp_path / "killed")
    monkeypatch.setattr(faults, "LAST", 20)
    monkeypatch.setattr(torch, "set_rng_state", lambda state: None)  # the random state, forgotten
    found = run("window", tmp_path / "killed")
    args = (tmp_path / "plain", tmp_path / "killed", expected, found)
    assert "weights differs" in faults.differences(*args)
    assert any("another value at step" in line for line in faults.differences(*args))

    def log(text: str) -> list[str]:
        (tmp_path / "killed" / "log").write_text(text)
        return faults.differences(tmp_path / "plain", tmp_path / "killed", expected, expected)

    values = faults.attempts(tmp_path / "plain")[0][1]
    lines = [f"{n} {v}\n" for n, v in values]
    assert log("from 0\n" + "".join(lines)) == []
    assert log("from 0\n" + "".join(lines[:5]) + "from 3\n" + "".join(lines[3:])) == []
    assert log("from 0\n" + "".join(lines[:5]) + "from 9\n" + "".join(lines[9:])) != []  # lost
    assert log("from 0\n" + "".join(lines[:5] + lines[4:])) != []  # one step twice, one missing
    assert log("from 0\n" + "".join(lines[:-1])) != []


# --- long runs -------------------------------------------------------------------------------


def live() -> int:
    gc.collect()
    return len(gc.get_objects())


@pytest.mark.parametrize("kind", soak.KINDS)
def test_nothing_grows_in_a_long_run(kind: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    stopping: Any = None
    if kind == "evidence":
        stopping = runs.EvidenceStopping(model, warmup=10**6, history=64)
    else:
        optimizer = heldin.ElementwiseStopping(optimizer, model)
    counts = []
    for step in range(1, 2001):
        x = torch.randn(3 + step % 4, 4)
        optimizer.zero_grad()
        F.mse_loss(model(x), x[:, :2]).backward()
        if stopping is not None:
            stopping.step()
        optimizer.step()
        if step % 500 == 0:
            counts.append(live())
    # the history holds between 32 and 64 records, of a few objects each; what earlier tests have
    # left may go in the meantime
    assert max(counts[1:]) - counts[0] < 250, counts
    if stopping is not None:
        assert len(stopping.history) <= 66
        assert stopping.history.checks == 2000
        assert len(stopping.state_dict()["history"]["values"]) <= 66
    close(stopping if stopping is not None else optimizer)


def test_the_soak_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "soak.json"
    threads = torch.get_num_threads()
    soak.main(40, ["evidence", "elementwise"], str(out))
    torch.set_num_threads(threads)
    gc.unfreeze()
    assert "slope, bytes per 1000 steps" in capsys.readouterr().out
    reports = json.loads(out.read_text())
    assert [r["kind"] for r in reports] == ["evidence", "elementwise"]
    assert reports[0]["records in the history"] == 40


def test_a_leak_is_told_from_noise() -> None:
    random = torch.Generator().manual_seed(0)
    noise = [4096.0 * int(v) for v in torch.randint(0, 5, (200,), generator=random)]
    xs = [float(x) for x in range(0, 200_000, 1000)]
    slope, error = soak.line(xs, noise)
    assert abs(slope) < 3 * error
    slope, error = soak.line(xs, [n + 0.5 * x for n, x in zip(noise, xs, strict=True)])
    assert slope == pytest.approx(0.5, rel=0.1)
    assert slope > 10 * error
