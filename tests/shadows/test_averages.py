"""Averages of weights: estimates and restored weights are those of the average."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import heldin
from heldin import rules

N, D, FOLDS, EPOCHS = 40, 5, 3, 4


def table() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, D, generator=generator, dtype=torch.float64)
    return x, x[:, :1] + torch.randn(N, 1, generator=generator, dtype=torch.float64)


def order() -> list[Tensor]:
    """Return the row numbers of all batches."""
    generator = torch.Generator().manual_seed(1)
    rows: DataLoader[Any] = DataLoader(range(N), 7, shuffle=True, generator=generator)  # type: ignore[arg-type]
    return [index for _ in range(EPOCHS) for index in rows]


def batches() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    return DataLoader(TensorDataset(*table()), 7, shuffle=True, generator=generator)


def network() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(D, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1)).double()


def batch_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


class Loop:
    """A loop that keeps an average of the weights."""

    def __init__(self, kind: str) -> None:
        self.model = network()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)
        ema = get_ema_multi_avg_fn(0.8) if kind == "ema" else None
        self.average = AveragedModel(self.model, multi_avg_fn=ema, use_buffers=kind == "ema")

    def step(self, batch: Any) -> Tensor:
        self.optimizer.zero_grad()
        loss = batch_loss(self.model, batch)
        loss.backward()
        self.optimizer.step()
        self.average.update_parameters(self.model)
        return loss

    def state(self) -> list[Tensor]:
        values = [*self.model.state_dict().values(), *self.average.state_dict().values()]
        return [value.clone() for value in values]


def follow(loop: Loop, loader: Any, **options: Any) -> heldin.EarlyStopping:
    given = {"rule": rules.Folds(folds=FOLDS, average="best"), "patience": None, **options}
    return heldin.EarlyStopping(
        loop.model,
        loop.optimizer,
        data=loader,
        batch_loss=batch_loss,
        train_step=loop.step,
        averaged_model=loop.average,
        **given,
    )


@pytest.mark.parametrize("kind", ["ema", "swa"])
def test_estimate_and_restored_weights_are_those_of_the_average(kind: str) -> None:
    plain, x, y = Loop(kind), *table()
    path = [copy.deepcopy(plain.average.module.state_dict())]
    states = []
    for index in order():
        plain.step((x[index], y[index]))
        path.append(copy.deepcopy(plain.average.module.state_dict()))
        states.append(plain.state())
    loop, loader = Loop(kind), batches()
    stopping = follow(loop, loader)
    inner, number = stopping.following, 0
    for _ in range(EPOCHS):
        for batch in loader:
            stopping.train(batch)
            for mine, theirs in zip(loop.state(), states[number], strict=True):
                assert torch.equal(mine, theirs)
            number += 1
    losses, labels = inner.backend.held_out(), inner.fold_of_row
    for k in range(FOLDS):
        twin = Loop(kind)
        for index in order():
            kept = index[labels[index] != k]
            if len(kept) > 1:
                twin.step((x[kept], y[kept]))
        twin.average.eval()
        held = labels == k
        expected = (twin.average(x[held]) - y[held]).square().mean(1).detach()
        torch.testing.assert_close(losses[held], expected)
    members = inner.backend.members()
    stopping.restore()
    assert inner.best_step > 0
    for module in (loop.average.module, loop.model):
        for name, value in module.state_dict().items():
            assert torch.equal(value, path[inner.best_step][name]), name
    twin.average.eval()
    for name, value in twin.average.module.named_parameters():
        torch.testing.assert_close(members[-1][name], value.detach())
    stopping.close()


def test_outputs_and_temperature_are_those_of_the_average() -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(60, D, generator=generator, dtype=torch.float64)
    y = (x[:, 0] + torch.randn(60, generator=generator, dtype=torch.float64) > 0).long()
    loader: DataLoader[Any] = DataLoader(TensorDataset(x, y), 20)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, 30), nn.ReLU(), nn.Linear(30, 2)).double()
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    loss_fn = nn.CrossEntropyLoss()

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        loss_fn(model(batch[0]), batch[1]).backward()
        optimizer.step()
        average.update_parameters(model)
        path.append({name: p.detach().clone() for name, p in average.module.named_parameters()})

    path = [{name: p.detach().clone() for name, p in model.named_parameters()}]
    stopping = heldin.EarlyStopping(
        model,
        optimizer,
        loss_fn,
        loader,
        rules.Folds(average="best"),
        train_step=step,
        averaged_model=average,
        metrics=["accuracy"],
    )
    for _ in stopping.epochs(60):
        for batch in loader:
            stopping.train(batch)
    assert stopping.temperature > 1
    assert 0.5 < stopping.estimates["accuracy"].value < 1
    kept = path[stopping.best_step or 0]
    with torch.no_grad():
        assert torch.equal(average(x), model(x))
        for name, value in model.named_parameters():
            scale = stopping.temperature if name.startswith("2.") else 1.0
            torch.testing.assert_close(value * scale, kept[name])
    assert len(stopping.committee().members) == 6


class ScheduleFree(torch.optim.Optimizer):
    """SGD whose evaluation mode has other weights, as the package schedulefree writes it."""

    def __init__(self, params: Iterable[Any], lr: float) -> None:
        super().__init__(params, {"lr": lr, "beta": 0.9, "k": 0, "train_mode": True})

    @torch.no_grad()
    def eval(self) -> None:
        for group in self.param_groups:
            if group["train_mode"]:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], 1 - 1 / group["beta"])
                group["train_mode"] = False

    @torch.no_grad()
    def train(self) -> None:
        for group in self.param_groups:
            if not group["train_mode"]:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], 1 - group["beta"])
                group["train_mode"] = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            share = 1 / (group["k"] + 1)
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, share)
                p.add_(p.grad, alpha=group["lr"] * (group["beta"] * (1 - share) - 1))
                z.sub_(p.grad, alpha=group["lr"])
            group["k"] += 1


def evaluated(model: nn.Module, optimizer: ScheduleFree) -> dict[str, Tensor]:
    """Return the weights of evaluation; the model and its optimiser stay as they are."""
    other = copy.deepcopy((model, optimizer))
    other[1].eval()
    return {name: p.detach() for name, p in other[0].named_parameters()}


@pytest.mark.parametrize("evaluates", [False, True])
def test_schedule_free_weights_are_those_of_evaluation(evaluates: bool) -> None:
    """In a plain loop, also if the loop switches to evaluation at the end of each epoch."""
    x, y = table()

    def build() -> tuple[nn.Module, ScheduleFree]:
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(D, 6), nn.Tanh(), nn.Linear(6, 1)).double()
        return model, ScheduleFree(model.parameters(), 0.3)

    def take_step(model: nn.Module, optimizer: ScheduleFree, index: Tensor) -> None:
        optimizer.zero_grad()
        F.mse_loss(model(x[index]), y[index]).backward()
        optimizer.step()

    plain, optimizer = build()
    path = [evaluated(plain, optimizer)]
    for number, index in enumerate(order()):
        if evaluates and number % 6 == 0:
            optimizer.train()
        take_step(plain, optimizer, index)
        path.append(evaluated(plain, optimizer))
        if evaluates and number % 6 == 5:
            optimizer.eval()
    model, made = build()
    rule = rules.Folds(folds=FOLDS, average="best")
    stopping = heldin.EarlyStopping(model, made, nn.MSELoss(), (x, y), rule, patience=None)
    assert stopping.following.backend.engine == "replay"
    for number, index in enumerate(order()):
        if evaluates and number % 6 == 0:
            made.train()
        take_step(model, made, index)
        if evaluates and number % 6 == 5:
            made.eval()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    losses, labels = stopping.following.backend.held_out(), stopping.following.fold_of_row
    for k in range(FOLDS):
        twin, other = build()
        for index in order():
            if len(kept := index[labels[index] != k]):
                take_step(twin, other, kept)
        other.eval()
        held = labels == k
        expected = (twin(x[held]) - y[held]).square().mean(1).detach()
        torch.testing.assert_close(losses[held], expected)
    stopping.restore()
    assert stopping.best_step is not None
    made.eval()  # changes nothing: restore() has switched to evaluation
    for name, value in model.named_parameters():
        torch.testing.assert_close(value.detach(), path[stopping.best_step][name])
    stopping.close()


def test_a_stack_is_refused_for_optimisers_with_an_evaluation_mode() -> None:
    model = nn.Linear(D, 1).double()
    optimizer = ScheduleFree(model.parameters(), 0.3)
    with pytest.raises(heldin.HeldinError, match="other weights for evaluation; use engine"):
        heldin.EarlyStopping(model, optimizer, nn.MSELoss(), table(), rules.Folds(engine="dense"))


def test_wrong_averages_are_refused() -> None:
    loop, loader = Loop("ema"), batches()
    parts: dict[str, Any] = {"data": loader, "batch_loss": batch_loss}
    with pytest.raises(heldin.HeldinError, match="averaged_model needs train_step"):
        heldin.EarlyStopping(loop.model, loop.optimizer, averaged_model=loop.average, **parts)
    parts["train_step"] = loop.step
    with pytest.raises(heldin.HeldinError, match="must be a module"):
        heldin.EarlyStopping(loop.model, loop.optimizer, averaged_model={}, **parts)  # type: ignore[arg-type]
    other = AveragedModel(nn.Linear(2, 1))
    with pytest.raises(heldin.HeldinError, match="no Sequential with the parameters of the model"):
        heldin.EarlyStopping(loop.model, loop.optimizer, averaged_model=other, **parts)
