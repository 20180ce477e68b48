"""A loop over dictionaries of rows, and the slow twins of its shadows."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.support import runs

from .shadow_runs import D, N

x = torch.randn(N, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
y = torch.randint(3, (N,), generator=torch.Generator().manual_seed(1))
ROWS: Any = [{"x": x[i], "y": y[i], "number": i} for i in range(N)]


def batch_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def network(*middle: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(D, 8), *middle, nn.Tanh(), nn.Linear(8, 3)).double()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.9)


def loader_of(**options: Any) -> Any:
    generator = torch.Generator().manual_seed(3)
    given: dict[str, Any] = {"batch_size": 7, "shuffle": True, "generator": generator}
    return DataLoader(ROWS, **given | options)


class Loop:
    """A user's loop; `train` says of every batch whether the optimiser has stepped on it."""

    def __init__(self, model: nn.Module, loader: Any, epochs: int = 3, **options: Any) -> None:
        self.start, self.model, self.loader = copy.deepcopy(model), model, loader
        self.optimizer = sgd(model)
        options = {"data": loader, "batch_loss": batch_loss} | options
        self.stopping: Any = runs.FoldStopping(model, self.optimizer, patience=None, **options)
        self.epochs, self.steps = epochs, list[list[Any]]()

    def batches(self) -> Iterator[tuple[int, Any]]:
        for _ in range(self.epochs):
            yield from enumerate(self.loader)

    def step(self, *batches: Any) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps.append([copy.deepcopy(batch) for batch in batches])

    def twin(self, k: int) -> nn.Module:
        """A model in a plain loop on exactly the rows that shadow k may see."""
        model, label = copy.deepcopy(self.start), self.stopping.fold_of_row
        optimizer = sgd(model)
        for batches in self.steps:
            kept = [label[batch["number"]] != k for batch in batches]
            if any(some.any() for some in kept):
                optimizer.zero_grad()
                for batch, some in zip(batches, kept, strict=True):
                    if some.any():
                        part = {key: batch[key][some] for key in ("x", "y")}
                        (batch_loss(model, part) / len(batches)).backward()
                optimizer.step()
        return model

    def check(self) -> None:
        label = self.stopping.fold_of_row
        expected = torch.zeros(len(label), dtype=torch.float64)
        for k in range(5):
            twin, weights = self.twin(k), self.stopping.backend.weights_of(k)
            for name, p in twin.named_parameters():
                torch.testing.assert_close(
                    weights[name].detach(), p.detach(), rtol=1e-9, atol=1e-11
                )
            twin.eval()
            own = label == k
            expected[own] = F.cross_entropy(twin(x[own]), y[own], reduction="none").detach()
        torch.testing.assert_close(self.stopping.backend.held_out(), expected)


def trained(loop: Loop) -> Loop:
    """One step on every batch."""
    for _, batch in loop.batches():
        batch_loss(loop.model, batch).backward()
        loop.step(batch)
        loop.stopping.step()
    return loop
