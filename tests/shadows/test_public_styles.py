"""Loops in the styles of public scripts, beside freshly built twins, and errors about them."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.data import DataLoader, Dataset

import heldin
from heldin import HeldinError, HeldinWarning, rules

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


class DenseLike(nn.Module):
    """Blocks whose inputs are the outputs of all earlier ones, each with a BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        sizes = range(4, 24, 2)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.BatchNorm1d(size), nn.ReLU(), nn.Linear(size, 2)) for size in sizes
        )
        self.head = nn.Linear(24, 1)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.cat([x, block(x)], 1)
        outputs: Tensor = self.head(x)
        return outputs


@pytest.mark.parametrize(("rule", "count"), [("evidence", 1), ("folds", 0)])
def test_many_layers_give_one_warning(rule: str, count: int) -> None:
    model, (x, y) = DenseLike(), rows()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    options: Any = {} if rule == "evidence" else {"loss_fn": nn.MSELoss(), "data": (x, y)}
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        stopping = heldin.EarlyStopping(model, optimizer, rule=rule, **options)
        for _ in stopping.epochs(4):
            take_step(optimizer, F.mse_loss(model(x), y))
    assert len([each for each in shown if issubclass(each.category, HeldinWarning)]) == count


class Normed(nn.Module):
    """A network with spectral norm and a BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.norm = spectral_norm(nn.Linear(4, 6)), nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 1)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.last(self.norm(self.first(x)).relu())
        return outputs


def test_restored_buffers_are_those_of_one_check() -> None:
    model, loader = Normed(), items_loader()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    steps = []
    rule = rules.Folds(folds=FOLDS, average="bagged")
    stopping = heldin.EarlyStopping(
        model, optimizer, data=loader, batch_loss=mse, rule=rule, patience=None
    )
    for _ in stopping.epochs(8):
        for batch in loader:
            take_step(optimizer, mse(model, batch))
            steps.append({name: value.clone() for name, value in model.state_dict().items()})
    restored = {name: value.clone() for name, value in model.state_dict().items()}
    buffers = dict(model.named_buffers())
    same = [step for step in steps if all(torch.equal(step[n], restored[n]) for n in buffers)]
    assert len(same) == 1  # neither averaged nor mixed
    assert not torch.equal(same[0]["last.weight"], restored["last.weight"])  # as weights are
    with torch.no_grad():
        assert 0.9 < float(torch.linalg.matrix_norm(model.eval().first.weight, 2)) < 1.1


# --- losses ----------------------------------------------------------------------------------


def token_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the mean over tokens, whose number changes from batch to batch."""
    logits = model(batch[0])[:, None].expand(-1, 5, -1)
    return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten(), ignore_index=-100)


def info_nce(model: nn.Module, batch: Any) -> Tensor:
    """Return a loss in which the other rows of the batch are negatives."""
    one, other = F.normalize(model(batch[0]), dim=1), F.normalize(model(batch[1]), dim=1)
    return F.cross_entropy(one @ other.T / 0.5, torch.arange(len(one)))


def dice(model: nn.Module, batch: Any) -> Tensor:
    """Return one ratio over all pixels of the batch."""
    guess = model(batch[0]).sigmoid()
    return 1 - 2 * (guess * batch[1]).sum() / (guess.sum() + batch[1].sum())


