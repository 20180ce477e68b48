"""Ways to run K copies of a model at once: stacked by hand, mapped, or one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor, nn

from heldin._private_torch import BatchNorm, own_parameters
from heldin.errors import HeldinError
from heldin.shadows.bare_model import copy_without_hooks
from heldin.shadows.dense import (
    ACTIVATIONS,
    DenseNetwork,
    LayerNames,
    Linear,
    Names,
    plain_layers,
)
from heldin.shadows.dense import BatchNorm as DenseNorm
from heldin.shadows.outputs import one_for_each_row

__all__ = ["CannotStack", "Engine", "Forward", "check_engine", "engine_for"]

Engine = Literal["auto", "dense", "vmap", "replay"]


class CannotStack(Exception):
    """Raised for a model whose copies cannot be run in one stack."""


def check_engine(engine: Any) -> None:
    """Refuse what is not the name of an engine."""
    if engine not in get_args(Engine):
        raise HeldinError(f"engine: expected 'auto', 'dense', 'vmap' or 'replay', got {engine!r}")


class Copies(Protocol):
    """Weights of K copies of a model, as an engine reads them, and places for the gradients.

    Attributes:
        copies: K.
        blocks, grads: (K, ...) tensors by the name of the parameter.
        buffers: (K, ...) statistics by the name of the buffer, where copies have their own.
    """

    copies: int
    blocks: dict[str, Tensor]
    grads: dict[str, Tensor]
    buffers: dict[str, Tensor]


class Forward(Protocol):
    """How the stacked models are run."""

    def __call__(
        self, inputs: Sequence[Tensor], keep: Tensor | None, shared: bool, train: bool
    ) -> Tensor:
        """(K, b, ...) outputs.

        Args:
            inputs: (b, ...), the same for all, or (K, b, ...).
            keep: (K, b), the rows that count in training.
            shared: whether all copies have the same inputs.
            train: whether a `backward` will follow.
        """

    def backward(self, gradient: Tensor) -> None:
        """Write the weights' gradients, from (K, b, ...) by the outputs of the last call."""


def engine_for(
    model: nn.Module, stack: Copies, inputs: Sequence[Tensor], engine: Engine
) -> tuple[str, Forward]:
    """Return the name and the engine asked for, or the first that can run the model."""
    check_engine(engine)
    layers = plain_layers(model, stack.blocks, inputs) if engine in ("auto", "dense") else None
    if layers is not None:
        return "dense", _Dense(stack, layers)
    if engine == "dense":
        names = ", ".join(sorted(kind.__name__ for kind in ACTIVATIONS))
        raise HeldinError(
            "engine='dense' is for nn.Linear, or nn.Sequential of nn.Linear, nn.Dropout and "
            f"activations ({names}) on rows that are vectors; use engine='auto'"
        )
    mapped = _Vmap(stack, model, len(inputs))
    problem = _why_not_mapped(model, mapped, inputs)
    if problem is None:
        return "vmap", mapped
    raise CannotStack(f"engine={engine!r}: {problem}; use engine='replay'")


def _why_not_mapped(model: nn.Module, mapped: _Vmap, inputs: Sequence[Tensor]) -> str | None:
    if any(isinstance(module, BatchNorm) for module in model.modules()):
        return "the rows that a shadow must not see would enter its batch statistics"
    some = [x[:2] for x in inputs]
    try:
        with torch.random.fork_rng():
            mapped(some, None, shared=True, train=True)
            mapped.outputs = None
            # At checks each copy has other rows: a model that branches on its data (on a mask
            # without padding, say) can be mapped over weights alone, but not over these.
            copies = mapped.stack.copies
            mapped([x.expand(copies, *x.shape) for x in some], None, shared=False, train=False)
    except HeldinError:
        raise
    except Exception as error:
        return f"the model cannot be mapped by torch.func.vmap ({error})"
    return None


class _Modes:
    """Keeps a copy of a model in its mode: evaluation, or in training whatever each module has."""

    def __init__(self, original: nn.Module, copied: nn.Module) -> None:
        self.pairs = list(zip(original.modules(), copied.modules(), strict=True))

    def follow(self, train: bool) -> None:
        for theirs, mine in self.pairs:
            mode = train and theirs.training
            if mine.training != mode:
                mine.training = mode


