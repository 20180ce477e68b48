"""Plain networks on rows of numbers, with passes written out by hand.

For networks this small, recording a graph would cost as much as the arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from heldin.capture.moments import Moments
from heldin.rules.estimated.engines import ACTIVATIONS as SLOPES

__all__ = [
    "ACTIVATIONS",
    "Inputs",
    "ManualBackprop",
    "build_network",
    "network_outputs",
    "set_weights",
]

CHUNK = 4096  # rows in one evaluation
ACTIVATIONS: dict[str, type[nn.Module]] = {
    "identity": nn.Identity,
    "logistic": nn.Sigmoid,
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
}


class Inputs(Protocol):
    """A dense tensor, or rows that are made dense when they are asked for."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: Any, /) -> Tensor: ...


def build_network(
    sizes: Sequence[int],
    activation: str,
    *,
    bias: bool = True,
    dtype: torch.dtype = torch.float64,
    generator: torch.Generator | None = None,
) -> nn.Sequential:
    """Linear layers with activations in between: zeros, or with a generator Glorot's weights.

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
        linear = nn.utils.skip_init(nn.Linear, above, below, bias=bias, dtype=dtype)
        bound = math.sqrt((2.0 if activation == "logistic" else 6.0) / (above + below))
        with torch.no_grad():
            for p in linear.parameters():
                p.zero_() if generator is None else p.uniform_(-bound, bound, generator=generator)
        layers.append(linear)
    return nn.Sequential(*layers)


class ManualBackprop:
    """Forward and backward passes of a network that `build_network` made.

    Gradients are written into the parameters' `grad`. With `observe`, sums of the samples'
    contributions and of their squares add up until `moments` is called.
    """

    def __init__(self, model: nn.Sequential, observe: bool = False) -> None:
        self.layers = list(model)
        self.parameters = dict(model.named_parameters())
        self.gradient, views = self._flat()
        for (_, p), view in zip(self.parameters.items(), views, strict=True):
            p.grad = view
        self.total, self.squares = torch.zeros_like(self.gradient), torch.zeros_like(self.gradient)
        ids = (id(p) for p in self.parameters.values())
        self.square_of = dict(zip(ids, self._views(self.squares), strict=True))
        self.observe = observe
        self.count = 0
        self.trace: list[Tensor] = []

    def _flat(self) -> tuple[Tensor, list[Tensor]]:
        first = next(iter(self.parameters.values()))
        flat = torch.zeros(sum(p.numel() for p in self.parameters.values()), dtype=first.dtype)
        return flat, self._views(flat)

    def _views(self, flat: Tensor) -> list[Tensor]:
        parts = flat.split([p.numel() for p in self.parameters.values()])
        pairs = zip(parts, self.parameters.values(), strict=True)
        return [part.view(p.shape) for part, p in pairs]

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """(b, outputs)."""
        self.trace = [x]
        for layer in self.layers:
            x = layer.forward(x)
            self.trace.append(x)
        return x

    @torch.no_grad()
    def backward(self, slope: Tensor) -> None:
        """The gradient of the mean of the rows' losses, from (b, outputs), each loss's slope."""
        for i in range(len(self.layers) - 1, -1, -1):
            layer, before = self.layers[i], self.trace[i]
            if not isinstance(layer, nn.Linear):
                slope = SLOPES[type(layer)](layer, slope, before, self.trace[i + 1])
                continue
            weight, bias = layer.weight, layer.bias
            torch.mm(slope.T, before, out=weight.grad)
            if bias is not None:
                torch.sum(slope, 0, out=bias.grad)
            if self.observe:
                squared = slope.square()
                self.square_of[id(weight)].addmm_(squared.T, before.square())
                if bias is not None:
                    self.square_of[id(bias)].add_(squared.sum(0))
            if i:
                slope = slope.mm(weight)
        if self.observe:
            self.total.add_(self.gradient)
            self.count += len(slope)
        self.gradient.div_(len(slope))

    def moments(self) -> dict[str, Moments]:
        """What was added up since the last call."""
        totals, squares = self._views(self.total.clone()), self._views(self.squares.clone())
        found = {
            name: Moments(total, square, self.count)
            for name, total, square in zip(self.parameters, totals, squares, strict=True)
        }
        self.total.zero_()
        self.squares.zero_()
        self.count = 0
        return found


@torch.no_grad()
def set_weights(model: nn.Sequential, layers: Sequence[tuple[Any, Any]]) -> bool:
    """Set weights (inputs, outputs) and biases of the layers; False if the shapes are others."""
    linear = [layer for layer in model if isinstance(layer, nn.Linear)]
    shapes = [(layer.in_features, layer.out_features) for layer in linear]
    if shapes != [tuple(weight.shape) for weight, _ in layers]:
        return False
    for layer, (weight, bias) in zip(linear, layers, strict=True):
        layer.weight.copy_(torch.tensor(weight).T)
        if bias is not None:
            layer.bias.copy_(torch.tensor(bias))
    return True


@torch.no_grad()
def network_outputs(model: nn.Sequential, x: Inputs) -> Tensor:
    """(n, outputs), in pieces that fit into memory."""
    pieces = [x[slice(i, i + CHUNK)] for i in range(0, len(x), CHUNK)]
    return torch.cat([model(piece) for piece in pieces])
