"""Plain networks on rows of numbers: made, trained without a graph, evaluated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from heldin.capture.moments import Moments
from heldin.rules.estimated.dense import DenseNetwork, Linear

__all__ = [
    "ACTIVATIONS",
    "Inputs",
    "ManualBackprop",
    "build_network",
    "constant_outputs",
    "network_of",
    "network_outputs",
    "predictions",
    "set_weights",
    "start_at",
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


def constant_outputs(loss_fn: Any, y: Tensor, outputs: int, weights: Tensor | None) -> Tensor:
    """(outputs,) that give the best constant prediction: the classes' shares, or the means.

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
    """Make a network that was just built give the same outputs for all inputs."""
    last = model[-1]
    assert isinstance(last, nn.Linear)
    last.weight.zero_()
    if last.bias is not None:
        last.bias.copy_(outputs)


def predictions(loss_fn: Any, outputs: Tensor) -> Tensor:
    """Probabilities, or the numbers themselves.

    >>> predictions(nn.BCEWithLogitsLoss(), torch.zeros(1, 1))
    tensor([[0.5000]])
    """
    if isinstance(loss_fn, nn.CrossEntropyLoss):
        return outputs.softmax(-1)
    return outputs.sigmoid() if isinstance(loss_fn, nn.BCEWithLogitsLoss) else outputs


class ManualBackprop:
    """Forward and backward passes of a network that `build_network` made.

    Gradients are written into the parameters' `grad`. With `observe`, sums of the samples'
    contributions and of their squares add up until `moments` is called.
    """

    def __init__(self, model: nn.Sequential, observe: bool = False) -> None:
        self.parameters = dict(model.named_parameters())
        self.observe = observe
        self.count = 0
        first = next(iter(self.parameters.values()))
        size = sum(p.numel() for p in self.parameters.values())
        self.gradient, self.total, self.squares = torch.zeros(3, size, dtype=first.dtype).unbind()
        for p, view in zip(self.parameters.values(), self._views(self.gradient), strict=True):
            p.grad = view
        named = {id(p): name for name, p in self.parameters.items()}
        squares = dict(zip(self.parameters, self._views(self.squares), strict=True))
        layers: list[Linear | nn.Module] = []
        self.squares_of: dict[Linear, tuple[Tensor, Tensor | None]] = {}
        for layer in model:
            if not isinstance(layer, nn.Linear):
                layers.append(layer)
                continue
            weight, bias = layer.weight, layer.bias
            assert weight.grad is not None
            has_bias = bias is not None
            made = Linear(
                weight.detach(),
                weight.grad,
                bias.detach() if has_bias else None,
                bias.grad if has_bias else None,
            )
            layers.append(made)
            self.squares_of[made] = (
                squares[named[id(weight)]],
                squares[named[id(bias)]] if has_bias else None,
            )
        self.network = DenseNetwork(layers)

    def _views(self, flat: Tensor) -> list[Tensor]:
        parts = flat.split([p.numel() for p in self.parameters.values()])
        pairs = zip(parts, self.parameters.values(), strict=True)
        return [part.view(p.shape) for part, p in pairs]

    def forward(self, x: Tensor) -> Tensor:
        """(b, outputs)."""
        return self.network.forward(x)

    @torch.no_grad()
    def backward(self, gradient: Tensor) -> None:
        """The gradient of the mean of the rows' losses, from (b, outputs), that of each loss."""
        self.network.backward(gradient, self._add_squares if self.observe else None)
        if self.observe:
            self.total.add_(self.gradient)
            self.count += len(gradient)
        self.gradient.div_(len(gradient))

    def _add_squares(self, layer: Linear, x: Tensor, gradient: Tensor) -> None:
        weight, bias = self.squares_of[layer]
        squared = gradient.square()
        weight.addmm_(squared.T, x.square())
        if bias is not None:
            bias.add_(squared.sum(0))

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


def network_of(layers: Sequence[tuple[Any, Any]], activation: str) -> nn.Sequential:
    """A network with weights (inputs, outputs) and biases."""
    sizes = [layers[0][0].shape[0], *(weight.shape[1] for weight, _ in layers)]
    kind = torch.tensor(layers[0][0][:0]).dtype
    model = build_network(sizes, activation, bias=layers[0][1] is not None, dtype=kind)
    set_weights(model, layers)
    return model


@torch.no_grad()
def network_outputs(model: nn.Sequential, x: Inputs) -> Tensor:
    """(n, outputs), in pieces that fit into memory."""
    pieces = [x[slice(i, i + CHUNK)] for i in range(0, len(x), CHUNK)]
    return torch.cat([model(piece) for piece in pieces])
