"""`heldin.EarlyStopping`: one class for every rule, without a call inside the loop."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import heldin
from heldin import rules
from heldin._private_torch import forward_hooks
from tests.support import runs

N, D = 60, 12


def rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, D, generator=generator, dtype=torch.float64)
    return x, x[:, :1] + torch.randn(N, 1, generator=generator, dtype=torch.float64)


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(D, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    return DataLoader(TensorDataset(*rows()), batch_size=15, shuffle=True, generator=generator)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def batch_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def train(stopping: Any, model: nn.Module, optimizer: Any, batches: Any, epochs: int = 400) -> None:
    for _ in stopping.epochs(epochs):
        for batch in batches:
            optimizer.zero_grad()
            batch_loss(model, batch).backward()
            optimizer.step()


RULES: dict[str, Any] = {
    "auto": lambda: {"rule": "auto"},
    "folds": lambda: {"rule": rules.Folds(folds=4)},
    "shadow": lambda: {"rule": "shadow"},
    "leave-one-out": lambda: {"rule": "leave-one-out"},
    "batch_loss": lambda: {"rule": "folds", "batch_loss": batch_loss, "loss_fn": None},
    "validation": lambda: {"rule": rules.Validation(data=rows()), "patience": 3},
    "evidence": lambda: {"rule": rules.Evidence(estimator="exact"), "loss_fn": None, "data": None},
}


def made(name: str, model: nn.Module, optimizer: Any, batches: Any) -> Any:
    options = {"loss_fn": nn.MSELoss(), "data": batches} | RULES[name]()
    return heldin.EarlyStopping(model, optimizer, **options)


@pytest.mark.parametrize("name", ["folds", "leave-one-out", "batch_loss"])
def test_no_call_in_the_loop_gives_the_run_of_the_rule_itself(name: str) -> None:
    model, batches = network(), loader()
    optimizer = sgd(model)
    stopping = made(name, model, optimizer, batches)
    train(stopping, model, optimizer, batches)

    twin, batches = network(), loader()
    optimizer = sgd(twin)
    rule: Any
    if name == "leave-one-out":
        rule = runs.LeaveOneOutStopping(twin, optimizer, nn.MSELoss(), batches)
    elif name == "folds":
        rule = runs.FoldStopping(twin, optimizer, nn.MSELoss(), batches, 4)
    else:
        rule = runs.FoldStopping(twin, optimizer, data=batches, batch_loss=batch_loss)
    while not rule.should_stop:
        for batch in batches:
            optimizer.zero_grad()
            batch_loss(twin, batch).backward()
            optimizer.step()
            rule.step()
    rule.restore()
    rule.close()
    assert stopping.stopped_step == rule.stopped_step
    assert stopping.estimates["loss"].value == rule.estimate
    assert stopping.best_step == rule.best_step
    assert stopping.best_epoch == (rule.best_step - 1) // 4
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("name", [*RULES])
def test_training_is_the_same_bit_for_bit(name: str) -> None:
    sums: list[list[Tensor]] = []
    for with_heldin in (False, True):
        model, batches = network(), loader()
        optimizer = sgd(model)
        stopping = made(name, model, optimizer, batches) if with_heldin else None
        torch.manual_seed(5)
        weights = []
        for _ in range(3):
            for batch in batches:
                optimizer.zero_grad()
                batch_loss(model, batch).backward()
                optimizer.step()
                weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        weights.append(torch.rand(1))
        sums.append(weights)
        if stopping is not None:
            stopping.close()
    assert all(torch.equal(a, b) for a, b in zip(*sums, strict=True))


@pytest.mark.parametrize("name", [*RULES])
def test_state_is_resumed(name: str) -> None:
    model, batches = network(), loader()
    optimizer = sgd(model)
    stopping = made(name, model, optimizer, batches)
    for batch in batches:
        optimizer.zero_grad()
        batch_loss(model, batch).backward()
        optimizer.step()
    other_model, other_batches = network(), loader()
    other = made(name, other_model, sgd(other_model), other_batches)
    other.load_state_dict(stopping.state_dict())
    assert len(other.history) == len(stopping.history)
    assert other.reason == stopping.reason
    other.close()
    stopping.close()
    with pytest.raises(heldin.HeldinError, match="called after close"):
        stopping.restore()


def test_evidence_keeps_the_weights_that_triggered_the_stop() -> None:
    model, batches = network(), loader()
    optimizer = sgd(model)
    stopping = made("evidence", model, optimizer, batches)
    weights: list[Tensor] = []
    for _ in stopping.epochs(400):
        for batch in batches:
            optimizer.zero_grad()
            batch_loss(model, batch).backward()
            weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
            optimizer.step()
    assert stopping.should_stop
    assert stopping.stopped_step is not None
    restored = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert torch.equal(restored, weights[stopping.stopped_step - 1])
    assert not torch.equal(restored, weights[-1]) or stopping.stopped_step == len(weights)


def test_fit_restores_the_best_weights() -> None:
    model = network()
    stopping = heldin.EarlyStopping(model, sgd(model), nn.MSELoss(), rows())
    assert stopping.fit(batch_size=15, max_epochs=500) is stopping
    assert stopping.should_stop
    interval = stopping.estimates["loss"]
    assert interval.low < interval.value < interval.high
    assert stopping.best_epoch is not None


def test_patience_is_a_number_of_epochs() -> None:
    model, batches = network(), loader()
    optimizer = sgd(model)
    stopping = heldin.EarlyStopping(model, optimizer, nn.MSELoss(), batches, patience=5)
    train(stopping, model, optimizer, batches)
    assert stopping.stopped_step is not None
    assert stopping.best_step is not None
    assert stopping.stopped_step >= stopping.best_step + 5 * 4


def test_batches_that_are_changed_in_the_loop_are_announced() -> None:
    x, y = rows()
    model = network()
    optimizer = sgd(model)
    stopping = heldin.EarlyStopping(
        model, optimizer, data=(x, y), batch_loss=batch_loss, rule=rules.Folds(), patience=None
    )
    with stopping:
        for index in torch.arange(N).split(20):
            batch = [2 * x[index], y[index]]
            stopping.note_batch(batch, index)
            optimizer.zero_grad()
            batch_loss(model, batch).backward()
            optimizer.step()
    assert len(stopping.history) > 2


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "budget with folds": ({"rule": "folds", "budget": 2.0}, "option of rule='auto'"),
    "unknown rule": ({"rule": "fold"}, "did you mean 'folds'"),
    "validation by name": ({"rule": "validation"}, "needs the held-out set"),
    "groups with evidence": (
        {"rule": "evidence", "loss_fn": None, "data": None, "groups": [0] * N},
        "groups has no effect",
    ),
    "loss with evidence": ({"rule": "evidence", "data": None}, "loss_fn has no effect"),
    "data with evidence": ({"rule": "evidence", "loss_fn": None}, "uses no data"),
    "stratify with leave-one-out": (
        {"rule": "leave-one-out", "stratify": [0] * N},
        "stratify has no effect",
    ),
    "no data": ({"data": None}, "data is missing"),
    "a class as loss": ({"loss_fn": nn.MSELoss}, r"loss_fn=MSELoss\(\)"),
    "patience": ({"patience": 0}, "number of epochs"),
    "several optimisers": ({"optimizer": []}, "optimisers were given"),
    "seed with validation": ({"rule": rules.Validation(data=rows()), "seed": 1}, "seed has no eff"),
    "mode with validation": (
        {"rule": rules.Validation(data=rows()), "mode": "min"},
        "mode has no effect",
    ),
    "temperature with evidence": (
        {"rule": "evidence", "loss_fn": None, "data": None, "temperature": False},
        "temperature has no effect",
    ),
    "a misspelt argument": ({"patiense": 3}, "unknown argument 'patiense'; did you mean 'patience"),
}


@pytest.mark.parametrize("case", [*REFUSED])
def test_refused(case: str) -> None:
    change, message = REFUSED[case]
    model = network()
    arguments: dict[str, Any] = {
        "optimizer": sgd(model),
        "loss_fn": nn.MSELoss(),
        "data": rows(),
    } | change
    with pytest.raises(heldin.HeldinError, match=message):
        heldin.EarlyStopping(model, **arguments)


@pytest.mark.parametrize("name", [*RULES])
def test_close_releases_the_model(name: str) -> None:
    model, batches = network(), loader()
    optimizer = sgd(model)
    stopping = made(name, model, optimizer, batches)
    for batch in batches:
        optimizer.zero_grad()
        batch_loss(model, batch).backward()
        optimizer.step()
    stopping.close()
    alive = weakref.ref(model)
    weight = weakref.ref(next(model.parameters()))
    del model, optimizer, batch
    gc.collect()
    assert alive() is None
    assert weight() is None
    assert stopping.reason


def test_a_step_that_is_refused_leaves_the_weights_of_the_loop() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(40, 3), torch.randn(40, 1)
    model = nn.Linear(3, 1)
    optimizer, loss_fn = torch.optim.SGD(model.parameters(), 0.1), nn.MSELoss()
    stopping = heldin.EarlyStopping(model, optimizer, loss_fn, (x, y))

    def train() -> None:
        for _ in stopping.epochs(3):
            optimizer.zero_grad()
            (0.5 * loss_fn(model(x), y)).backward()
            optimizer.step()

    start = model.weight.detach().clone()
    with pytest.raises(heldin.HeldinError, match="another gradient"):
        train()
    gc.collect()  # ends epochs(), which would warn that untrained weights are restored
    assert not torch.equal(model.weight, start)
    assert not forward_hooks(model)


def test_a_method_of_the_model_in_place_of_its_forward_pass() -> None:
    """With evidence, samples are counted by the arguments; with other rules it is a plain call."""

    class Density(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1).double()

        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            return (self.layer(x) - y).square().mean()

    x, y = rows()
    values = []
    for through_call in (True, False):
        torch.manual_seed(0)
        model: Any = Density()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        rule = rules.Evidence(estimator="exact")
        stopping = heldin.EarlyStopping(model, optimizer, rule=rule)
        if not through_call:
            model.forward = model.loss
        for _ in range(3):
            optimizer.zero_grad()
            loss = stopping.call(model.loss, x[:, :3], y) if through_call else model(x[:, :3], y)
            loss.backward()
            optimizer.step()
        values.append(stopping.history[-1].criterion)
        stopping.close()
    assert values[0] == pytest.approx(values[1])
    model = network()
    stopping = made("folds", model, sgd(model), loader())
    assert stopping.call(lambda a, b: a + b, 1, b=2) == 3
    stopping.close()


@pytest.mark.parametrize("every", [None, 3])
def test_validation_counts_optimiser_steps(every: int | None) -> None:
    model, batches = network(), loader()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    held_out = [each[::2] for each in rows()]
    rule = rules.Validation(data=held_out, check_every=every)
    stopping = heldin.EarlyStopping(model, optimizer, nn.MSELoss(), batches, rule, patience=4)
    losses: dict[int, float] = {}
    weights: dict[int, Tensor] = {}
    step = 0
    for _ in stopping.epochs(60):
        for batch in batches:
            optimizer.zero_grad()
            batch_loss(model, batch).backward()
            running = not stopping.should_stop
            optimizer.step()
            step += 1
            if step % (every or len(batches)) == 0 and running:
                losses[step] = float(batch_loss(model, held_out).detach())
                weights[step] = next(model.parameters()).detach().clone()
    best = min(losses, key=lambda step: losses[step])
    assert stopping.best_step == best
    assert stopping.best_epoch == (best - 1) // len(batches)
    assert stopping.plan().steps == best
    assert [record.step for record in stopping.history] == [*losses]
    assert stopping.estimates["loss"].value == losses[best]
    assert torch.equal(next(model.parameters()), weights[best])


def test_validation_in_a_loop_without_epochs() -> None:
    for batches, steps in ((loader(), [4, 8]), (None, [])):
        model = network()
        optimizer = sgd(model)
        rule = rules.Validation(data=rows())
        stopping = heldin.EarlyStopping(model, optimizer, nn.MSELoss(), batches, rule)

        def loop(stopping: Any = stopping, model: Any = model, optimizer: Any = optimizer) -> None:
            with stopping:
                for _ in range(2):
                    for batch in loader():
                        optimizer.zero_grad()
                        batch_loss(model, batch).backward()
                        optimizer.step()

        if batches is None:
            with pytest.warns(heldin.HeldinWarning, match="does not say where its epochs end"):
                loop()
        else:
            loop()
        assert [record.step for record in stopping.history] == steps


@pytest.mark.parametrize("name", [*RULES])
def test_a_damaged_state_is_refused_and_changes_nothing(name: str) -> None:
    model, batches = network(), loader()
    optimizer = sgd(model)
    stopping = made(name, model, optimizer, batches)
    for batch in batches:
        optimizer.zero_grad()
        batch_loss(model, batch).backward()
        optimizer.step()
    state = stopping.state_dict()
    model = network()
    other = made(name, model, sgd(model), loader())
    before = repr(other.state_dict())
    damages: list[tuple[dict[str, Any], str]] = [
        ({}, "not a state that heldin saved"),
        ({**state, "heldin": "ElementwiseStopping"}, "state of a ElementwiseStopping"),
        ({**state, "version": 0}, "version 0"),
        ({**state, "step": "three"}, "incomplete or damaged"),
        ({k: v for k, v in state.items() if k != "rule"}, "incomplete or damaged"),
        ({**state, "rule": {**state["rule"], "history": 3}}, "incomplete or damaged"),
        ({**state, "stopped_weights": {"0.weight": torch.zeros(1)}}, "stopped_weights"),
    ]
    for damaged, message in damages:
        with pytest.raises(heldin.HeldinError, match=message) as caught:
            other.load_state_dict(damaged)
        assert "heldin.EarlyStopping.load_state_dict" in str(caught.value)
        assert repr(other.state_dict()) == before
    other.load_state_dict(state)
    assert repr(other.state_dict()["rule"]) == repr(state["rule"])
    stopping.close(), other.close()


def test_fit_says_that_evidence_follows_loops() -> None:
    model = network()
    stopping = heldin.EarlyStopping(model, sgd(model), rule="evidence")
    with pytest.raises(heldin.HeldinError, match="follows a loop of yours; write it: for epoch in"):
        stopping.fit(batch_size=8)
    stopping.close()


def test_a_misspelt_public_name() -> None:
    with pytest.raises(AttributeError, match="did you mean 'EarlyStopping'"):
        _ = heldin.EarlyStoping


def test_evidence_that_does_not_stop_in_many_epochs_is_warned_about() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    rule = rules.Evidence(estimator="exact", checks=10**6)
    stopping = heldin.EarlyStopping(model, optimizer, rule=rule)
    batch = [each[:4] for each in rows()]

    def loop() -> None:
        for _ in stopping.epochs(102):
            for _ in range(10):
                optimizer.zero_grad()
                batch_loss(model, batch).backward()
                optimizer.step()

    with pytest.warns(heldin.HeldinWarning, match="100 epochs have passed") as caught:
        loop()
    assert len(caught) == 1
