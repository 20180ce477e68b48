"""Networks on tables: where they start."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("sklearn")

from heldin.sklearn.training import build_network, constant_outputs, start_at

LOSSES = {
    "classes": nn.CrossEntropyLoss(),
    "two": nn.BCEWithLogitsLoss(),
    "numbers": nn.MSELoss(),
}


def rows(kind: str, n: int = 40, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Inputs, targets as a loss takes them, and the number of outputs."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, dtype=torch.float64, generator=generator)
    noisy = x[:, :1] + 0.5 * torch.randn(n, 1, dtype=torch.float64, generator=generator)
    if kind == "classes":
        return x, (noisy[:, 0] > -0.5).long() + (noisy[:, 0] > 0.5).long(), 3
    return x, (noisy > 0).double() if kind == "two" else noisy, 1


@pytest.mark.parametrize("kind", list(LOSSES))
def test_the_constant_is_the_best_constant(kind: str) -> None:
    x, y, size = rows(kind)
    weights = torch.linspace(0.2, 1.8, len(x), dtype=torch.float64)
    loss_fn = LOSSES[kind]
    best = constant_outputs(loss_fn, y, size, weights)
    model = build_network([3, 4, size], "relu", generator=torch.Generator().manual_seed(0))
    start_at(model, best)
    assert torch.allclose(model(x), best.expand(len(x), size))

    per_row = type(loss_fn)(reduction="none")

    def loss(outputs: torch.Tensor) -> float:
        losses = per_row(outputs.expand(len(x), size), y).reshape(len(x))
        return float((losses * weights).mean())

    for number in range(size):
        for move in (-0.01, 0.01):
            other = best.clone()
            other[number] += move
            assert loss(other) > loss(best)


def test_layers_of_a_network() -> None:
    model = build_network([3, 5, 2], "relu")
    kinds = [type(layer).__name__ for layer in model]
    assert kinds == ["Linear", "ReLU", "Linear"]
    assert [tuple(p.shape) for p in model.parameters()] == [(5, 3), (5,), (2, 5), (2,)]
    assert all(p.count_nonzero() == 0 for p in model.parameters())


def test_a_class_that_is_missing_has_a_share() -> None:
    shares = constant_outputs(nn.CrossEntropyLoss(), torch.tensor([0, 0, 2]), 3, None).exp()
    assert shares.sum() == pytest.approx(1)
    assert 0 < shares[1] < shares[2]
    assert constant_outputs(nn.BCEWithLogitsLoss(), torch.ones(4, 1), 1, None).isfinite().all()
