"""Held-out losses: of rows of different sizes, of ratios over a batch, beside a bad row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import heldin
from heldin import rules
from tests.support.reading import curves

N = 32


def made(model: nn.Module, loader: Any, batch_loss: Callable[[Any, Any], Tensor]) -> Any:
    return heldin.EarlyStopping(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        data=loader,
        batch_loss=batch_loss,
        rule=rules.Folds(folds=4),
        patience=None,
    )


def losses(stopping: Any) -> Tensor:
    return curves(stopping)[0]


def test_rows_of_different_sizes_are_evaluated_one_by_one() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(2 + i % 5, 3, generator=generator) for i in range(N)]
    model = nn.Linear(3, 1)
    loader: DataLoader[Any] = DataLoader(rows, batch_size=1, shuffle=True)  # type: ignore[arg-type]
    stopping = made(model, loader, lambda model, row: model(row).square().mean())
    with torch.no_grad():
        expected = torch.stack([model(row).square().mean() for row in rows])
    assert losses(stopping).sort().values == pytest.approx(expected.sort().values.tolist())


def test_a_ratio_over_the_batch_is_no_mean() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, 16, generator=generator, dtype=torch.float64)
    y = (x + torch.randn(N, 16, generator=generator) > 0).double()
    model = nn.Linear(16, 16).double()

    def dice(model: nn.Module, batch: Any) -> Tensor:
        guess = model(batch[0]).sigmoid()
        return 1 - 2 * (guess * batch[1]).sum() / (guess.sum() + batch[1].sum())

    stopping = made(model, DataLoader(TensorDataset(x, y), batch_size=8), dice)
    label = stopping.following.fold_of_row
    blocks = [(label == k).nonzero().flatten() for k in range(4)]
    with torch.no_grad():
        expected = [float(dice(model, (x[block], y[block]))) for block in blocks]
    assert losses(stopping).tolist() == pytest.approx(expected, rel=1e-12)


def test_a_bad_row_alone_is_left_out() -> None:
    x = torch.randn(N, 3, generator=torch.Generator().manual_seed(0))
    x[5, 1] = float("nan")
    model = nn.Linear(3, 1)
    loader = DataLoader(TensorDataset(x, torch.zeros(N, 1)), batch_size=8)
    with pytest.warns(heldin.HeldinWarning, match="row 5 is nan .* other 31 rows"):
        stopping = made(model, loader, lambda m, b: F.mse_loss(m(b[0]), b[1]))
    assert len(losses(stopping)) == N - 1
    assert bool(losses(stopping).isfinite().all())


class Graphs:
    """Graphs of different sizes in one batch: the nodes of all of them, and whose they are."""

    def __init__(self, graphs: list[tuple[Tensor, int]]) -> None:
        self.nodes = torch.cat([nodes for nodes, _ in graphs])
        self.owner = torch.cat([torch.full((len(n),), i) for i, (n, _) in enumerate(graphs)])
        self.labels = torch.tensor([label for _, label in graphs])

    def __call__(self, name: str) -> Any:
        return getattr(self, name)


def test_rows_of_a_batch_are_not_counted_by_its_first_tensor() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = [(torch.randn(2 + i % 5, 3, generator=generator).double(), i % 2) for i in range(N)]
    model = nn.Linear(3, 2).double()

    def batch_loss(model: nn.Module, batch: Any) -> Tensor:
        sums = batch.nodes.new_zeros(len(batch.labels), 3).index_add(0, batch.owner, batch.nodes)
        return F.cross_entropy(model(sums), batch.labels)

    loader: Any = DataLoader(rows, batch_size=8, collate_fn=Graphs)  # type: ignore[arg-type]
    stopping = made(model, loader, batch_loss)
    with torch.no_grad():
        expected = torch.stack([batch_loss(model, Graphs([row])) for row in rows])
    assert losses(stopping).sort().values.tolist() == pytest.approx(
        expected.sort().values.tolist(), rel=1e-12
    )


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_a_loss_with_noise_is_known_as_mean_or_sum(reduction: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, 16, generator=generator, dtype=torch.float64)
    model = nn.Linear(16, 16).double()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        code = model(batch[0])
        return F.mse_loss(code + 0.1 * torch.randn_like(code), batch[0], reduction=reduction)

    loader = DataLoader(TensorDataset(x), batch_size=8)
    stopping = made(model, loader, loss)
    with torch.no_grad():
        rows = (model(x) - x).square() + 0.1**2
        expected = float(rows.sum(1).mean() if reduction == "sum" else rows.mean())
    estimate = stopping.estimates["loss"]
    assert estimate.value == pytest.approx(expected, rel=0.05)  # of a row
    assert estimate.low < expected < estimate.high
