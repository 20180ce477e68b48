"""What the tests of shadows share."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import (
    Dataset,
)

np = pytest.importorskip("numpy")


N, D = 26, 5


def batch_loss(model: nn.Module, batch: Any) -> Tensor:
    assert batch["square"].shape == (4, 4)
    assert len(batch["name"]) == len(batch["y"])
    return F.cross_entropy(model(batch["x"], batch["mask"]) / batch["temperature"], batch["y"])


class Augmented(Dataset[Any]):
    def __init__(self) -> None:
        self.x = torch.randn(N, D, generator=torch.Generator().manual_seed(4))

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        noise = torch.randn(D) * random.random() * np.random.rand()
        return (self.x[i] + noise).float(), self.x[i, :1]


def mse(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


class Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        return torch.tensor([float(i)] * D), torch.tensor([float(i % 3)])
