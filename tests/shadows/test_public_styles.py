"""Loops in the styles of public scripts, beside freshly built twins, and errors about them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import heldin
from heldin import HeldinError, rules

N, FOLDS, SIZE = 24, 3, 8

Loss = Callable[[nn.Module, Any], Tensor]


def rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, 4, generator=generator, dtype=torch.float64)
    return x, x[:, :1] + torch.randn(N, 1, generator=generator, dtype=torch.float64)


def items() -> list[Any]:
    return list(zip(*rows(), strict=True))


def linear(outputs: int = 1) -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(4, outputs).double()


def mse(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def lists() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    orders = [torch.randperm(N, generator=generator) for _ in range(2)]
    return [part.tolist() for order in orders for part in order.split(SIZE)]


def take_step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def check_twins(
    dataset: Any, build: Callable[[], nn.Module], batch_loss: Loss = mse, **options: Any
) -> Any:
    """Train in a loop; compare shadows with models that are built anew for their rows."""
    read = getattr(dataset, "__getitems__", lambda index: [dataset[i] for i in index])
    plain = build()
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    loader = DataLoader(dataset, batch_sampler=lists(), **options)
    for index in lists():
        take_step(optimizer, batch_loss(plain, loader.collate_fn(read(index))))

    model = build()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    stopping = heldin.EarlyStopping(
        model,
        optimizer,
        data=loader,
        batch_loss=batch_loss,
        rule=rules.Folds(folds=FOLDS),
        patience=None,
    )
    for batch in loader:
        take_step(optimizer, batch_loss(model, batch))
    for name, value in plain.state_dict().items():
        assert torch.equal(value, model.state_dict()[name])

    rule: Any = stopping.following
    for number in range(FOLDS):
        twin = build()
        optimizer = torch.optim.SGD(twin.parameters(), 0.1)
        for index in lists():
            visible = [i for i in index if rule.fold_of_row[i] != number]
            if visible:
                take_step(optimizer, batch_loss(twin, loader.collate_fn(read(visible))))
        for name, weight in rule.backend.weights_of(number).items():
            torch.testing.assert_close(weight, twin.state_dict()[name], rtol=1e-12, atol=1e-14)
    return stopping


# --- batches ---------------------------------------------------------------------------------


def stacked(some: list[Any]) -> tuple[Tensor, Tensor]:
    return torch.stack([x for x, _ in some]), torch.stack([y for _, y in some])


def test_sparse_batches() -> None:
    def collate(some: list[Any]) -> Any:
        x, y = stacked(some)
        return x.to_sparse(), y

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.mse_loss(torch.sparse.mm(batch[0], model.weight.T) + model.bias, batch[1])

    check_twins(items(), linear, loss, collate_fn=collate)


def test_batches_of_nested_tensors() -> None:
    x, y = rows()
    dataset = [(x[i].expand(1 + i % 3, 4), y[i]) for i in range(N)]

    def collate(some: list[Any]) -> Any:
        nested = torch.nested.nested_tensor([x for x, _ in some], layout=torch.jagged)
        return nested, torch.stack([y for _, y in some])

    def loss(model: nn.Module, batch: Any) -> Tensor:
        means = torch.stack([each.mean(0) for each in model(batch[0]).unbind()])
        return F.mse_loss(means, batch[1])

    check_twins(dataset, linear, loss, collate_fn=collate)


class Columns(Dataset[Any]):
    """Rows that are read several at once, as columns."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, row: int) -> Any:
        raise AssertionError("torch does not read single rows where it can read several")

    def __getitems__(self, index: list[int]) -> Any:
        x, y = rows()
        return {"x": x[index], "y": y[index], "name": [str(row) for row in index]}


def test_a_dataset_in_columns() -> None:
    check_twins(Columns(), linear, collate_fn=lambda columns: (columns["x"], columns["y"]))


# --- models ----------------------------------------------------------------------------------


class Changing(nn.Module):
    """A model whose output is a tuple at times."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = linear(), 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        outputs = self.inner(x)
        return outputs if self.calls % 3 else (outputs, outputs)


@pytest.mark.parametrize("rule", [rules.Folds(folds=3), rules.LeaveOneOut()])
def test_an_output_structure_that_changes(rule: Any) -> None:
    model = Changing()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def train() -> None:
        stopping = heldin.EarlyStopping(
            model, optimizer, nn.MSELoss(), rows(), rule, patience=None, temperature=False
        )
        for _ in stopping.epochs(6):
            outputs = model(rows()[0])
            if isinstance(outputs, tuple):
                outputs = outputs[0]
            take_step(optimizer, F.mse_loss(outputs, rows()[1]))

    with pytest.raises(HeldinError, match=r"must return a tensor .* in every call, got"):
        train()


def test_predict_does_not_change_what_loss_fn_gets() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = linear()

        def forward(self, x: Tensor) -> Any:
            return self.inner(x), x

    model = Pair()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(HeldinError, match=r"give batch_loss, .*predict= changes what metrics"):
        heldin.EarlyStopping(
            model, optimizer, nn.MSELoss(), rows(), predict=lambda model, batch: model(batch[0])[0]
        )


def test_a_compiled_model_with_hooks_for_its_outputs() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.calls = linear(), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.inner(x) * (1 + 0.1 * (self.calls % 3))

    model: Any = torch.compile(Counts(), backend="eager")
    with torch._dynamo.config.patch(recompile_limit=2):
        stopping = heldin.EarlyStopping(
            model, torch.optim.SGD(model.parameters(), 0.1), data=items_loader(), batch_loss=mse
        )
    assert stopping.estimates["loss"].value > 0


def items_loader() -> DataLoader[Any]:
    return DataLoader(items(), batch_size=SIZE)  # type: ignore[arg-type]
