"""Operations of an observed step and the times that it waits for the device, as counted."""

from __future__ import annotations

from typing import Any

import pytest

from heldin_lab.bench.counts import count_steps, counted
from heldin_lab.bench.workloads import encoder, mlp
from tests.support import runs


@pytest.mark.parametrize(
    "make", [lambda: mlp((6, 5, 4), 8), lambda: encoder(8, 3, 5, 4)], ids=["mlp", "encoder"]
)
def test_a_check_waits_for_the_device_once(make: Any) -> None:
    found = count_steps(make=make, steps=5)
    assert max(each.waits for each in found["plain"]) == 0
    assert max(each.waits for each in found["heldin sampled"]) == 1
    assert max(each.waits for each in found["heldin exact"]) <= 2


def test_a_step_of_a_window_waits_for_the_device_once() -> None:
    """It is left out if it holds an inf or nan, so that has to be known."""
    model, x, _ = mlp((6, 5, 4), 8)
    waits = []
    with runs.EvidenceStopping(model, window=3) as rule:
        for _ in range(12):
            model(x).square().sum().backward()
            with counted() as found:
                rule.step()
            waits.append(found.waits)
            model.zero_grad()
    assert waits[6:] == [1, 1, 2, 1, 1, 2]


def test_the_outlook_waits_once_more() -> None:
    """At few checks, the 64th is the first, it is asked whether gradients have vanished."""
    found = count_steps(["heldin sampled"], lambda: mlp((6, 5, 4), 8), steps=64)
    waits = [each.waits for each in found["heldin sampled"]]
    assert sorted(set(waits)) == [1, 2]
    assert waits.count(2) == 1


def test_operations_do_not_grow_with_depth() -> None:
    def extra(depth: int) -> float:
        found = count_steps(make=lambda: encoder(8, depth, 5, 4), steps=5)
        return found["heldin sampled"][-1].operations - found["plain"][-1].operations

    assert extra(12) < 1.25 * extra(4)
