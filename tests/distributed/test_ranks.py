"""Several processes give the values and decisions of one on the concatenated batch."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.support import ranks
from tests.support.ranks import launching

pytest.importorskip("numpy", reason="torch.distributed.all_gather_object needs numpy")
pytestmark = launching.needed
CASES = [name for name in ranks.CASES if name not in ranks.SHADOWS + ranks.FRAMEWORKS]


@pytest.fixture(scope="module", params=[2, 4])
def outcome(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> launching.Outcome:
    """All cases, run once in each number of processes."""
    return launching.outcomes(request.param, tmp_path_factory.mktemp("ranks"), CASES)


@pytest.mark.parametrize("name", CASES)
def test_ranks(outcome: launching.Outcome, name: str) -> None:
    launching.expect_ok(outcome, name)


def test_the_others_do_not_wait_for_a_dead_rank(tmp_path: Path) -> None:
    """An error is raised within the group's own timeout."""
    processes = launching.launch(3, tmp_path, "die")
    for process in processes:
        process.communicate(timeout=300)
    assert processes[-1].returncode == -signal.SIGKILL
    for rank in (0, 1):
        assert json.loads((tmp_path / f"{rank}.json").read_text())["die"] == "ok"
