"""Learning-rate schedules with a fixed end: a warning, and runs that go to their end."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

import heldin
from heldin.rules.schedules import fixed_schedule

LOSS = nn.MSELoss()
EPOCHS = 40


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 20, generator=generator, dtype=torch.float64)
    return x, 3 * x[:, :1] + torch.randn(40, 1, generator=generator, dtype=torch.float64)


def parts() -> tuple[Any, Any, Any, DataLoader[Any]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS)
    generator = torch.Generator().manual_seed(1)
    loader: DataLoader[Any] = DataLoader(
        TensorDataset(*data()), 20, shuffle=True, generator=generator
    )
    return model, optimizer, scheduler, loader


def train(model: Any, optimizer: Any, scheduler: Any, loader: Any, epochs: Any) -> None:
    for _ in epochs:
        for x, y in loader:
            optimizer.zero_grad()
            LOSS(model(x), y).backward()
            optimizer.step()
        scheduler.step()


def sequential(optimizer: Any) -> Any:
    warmup = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, 35)
    return lr_scheduler.SequentialLR(optimizer, [warmup, cosine], [5])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda o: lr_scheduler.CosineAnnealingLR(o, 40), "CosineAnnealingLR(T_max=40)"),
        (lambda o: lr_scheduler.OneCycleLR(o, 0.1, 40), "OneCycleLR(total_steps=40)"),
        (lambda o: lr_scheduler.PolynomialLR(o, 40), "PolynomialLR(total_iters=40)"),
        (lambda o: lr_scheduler.LinearLR(o, 1.0, 0.01, 40), "LinearLR(total_iters=40)"),
        (sequential, "CosineAnnealingLR(T_max=35)"),
        (lambda o: None, None),
        (lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=5), None),
        (lambda o: lr_scheduler.StepLR(o, 10), None),
        (lambda o: lr_scheduler.ExponentialLR(o, 0.9), None),
        (lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 10), None),
        (lambda o: lr_scheduler.ReduceLROnPlateau(o), None),
        (lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)), None),
    ],
)
def test_schedules_with_an_end_are_recognised(make: Any, words: str | None) -> None:
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
    kept = make(optimizer), lr_scheduler.StepLR(other, 10)
    assert fixed_schedule(optimizer) == words
    assert fixed_schedule(other) is None
    del kept


def test_schedules_of_transformers_are_recognised() -> None:
    transformers = pytest.importorskip("transformers")
    for name, words in (
        ("get_linear_schedule_with_warmup", "a schedule of num_training_steps=40"),
        ("get_cosine_schedule_with_warmup", "a schedule of num_training_steps=40"),
        ("get_constant_schedule_with_warmup", None),
    ):
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
        steps = (5,) if words is None else (5, 40)
        scheduler = getattr(transformers, name)(optimizer, *steps)
        assert fixed_schedule(optimizer) == words
        del scheduler


def test_a_run_that_would_stop_in_the_middle_is_warned_of_once() -> None:
    model, optimizer, scheduler, loader = parts()
    stopping = heldin.EarlyStopping(model, optimizer, LOSS, loader)
    with pytest.warns(heldin.HeldinWarning, match=r"T_max=40.*finish=True") as caught:
        train(model, optimizer, scheduler, loader, range(3))
    assert len(caught) == 1
    stopping.close()


@pytest.mark.parametrize("options", [{"finish": False}, {"finish": True}])
def test_who_has_decided_is_not_warned(options: dict[str, Any]) -> None:
    model, optimizer, scheduler, loader = parts()
    stopping = heldin.EarlyStopping(model, optimizer, LOSS, loader, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, scheduler, loader, range(3))
    stopping.close()


@pytest.mark.parametrize("rule", [heldin.rules.Folds(), heldin.rules.Folds(rows=0.5)])
def test_a_run_to_its_end_keeps_its_last_weights(rule: Any) -> None:
    plain, optimizer, scheduler, loader = parts()
    train(plain, optimizer, scheduler, loader, range(EPOCHS))
    model, optimizer, scheduler, loader = parts()
    stopping: Any = heldin.EarlyStopping(model, optimizer, LOSS, loader, rule, finish=True)
    train(model, optimizer, scheduler, loader, stopping.epochs(EPOCHS))
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    last = stopping.history.last()
    assert last.step == EPOCHS * len(loader)
    assert not stopping.should_stop
    assert 0 < stopping.best_step < last.step
    lowest = min(record.estimate for record in stopping.history)
    assert stopping.estimates["loss"].value == pytest.approx(last.estimate)
    assert last.estimate > lowest
    held = stopping.out_of_fold
    losses = (held.outputs - held.targets).square().mean()
    assert float(losses) == pytest.approx(last.estimate)
    assert stopping.plan().steps == stopping.best_step
    assert len(stopping.committee().members) == 6


def test_a_state_is_that_of_one_kind_of_run() -> None:
    model, optimizer, _, loader = parts()
    first = heldin.EarlyStopping(model, optimizer, LOSS, loader, finish=True)
    state = copy.deepcopy(first.state_dict())
    first.close()
    second = heldin.EarlyStopping(model, optimizer, LOSS, loader, finish=False)
    with pytest.raises(heldin.HeldinError, match="saved with finish=True"):
        second.load_state_dict(state)
    second.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"finish": True, "patience": 3}, "patience has no effect with finish=True"),
        ({"finish": "yes"}, "finish must be True, False or None"),
        ({"finish": True, "rule": heldin.rules.Validation(data=data())}, "finish has no effect"),
    ],
)
def test_what_would_be_ignored_is_refused(options: dict[str, Any], message: str) -> None:
    model, optimizer, _, loader = parts()
    with pytest.raises(heldin.HeldinError, match=message):
        heldin.EarlyStopping(model, optimizer, LOSS, loader, **options)


class MyCosine(lr_scheduler.CosineAnnealingLR):
    """A subclass with the same end."""


def test_subclasses_are_recognised() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    scheduler = MyCosine(optimizer, T_max=50)
    assert fixed_schedule(optimizer) == "MyCosine(T_max=50)"
    del scheduler


def test_a_run_without_patience_is_warned_too() -> None:
    model, optimizer, scheduler, loader = parts()
    stopping = heldin.EarlyStopping(model, optimizer, LOSS, loader, patience=None)
    with pytest.warns(heldin.HeldinWarning, match="T_max=40"):
        train(model, optimizer, scheduler, loader, range(3))
    stopping.close()
