"""Networks of linear layers, activations and dropout, with back-propagation written out by hand.

For networks this small, recording a graph would cost as much as the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from heldin._private_torch import forward_hooks
from heldin.shadows.bare_model import is_parametrization_hook

__all__ = ["ACTIVATIONS", "DenseNetwork", "LayerNames", "Linear", "is_plain", "plain_layers"]

Slope = Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]  # module, gradient, input, output

_aten = torch.ops.aten

ACTIVATIONS: dict[type[nn.Module], Slope] = {
    nn.ReLU: lambda _, g, z, a: _aten.threshold_backward(g, a, 0),
    nn.Tanh: lambda _, g, z, a: _aten.tanh_backward(g, a),
    nn.Sigmoid: lambda _, g, z, a: _aten.sigmoid_backward(g, a),
    nn.SiLU: lambda _, g, z, a: _aten.silu_backward(g, z),
    nn.GELU: lambda m, g, z, a: _aten.gelu_backward(g, z, approximate=m.approximate),
    nn.LeakyReLU: lambda m, g, z, a: _aten.leaky_relu_backward(g, z, m.negative_slope, False),
    nn.Identity: lambda _, g, z, a: g,
}


@dataclass(frozen=True, eq=False)
class Linear:
    """A linear layer: of one network, or with a first dimension of K networks at once.

    Attributes:
        weight, weight_grad: ([K,] outputs, inputs).
        bias, bias_grad: ([K,] outputs), or None.
    """

    weight: Tensor
    weight_grad: Tensor
    bias: Tensor | None = None
    bias_grad: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """([K,] b, outputs)."""
        turned = self.weight.mT
        if x.dim() == 2:
            return x.mm(turned) if self.bias is None else torch.addmm(self.bias, x, turned)
        if self.bias is None:
            return x.bmm(turned)
        return torch.baddbmm(self.bias.unsqueeze(1), x, turned)

    def write_gradient(self, x: Tensor, gradient: Tensor) -> None:
        """From the inputs and the gradient by the outputs."""
        product = torch.mm if x.dim() == 2 else torch.bmm
        product(gradient.mT, x, out=self.weight_grad)
        if self.bias_grad is not None:
            torch.sum(gradient, -2, out=self.bias_grad)

    def pull_back(self, gradient: Tensor) -> Tensor:
        """Return the gradient with respect to the inputs."""
        return gradient.mm(self.weight) if gradient.dim() == 2 else gradient.bmm(self.weight)


class DenseNetwork:
    """Forward and backward passes, with nothing recorded but the values between layers.

    >>> weight, grad = torch.ones(1, 2), torch.zeros(1, 2)
    >>> network = DenseNetwork([Linear(weight, grad), nn.ReLU()])
    >>> network.forward(torch.tensor([[1.0, 2.0], [-3.0, 1.0]]))
    tensor([[3.],
            [0.]])
    >>> network.backward(torch.ones(2, 1))
    >>> grad
    tensor([[1., 2.]])
    """

    def __init__(self, layers: Sequence[Linear | nn.Module]) -> None:
        self.layers = list(layers)
        self._first = next(i for i, layer in enumerate(layers) if isinstance(layer, Linear))
        self._trace: list[Tensor] = []
        self._masks: dict[int, Tensor] = {}  # of dropout, by number of the layer
        self._generator: torch.Generator | None = None

    @property
    def has_dropout(self) -> bool:
        """Whether a training pass draws random numbers."""
        return any(isinstance(layer, nn.Dropout) for layer in self.layers)

    def seed(self, seed: int, device: torch.device) -> None:
        """Set the random numbers of the coming training passes."""
        if self._generator is None:
            self._generator = torch.Generator(device)
        self._generator.manual_seed(seed)

    @torch.no_grad()
    def forward(self, x: Tensor, train: bool = True) -> Tensor:
        """([K,] b, outputs); `train`: a `backward` will follow."""
        trace, self._masks = [x], {}
        for number, layer in enumerate(self.layers):
            if isinstance(layer, nn.Dropout):
                x = self._drop(number, layer, x) if train and layer.training else x
            else:
                x = layer(x) if isinstance(layer, Linear) else _activate(layer, x)
            trace.append(x)
        self._trace = trace if train else []
        return x

    def _drop(self, number: int, layer: nn.Dropout, x: Tensor) -> Tensor:
        kept = 1.0 - layer.p
        mask = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        mask.bernoulli_(kept, generator=self._generator)
        self._masks[number] = mask.div_(kept) if kept else mask
        return x * mask

    @torch.no_grad()
    def backward(
        self, gradient: Tensor, visit: Callable[[Linear, Tensor, Tensor], None] | None = None
    ) -> None:
        """Write the weights' gradients, from ([K,] b, outputs) by the outputs of the last call.

        Args:
            gradient: by the outputs.
            visit: takes each linear layer, its inputs and the gradient by its outputs.
        """
        trace, self._trace = self._trace, []
        for i in range(len(self.layers) - 1, self._first - 1, -1):
            layer, before = self.layers[i], trace[i]
            if isinstance(layer, nn.Dropout):
                gradient = gradient * self._masks[i] if i in self._masks else gradient
                continue
            if not isinstance(layer, Linear):
                gradient = ACTIVATIONS[type(layer)](layer, gradient, before, trace[i + 1])
                continue
            layer.write_gradient(before, gradient)
            if visit is not None:
                visit(layer, before, gradient)
            if i > self._first:
                gradient = layer.pull_back(gradient)


def _activate(module: nn.Module, h: Tensor) -> Tensor:
    """Apply a module to a copy, so that `inplace=True` keeps what backward needs."""
    if getattr(module, "inplace", False):
        h = h.clone()
    result: Tensor = module.forward(h)
    return result


# -- which models are such networks


class Names(NamedTuple):
    """Of the parameters of a linear layer."""

    weight: str
    bias: str | None


LayerNames = Names | nn.Module  # or an activation, or dropout


def is_plain(model: nn.Module, inputs: Sequence[Tensor]) -> bool:
    """Whether the model is a network that can be stacked by hand."""
    names = {name for name, p in model.named_parameters() if p.requires_grad}
    return plain_layers(model, names, inputs) is not None


def plain_layers(
    model: nn.Module, trained: Collection[str], inputs: Sequence[Tensor]
) -> list[LayerNames] | None:
    """Return the layers of a plain network, or None for any other model."""
    found: list[LayerNames] = []
    seen: set[int] = set()
    flattens = False

    def walk(module: nn.Module, prefix: str) -> bool:
        nonlocal flattens
        hooks = forward_hooks(module)
        if any(is_parametrization_hook(hook) for hook in hooks):
            return False
        if type(module) is nn.Sequential:
            return all(walk(child, f"{prefix}{name}.") for name, child in module.named_children())
        if type(module) is nn.Linear:
            weight, bias = f"{prefix}weight", f"{prefix}bias" if module.bias is not None else None
            known = weight in trained and (bias is None or bias in trained)
            if id(module) in seen or not known:
                return False
            seen.add(id(module))
            found.append(Names(weight, bias))
            return True
        if type(module) in ACTIVATIONS or type(module) is nn.Dropout:
            found.append(module)
            return True
        if type(module) is nn.Flatten and module.start_dim == 1 and module.end_dim == -1:
            flattens = not found
            return flattens
        return False

    if not walk(model, "") or not any(isinstance(layer, Names) for layer in found):
        return None
    if len(inputs) != 1 or not (flattens or inputs[0].dim() == 2):
        return None
    used = {name for layer in found if isinstance(layer, Names) for name in layer if name}
    return found if used == set(trained) else None
