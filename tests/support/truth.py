"""The slow truth: one backward pass per sample through the same forward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import heldin


def truth(model: nn.Module, losses: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Sum and sum of squares per parameter, of the gradients of each of the losses."""
    params = {n: p for n, p in model.named_parameters() if p.requires_grad}
    sums: dict[str, tuple[Tensor, Tensor]] = {}
    for loss in losses:
        grads = torch.autograd.grad(
            loss, list(params.values()), retain_graph=True, allow_unused=True
        )
        for name, grad in zip(params, grads, strict=True):
            if grad is not None:
                dense = grad.to_dense() if grad.is_sparse else grad
                grad = (
                    torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
                ).double()
                first, second = sums.get(name, (torch.zeros_like(grad), torch.zeros_like(grad)))
                sums[name] = (first + grad, second + grad.square())
    return sums


def error(seen: Any, expected: dict[str, tuple[Tensor, Tensor]], floor: float) -> dict[str, float]:
    """The larger relative error of the two sums, per parameter.

    Parameters whose true gradient is zero hold rounding noise: a floor, relative to the largest
    parameter, keeps it from counting.
    """
    scale = max(float(second.norm()) for _, second in expected.values())
    result = {}
    for name, (first, second) in expected.items():
        size = float(second.norm()) + floor * scale + 1e-300  # where all is zero, so must we be
        got = seen[name]
        result[name] = max(
            float((got.total.double() - first).norm()) / (float(first.norm()) + size**0.5),
            float((got.squares.double() - second).norm()) / size,
        )
    return result


def observe_once(
    seen: heldin.Observation, model: nn.Module, losses: Any, batch: Any, floor: float
) -> dict[str, float]:
    """Observe one step inside an open block and compare it with the truth."""
    seen.clear()
    model.zero_grad()
    values = losses(model, *batch)
    expected = truth(model, values)
    values.sum().backward()
    missing = set(expected) - set(seen)
    assert not missing, f"not seen: {missing}"
    assert seen.count == len(values)
    return error(seen, expected, floor)
