"""Loops of other people's kinds, beside freshly built twins; `heldin-lab loops` has many more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

import heldin
from heldin import HeldinError, HeldinWarning, rules
from heldin.shadows import variables

N, FOLDS = 32, 4


def rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, 4, generator=generator, dtype=torch.float64)
    return x, x[:, :1] + torch.randn(N, 1, generator=generator, dtype=torch.float64)


def mse(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


class Trained:
    """A model, what trains it, and all that its step remembers."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()
        self.first = torch.optim.SGD(self.model[0].parameters(), 0.1)
        self.second = torch.optim.Adam(self.model[2].parameters(), 0.01)
        self.calls, self.losses = 0, [1.0]
        self.averages = {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def step(self, batch: Any) -> None:
        """Take a step that depends on everything that is remembered."""
        self.calls += 1
        self.first.zero_grad()
        self.second.zero_grad()
        loss = mse(self.model, batch)
        self.losses.append(loss.item())
        mean = sum(self.losses) / len(self.losses)
        (loss * mean / self.calls).backward()
        self.first.step()
        self.second.step()
        for name, p in self.model.named_parameters():
            self.averages[name].lerp_(p.detach(), 0.1)
            p.data.lerp_(self.averages[name], 0.05)


def lists() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [
        part.tolist() for _ in range(3) for part in torch.randperm(N, generator=generator).split(8)
    ]


def test_a_step_with_memory_and_two_optimisers() -> None:
    alone, run = Trained(), Trained()
    x, y = rows()
    loader = DataLoader(TensorDataset(x, y), batch_sampler=lists())
    stopping = heldin.EarlyStopping(
        run.model,
        run.first,
        data=loader,
        batch_loss=mse,
        rule=rules.Folds(folds=FOLDS),
        patience=None,
        train_step=run.step,
        state=[run.second],
    )
    for batch in loader:
        alone.step(batch)
        stopping.train(batch)
        for one, other in zip(alone.model.parameters(), run.model.parameters(), strict=True):
            assert torch.equal(one, other)
    assert (run.calls, run.losses) == (alone.calls, alone.losses)

    rule: Any = stopping.following
    for number in range(FOLDS):
        twin = Trained()
        for index in lists():
            visible = [i for i in index if rule.fold_of_row[i] != number]
            if visible:
                twin.step((x[visible], y[visible]))
        for name, weight in rule.backend.weights_of(number).items():
            torch.testing.assert_close(weight, twin.model.state_dict()[name], rtol=1e-12, atol=0)


class Fading(nn.Module):
    """Changes a tensor in place that is no buffer, and depends on it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear, self.level = nn.Linear(4, 1).double(), torch.ones((), dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.level.mul_(0.9)
        return self.linear(x) * self.level


@pytest.mark.parametrize("with_function", [False, True])
def test_a_module_that_changes_a_tensor_in_place(with_function: bool) -> None:
    x, y = rows()
    model, loader = Fading(), DataLoader(TensorDataset(x, y), batch_sampler=lists())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(batch: Any, model: nn.Module = model, optimizer: Any = optimizer) -> None:
        optimizer.zero_grad()
        mse(model, batch).backward()
        optimizer.step()

    options: Any = {"data": loader, "batch_loss": mse, "patience": None}
    if with_function:
        options["train_step"] = step
    stopping = heldin.EarlyStopping(model, optimizer, rule=rules.Folds(folds=FOLDS), **options)
    for batch in loader:
        stopping.train(batch) if with_function else step(batch)
    assert float(model.level) == pytest.approx(0.9 ** len(lists()))
    inner: Any = stopping.following
    for number in range(FOLDS):
        twin = Fading()
        optimizer = torch.optim.SGD(twin.parameters(), 0.1)
        for index in lists():
            visible = [i for i in index if inner.fold_of_row[i] != number]
            step((x[visible], y[visible]), twin, optimizer)
        found = inner.backend.weights_of(number)["linear.weight"]
        torch.testing.assert_close(found, twin.linear.weight.detach(), rtol=1e-12, atol=0)


class Counting(nn.Module):
    """Counts calls, sums inputs and notes one row, in attributes; all of it scales the outputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.Linear(4, 1).double()
        self.calls, self.state, self.log, self.rare = 0, torch.zeros(()).double(), [0], 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.log[0] += 1
            self.state = self.state + x.detach().mean()
            if bool((x == rows()[0][0]).all(1).any()):
                self.rare += 1
                self.noted = 2.0
        scale = self.calls + self.state + self.log[0] + 5 * self.rare + getattr(self, "noted", 0.0)
        return self.linear(x) * (1 + scale / 20)


RESETS: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda model: None,
    "a number": lambda model: setattr(model, "calls", 0),
    "a tensor": lambda model: setattr(model, "state", torch.zeros(()).double()),
    "a tensor in place": lambda model: model.state.zero_(),
    "a list": lambda model: setattr(model, "log", [0]),
    "a list in place": lambda model: model.log.__setitem__(0, 0),
}


