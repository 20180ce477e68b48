"""`train_step=`: the user's own step, replayed for every shadow."""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import heldin
from heldin import rules

N, D, FOLDS, EPOCHS = 40, 5, 4, 3


def table() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, D, generator=generator, dtype=torch.float64)
    return x, x[:, :1] + torch.randn(N, 1, generator=generator, dtype=torch.float64)


def batches() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    return DataLoader(TensorDataset(*table()), batch_size=7, shuffle=True, generator=generator)


class Network(nn.Module):
    """A network with a function that keeps a submodule, a setting in a tensor and spectral norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(D, 6)
        self.second = spectral_norm(nn.Linear(6, 6))
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 1)
        kept = self.last
        self.head = lambda hidden: kept(torch.tanh(hidden))
        self.config = {"temperature": torch.tensor(1.0, dtype=torch.float64)}
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        hidden = self.norm(self.second(torch.tanh(self.first(x))))
        return self.head(hidden) * self.config["temperature"] * (1 + 0.01 * self.calls)


def build() -> Network:
    torch.manual_seed(2)
    return Network().double()


class Loop:
    """A training loop whose step is not the plain one."""

    def __init__(self, make: Callable[[Any], torch.optim.Optimizer]) -> None:
        self.model = build()
        self.optimizer = make(self.model.parameters())
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.8))

    def step(self, batch: Any) -> None:
        x, y = batch
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.model(x), y)
        loss = loss + 0.01 * sum(p.abs().sum() for p in self.model.parameters())
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        with torch.no_grad():
            self.model.first.weight.clamp_(-0.5, 0.5)
        self.average.update_parameters(self.model)


MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05),
}


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def train(
    make: Any, follow: bool, checksums: list[float], **options: Any
) -> tuple[Loop, heldin.EarlyStopping | None]:
    loop, loader, stopping = Loop(make), batches(), None
    if follow:
        stopping = heldin.EarlyStopping(
            loop.model,
            loop.optimizer,
            data=loader,
            batch_loss=loss,
            rule=rules.Folds(folds=FOLDS),
            train_step=loop.step,
            patience=None,
            **({"state": [loop.average]} | options),
        )
    for epoch in range(EPOCHS):
        loop.model.config["temperature"].fill_(1 + 0.1 * epoch)
        for batch in loader:
            loop.step(batch) if stopping is None else stopping.train(batch)
            state = {**loop.model.state_dict(), **loop.average.state_dict(prefix="average.")}
            checksums.append(sum(float(t.double().sum()) for t in state.values()))
    return loop, stopping


@pytest.mark.parametrize("name", MAKERS)
def test_training_is_untouched_and_shadows_equal_fresh_twins(name: str) -> None:
    make = MAKERS[name]
    plain: list[float] = []
    followed: list[float] = []
    train(make, False, plain)
    _, stopping = train(make, True, followed)
    assert plain == followed
    assert stopping is not None
    labels = stopping.following.fold_of_row
    for k in range(FOLDS):
        twin = Loop(make)
        x, y = table()
        for epoch in range(EPOCHS):
            twin.model.config["temperature"].fill_(1 + 0.1 * epoch)
            for index in _order(epoch):
                kept = index[labels[index] != k]
                if len(kept) > 1:
                    twin.step((x[kept], y[kept]))
        weights = stopping.following.backend.weights_of(k)
        for key, p in twin.model.named_parameters():
            torch.testing.assert_close(weights[key], p.detach(), rtol=0, atol=0)
        shadow = stopping.following.backend.shadows[k]
        averages = list(twin.average.parameters())
        for mine, theirs in zip(shadow.weights[-len(averages) :], averages, strict=True):
            assert torch.equal(mine, theirs.detach())
        twin.model.eval()
        held = labels == k
        expected = (twin.model(x[held]) - y[held]).square().mean(1).detach()
        torch.testing.assert_close(stopping.following.backend.held_out()[held], expected)


def _order(epoch: int) -> list[Tensor]:
    """Return the row numbers of the batches of an epoch."""
    generator = torch.Generator().manual_seed(1)
    loader: DataLoader[Any] = DataLoader(
        range(N),  # type: ignore[arg-type]
        batch_size=7,
        shuffle=True,
        generator=generator,
    )
    return [list(loader) for _ in range(epoch + 1)][epoch]


def test_an_object_that_is_not_given_is_named() -> None:
    loop = Loop(MAKERS["momentum"])
    loader = batches()
    stopping = heldin.EarlyStopping(
        loop.model, loop.optimizer, data=loader, batch_loss=loss, train_step=loop.step
    )
    with pytest.raises(heldin.HeldinError, match=r"'average' .* state=\[average\]"):
        stopping.train(next(iter(loader)))


def test_a_step_outside_of_the_function_is_refused() -> None:
    loop = Loop(MAKERS["momentum"])
    loader = batches()
    _ = heldin.EarlyStopping(
        loop.model,
        loop.optimizer,
        data=loader,
        batch_loss=loss,
        train_step=loop.step,
        state=[loop.average],
    )
    with pytest.raises(heldin.HeldinError, match="outside of train_step"):
        loop.step(next(iter(loader)))


def test_arguments_are_checked() -> None:
    loop = Loop(MAKERS["momentum"])
    parts: dict[str, Any] = {"data": batches(), "batch_loss": loss}
    with pytest.raises(heldin.HeldinError, match="must be a function of a batch"):
        heldin.EarlyStopping(loop.model, loop.optimizer, train_step=3, **parts)  # type: ignore[arg-type]
    with pytest.raises(heldin.HeldinError, match="no effect without train_step"):
        heldin.EarlyStopping(loop.model, loop.optimizer, state=[loop.average], **parts)
    with pytest.raises(heldin.HeldinError, match="objects with state_dict"):
        heldin.EarlyStopping(
            loop.model, loop.optimizer, train_step=loop.step, state=["ema"], **parts
        )
    stopping = heldin.EarlyStopping(loop.model, loop.optimizer, **parts)
    with pytest.raises(heldin.HeldinError, match="there is none"):
        stopping.train(next(iter(batches())))


def test_a_function_of_outputs_and_targets_will_do() -> None:
    """A loss_fn with logits, whose last layer is tried for a temperature before training."""
    x, y = table()
    data = TensorDataset(x, (y[:, 0] > 0).long())
    loader: DataLoader[Any] = DataLoader(data, batch_size=7)
    model = nn.Sequential(nn.Linear(x.shape[1], 2, dtype=x.dtype))
    optimizer, loss_fn = torch.optim.SGD(model.parameters(), 0.1), nn.CrossEntropyLoss()

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        loss_fn(model(batch[0]), batch[1]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()

    stopping = heldin.EarlyStopping(model, optimizer, loss_fn, loader, "folds", train_step=step)
    for _ in stopping.epochs(2):
        for batch in loader:
            stopping.train(batch)
    assert stopping.best_step == 2 * len(loader)
    assert stopping.estimates["loss"].value < 0.7


class Counting:
    """A step that depends on a counter, a list and an average, in attributes and around it."""

    def __init__(self) -> None:
        torch.manual_seed(2)
        self.model = nn.Linear(D, 1).double()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.count, self.losses = 0, [1.0]
        self.mean = torch.ones((), dtype=torch.float64)
        self.step = self.make_step()

    def make_step(self, calls: int = 0) -> Callable[[Any], None]:
        """Return a function with a variable around it."""

        def step(batch: Any) -> None:
            nonlocal calls
            calls += 1
            self.count += 1
            self.optimizer.zero_grad()
            loss = F.mse_loss(self.model(batch[0]), batch[1])
            factor = 1 + 0.1 * (self.count % 3) + 0.05 * calls + 0.1 * sum(self.losses)
            (loss * factor / self.mean).backward()
            self.optimizer.step()
            self.mean = 0.9 * self.mean + 0.1 * loss.detach()
            self.losses.append(loss.item())
            del self.losses[:-3]

        return step

    def state(self) -> list[Any]:
        """Return copies of everything that a checkpoint of the user has."""
        state = [self.model.state_dict(), self.optimizer.state_dict(), self.count, self.losses]
        return copy.deepcopy([*state, self.mean])

    def resume(self, state: list[Any]) -> None:
        model, optimizer, self.count, losses, mean = copy.deepcopy(state)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        self.losses, self.mean = losses, mean
        self.step = self.make_step(self.count)


def test_a_resumed_run_has_the_variables_of_its_shadows(tmp_path: Path) -> None:
    x, y = table()
    rows = [index for epoch in range(4) for index in _order(epoch)]

    def start(loop: Counting) -> heldin.EarlyStopping:
        return heldin.EarlyStopping(
            loop.model,
            loop.optimizer,
            data=(x, y),
            batch_loss=loss,
            rule=rules.Folds(folds=FOLDS),
            train_step=loop.step,
            patience=None,
        )

    def train(stopping: heldin.EarlyStopping, indices: list[Tensor]) -> None:
        for index in indices:
            batch = (x[index], y[index])
            stopping.note_batch(batch, index)
            stopping.train(batch)

    loop = Counting()
    whole = start(loop)
    train(whole, rows[:9])
    torch.save({"loop": loop.state(), "stopping": whole.state_dict()}, tmp_path / "state.pt")
    train(whole, rows[9:])
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    other = Counting()
    other.resume(saved["loop"])
    resumed = start(other)
    resumed.load_state_dict(saved["stopping"])
    train(resumed, rows[9:])
    assert resumed.history.columns()["estimate"] == whole.history.columns()["estimate"]
    for number in range(FOLDS):
        shadows = [run.following.backend.shadows[number] for run in (whole, resumed)]
        assert torch.equal(shadows[0].weights[0], shadows[1].weights[0])
    assert torch.equal(other.model.weight, loop.model.weight)


class Recurrent:
    """A loop over stretches of 20 sequences that carries the hidden state of each on."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.series = torch.randn(20, 31, 1).double()
        self.model = nn.ModuleList([nn.GRU(1, 4, batch_first=True), nn.Linear(4, 1)]).double()
        self.optimizer = torch.optim.Adam(self.model.parameters(), 0.01)
        self.hidden: Tensor | None = None
        self.steps = 0

    def loss(self, model: Any, part: Tensor, hidden: Tensor | None = None) -> tuple[Tensor, Tensor]:
        outputs, hidden = model[0](part[:, :-1], hidden)
        return F.mse_loss(model[1](outputs), part[:, 1:]), hidden.detach()

    def step(self, part: Tensor) -> None:
        self.steps += 1
        self.optimizer.zero_grad()
        loss, self.hidden = self.loss(self.model, part, self.hidden)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.optimizer.step()

    def run(self, rows: Tensor, step: Callable[[Tensor], Any], epochs: int = 2) -> None:
        for _ in range(epochs):
            self.hidden = None
            for start in range(0, 30, 10):
                step(self.series[rows, start : start + 11])


