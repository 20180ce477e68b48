"""What the experiments with minibatches have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["Rows", "backward", "batch", "chunks", "mean_loss", "perceptron"]

Rows = Callable[[Tensor], tuple[Tensor, Tensor]]  # row numbers to inputs and labels


def perceptron(
    widths: Iterable[int], seed: int, std: float | None = None, init: str = "he"
) -> nn.Sequential:
    """Linear layers with ReLU between them, biases zero.

    Args:
        widths: of the layers, the inputs first.
        seed: of the weights.
        std: of the weights (default: as `init` says).
        init: "he", normal with variance 2 / inputs; or "glorot", uniform with variance
            2 / (inputs + outputs).

    >>> sum(p.numel() for p in perceptron([784, 2500, 2000, 1500, 1000, 500, 10], 0).parameters())
    11972510
    """
    generator = torch.Generator().manual_seed(seed)
    sizes = list(widths)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layer = nn.utils.skip_init(nn.Linear, inputs, outputs)
        if std is None and init == "glorot":
            nn.init.xavier_uniform_(layer.weight, generator=generator)
        else:
            scale = (2.0 / inputs) ** 0.5 if std is None else std
            nn.init.normal_(layer.weight, std=scale, generator=generator)
        nn.init.zeros_(layer.bias)
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def batch(step: int, rows: int, size: int, seed: int) -> Tensor:
    """The row numbers of a step's minibatch: epochs without replacement, the rest dropped.

    It depends on nothing but the arguments, so a run goes on after a kill with the same batches.

    >>> [batch(step, rows=5, size=2, seed=0).tolist() for step in (1, 2, 3)]
    [[4, 0], [1, 3], [0, 4]]
    """
    per_epoch = max(1, rows // size)
    epoch, place = divmod(step - 1, per_epoch)
    generator = torch.Generator().manual_seed(1_000_003 * seed + epoch)
    order = torch.randperm(rows, generator=generator)
    return order[place * size : (place + 1) * size]


def chunks(rows: int, size: int) -> Iterator[Tensor]:
    """All row numbers in pieces."""
    yield from torch.arange(rows).split(size)


def backward(model: nn.Module, data: Rows, pieces: Sequence[Tensor]) -> None:
    """Add the gradient of the mean cross-entropy over all pieces to those of the weights."""
    rows = sum(map(len, pieces))
    for piece in pieces:
        x, y = data(piece)
        (F.cross_entropy(model(x), y, reduction="sum") / rows).backward()


@torch.no_grad()
def mean_loss(model: nn.Module, data: Rows, rows: int, size: int = 4096) -> float:
    """The mean cross-entropy over the first `rows` rows, worked on in pieces."""
    total = 0.0
    for piece in chunks(rows, size):
        x, y = data(piece)
        total += float(F.cross_entropy(model(x), y, reduction="sum"))
    return total / rows
