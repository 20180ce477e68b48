"""Plain networks on rows of numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn

__all__ = [
    "ACTIVATIONS",
    "Inputs",
    "build_network",
    "constant_outputs",
    "network_of",
    "network_outputs",
    "set_weights",
    "start_at",
]

CHUNK = 4096  # rows per evaluation call
ACTIVATIONS: dict[str, type[nn.Module]] = {
    "identity": nn.Identity,
    "logistic": nn.Sigmoid,
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
}


class Inputs(Protocol):
    """A dense tensor, or rows that are made dense on access."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: Any, /) -> Tensor: ...


def build_network(
    sizes: Sequence[int],
    activation: str,
    *,
    dtype: torch.dtype = torch.float64,
    generator: torch.Generator | None = None,
) -> nn.Sequential:
    """Return linear layers with activations: zeros, or with a generator Glorot's weights.

    The global random stream is not used.

    >>> build_network([3, 5, 2], "relu")
    Sequential(
      (0): Linear(in_features=3, out_features=5, bias=True)
      (1): ReLU()
      (2): Linear(in_features=5, out_features=2, bias=True)
    )
    """
    layers: list[nn.Module] = []
    for above, below in pairwise(sizes):
        layers += [ACTIVATIONS[activation]()] if layers else []
        linear = nn.utils.skip_init(nn.Linear, above, below, dtype=dtype)
        bound = math.sqrt((2.0 if activation == "logistic" else 6.0) / (above + below))
        with torch.no_grad():
            for p in linear.parameters():
                p.zero_() if generator is None else p.uniform_(-bound, bound, generator=generator)
        layers.append(linear)
    return nn.Sequential(*layers)


def constant_outputs(loss_fn: Any, y: Tensor, outputs: int, weights: Tensor | None) -> Tensor:
    """Return the (outputs,) of the best constant prediction: class frequencies, or means.

    A class that is missing counts as half a row.

    >>> y = torch.tensor([0, 0, 0, 1])
    >>> constant_outputs(nn.CrossEntropyLoss(), y, 2, None).exp()
    tensor([0.7500, 0.2500], dtype=torch.float64)
    """
    weights = torch.ones(len(y), dtype=torch.float64) if weights is None else weights.double()
    if isinstance(loss_fn, nn.CrossEntropyLoss):
        counts = torch.zeros(outputs, dtype=torch.float64).index_add_(0, y, weights)
        counts = torch.where(counts > 0, counts, 0.5)
        return (counts / counts.sum()).log()
    means = (y.double() * weights.unsqueeze(1)).sum(0) / weights.sum()
    if isinstance(loss_fn, nn.BCEWithLogitsLoss):
        half = 0.5 / (len(y) + 1)
        means = torch.where(means <= 0, half, torch.where(means >= 1, 1 - half, means))
        return means.logit()
    return means


@torch.no_grad()
def start_at(model: nn.Sequential, outputs: Tensor) -> None:
    """Make a new network give the same outputs for all inputs."""
    last = model[-1]
    assert isinstance(last, nn.Linear)
    last.weight.zero_()
    last.bias.copy_(outputs)


@torch.no_grad()
def set_weights(model: nn.Sequential, layers: Sequence[tuple[Any, Any]]) -> bool:
    """Set weights (inputs, outputs) and biases; return False if shapes differ."""
    linear = [layer for layer in model if isinstance(layer, nn.Linear)]
    shapes = [(layer.in_features, layer.out_features) for layer in linear]
    if shapes != [tuple(weight.shape) for weight, _ in layers]:
        return False
    for layer, (weight, bias) in zip(linear, layers, strict=True):
        layer.weight.copy_(torch.tensor(weight).T)
        layer.bias.copy_(torch.tensor(bias))
    return True


def network_of(layers: Sequence[tuple[Any, Any]], activation: str) -> nn.Sequential:
    """Return a network with weights (inputs, outputs) and biases."""
    sizes = [layers[0][0].shape[0], *(weight.shape[1] for weight, _ in layers)]
    kind = torch.tensor(layers[0][0][:0]).dtype
    model = build_network(sizes, activation, dtype=kind)
    set_weights(model, layers)
    return model


@torch.no_grad()
def network_outputs(model: nn.Sequential, x: Inputs) -> Tensor:
    """Return the (n, outputs) outputs, computed in chunks."""
    pieces = [x[slice(i, i + CHUNK)] for i in range(0, len(x), CHUNK)]
    return torch.cat([model(piece) for piece in pieces])