def recurrent_stopping(loop: Recurrent, rule: Any) -> Any:
    return heldin.EarlyStopping(
        loop.model,
        loop.optimizer,
        data=loop.series,
        batch_loss=lambda model, part: loop.loss(model, part)[0],
        train_step=loop.step,
        rule=rule,
        patience=None,
    )


def test_shadows_have_the_hidden_state_of_their_rows() -> None:
    loop, everything = Recurrent(), torch.arange(20)
    stopping = recurrent_stopping(loop, rules.Folds(folds=FOLDS))

    def step(part: Tensor) -> None:
        stopping.note_batch(part, everything)
        stopping.train(part)

    loop.run(everything, step)
    label, losses = stopping.following.fold_of_row, stopping.following.backend.held_out()
    for k in range(FOLDS):
        twin = Recurrent()
        twin.run((label != k).nonzero().flatten(), twin.step)
        held = (label == k).nonzero().flatten()
        with torch.no_grad():
            rows = [twin.loss(twin.model, twin.series[row : row + 1])[0] for row in held.tolist()]
        torch.testing.assert_close(losses[held], torch.stack(rows), rtol=1e-12, atol=0)


def test_light_shadows_are_refused_a_hidden_state() -> None:
    loop = Recurrent()
    stopping = recurrent_stopping(loop, rules.Folds(rows=0.25, shadows=3))
    part = loop.series[:, :11]
    stopping.note_batch(part, torch.arange(20))
    with pytest.raises(heldin.HeldinError, match=r"20 entries.*'self.hidden'.*rule='folds'"):
        stopping.train(part)


