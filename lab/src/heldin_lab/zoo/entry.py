"""An entry of the zoo: a model that nobody here wrote, and batches for it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "Batch",
    "Entry",
    "Named",
    "call",
    "lib",
    "mapped",
    "normal",
    "rows",
    "run",
    "tensors",
    "tokens",
]

Named = dict[str, Any]
Batch = tuple[Any, ...] | Named  # positional arguments of the model, or named ones


def lib(module: str) -> Any:
    """A library's module. It is imported only when a model of it is made."""
    return importlib.import_module(module)


def call(model: nn.Module, batch: Batch) -> Any:
    """Run the model on a batch."""
    return model(**batch) if isinstance(batch, dict) else model(*batch)


def run(model: nn.Module, batch: Batch, m: int) -> Tensor:
    """The losses (m,) of the samples, for a model whose outputs have the batch first."""
    return rows(call(model, batch), m)


def rows(output: Any, m: int) -> Tensor:
    """A curved loss for each sample, of all outputs that have a row for each."""
    found = [
        t.abs() if t.is_complex() else t
        for t in tensors(output)
        if t.requires_grad and t.dim() and t.shape[0] == m
    ]
    parts = [t.reshape(m, -1) for t in found]
    return torch.stack([t.sin().mean(1) + t.square().mean(1) for t in parts]).sum(0)


def tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in what a model returns."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors(each)
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors(getattr(value, field.name))


def mapped(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """A batch with the function applied to its tensors; what it does not know is left alone."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: mapped(function, each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(mapped(function, each) for each in value)
    if hasattr(value, "apply") and hasattr(value, "edge_index"):  # graphs of torch_geometric
        return value.clone().apply(function)
    return value


def normal(*shape: int) -> Callable[[int], Batch]:
    """Batches of normal numbers."""
    return lambda m: (torch.randn(m, *shape),)


def tokens(length: int, size: int = 32) -> Callable[[int], Batch]:
    """Batches of sequences of tokens."""
    return lambda m: (torch.randint(3, size, (m, length)),)


@dataclass(frozen=True)
class Entry:
    """A model of a library.

    Attributes:
        library: as pip knows it.
        name: of the model, unlike any other in the zoo.
        make: builds it, small and with random weights; nothing is downloaded.
        batch: draws a batch of that many samples.
        losses: the losses (m,) of a batch's samples.
        double: whether it runs in double precision.
        mixes: whether gradients flow from one sample's loss to another sample, so that there is no
            gradient of a single one; None: this is tried out.
    """

    library: str
    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    losses: Callable[[nn.Module, Batch, int], Tensor] = run
    double: bool = True
    mixes: bool | None = None
