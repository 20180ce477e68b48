"""Single weights stopped: runs that go on where they were saved."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import heldin
from tests.support.elementwise_runs import values, wrapped
from tests.support.loops import data, net

PLAIN_BACKWARD = torch.autograd.backward


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    if torch.autograd.backward is not PLAIN_BACKWARD:
        gc.collect()  # what was forgotten removes itself
    assert torch.autograd.backward is PLAIN_BACKWARD


class Run:
    def __init__(self, kind: str, **options: Any) -> None:
        torch.manual_seed(3)
        self.model = net(dropout=0.2, dtype=torch.float32)
        self.x, self.y = data(dtype=torch.float32)
        self.optimizer = wrapped(self.model, kind, smoothing=0.7, start=3.0, **options)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.95)

    def step(self) -> None:
        rows = torch.randint(0, 64, (24,))
        F.cross_entropy(self.model(self.x[rows]), self.y[rows]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()

    def state(self) -> dict[str, Any]:
        parts = {n: getattr(self, n).state_dict() for n in ("model", "optimizer", "scheduler")}
        return {**parts, "rng": torch.get_rng_state()}

    def load(self, state: dict[str, Any]) -> None:
        for name in ("model", "optimizer", "scheduler"):
            getattr(self, name).load_state_dict(state[name])
        torch.set_rng_state(state["rng"])


@pytest.mark.parametrize("kind", ["SGD", "AdamW", "RMSprop"])
@pytest.mark.parametrize("options", [{}, {"greedy": False}, {"every": 2}], ids=str)
def test_a_resumed_run_is_the_uninterrupted_one(kind: str, options: Any, tmp_path: Any) -> None:
    whole, saved = Run(kind, **options), []
    for step in range(12):
        torch.save(whole.state(), tmp_path / f"{step}.pt")
        saved.append(tmp_path / f"{step}.pt")
        whole.step()
    final = values(whole.model)
    masks = whole.optimizer.masks()
    assert 0 < whole.optimizer.stopped_fraction() < 1
    for done, file in enumerate(saved):
        run = Run(kind, **options)
        run.load(torch.load(file, weights_only=True))
        for _ in range(12 - done):
            run.step()
        for name, value in values(run.model).items():
            assert torch.equal(value, final[name]), (done, name)
            assert torch.equal(run.optimizer.masks()[name], masks[name])
        run.optimizer.close()
    whole.optimizer.close()


def test_foreign_states_are_refused_and_change_nothing() -> None:
    run = Run("AdamW")
    run.step()
    state = run.optimizer.state_dict()
    plain = run.optimizer.optimizer.state_dict()
    own = state["heldin"]
    bad = [
        (plain, "state of a plain optimiser"),
        ({**plain, "heldin": {**own, "version": 2}}, "has version 2"),
        ({**plain, "heldin": {**own, "heldin": "EvidenceStopping"}}, "of a EvidenceStopping"),
        ({**plain, "heldin": {**own, "averages": {"x": torch.ones(2)}}}, "parameter 'x' of shape"),
        ({**plain, "heldin": {**own, "averages": 3}}, "incomplete or damaged"),
        (Run("AdamW", greedy=False).optimizer.state_dict(), "saved with greedy=False"),
    ]
    for foreign, message in bad:
        with pytest.raises(heldin.HeldinError, match=message):
            run.optimizer.load_state_dict(foreign)
    for name, average in run.optimizer._averages.items():
        assert torch.equal(average, own["averages"][name])
    run.optimizer.close()
