"""The model of what evidence costs in data-parallel training, against what processes measure."""

from __future__ import annotations

import pytest
import torch

from heldin_lab.bench import distributed as _distributed


@pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
    reason="this build of torch has no gloo",
)
def test_two_processes_send_and_compute_what_the_model_says() -> None:
    """The paper's perceptron: exact counts, below 1 % of the gradients."""
    found = _distributed.measured("mlp", 2, "sampled", batch=4)
    for name in ("bytes", "step", "flops"):
        assert found[name]["measured"] == found[name]["model"] > 0, name
    assert found["share of gradients"] < 0.01


def test_the_ring_that_is_simulated() -> None:
    """Without delays it takes the time of the formula; with them, a little more."""
    for size, ranks in ((10**6, 4), (10**9, 64)):
        link = (size, ranks, 1e-5, 1e10)
        formula = _distributed.ring_time(*link)
        assert _distributed.simulated_ring(*link) == pytest.approx(formula)
        assert formula < _distributed.simulated_ring(*link, jitter=0.2) < 2 * formula
    assert _distributed.on_the_wire(1000, 1) == 0
    assert _distributed.on_the_wire(1000, 1000) == pytest.approx(1998)


def test_the_decoder_has_70_billion_parameters() -> None:
    assert 70e9 < _distributed.Job(_distributed.llama_70b(), batch=1).parameters < 71e9
