"""Modules in another order, and the tests in them: `pytest -p tests.support.shuffled`.

ORDER is the seed. pytest then joins those that share a fixture again.
"""

from __future__ import annotations

import os
import random

import pytest


def shuffled(names: list[str], seed: int) -> list[int]:
    """Places of tests in a new order; those of a module (what is before `::`) stay together."""
    draw = random.Random(seed)
    modules: dict[str, list[int]] = {}
    for place, name in enumerate(names):
        modules.setdefault(name.split("::")[0], []).append(place)
    groups = list(modules.values())
    draw.shuffle(groups)
    for group in groups:
        draw.shuffle(group)
    return [place for group in groups for place in group]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Draw an order, by the seed ORDER."""
    order = shuffled([item.nodeid for item in items], int(os.environ.get("ORDER", "0")))
    items[:] = [items[place] for place in order]
