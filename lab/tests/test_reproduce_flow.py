"""Gradient flow in the place of many small steps: against such steps, and the exact solution."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from heldin_lab.reproduce import EXPERIMENTS
from heldin_lab.reproduce.collected import Found
from heldin_lab.reproduce.confirm import beside_steps
from heldin_lab.reproduce.experiments import mnist_flow
from heldin_lab.reproduce.flow import Sharpness, advance, coefficients, ends, reach, stages_for
from heldin_lab.reproduce.lessons import from_flow, sentences
from heldin_lab.reproduce.run import Run
from small_data import TINY, data

np = pytest.importorskip("numpy")
pandas = pytest.importorskip("pandas")
pytest.importorskip("scipy")

__all__ = ["data"]


def _moved(curvature: float, stretch: float, stages: int) -> float:
    """Where a weight at 1 of the loss c w^2 / 2 comes to."""
    w = torch.ones(1, dtype=torch.float64)
    advance([w], lambda: [curvature * w], stretch, stages)
    return float(w)


# --- the method ------------------------------------------------------------------------------


@given(stages=st.integers(1, 60), share=st.floats(0.05, 1.0))
def test_stiff_directions_shrink(stages: int, share: float) -> None:
    """Within reach; what lies beyond it grows."""
    assert abs(_moved(share * reach(stages), 1.0, stages)) < 1
    beyond = 3 * reach(stages)
    assert abs(_moved(beyond, 1.0, stages)) > 1


@given(stages=st.integers(1, 40))
def test_more_gradients_reach_further_by_their_square(stages: int) -> None:
    assert reach(2 * stages) > 3.3 * reach(stages)
    assert abs(sum(coefficients(stages)[-1][:2]) - 1) < 1e-12  # weights that rest stay at rest


@given(stretch=st.floats(0.01, 5), sharpness=st.floats(1, 300))
def test_stages_suffice_and_are_few(stretch: float, sharpness: float) -> None:
    stages = stages_for(stretch, sharpness)
    assert reach(stages) >= stretch * sharpness
    assert stages == 2 or reach(stages - 1) < 1.3 * stretch * sharpness


@pytest.mark.parametrize("stages", [2, 3, 7])
def test_halved_stretches_halve_the_error(stages: int) -> None:
    """Of a flow that is not linear: w' = -w - w^3 has the solution below."""

    def error(stretches: int) -> float:
        w = torch.ones(1, dtype=torch.float64)
        for _ in range(stretches):
            advance([w], lambda: [w + w**3], 1 / stretches, stages)
        exact = math.exp(-1) / math.sqrt(2 - math.exp(-2))
        return abs(float(w) - exact)

    assert error(40) < 0.01
    assert error(40) / error(80) == pytest.approx(2, rel=0.05)