def following(model: nn.Module, optimizer: Any, step: Any) -> heldin.EarlyStopping:
    """Return folds of the table that replay a function."""
    rule = rules.Folds(folds=FOLDS)
    return heldin.EarlyStopping(
        model, optimizer, data=table(), batch_loss=loss, rule=rule, train_step=step
    )


def results_of_epoch(stopping: heldin.EarlyStopping, epoch: int) -> list[Any]:
    """Train on an epoch of the table; return what the function returned."""
    x, y = table()
    results = []
    for index in _order(epoch):
        stopping.note_batch((x[index], y[index]), index)
        results.append(stopping.train((x[index], y[index])))
    return results


LONG_LOGS: dict[str, Any] = {
    "list": lambda: [0.0] * 5000,
    "dict": lambda: dict.fromkeys(range(-5000, 0), 0.0),
    "OrderedDict": lambda: OrderedDict.fromkeys(range(-5000, 0), 0.0),
    "deque": lambda: deque([0.0] * 5000),
    "full deque": lambda: deque([0.0] * 5000, maxlen=5000),
    "set": lambda: set(range(-5000, 0)),
}


@pytest.mark.parametrize("kind", LONG_LOGS)
def test_long_logs_keep_the_losses_of_the_model(kind: str) -> None:
    """Of lists and mappings with thousands of entries only the end is exchanged."""
    x = table()[0]
    model = nn.Linear(x.shape[1], 1).to(x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    log, taken = LONG_LOGS[kind](), 0

    def step(batch: Any) -> float:
        nonlocal taken
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()
        optimizer.step()
        if isinstance(log, dict):
            log[taken] = value.item()
        else:
            (log.add if isinstance(log, set) else log.append)(value.item())
        taken += 1
        return value.item()

    stopping = following(model, optimizer, step)
    returned = results_of_epoch(stopping, 0)
    losses = list(log.values() if isinstance(log, dict) else log)
    if isinstance(log, set):
        assert {each for each in losses if each >= 0} == set(returned)
    else:
        assert losses[-len(returned) :] == returned
    assert len(log) == 5000 + len(returned) * (kind != "full deque")
    stopping.close()


@pytest.mark.parametrize("kind", ["list", "dict"])
def test_writes_into_the_middle_of_a_long_container_are_refused(kind: str) -> None:
    x = table()[0]
    model = nn.Linear(x.shape[1], 1).to(x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    bank: Any = [0.0] * 5000 if kind == "list" else dict.fromkeys(range(5000), 0.0)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        value = loss(model, batch)
        (value * (1 + bank[7])).backward()
        optimizer.step()
        bank[7] = value.item()

    stopping = following(model, optimizer, step)
    with pytest.raises(heldin.HeldinError, match="changes 'bank'"):
        results_of_epoch(stopping, 0)
    stopping.close()


def test_a_resumed_run_has_the_numpy_generators_of_its_shadows() -> None:
    numpy = pytest.importorskip("numpy")
    x = table()[0]

    def made() -> tuple[Any, Any, heldin.EarlyStopping, Any]:
        torch.manual_seed(0)
        model = nn.Linear(x.shape[1], 1).to(x)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        generator = numpy.random.default_rng(0)

        def step(batch: Any) -> None:
            optimizer.zero_grad()
            noise = float(generator.normal())
            ((1 + 0.1 * noise) * loss(model, batch)).backward()
            optimizer.step()
            with torch.no_grad():
                model.bias.add_(0.01 * noise)

        return model, optimizer, following(model, optimizer, step), generator

    whole = made()
    results_of_epoch(whole[2], 0)
    saved = whole[2].state_dict()
    resumed = made()
    for new, old in zip(resumed[:2], whole[:2], strict=True):
        new.load_state_dict(old.state_dict())
    resumed[3].bit_generator.state = whole[3].bit_generator.state
    resumed[2].load_state_dict(saved)
    results_of_epoch(whole[2], 1)
    results_of_epoch(resumed[2], 1)
    for number in range(FOLDS):
        one, other = (each[2].following.backend.weights_of(number) for each in (whole, resumed))
        assert all(torch.equal(one[name], other[name]) for name in one)
