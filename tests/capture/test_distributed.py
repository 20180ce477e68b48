"""Several processes give the values and decisions of one on the concatenated batch."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support import ranks

ROOT = Path(__file__).parents[2]
pytest.importorskip("numpy", reason="torch.distributed.all_gather_object needs numpy")
pytestmark = [
    pytest.mark.skipif(
        not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
        reason="this build of torch has no gloo",
    ),
    pytest.mark.xdist_group("ranks"),  # one worker runs the ranks, once for all tests
]


def launch(world: int, out: Path, names: str) -> list[subprocess.Popen[bytes]]:
    """One process per rank."""
    common = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(world)}
    command = [sys.executable, "-m", "tests.support.ranks", str(out), names]
    return [
        subprocess.Popen(command, cwd=ROOT, env={**common, "RANK": str(r)}, stderr=subprocess.PIPE)
        for r in range(world)
    ]


@pytest.fixture(scope="module", params=[2, 4])
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """All cases, run once in each number of processes."""
    world, out = request.param, tmp_path_factory.mktemp("ranks")
    processes = launch(world, out, ",".join(ranks.CASES))
    tails = [process.communicate(timeout=300)[1].decode()[-2000:] for process in processes]
    found = {}
    for rank, tail in enumerate(tails):
        path = out / f"{rank}.json"
        found[rank] = json.loads(path.read_text()) if path.exists() else {"": tail}
    return found


@pytest.mark.parametrize("name", ranks.CASES)
def test_ranks(outcome: dict, name: str) -> None:
    for rank, results in outcome.items():
        assert name in results, f"rank {rank} did not come that far: {list(results.items())[-1:]}"
        assert results[name] == "ok", f"rank {rank}:\n{results[name]}"


def test_the_others_do_not_wait_for_a_dead_rank(tmp_path: Path) -> None:
    """An error is raised within the group's own timeout."""
    processes = launch(3, tmp_path, "die")
    for process in processes:
        process.communicate(timeout=120)
    assert processes[-1].returncode == -signal.SIGKILL
    for rank in (0, 1):
        assert json.loads((tmp_path / f"{rank}.json").read_text())["die"] == "ok"


def test_the_ring_that_is_simulated() -> None:
    """Without delays it takes the time of the formula; with them, a little more."""
    costs = runpy.run_path(str(ranks.BENCHMARK))
    for size, number in ((10**6, 4), (10**9, 64)):
        formula = costs["ring_time"](size, number, 1e-5, 1e10)
        assert costs["simulated_ring"](size, number, 1e-5, 1e10) == pytest.approx(formula)
        assert formula < costs["simulated_ring"](size, number, 1e-5, 1e10, jitter=0.2) < 2 * formula
    assert costs["on_the_wire"](1000, 1) == 0
    assert costs["on_the_wire"](1000, 1000) == pytest.approx(1998)
    total = costs["Job"](costs["llama_70b"](), batch=1).parameters
    assert 70e9 < total < 71e9