def test_the_path_is_that_of_many_small_steps() -> None:
    """Of a small net, in float64, with a slow twin: gradient descent of a tiny rate."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, 5, generator=generator, dtype=torch.float64)
    y = x[:, :1] * x[:, 1:2]

    def start() -> list[torch.Tensor]:
        own = torch.Generator().manual_seed(1)
        shapes = (5, 8), (8, 1)
        return [torch.randn(s, generator=own, dtype=torch.float64).div_(2) for s in shapes]

    def gradient(weights: list[torch.Tensor]) -> list[torch.Tensor]:
        a, b = weights
        hidden = torch.tanh(x @ a)
        r = (hidden @ b - y) / len(x)
        return [x.T @ (r @ b.T * (1 - hidden**2)), hidden.T @ r]

    slow, fast = start(), start()
    for _ in range(10_000):
        for w, g in zip(slow, gradient(slow), strict=True):
            w -= 2e-3 * g
    for _ in range(500):
        advance(fast, lambda: gradient(fast), 0.04, 3)
    moved = max(float((w - v).abs().max()) for w, v in zip(slow, start(), strict=True))
    assert moved > 0.3
    for one, other in zip(slow, fast, strict=True):
        assert torch.allclose(one, other, atol=0.01 * moved)


def test_sharpness_is_the_largest_curvature() -> None:
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(6, 6, generator=generator, dtype=torch.float64)
    curved = root @ root.T
    w = torch.ones(6, dtype=torch.float64, requires_grad=True)
    sharpness = Sharpness()
    value = sharpness.at([w], lambda: w @ curved @ w / 2, rounds=30)
    assert value == pytest.approx(float(torch.linalg.eigvalsh(curved)[-1]), rel=1e-4)
    again = Sharpness()
    again.load_state_dict(sharpness.state_dict())
    assert again.at([w], lambda: w @ curved @ w / 2, rounds=1) == pytest.approx(value, rel=1e-4)


@given(steps=st.integers(1, 30_000))
def test_stretches_cover_the_steps(steps: int) -> None:
    found = ends(steps)
    assert (found[0], found[-1]) == (1, steps)
    lengths = np.diff(found)
    assert (lengths > 0).all()
    assert (lengths <= np.maximum(5, np.minimum(1000, 0.1 * np.array(found[:-1])))).all()


# --- MNIST -----------------------------------------------------------------------------------


def _run(data: Path, path: Path | None = None, **changes: Any) -> Run:
    e = EXPERIMENTS["mnist-gd"]
    small = {**TINY["mnist-gd"], "rates": (0.005,), "steps": 400, "every": 1, **changes}
    return Run(0, replace(e.settings["quick"], **small), data=data, path=path, pause=0.0)


@pytest.mark.parametrize("method", ["validation", "evidence"])
def test_gradient_descent_follows_the_flow(
    data: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses, criterion and stop, at the steps that both record; stretches are short."""
    monkeypatch.setattr(mnist_flow, "ends", lambda steps: ends(steps, shortest=2, growth=0.03))
    descent = EXPERIMENTS["mnist-gd"].run
    steps, flow = _run(data), _run(data, flow=True)
    for run in (steps, flow):
        descent(run, rate=0.005, method=method)
    slow = {row["step"]: row for row in steps.rows}
    assert len(flow.rows) < len(slow) / 2
    for row in flow.rows:
        for name, within in (("test_loss", 0.003), ("validation_loss", 0.003), ("raw", 0.1)):
            if name in row and name in slow[row["step"]]:
                expected = pytest.approx(slow[row["step"]][name], rel=within)
                assert row[name] == expected, (name, row["step"])
    stops = [[row["step"] for row in run.rows if row["stop"]] for run in (steps, flow)]
    assert len(stops[0]) == len(stops[1])
    for one, other in zip(*stops, strict=True):
        assert abs(one - other) <= 0.1 * one + 5
    assert slow[1]["test_loss"] > 1.5 * slow[400]["test_loss"]


def test_a_flow_goes_on_after_a_kill(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    descent = EXPERIMENTS["mnist-gd"].run
    whole = _run(data, flow=True)
    descent(whole, rate=0.005, method="evidence")
    path = tmp_path / "run.pt"
    tick = Run.tick

    def dies(self: Run, step: int, parts: Any) -> None:
        tick(self, step, parts)
        if step == 100:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Run, "tick", dies)
        with pytest.raises(KeyboardInterrupt):
            descent(_run(data, path, flow=True), rate=0.005, method="evidence")
    again = _run(data, path, flow=True)
    descent(again, rate=0.005, method="evidence")
    assert again.rows == whole.rows
    assert (again.arrays["table"] == whole.arrays["table"]).all()


def test_what_is_told_of_the_flow(data: Path) -> None:
    tiny = {**TINY["mnist-gd"], "rates": (0.005,), "steps": 400, "every": 5}
    settings = replace(EXPERIMENTS["mnist-gd"].settings["quick"], **tiny)
    beside = beside_steps(settings, data)
    assert 0 < beside["test_loss"] < 0.02
    assert 0 < beside["ratio"] < 0.5
    steps, flow = beside["stops"]
    assert math.isnan(steps) == math.isnan(flow)
    table = pandas.DataFrame(
        {"step": [1, 11, 111], "sharpness": [9.0, 20.0, 40.0], "test_loss": [3.0, 1.0, 2.0],
         "stop": [0.0, 0.0, 1.0]}
    )  # fmt: skip
    logged = np.zeros((3, 1, 6))
    logged[:, 0, 0], logged[:, 0, 1] = 1.0, [10.0, 2.0, 0.5]  # all live, and f
    log = {"steps": table.step.to_numpy(), "sizes": np.ones(1), "table": logged}
    one = Found(table, log, True, 111, 111, 1.0)
    facts: dict[str, Any] = {"flow beside steps": {**beside, "stops": [math.nan, 7.0]}}
    held = replace(one, table=table.assign(stop=[0.0, 1.0, 0.0]))
    from_flow(facts, 0.01, {"validation": held, "evidence": one})
    assert facts["flow"]["gradients"]["evidence"] == stages_for(0.1, 20) + stages_for(1.0, 40)
    assert (facts["flow"]["turn"], facts["flow"]["crossing"]) == (11, (111, 2.0))
    early, sentence = sentences(facts)
    assert "from step 111 on (a fifth of the width), where the test loss is 2.00 times" in early
    assert "It is 2.00 times that of validation" in early
    assert "the largest curvature on the way is 40" in sentence
    assert "stops never of the descent and at step 7 of the flow" in sentence
