"""Several processes give the values and decisions of one on the concatenated batch."""

from __future__ import annotations

import json
import runpy
import signal
from pathlib import Path

import pytest

from tests.support import ranks
from tests.support.ranks import launching

pytest.importorskip("numpy", reason="torch.distributed.all_gather_object needs numpy")
pytestmark = launching.needed
CASES = [name for name in ranks.CASES if name not in ranks.SHADOWS + ranks.FRAMEWORKS]


@pytest.fixture(scope="module", params=[2, 4])
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """All cases, run once in each number of processes."""
    return launching.outcomes(request.param, tmp_path_factory.mktemp("ranks"), CASES)


@pytest.mark.parametrize("name", CASES)
def test_ranks(outcome: dict, name: str) -> None:
    launching.expect_ok(outcome, name)


def test_the_others_do_not_wait_for_a_dead_rank(tmp_path: Path) -> None:
    """An error is raised within the group's own timeout."""
    processes = launching.launch(3, tmp_path, "die")
    for process in processes:
        process.communicate(timeout=300)
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