class _Vmap:
    """All copies in one call of `torch.func.vmap`; the rows that one must not see weigh nothing."""

    def __init__(self, stack: Copies, model: nn.Module, arguments: int) -> None:
        self.stack, self.model = stack, copy_without_hooks(model)
        self.modes = _Modes(model, self.model)
        self.outputs: Tensor | None = None
        # `functional_call` would look these places up in every step, at the price of a small
        # network's forward pass. The copy is ours, so nothing has to be put back either.
        numbers = {id(p): i for i, p in enumerate(_named(model, stack.blocks))}
        self.places = [
            (own_parameters(module), name, numbers[id(p)])
            for module in self.model.modules()
            for name, p in own_parameters(module).items()
            if id(p) in numbers
        ]
        weights = (0,) * len(stack.blocks)
        self.on_shared_rows, self.on_own_rows = (
            torch.func.vmap(
                self._one, in_dims=(*weights, *(rows,) * arguments), randomness="different"
            )
            for rows in (None, 0)
        )

    def _one(self, *tensors: Tensor) -> Tensor:
        for table, name, number in self.places:
            table[name] = tensors[number]  # type: ignore[assignment]
        return one_for_each_row("step", self.model(*tensors[len(self.stack.blocks) :]))

    def __call__(
        self, inputs: Sequence[Tensor], keep: Tensor | None, shared: bool, train: bool
    ) -> Tensor:
        self.modes.follow(train)
        blocks = self.stack.blocks.values()
        mapped = self.on_shared_rows if shared else self.on_own_rows
        with torch.set_grad_enabled(train):
            outputs: Tensor = mapped(*blocks, *inputs)
        self.outputs = outputs if train else None
        return outputs.detach()

    def backward(self, gradient: Tensor) -> None:
        assert self.outputs is not None
        _write(self.stack, self.outputs, gradient)
        self.outputs = None


def _named(model: nn.Module, names: Iterable[str]) -> list[nn.Parameter]:
    known = dict(model.named_parameters())
    return [known[name] for name in names]


def _write(stack: Copies, outputs: Tensor, gradient: Tensor) -> None:
    """Put the gradients into their places in the flat vectors."""
    blocks = list(stack.blocks.values())
    found: Sequence[Tensor | None] = [None] * len(blocks)
    if outputs.requires_grad:
        found = torch.autograd.grad(outputs, blocks, gradient, allow_unused=True)
    for place, value in zip(stack.grads.values(), found, strict=True):
        if value is None:
            place.zero_()
        else:
            place.copy_(value)


class _Dense:
    """Plain networks: batched matrix products forwards and backwards, without a graph."""

    def __init__(self, stack: Copies, layers: list[LayerNames]) -> None:
        self.copies = stack.copies
        self.network = DenseNetwork([_of_stack(stack, layer) for layer in layers])

    def __call__(
        self, inputs: Sequence[Tensor], keep: Tensor | None, shared: bool, train: bool
    ) -> Tensor:
        (x,) = inputs
        rows = x.flatten(1).expand(self.copies, -1, -1) if shared else x.flatten(2)
        return self.network.forward(rows, train, keep)

    def backward(self, gradient: Tensor) -> None:
        self.network.backward(gradient)


def _of_stack(stack: Copies, layer: LayerNames) -> Linear | DenseNorm | nn.Module:
    """Return a layer of all copies."""
    if isinstance(layer, nn.Module):
        return layer
    own: list[Tensor | None] = []
    for name in (layer.weight, layer.bias):
        own += [None, None] if name is None else [stack.blocks[name].detach(), stack.grads[name]]
    if isinstance(layer, Names):
        return Linear(*own)  # type: ignore[arg-type]
    buffers = dict(zip(layer.buffers, layer.module.buffers(), strict=True))
    for name, value in buffers.items():
        stack.buffers[name] = value.detach().expand(stack.copies, *value.shape).clone()
    return DenseNorm(layer.module, *map(stack.buffers.get, buffers), *own)  # type: ignore[arg-type]