@pytest.mark.parametrize("name", RESETS)
def test_attributes_that_the_loop_resets_or_one_row_changes(name: str) -> None:
    """A shadow without the row must not get what the model has noted of it."""
    x, y = rows()
    batches = [part.tolist() for part in torch.arange(N).split(8)]

    def train(model: nn.Module, batch_of: Callable[[list[int]], list[int]]) -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for _ in range(3):
            RESETS[name](model)
            for index in filter(len, map(batch_of, batches)):
                optimizer.zero_grad()
                mse(model, (x[index], y[index])).backward()
                optimizer.step()

    model = Counting()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    loader = DataLoader(TensorDataset(x, y), batch_sampler=batches)
    stopping = heldin.EarlyStopping(
        model, optimizer, data=loader, batch_loss=mse, rule=rules.Folds(folds=FOLDS), patience=None
    )
    for _ in range(3):
        RESETS[name](model)
        for batch in loader:
            optimizer.zero_grad()
            mse(model, batch).backward()
            optimizer.step()
    inner: Any = stopping.following
    for number in range(FOLDS):
        twin = Counting()
        train(twin, lambda index: [i for i in index if inner.fold_of_row[i] != number])
        found = inner.backend.weights_of(number)["linear.weight"]
        torch.testing.assert_close(found, twin.linear.weight.detach(), rtol=1e-12, atol=0)


def test_a_variable_that_one_row_changes() -> None:
    x, y = rows()

    class Step:
        def __init__(self) -> None:
            torch.manual_seed(1)
            self.model, self.seen = nn.Linear(4, 1).double(), 0
            self.optimizer = torch.optim.SGD(self.model.parameters(), 0.02)

        def __call__(self, batch: Any) -> None:
            self.seen += int((batch[0] == x[0]).all(1).any())
            self.optimizer.zero_grad()
            (mse(self.model, batch) * (1 + self.seen)).backward()
            self.optimizer.step()

    step, loader = Step(), DataLoader(TensorDataset(x, y), batch_sampler=lists())
    stopping = heldin.EarlyStopping(
        step.model,
        step.optimizer,
        data=loader,
        batch_loss=mse,
        rule=rules.Folds(folds=FOLDS),
        patience=None,
        train_step=step,
    )
    for batch in loader:
        stopping.train(batch)
    inner: Any = stopping.following
    for number in range(FOLDS):
        twin = Step()
        for index in lists():
            visible = [i for i in index if inner.fold_of_row[i] != number]
            twin((x[visible], y[visible]))
        found = inner.backend.weights_of(number)["weight"]
        torch.testing.assert_close(found, twin.model.weight.detach(), rtol=1e-12, atol=0)


def test_a_large_tensor_changed_in_place_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variables, "LARGE", 1000)
    run, large = Trained(), torch.zeros(5000)

    def step(batch: Any) -> None:
        large.add_(1)
        run.step(batch)

    loader = DataLoader(TensorDataset(*rows()), batch_size=8)
    stopping = heldin.EarlyStopping(
        run.model,
        run.first,
        data=loader,
        batch_loss=mse,
        train_step=step,
        state=[run.second],
    )
    with pytest.raises(HeldinError, match="the tensor 'large' in place"):
        stopping.train(next(iter(loader)))


def trained_weights(loader: Any, model: nn.Module, loss_fn: Any = None) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loss = {"loss_fn": loss_fn} if loss_fn is not None else {"batch_loss": mse}
    stopping = heldin.EarlyStopping(
        model, optimizer, data=loader, rule=rules.Folds(folds=FOLDS), patience=None, **loss
    )
    for batch in loader:
        optimizer.zero_grad()
        mse(model, batch).backward()
        optimizer.step()
    return stopping.following


def test_a_collate_function_that_drops_rows() -> None:
    x, y = rows()
    last = x[16:24, 0].min()  # in the third batch, at which slices are not looked at

    def without_some(items: list[Any]) -> Any:
        return default_collate([item for item in items if item[0][0] != last])

    def build() -> nn.Module:
        torch.manual_seed(1)
        return nn.Linear(4, 1).double()

    loader = DataLoader(TensorDataset(x, y), batch_size=8, collate_fn=without_some)
    rule = trained_weights(loader, build())
    for number in range(FOLDS):
        twin = build()
        optimizer = torch.optim.SGD(twin.parameters(), 0.1)
        for start in range(0, N, 8):
            visible = [
                i
                for i in range(start, start + 8)
                if rule.fold_of_row[i] != number and x[i, 0] != last
            ]
            optimizer.zero_grad()
            mse(twin, (x[visible], y[visible])).backward()
            optimizer.step()
        for name, weight in rule.backend.weights_of(number).items():
            torch.testing.assert_close(weight, twin.state_dict()[name], rtol=1e-12, atol=0)


