"""The moving average of the criterion: its start, lag and noise."""

from __future__ import annotations

import math

import pytest
import torch

from heldin.criterion.average import Average


def test_a_start_value_delays_the_crossing() -> None:
    average, steps = Average(0.999, start=-100.0), 0
    while average.value <= 0:
        average.add(0.01)
        steps += 1
    assert steps == math.ceil(math.log(1 + 100 / 0.01) / math.log(1 / 0.999)) == 9206


@pytest.mark.parametrize("start", [None, 0.0])
def test_lag_and_noise_of_the_average(start: float | None) -> None:
    b = 0.9
    ramp = Average(b, start)
    for t in range(400):
        ramp.add(float(t))
    assert 399 - ramp.value == pytest.approx(b / (1 - b), rel=1e-6)
    noise, values = Average(b, start), []
    generator = torch.Generator().manual_seed(0)
    for x in torch.randn(20_000, generator=generator).tolist():
        values.append(noise.add(x))
    spread = float(torch.tensor(values[100:]).std())
    assert spread == pytest.approx(math.sqrt((1 - b) / (1 + b)), rel=0.05)
