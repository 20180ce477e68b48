"""Ways to run K copies of a model at once: stacked by hand, mapped, or one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor, nn

from heldin._private_torch import BatchNorm, Dropout, own_parameters
from heldin.errors import HeldinError
from heldin.loop.randomness import separate_random_stream
from heldin.shadows.bare_model import copy_without_hooks, unfused_attention
from heldin.shadows.dense import ACTIVATIONS, DenseNetwork, Linear, plain_layers, weights_of
from heldin.shadows.dense import BatchNorm as DenseNorm
from heldin.shadows.outputs import one_for_each_row

__all__ = ["CannotStack", "Engine", "engine_for"]

Engine = Literal["auto", "dense", "vmap", "replay"]


class CannotStack(Exception):
    """Raised for a model whose copies cannot be run in one stack."""


class Copies(Protocol):
    """Weights of K copies of a model, as an engine reads them, and places for the gradients."""

    copies: int
    blocks: dict[str, Tensor]  # (K, ...) by the name of the parameter
    grads: dict[str, Tensor]
    buffers: dict[str, Tensor]  # statistics, where copies have their own


def engine_for(
    model: nn.Module, stack: Copies, inputs: Sequence[Tensor], engine: Engine
) -> tuple[str, DenseNetwork | Vmap]:
    """Return the name and the engine asked for, or the first that can run the model.

    It takes inputs (K, b, ...), or (b, ...) if all copies share them, and returns (K, b, ...)
    outputs. In training, `keep` (K, b) has the rows that count, and `backward` writes the weights'
    gradients, from (K, b, ...) by the outputs of the last call. Copies need `least_rows` for a
    step. In `random_stream`, random numbers in training depend on its numbers only.
    """
    if engine not in get_args(Engine):
        raise HeldinError(f"engine: expected 'auto', 'dense', 'vmap' or 'replay', got {engine!r}")
    layers = plain_layers(model, stack.blocks, inputs) if engine in ("auto", "dense") else None
    if layers is not None:
        return "dense", DenseNetwork([_of_copies(stack, *layer) for layer in layers])
    if engine == "dense":
        names = ", ".join(sorted(kind.__name__ for kind in ACTIVATIONS))
        raise HeldinError(
            "engine='dense' is for nn.Linear, or nn.Sequential of nn.Linear, nn.Dropout and "
            f"activations ({names}) on rows that are vectors; use engine='auto'"
        )
    mapped = Vmap(stack, model, len(inputs))
    problem = _why_not_mapped(model, mapped, inputs)
    if problem is None:
        return "vmap", mapped
    raise CannotStack(f"engine={engine!r}: {problem}; use engine='replay'")


def _why_not_mapped(model: nn.Module, mapped: Vmap, inputs: Sequence[Tensor]) -> str | None:
    if any(isinstance(module, BatchNorm) for module in model.modules()):
        return "the rows that a shadow must not see would enter its batch statistics"
    some = [x[:2] for x in inputs]
    try:
        with torch.random.fork_rng():
            mapped(some, shared=True, train=True)
            mapped.outputs = None
            # At checks each copy has other rows: a model that branches on its data (on a mask
            # without padding, say) can be mapped over weights alone, but not over these.
            copies = mapped.stack.copies
            mapped([x.expand(copies, *x.shape) for x in some])
    except HeldinError:
        raise
    except Exception as error:
        return f"the model cannot be mapped by torch.func.vmap ({error})"
    return None


class Vmap:
    """All copies in one call of `torch.func.vmap`; the rows that one must not see weigh nothing."""

    least_rows = 1

    def __init__(self, stack: Copies, model: nn.Module, arguments: int) -> None:
        self.stack, self.model = stack, copy_without_hooks(model)
        self.pairs = list(zip(model.modules(), self.model.modules(), strict=True))
        self.outputs: Tensor | None = None
        # `functional_call` would look these places up in every step, at the price of a small
        # network's forward pass. The copy is ours, so nothing has to be put back either.
        parameters = dict(model.named_parameters())
        numbers = {id(parameters[name]): number for number, name in enumerate(stack.blocks)}
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

    def random_stream(self, device: torch.device, *numbers: int) -> AbstractContextManager[None]:
        return separate_random_stream(device, *numbers)

    def _one(self, *tensors: Tensor) -> Tensor:
        for table, name, number in self.places:
            table[name] = tensors[number]  # type: ignore[assignment]
        return one_for_each_row("step", self.model(*tensors[len(self.stack.blocks) :]))

    def __call__(
        self,
        inputs: Sequence[Tensor],
        keep: Tensor | None = None,
        shared: bool = False,
        train: bool = False,
    ) -> Tensor:
        for theirs, mine in self.pairs:
            mode = train and theirs.training
            if mine.training != mode:
                mine.training = mode
            if isinstance(theirs, Dropout):
                mine.p = theirs.p  # type: ignore[assignment]
        mapped = self.on_shared_rows if shared else self.on_own_rows
        with torch.set_grad_enabled(train), unfused_attention():
            outputs: Tensor = mapped(*self.stack.blocks.values(), *inputs)
        self.outputs = outputs if train else None
        return outputs.detach()

    def backward(self, gradient: Tensor) -> None:
        outputs, self.outputs = self.outputs, None
        assert outputs is not None
        blocks = list(self.stack.blocks.values())
        found: Sequence[Tensor | None] = [None] * len(blocks)
        if outputs.requires_grad:
            found = torch.autograd.grad(outputs, blocks, gradient, allow_unused=True)
        for place, value in zip(self.stack.grads.values(), found, strict=True):
            if value is None:
                place.zero_()
            else:
                place.copy_(value)


def _of_copies(stack: Copies, start: str, module: nn.Module) -> Linear | DenseNorm | nn.Module:
    """Return a layer of all copies; the names of its parameters begin with `start`."""
    if not isinstance(module, (nn.Linear, nn.BatchNorm1d)):
        return module
    own: dict[str, Tensor] = {}
    for name in weights_of(module):
        own[name] = stack.blocks[start + name].detach()
        own[f"{name}_grad"] = stack.grads[start + name]
    if isinstance(module, nn.Linear):
        return Linear(**own)
    statistics = []
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        value = getattr(module, name).detach()
        statistics.append(value.expand(stack.copies, *value.shape).clone())
        stack.buffers[start + name] = statistics[-1]
    return DenseNorm(module, *statistics, **own)
