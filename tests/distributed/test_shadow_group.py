"""Folds and shadow in several processes: the numbers of one on the batches put together."""

from __future__ import annotations

import pytest

from tests.support import ranks
from tests.support.ranks import launching

pytest.importorskip("numpy", reason="torch.distributed.all_gather_object needs numpy")
pytestmark = launching.needed


@pytest.fixture(scope="module", params=[2, 3])
def outcome(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> launching.Outcome:
    """All cases, run once in each number of processes."""
    return launching.outcomes(request.param, tmp_path_factory.mktemp("ranks"), ranks.SHADOWS)


@pytest.mark.parametrize("name", ranks.SHADOWS)
def test_ranks(outcome: launching.Outcome, name: str) -> None:
    launching.expect_ok(outcome, name)
