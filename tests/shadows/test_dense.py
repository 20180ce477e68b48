"""Networks with back-propagation written out by hand, against autograd."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from heldin.shadows.dense import ACTIVATIONS, DenseNetwork, Linear

K, ROWS, SIZES = 3, 5, (4, 6, 2)


def layers(middle: list[nn.Module]) -> tuple[list[Linear], list[Linear | nn.Module]]:
    torch.manual_seed(0)
    linear = []
    for before, after in pairwise(SIZES):
        weight, bias = torch.randn(K, after, before).double(), torch.randn(K, after).double()
        linear.append(Linear(weight, torch.zeros_like(weight), bias, torch.zeros_like(bias)))
    return linear, [linear[0], *middle, linear[1]]


def by_autograd(
    network: DenseNetwork, linear: list[Linear], middle: list[nn.Module], x: Tensor
) -> list[Tensor]:
    """Gradients of the sum of the outputs, with the masks that the network has drawn."""
    weights = [layer.weight.clone().requires_grad_() for layer in linear]
    h = x @ weights[0].mT + linear[0].bias.unsqueeze(1)
    for number, module in enumerate(middle, 1):
        mask = network._masks.get(number)
        h = h * mask if mask is not None else h if isinstance(module, nn.Dropout) else module(h)
    outputs = h @ weights[1].mT + linear[1].bias.unsqueeze(1)
    return list(torch.autograd.grad(outputs.sum(), weights))


@pytest.mark.parametrize("kind", list(ACTIVATIONS), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("rate", [None, 0.0, 0.4, 1.0])
def test_gradients_are_those_of_autograd(kind: type[nn.Module], rate: float | None) -> None:
    middle = [kind(), *([] if rate is None else [nn.Dropout(rate)])]
    linear, all_layers = layers(middle)
    network = DenseNetwork(all_layers)
    assert network.has_dropout == (rate is not None)
    x = torch.randn(K, ROWS, SIZES[0]).double()
    outputs = network.forward(x)
    expected = by_autograd(network, linear, middle, x)
    network.backward(torch.ones_like(outputs))
    for layer, gradient in zip(linear, expected, strict=True):
        torch.testing.assert_close(layer.weight_grad, gradient)


def test_dropout_keeps_its_share_of_units_at_its_scale() -> None:
    weight = torch.eye(50).double().unsqueeze(0)
    network = DenseNetwork([Linear(weight, torch.zeros_like(weight)), nn.Dropout(0.25)])
    network.seed(1, torch.device("cpu"))
    ones = torch.ones(1, 400, 50).double()
    outputs = network.forward(ones)
    assert set(outputs.unique().tolist()) == {0.0, 1 / 0.75}
    assert abs(float(outputs.mean()) - 1) < 0.02
    network.seed(1, torch.device("cpu"))
    assert torch.equal(network.forward(ones), outputs)
    assert torch.equal(network.forward(ones, train=False), ones)
