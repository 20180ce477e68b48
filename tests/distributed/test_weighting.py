"""The constant factor of a loss."""

from __future__ import annotations

import torch

from heldin.distributed.weighting import MEAN, SUM, root_factor


def test_the_factor_before_a_mean_or_a_sum() -> None:
    losses = torch.ones(8, requires_grad=True)
    assert root_factor(3 * losses.mean() / 2) == (1.5, MEAN)
    assert root_factor(losses.sum() / 8) == (0.125, SUM)
    assert root_factor(losses.mean() + losses.square().sum()) is None
