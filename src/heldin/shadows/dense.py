"""Networks of linear layers, norms and dropout, with back-propagation written out by hand.

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

__all__ = [
    "ACTIVATIONS",
    "BatchNorm",
    "DenseNetwork",
    "LayerNames",
    "Linear",
    "NormNames",
    "is_plain",
    "plain_layers",
]

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


@dataclass(frozen=True, eq=False)
class BatchNorm:
    """A batch normalisation of K networks at once, each on the rows that it keeps.

    Attributes:
        module: the user's, for its settings and its mode.
        mean, variance, count: running statistics (K, features), and (K,) batches behind them.
        weight, weight_grad, bias, bias_grad: (K, features), or None.
    """

    module: nn.BatchNorm1d
    mean: Tensor
    variance: Tensor
    count: Tensor
    weight: Tensor | None = None
    weight_grad: Tensor | None = None
    bias: Tensor | None = None
    bias_grad: Tensor | None = None

    def normalise(self, x: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return normalised inputs, their scale, and each row's share in the statistics.

        Copies that keep fewer than two rows take no step: their statistics stay as they are.

        Args:
            x: (K, b, features).
            keep: (K, b), true for the rows that a copy keeps; None: by the running statistics.
        """
        if keep is None:
            scale = (self.variance + self.module.eps).rsqrt().unsqueeze(1)
            return (x - self.mean.unsqueeze(1)) * scale, scale, None
        rows = keep.sum(1, keepdim=True).to(x.dtype)  # (K, 1)
        share = (keep / rows.clamp(min=1)).unsqueeze(1)  # (K, 1, b)
        mean = share.bmm(x)
        centred = x - mean
        variance = share.bmm(centred.square())
        scale = (variance + self.module.eps).rsqrt()
        self._follow(mean.squeeze(1), variance.squeeze(1), rows)
        return centred * scale, scale, share.mT

    def __call__(self, normed: Tensor) -> Tensor:
        """(K, b, features) of normalised inputs."""
        outputs = normed if self.weight is None else normed * self.weight.unsqueeze(1)
        return outputs if self.bias is None else outputs + self.bias.unsqueeze(1)

    def _follow(self, mean: Tensor, variance: Tensor, rows: Tensor) -> None:
        """Move the running statistics towards those of a batch."""
        trains = rows > 1
        self.count.add_(trains.squeeze(1))
        momentum = self.module.momentum
        part = trains.to(mean.dtype)
        if momentum is None:  # the mean over all batches
            part = part / self.count.clamp(min=1).unsqueeze(1)
        else:
            part = part * momentum
        self.mean.lerp_(mean, part)
        self.variance.lerp_(variance * (rows / (rows - 1).clamp(min=1)), part)

    def write_gradient(self, normed: Tensor, gradient: Tensor) -> None:
        """From the normalised inputs and the gradient by the outputs."""
        if self.weight_grad is not None:
            torch.sum(gradient * normed, 1, out=self.weight_grad)
        if self.bias_grad is not None:
            torch.sum(gradient, 1, out=self.bias_grad)

    def pull_back(
        self, gradient: Tensor, normed: Tensor, scale: Tensor, share: Tensor | None
    ) -> Tensor:
        """Return the gradient with respect to the inputs; it is zero at rows that are not kept."""
        if self.weight is not None:
            gradient = gradient * self.weight.unsqueeze(1)
        if share is None:
            return gradient * scale
        mean = gradient.sum(1, keepdim=True)
        along = (gradient * normed).sum(1, keepdim=True)
        return (gradient - share * torch.addcmul(mean, normed, along)).mul_(scale)


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

    def __init__(self, layers: Sequence[Linear | BatchNorm | nn.Module]) -> None:
        self.layers = list(layers)
        kinds = (Linear, BatchNorm)
        self._first = next(i for i, layer in enumerate(layers) if isinstance(layer, kinds))
        self._norms: dict[int, tuple[Tensor, Tensor, Tensor | None]] = {}  # see `normalise`
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

    @property
    def least_rows(self) -> int:
        """The fewest rows on which a network can take a training step."""
        norms = (layer for layer in self.layers if isinstance(layer, BatchNorm))
        return 2 if any(norm.module.training for norm in norms) else 1

    @torch.no_grad()
    def forward(self, x: Tensor, train: bool = True, keep: Tensor | None = None) -> Tensor:
        """([K,] b, outputs).

        Args:
            x: ([K,] b, inputs).
            train: a `backward` will follow.
            keep: (K, b), the rows that count in the statistics of a batch normalisation.
        """
        trace, self._masks, self._norms = [x], {}, {}
        for number, layer in enumerate(self.layers):
            if isinstance(layer, nn.Dropout):
                x = self._drop(number, layer, x) if train and layer.training else x
            elif isinstance(layer, BatchNorm):
                by_batch = train and layer.module.training
                self._norms[number] = layer.normalise(x, keep if by_batch else None)
                x = layer(self._norms[number][0])
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
            if isinstance(layer, BatchNorm):
                normed, scale, share = self._norms.pop(i)
                layer.write_gradient(normed, gradient)
                gradient = layer.pull_back(gradient, normed, scale, share)
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


class NormNames(NamedTuple):
    """Of the parameters and buffers of a batch normalisation, and the module itself."""

    weight: str | None
    bias: str | None
    buffers: tuple[str, ...]
    module: nn.BatchNorm1d


LayerNames = Names | NormNames | nn.Module  # or an activation, or dropout


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
        if type(module) is nn.BatchNorm1d and module.track_running_stats:
            own = {name for name, _ in module.named_parameters()}
            names = [f"{prefix}{name}" if name in own else None for name in ("weight", "bias")]
            if id(module) in seen or not all(name in trained for name in names if name):
                return False
            seen.add(id(module))
            buffers = tuple(f"{prefix}{name}" for name, _ in module.named_buffers())
            found.append(NormNames(names[0], names[1], buffers, module))
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
    named = [layer for layer in found if not isinstance(layer, nn.Module)]
    used = {name for layer in named for name in (layer.weight, layer.bias) if name}
    return found if used == set(trained) else None
