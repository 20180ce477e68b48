"""Networks of linear layers, norms and dropout, with back-propagation written out by hand.

For networks this small, recording a graph would cost as much as the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from heldin._private_torch import forward_hooks
from heldin.loop.randomness import mixed_seed
from heldin.shadows.bare_model import is_parametrization_hook

__all__ = [
    "ACTIVATIONS",
    "BatchNorm",
    "DenseNetwork",
    "Linear",
    "is_plain",
    "plain_layers",
    "weights_of",
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
WITH_WEIGHTS = (nn.Linear, nn.BatchNorm1d)
LAYERS = {*WITH_WEIGHTS, nn.Dropout, *ACTIVATIONS}


@dataclass(frozen=True, eq=False)
class Linear:
    """A linear layer of K networks at once."""

    weight: Tensor  # (K, outputs, inputs)
    weight_grad: Tensor
    bias: Tensor | None = None  # (K, outputs)
    bias_grad: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """(K, b, outputs)."""
        if self.bias is None:
            return x.bmm(self.weight.mT)
        return torch.baddbmm(self.bias.unsqueeze(1), x, self.weight.mT)

    def write_gradient(self, x: Tensor, gradient: Tensor) -> None:
        """From the inputs and the gradient by the outputs."""
        torch.bmm(gradient.mT, x, out=self.weight_grad)
        if self.bias_grad is not None:
            torch.sum(gradient, 1, out=self.bias_grad)


@dataclass(frozen=True, eq=False)
class BatchNorm:
    """A batch normalisation of K networks at once, each on the rows that it keeps."""

    module: nn.BatchNorm1d  # the user's, for its settings and its mode
    mean: Tensor  # (K, features) running statistics
    variance: Tensor
    count: Tensor  # (K,) batches behind them
    weight: Tensor | None = None  # (K, features)
    weight_grad: Tensor | None = None
    bias: Tensor | None = None
    bias_grad: Tensor | None = None

    def normalise(self, x: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return normalised inputs, their scale, and each row's share in the statistics.

        x: (K, b, features); keep: (K, b), the rows that a copy keeps; None: by the running
        statistics. Copies with fewer than two rows take no step: their statistics stay as they are.
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
    """An engine that records nothing but the values between layers."""

    def __init__(self, layers: Sequence[Linear | BatchNorm | nn.Module]) -> None:
        self.layers = list(layers)
        kinds = (Linear, BatchNorm)
        self._first = next(i for i, layer in enumerate(layers) if isinstance(layer, kinds))
        self._copies = next(len(each.weight) for each in layers if isinstance(each, Linear))
        self._norms: dict[int, tuple[Tensor, Tensor, Tensor | None]] = {}  # see `normalise`
        self._trace: list[Tensor] = []
        self._masks: dict[int, Tensor] = {}  # of dropout, by number of the layer
        self._generator: torch.Generator | None = None

    def __call__(
        self,
        inputs: Sequence[Tensor],
        keep: Tensor | None = None,
        shared: bool = False,
        train: bool = False,
    ) -> Tensor:
        (x,) = inputs
        rows = x.flatten(1).expand(self._copies, -1, -1) if shared else x.flatten(2)
        return self.forward(rows, train, keep)

    def random_stream(self, device: torch.device, *numbers: int) -> AbstractContextManager[None]:
        if self.has_dropout:  # nothing else draws, and that from its own generator
            self.seed(mixed_seed(*numbers), device)
        return nullcontext()

    @property
    def has_dropout(self) -> bool:
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
        """(K, b, outputs).

        train: a `backward` will follow; keep: (K, b), the rows that count in the statistics of a
        batch normalisation.
        """
        trace, self._masks, self._norms = [x], {}, {}
        for number, layer in enumerate(self.layers):
            if isinstance(layer, nn.Dropout):
                x = self._drop(number, layer, x) if train and layer.training else x
            elif isinstance(layer, BatchNorm):
                by_batch = train and layer.module.training
                self._norms[number] = layer.normalise(x, keep if by_batch else None)
                x = layer(self._norms[number][0])
            elif isinstance(layer, Linear):
                x = layer(x)
            else:  # what works in place gets a copy, as backward needs its inputs
                x = layer.forward(x.clone() if getattr(layer, "inplace", False) else x)
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
    def backward(self, gradient: Tensor) -> None:
        """Write the weights' gradients, from (K, b, outputs) by the outputs of the last call."""
        trace, self._trace = self._trace, []
        for i in range(len(self.layers) - 1, self._first - 1, -1):
            layer, before = self.layers[i], trace[i]
            if isinstance(layer, nn.Dropout):
                gradient = gradient * self._masks[i] if i in self._masks else gradient
            elif isinstance(layer, BatchNorm):
                normed, scale, share = self._norms.pop(i)
                layer.write_gradient(normed, gradient)
                gradient = layer.pull_back(gradient, normed, scale, share)
            elif isinstance(layer, Linear):
                layer.write_gradient(before, gradient)
                if i > self._first:
                    gradient = gradient.bmm(layer.weight)
            else:
                gradient = ACTIVATIONS[type(layer)](layer, gradient, before, trace[i + 1])


# -- which models are such networks


def is_plain(model: nn.Module, inputs: Sequence[Tensor]) -> bool:
    """Whether the model is a network that can be stacked by hand."""
    names = {name for name, p in model.named_parameters() if p.requires_grad}
    return plain_layers(model, names, inputs) is not None


def plain_layers(
    model: nn.Module, trained: Collection[str], inputs: Sequence[Tensor]
) -> list[tuple[str, nn.Module]] | None:
    """Return the layers of a plain network with the start of their parameters' names.

    None for any other model.
    """
    layers: list[tuple[str, nn.Module]] = []
    flattens = False
    for name, module in model.named_modules(remove_duplicate=False):
        kind = type(module)
        if any(map(is_parametrization_hook, forward_hooks(module))):
            return None
        if kind is nn.Flatten and not layers and (module.start_dim, module.end_dim) == (1, -1):
            flattens = True
        elif kind in LAYERS:
            layers.append((f"{name}." if name else "", module))
        elif kind is not nn.Sequential:
            return None
    layers_with_weights = [layer for layer in layers if isinstance(layer[1], WITH_WEIGHTS)]
    modules = [module for _, module in layers_with_weights]
    if len({*modules}) < len(modules) or not any(isinstance(m, nn.Linear) for m in modules):
        return None
    if not all(m.track_running_stats for m in modules if isinstance(m, nn.BatchNorm1d)):
        return None
    if len(inputs) != 1 or not (flattens or inputs[0].dim() == 2):
        return None
    names = {start + name for start, module in layers_with_weights for name in weights_of(module)}
    return layers if names == {*trained} else None


def weights_of(module: nn.Module) -> list[str]:
    return [name for name in ("weight", "bias") if getattr(module, name) is not None]
