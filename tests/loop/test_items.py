"""A dataset is read once when a rule is made, but for a few rows."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import heldin
from heldin import rules

N = 120
TWICE = 24  # rows that are read a second time, to see whether they are random


class Images(Dataset[Any]):
    """Rows that are made when they are read, and count how often they are."""

    def __init__(self, draws: bool = False) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(N, 1, 6, 6, generator=generator)
        self.y = self.x.sum((1, 2, 3)).unsqueeze(1)
        self.reads, self.draws = torch.zeros(N, dtype=torch.long), draws

    def __len__(self) -> int:
        return N

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        self.reads[row] += 1
        noise = torch.randn(1, 6, 6) if self.draws else 0.0
        return self.x[row] + noise, self.y[row].clone()


MODELS = {
    "dense": lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 4), nn.Tanh(), nn.Linear(4, 1)),
    "vmap": lambda: nn.Sequential(nn.Flatten(), nn.LayerNorm(36), nn.Linear(36, 1)),
    "BatchNorm": lambda: nn.Sequential(nn.Flatten(), nn.BatchNorm1d(36), nn.Linear(36, 1)),
    "conv": lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 1)),
}


def batch_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


LOSSES: dict[str, dict[str, Any]] = {
    "loss_fn": {"loss_fn": nn.MSELoss()},
    "sum": {"loss_fn": nn.MSELoss(reduction="sum")},
    "batch_loss": {"batch_loss": batch_loss},
    "eval_loss": {"batch_loss": batch_loss, "eval_loss": batch_loss},
}
RULES: dict[str, Any] = {
    "auto": "auto",
    "folds": "folds",
    "light": rules.Folds(shadows=3, rows=0.25),
}


def reads(
    model: str, loss: str, rule: Any, loads: bool, images: Images, **options: Any
) -> tuple[Tensor, Any]:
    """Return how often each row was read to make a stopping object, and the object."""
    torch.manual_seed(0)
    network = MODELS[model]()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    data: Any = DataLoader(images, batch_size=16, shuffle=True) if loads else images
    stopping = heldin.EarlyStopping(
        network, optimizer, data=data, rule=rule, **LOSSES[loss], **options
    )
    return images.reads.clone(), stopping


@pytest.mark.parametrize(
    ("model", "loss", "rule", "loads"),
    [
        each
        for each in itertools.product(MODELS, LOSSES, RULES, (True, False))
        if each[1:3] != ("sum", "light")
    ],
)
def test_every_row_is_read_once(model: str, loss: str, rule: str, loads: bool) -> None:
    counts, stopping = reads(model, loss, RULES[rule], loads, Images())
    assert int(counts.max()) <= 2
    assert int((counts > 1).sum()) <= TWICE
    assert int(counts.sum()) <= N + TWICE
    before = stopping.estimates["loss"].value
    stopping.close()
    assert before == stopping.estimates["loss"].value


def test_evaluation_rows_of_their_own_are_read_once() -> None:
    view = Images()
    reads("conv", "batch_loss", "folds", True, Images(draws=True), eval_data=view)
    assert int(view.reads.max()) <= 2
    assert int(view.reads.sum()) <= N + TWICE


def test_random_rows_are_drawn_again() -> None:
    counts, _ = reads("conv", "batch_loss", "folds", True, Images(draws=True))
    assert int(counts.sum()) > 2 * N


def test_checks_of_light_shadows_read_no_row_again() -> None:
    images = Images()
    _, stopping = reads("conv", "batch_loss", RULES["light"], False, images)
    inner = stopping.following
    before = images.reads.clone()
    for _ in range(3):
        inner._check()
    first_block = int((images.reads - before).sum())
    assert first_block <= 3 * N / 16  # to see whether the rows have changed


def test_a_collate_function_that_changes_items_gets_fresh_ones() -> None:
    class Scaled(Images):
        def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
            x, y = super().__getitem__(row)
            return x.clone(), y

    def scale(items: Any) -> Any:
        for x, _ in items:
            x /= 255
        return torch.utils.data.default_collate(items)

    images, model = Scaled(), MODELS["conv"]()
    loader = DataLoader(images, batch_size=16, collate_fn=scale)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    stopping = heldin.EarlyStopping(
        model, optimizer, data=loader, rule="folds", batch_loss=batch_loss
    )
    batch = scale([Images()[row] for row in range(N)])
    with torch.no_grad():
        assert stopping.estimates["loss"].value == pytest.approx(float(batch_loss(model, batch)))


def test_rows_that_are_no_pairs_need_a_loss_of_the_batch() -> None:
    rows: Any = [{"x": torch.randn(1, 6, 6), "y": torch.randn(1)} for _ in range(40)]
    model = MODELS["conv"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with pytest.raises(heldin.HeldinError, match="at least two of them"):
        heldin.EarlyStopping(model, optimizer, nn.MSELoss(), DataLoader(rows, batch_size=8))
