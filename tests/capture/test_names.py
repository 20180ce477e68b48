"""Names of parameters, read while other threads read them."""

from __future__ import annotations

import torch

from heldin.capture.names import Names
from tests.support.observe_runs import net


def test_names_are_whole_at_any_time() -> None:
    """Passes of other threads make them be read again, in the middle of a pass of this one."""
    known: list[int] = []

    def chosen(name: str) -> bool:
        known.append(len(names.by_id) if reading else 4)
        return True

    reading, model = False, net(3, 4, 2)
    names = Names(model, chosen)
    reading = True
    assert len(names.for_leaves([torch.ones(1, requires_grad=True)])) == 4
    assert known == [4] * 8
