"""Gradients of losses by the outputs."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from heldin.shadows.losses import PerRowLoss


@given(seed=st.integers(0, 1000), k=st.integers(1, 3), b=st.integers(1, 6), c=st.integers(1, 4))
@settings(deadline=None, max_examples=25)
def test_closed_slopes_are_those_of_autograd(seed: int, k: int, b: int, c: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    o, keep = normal(k, b, c), torch.rand(k, b, generator=generator) > 0.4
    some = torch.randn(5, c, dtype=torch.float64)
    weights = torch.rand(b, generator=generator, dtype=torch.float64)
    labels = torch.randint(c, (5 + b,), generator=generator)
    shaped = torch.rand(5 + b, c, generator=generator, dtype=torch.float64)
    for loss_fn, targets in (
        (F.mse_loss, shaped),
        (nn.MSELoss(reduction="sum"), shaped),
        (F.binary_cross_entropy_with_logits, shaped),
        (F.cross_entropy, labels),
    ):
        fast = PerRowLoss.of(loss_fn, some, targets[:5])
        assert fast.row_gradient is not None
        slow = PerRowLoss(fast.loss_fn, fast.per_row, fast.kind, None, True, lambda t: t)
        for w in (None, weights):
            ready = fast.prepare(targets[5:])
            torch.testing.assert_close(
                fast.gradient(o, ready, keep, w), slow.gradient(o, targets[5:], keep, w)
            )
