"""`EarlyStopping` of frameworks that train in several processes: the numbers of one."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.support import ranks
from tests.support.ranks import launching

pytest.importorskip("numpy", reason="torch.distributed.all_gather_object needs numpy")
pytestmark = launching.needed
NEEDS = {"frameworks_transformers": ("transformers", "accelerate")}
INSTALLED = [
    name
    for name in ranks.FRAMEWORKS
    if all(map(find_spec, NEEDS.get(name, (name.removeprefix("frameworks_"),))))
]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> launching.Outcome:
    """All cases, run in two processes."""
    return launching.outcomes(2, tmp_path_factory.mktemp("ranks"), INSTALLED)


@pytest.mark.parametrize("name", ranks.FRAMEWORKS)
def test_ranks(outcome: launching.Outcome, name: str) -> None:
    if name not in INSTALLED:
        pytest.skip(f"{name.removeprefix('frameworks_')} is not installed")
    launching.expect_ok(outcome, name)