def tokens(x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    labels = torch.randint(0, 3, (N, 5), generator=generator)
    lengths = torch.randint(1, 6, (N, 1), generator=generator)
    return labels.masked_fill(torch.arange(5) >= lengths, -100)


@pytest.mark.parametrize(
    ("batch_loss", "outputs", "targets"),
    [
        (token_loss, 3, tokens),
        (info_nce, 3, lambda x: x + 0.1 * x.roll(1, 0)),
        (dice, 4, lambda x: (x > 0).double()),
    ],
    ids=["ignore_index", "info_nce", "dice"],
)
def test_losses_that_are_no_mean_over_rows(batch_loss: Loss, outputs: int, targets: Any) -> None:
    x, _ = rows()
    y = targets(x)
    dataset = list(zip(x, y, strict=True))
    stopping = check_twins(dataset, lambda: linear(outputs), batch_loss)
    rule = stopping.following
    losses = []
    for number in range(FOLDS):  # blocks of the loop's size, as its own loss gives them
        block = (rule.fold_of_row == number).nonzero().flatten()
        model = linear(outputs)
        with torch.no_grad():
            model.load_state_dict(rule.backend.weights_of(number))
            losses += [float(batch_loss(model, (x[block], y[block])))] * len(block)
    rule._check()
    assert stopping.history.last().estimate == pytest.approx(sum(losses) / N, rel=1e-12)


# --- rows ------------------------------------------------------------------------------------


def test_several_crops_of_each_row() -> None:
    x, y = rows()
    dataset = [[(x[i], y[i]), (-x[i], y[i])] for i in range(N)]

    def collate(some: list[Any]) -> Any:  # as MONAI's list_data_collate
        return stacked([crop for row in some for crop in row])

    check_twins(dataset, linear, collate_fn=collate)


class Pairs(Dataset[Any]):
    """Rows beside a partner that is drawn when they are read."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, row: int) -> Any:
        x, y = rows()
        other = int(torch.randint(N, ()))
        return torch.cat([x[row], x[other]]), (y[row] > y[other]).double()


class Windows(Dataset[Any]):
    """Windows of a series that overlap by all but one value."""

    series = rows()[0].flatten()

    def __len__(self) -> int:
        return N

    def __getitem__(self, row: int) -> Any:
        return self.series[row : row + 12], self.series[row + 12 : row + 13]


@pytest.mark.parametrize(
    ("dataset", "message"),
    [(Pairs(), "the estimate is too low; draw such partners"), (Windows(), "rows overlap")],
    ids=["siamese_pairs", "overlapping_windows"],
)
def test_rows_that_share_inputs(dataset: Any, message: str) -> None:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.mse_loss(model(batch[0].unflatten(1, (-1, 4))).mean(1), batch[1])

    with pytest.warns(HeldinWarning, match=message):
        heldin.EarlyStopping(
            model, optimizer, data=DataLoader(dataset, batch_size=SIZE), batch_loss=loss
        )


@pytest.mark.parametrize("kind", ["anew", "list", "cycle"])
def test_batches_of_another_loader(kind: str) -> None:
    model, loader = linear(), items_loader()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    stopping = heldin.EarlyStopping(model, optimizer, data=loader, batch_loss=mse)
    batches: Any = {"anew": items_loader, "list": lambda: list(loader) * 2}.get(
        kind, lambda: itertools.islice(itertools.cycle(loader), 6)
    )()

    def train() -> None:
        for batch in batches:
            take_step(optimizer, mse(model, batch))

    with pytest.raises(HeldinError, match="another DataLoader than the one given as data"):
        train()
    stopping.close()


def test_a_row_without_a_loss_is_named_by_leave_one_out() -> None:
    x, y = rows()
    x[7] = float("nan")
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(HeldinError, match="the loss of row 7 is nan"):
        heldin.EarlyStopping(model, optimizer, nn.MSELoss(), (x, y), "leave-one-out")


def test_weights_perturbed_inside_of_the_first_step() -> None:
    model: Any = linear()
    loader = items_loader()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    stopping = heldin.EarlyStopping(model, optimizer, data=loader, batch_loss=mse)
    batch = next(iter(loader))
    mse(model, batch).backward()
    with torch.no_grad():  # adversarial training
        model.weight.add_(0.1)
    mse(model, batch).backward()
    with pytest.raises(HeldinError, match=r"outside of optimizer\.step\(\) after step 0 \(perturb"):
        optimizer.step()
    stopping.close()