class Hooked(nn.Module):
    """A model that reads a layer through a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.kept = nn.Linear(4, 1).double(), []  # type: ignore[var-annotated]
        self.layer.register_forward_hook(lambda module, args, output: self.kept.append(output))

    def forward(self, x: Tensor) -> Tensor:
        self.layer(x)
        output: Tensor = self.kept.pop()
        return output


def test_a_model_that_needs_its_hooks_is_replayed() -> None:
    loader = DataLoader(TensorDataset(*rows()), batch_size=8)
    assert trained_weights(loader, Hooked(), nn.MSELoss()).backend.engine == "replay"


class Rows(Dataset[Any]):
    """Rows that lie in no tensors, in some order."""

    def __init__(self, order: list[int]) -> None:
        self.x, self.y = rows()
        self.order = order

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[self.order[i]], self.y[self.order[i]]


def made(data: Any, **arguments: Any) -> Callable[[], Any]:
    model = nn.Linear(4, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return lambda: heldin.EarlyStopping(
        model, optimizer, data=DataLoader(data, 8), batch_loss=mse, **arguments
    )


def test_copies_in_a_dataset_are_warned_of() -> None:
    with pytest.warns(HeldinWarning, match="32 of 64 rows of the dataset are exact copies"):
        made(Rows([i // 2 for i in range(2 * N)]))()


@pytest.mark.filterwarnings("error")
def test_rows_without_copies_are_not() -> None:
    made(Rows([*range(N)]), eval_data=Rows([*range(N)]))()


def test_measured_targets_in_another_order_are_refused() -> None:
    with pytest.raises(HeldinError, match="another target"):
        made(Rows([*range(N)]), eval_data=Rows([*reversed(range(N))]))()


def test_gradients_of_an_earlier_training_are_warned_of() -> None:
    model = nn.Linear(4, 1).double()
    mse(model, rows()).backward()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.warns(HeldinWarning, match="the parameters have gradients"):
        heldin.EarlyStopping(model, optimizer, nn.MSELoss(), rows())


class Remembering(nn.Module):
    """A model that keeps statistics of its first batch, and a place that goes round."""

    kept: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.place = nn.Linear(4, 1).double(), 0
        self.register_buffer("kept", torch.zeros(5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "shift"):
            self.shift = x.detach().mean(0)
        output: Tensor = self.layer(x - self.shift) + self.kept.sum()
        if self.training:
            for value in output.detach()[:, 0]:
                self.kept = self.kept.index_fill(0, torch.tensor(self.place), 0.01 * float(value))
                self.place = (self.place + 1) % 5
        return output


def remembering() -> Remembering:
    torch.manual_seed(1)
    return Remembering()


def test_what_a_model_remembers_is_its_own() -> None:
    x, y = rows()
    loader = DataLoader(TensorDataset(x, y), batch_size=8)
    alone, model = remembering(), remembering()
    optimizer = torch.optim.SGD(alone.parameters(), 0.1)
    for batch in loader:
        optimizer.zero_grad()
        mse(alone, batch).backward()
        optimizer.step()
    rule = trained_weights(loader, model)
    assert torch.equal(alone.layer.weight, model.layer.weight)
    assert torch.equal(alone.shift, model.shift)
    for number in range(FOLDS):
        twin = remembering()
        optimizer = torch.optim.SGD(twin.parameters(), 0.1)
        for start in range(0, N, 8):
            visible = [i for i in range(start, start + 8) if rule.fold_of_row[i] != number]
            optimizer.zero_grad()
            mse(twin, (x[visible], y[visible])).backward()
            optimizer.step()
        for name, weight in rule.backend.weights_of(number).items():
            torch.testing.assert_close(weight, twin.state_dict()[name], rtol=1e-12, atol=0)


class EveryOther(torch.utils.data.Sampler[int]):
    """Draws rows with even numbers."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(0, N, 2))

    def __len__(self) -> int:
        return N // 2


@pytest.mark.parametrize("engine", ["dense", "replay"])
@pytest.mark.parametrize("leaves_out", [True, False])
def test_held_out_rows_that_a_sampler_never_draws(engine: Any, leaves_out: bool) -> None:
    model = nn.Linear(4, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    dataset = torch.utils.data.TensorDataset(*rows())
    sampler = EveryOther() if leaves_out else None
    loader = torch.utils.data.DataLoader(dataset, 8, sampler=sampler)
    rule = heldin.rules.Folds(engine=engine)
    stopping = heldin.EarlyStopping(model, optimizer, nn.MSELoss(), loader, rule, patience=None)

    def loop() -> None:
        for _ in stopping.epochs(30):
            for batch in loader:
                optimizer.zero_grad()
                mse(model, batch).backward()
                optimizer.step()

    if not leaves_out:
        loop()
        return
    with pytest.warns(HeldinWarning, match="has not drawn them in 8 epochs") as caught:
        loop()
    assert len(caught) == 1
