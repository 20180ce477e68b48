"""Saved state: a resumed run is the uninterrupted one, to the last bit."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import heldin
from tests.support import runs
from tests.support.loops import Dial, data, net
from tests.support.states import same, through_a_file

STEPS = 14


class Run:
    """A training run that can be saved and loaded."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(5)
        self.model = net(dropout=0.3, dtype=torch.float32)
        self.x, self.y = data(48, dtype=torch.float32)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.05)
        self.stopping = runs.EvidenceStopping(self.model, **options)
        self.generator = torch.Generator().manual_seed(1)

    def step(self) -> None:
        rows = torch.randperm(48, generator=self.generator)[:20]
        for part in rows.split(12):  # two micro-batches
            F.cross_entropy(self.model(self.x[part]), self.y[part]).backward()
        self.stopping.step()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "stopping": self.stopping.state_dict(),
            "generator": self.generator.get_state(),
            "rng": torch.get_rng_state(),
        }

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.stopping.load_state_dict(state["stopping"])
        self.generator.set_state(state["generator"])
        torch.set_rng_state(state["rng"])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"smoothing": 0.0, "patience": 3, "warmup": 3},
        {"window": 3},
        {"every": 2, "window": 2, "correction": "symmetric"},
        {"history": 4, "start": 0.0, "weighted": False},
        {"estimator": "exact"},
        {"coordinates": 8},
        {"coordinates": 8, "window": 3},
        {"estimator": "microbatch", "window": 2},
    ],
    ids=str,
)
def test_a_run_resumed_at_any_step_is_the_uninterrupted_one(options: dict[str, Any]) -> None:
    whole = Run(**options)
    saved = []
    for _ in range(STEPS):
        saved.append(through_a_file(whole.state()))
        whole.step()
    final = whole.state()
    whole.stopping.close()
    for done, state in enumerate(saved):
        run = Run(**options)
        run.load(state)
        assert same(run.stopping.state_dict(), state["stopping"])
        for _ in range(STEPS - done):
            run.step()
        assert same(run.state(), final)
        assert same(run.stopping.metrics(), whole.stopping.metrics())
        run.stopping.close()


SCRIPT = [0.3, -0.2, -9.0, 0.4, 0.4, -0.1, 0.2, math.nan, 0.2, 0.2, 0.2, 0.2]
SLOW = [-3.0, -3.0, -3.0, 0.1]  # the average that arms: -0.3, -0.57, -0.81


@pytest.mark.parametrize(
    ("options", "script", "stop"),
    [
        ({"patience": 3}, SCRIPT, 10),
        ({"warmup": 10}, SCRIPT, 11),
        ({"arming": 1.2}, SCRIPT, None),
        ({"arming": 0.8}, SLOW, 4),
    ],
    ids=str,
)
def test_arming_and_patience_are_resumed(
    options: dict[str, Any], script: list[float], stop: int | None
) -> None:
    """The streak, the average that arms and whether it has: each decides when this one stops."""

    def run(values: list[float], state: Any = None) -> runs.EvidenceStopping:
        dial = Dial()
        with runs.EvidenceStopping(dial, smoothing=0, **options) as stopping:
            if state is not None:
                stopping.load_state_dict(through_a_file(state))
            for value in values:
                dial.show(value)
                stopping.step()
        return stopping

    whole = run(script)
    assert whole.stopped_step == stop
    for at in range(len(script)):
        second = run(script[at:], run(script[:at]).state_dict())
        assert second.stopped_step == stop
        assert second.armed == whole.armed == (stop is not None)


def test_a_state_is_not_changed_by_what_follows() -> None:
    run = Run(window=3)
    run.step()
    state = run.stopping.state_dict()
    before = copy.deepcopy(state)
    for _ in range(5):
        run.step()
    assert same(state, before)
    run.stopping.close()


def test_a_stop_is_saved() -> None:
    run = Run(arming=None, smoothing=0.0)
    while not run.stopping.should_stop:
        run.step()
    again = Run(arming=None, smoothing=0.0)
    again.stopping.load_state_dict(through_a_file(run.stopping.state_dict()))
    assert again.stopping.should_stop
    assert again.stopping.stopped_step == run.stopping.stopped_step
    assert again.stopping.reason == run.stopping.reason
    assert again.stopping.history.stopped == run.stopping.history.stopped
    run.stopping.close()
    again.stopping.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: [], "not a state that heldin saved"),
        (lambda s: {"state": {}, "param_groups": []}, "not a state that heldin saved"),
        (lambda s: {**s, "heldin": "ValidationStopping"}, "state of a ValidationStopping"),
        (lambda s: {**s, "version": 99}, "has version 99, this heldin reads version 4"),
        (
            lambda s: {**s, "settings": {**s["settings"], "smoothing": 0.5}},
            r"saved with smoothing=0\.5, but this one has smoothing=0\.9",
        ),
        (lambda s: {k: v for k, v in s.items() if k != "decision"}, "incomplete.*'decision'"),
        (lambda s: {**s, "decision": {**s["decision"], "streak": 7}, "history": {}}, "incomplete"),
    ],
)
def test_foreign_states_are_refused_and_change_nothing(change: Any, message: str) -> None:
    run = Run()
    run.step()
    before = run.stopping.state_dict()
    with pytest.raises(heldin.HeldinError, match=message):
        run.stopping.load_state_dict(change(before))
    assert same(run.stopping.state_dict(), before)
    run.stopping.close()


def test_the_window_of_another_model_is_refused() -> None:
    run = Run(window=3)
    run.step()
    other = nn.Linear(5, 3)
    state = run.stopping.state_dict()
    with (
        runs.EvidenceStopping(other, window=3) as stopping,
        pytest.raises(heldin.HeldinError, match=r"saved with model=.* but this one has model="),
    ):
        stopping.load_state_dict(state)
    run.stopping.close()


def test_first_step_after_resuming_is_as_any_other_where_batched_passes_are_tried() -> None:
    """A plan that is new is compared with single passes; that must not leave a trace."""

    class Quadratic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.w = nn.Parameter(torch.randn(20))
            self.b, self.zeta, self.error = torch.randn(20, 20), torch.randn(20), torch.randn(20)

        def forward(self, side: torch.Tensor) -> torch.Tensor:
            shift = self.w + self.zeta
            return 0.5 * shift @ (self.b @ shift) + side * (self.error @ self.w)

    model, side = Quadratic(), torch.tensor([-1.0, 1.0])
    found = []
    with heldin.observe(model) as seen:
        for _ in range(3):
            seen.clear()
            model.zero_grad()
            model(side).mean().backward()
            found.append((seen["w"].total.clone(), seen["w"].squares.clone()))
    for total, squares in found[1:]:
        assert torch.equal(total, found[0][0])
        assert torch.equal(squares, found[0][1])
