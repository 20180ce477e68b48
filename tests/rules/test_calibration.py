"""Refine, then calibrate: the check after a temperature, and the temperature in the weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import heldin
from heldin import rules
from heldin.crossval import fit_temperature, temperature_losses
from heldin.rules.calibration import is_scalable
from tests.support.outcome_runs import CLASSES, D, N, cross_fitted, network, rows, sgd

STEPS = 120  # long enough for confident mistakes


def run(
    model: nn.Module, loss: Any, y: Tensor, engine: str = "dense", steps: int = STEPS, **more: Any
) -> tuple[heldin.EarlyStopping, dict[int, dict[str, Tensor]]]:
    """Train a model with shadows; return the weights after every step, too."""
    x, _ = rows()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    rule = rules.Folds(folds=4, engine=engine, average="best")  # type: ignore[arg-type]
    functions: dict[str, Any] = {"loss_fn": loss}
    if engine == "auto":
        functions = {"batch_loss": lambda model, batch: loss(model(batch[0]), batch[1])}
    stopping = heldin.EarlyStopping(
        model, optimizer, data=(x, y), rule=rule, patience=None, **functions, **more
    )
    weights = {0: copy.deepcopy(model.state_dict())}
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        weight = more.get("sample_weight")
        if weight is None:
            loss(model(x), y).backward()
        else:
            each = F.cross_entropy(model(x), y, reduction="none")
            (each * weight / weight.mean()).mean().backward()
        optimizer.step()
        weights[step] = copy.deepcopy(model.state_dict())
    return stopping, weights


@pytest.mark.parametrize("engine", ["dense", "vmap", "replay", "auto"])
def test_the_check_is_chosen_after_a_temperature(engine: str) -> None:
    _, y = rows()
    plain, _ = run(network(), F.cross_entropy, y, engine, temperature=False)
    outputs = plain.following.outcome.state_dict()["outputs"]
    held = plain.out_of_fold
    means, estimates = [], []
    for number in range(len(plain.history)):
        temperature, losses = cross_fitted(outputs[number], y, held.folds)
        means.append(float(temperature_losses(outputs[number], y, temperature).mean()))
        estimates.append(float(losses.mean()))
    best = min(range(len(means)), key=means.__getitem__)

    model = network()
    stopping, weights = run(model, F.cross_entropy, y, engine)
    assert stopping.best_step == plain.history[best].step != plain.best_step
    assert stopping.temperature == pytest.approx(fit_temperature(outputs[best], y))
    assert stopping.temperature > 1.05
    assert stopping.estimates["loss"].value == pytest.approx(estimates[best], rel=1e-4)
    # temperatures without a fold are exact to some per cent
    assert [r.estimate for r in stopping.history] == pytest.approx(estimates, rel=1e-4)
    assert stopping.estimates["loss"].value < plain.estimates["loss"].value
    torch.testing.assert_close(stopping.out_of_fold.outputs, outputs[best] / stopping.temperature)

    stopping.restore()
    stopping.restore()
    twin = network()
    twin.load_state_dict(weights[stopping.best_step or 0])
    x, _ = rows()
    torch.testing.assert_close(model(x), twin(x) / stopping.temperature)
    for name, value in twin.state_dict().items():
        if not name.startswith("3."):
            assert torch.equal(model.state_dict()[name], value)
    stopping.close()
    plain.close()
    members = stopping.committee().members
    inside = held.folds == 2
    torch.testing.assert_close(members[3](x)[inside], stopping.out_of_fold.outputs[inside])


def test_a_sigmoid() -> None:
    _, classes = rows()
    y = F.one_hot(classes, CLASSES).double()
    y[:, 0] = (classes != 1).double()  # rows with two labels
    model = network()
    with torch.no_grad():
        model[3].weight.mul_(8)  # confident from the start
    stopping, weights = run(model, nn.BCEWithLogitsLoss(), y)
    assert stopping.best_step
    held = stopping.out_of_fold
    assert stopping.temperature > 1.05
    again = fit_temperature(held.outputs * stopping.temperature, y, binary=True)
    assert stopping.temperature == pytest.approx(again)
    stopping.restore()
    twin = network()
    twin.load_state_dict(weights[stopping.best_step or 0])
    x, _ = rows()
    torch.testing.assert_close(model(x), twin(x) / stopping.temperature)
    stopping.close()
    assert stopping.committee().average == "sigmoid"


def test_rows_with_weights() -> None:
    _, y = rows()
    weight = torch.linspace(0.1, 2, N, dtype=torch.float64)
    stopping, _ = run(network(), F.cross_entropy, y, sample_weight=weight)
    held = stopping.out_of_fold
    logits = held.outputs * stopping.temperature
    assert stopping.temperature > 1.01
    assert stopping.temperature == pytest.approx(fit_temperature(logits, y, weight))
    losses = cross_fitted(logits, y, held.folds, weight)[1] * weight / weight.mean()
    assert stopping.estimates["loss"].value == pytest.approx(float(losses.mean()), rel=1e-4)
    stopping.close()


def softened(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, label_smoothing=0.2)


def zero_last(model: nn.Module) -> nn.Module:
    """Make the first outputs zero: smoothed labels then have the loss of hard ones."""
    with torch.no_grad():
        for p in model[3].parameters():
            p.zero_()
    return model


OTHERS: dict[str, Any] = {
    "label smoothing": (network, softened),
    "label smoothing, all outputs zero at first": (lambda: zero_last(network()), softened),
    "class weights": (network, nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 5.0]).double())),
    "squared error": (network, lambda o, t: F.mse_loss(o, F.one_hot(t, CLASSES).double())),
}


@pytest.mark.parametrize("name", [*OTHERS])
def test_other_losses_have_no_temperature(name: str) -> None:
    make, loss = OTHERS[name]
    _, y = rows()
    engine = "replay" if name == "class weights" else "dense"
    stopping, _ = run(make(), loss, y, engine)
    assert stopping.temperature == 1
    assert stopping.best_step == min(stopping.history, key=lambda r: r.estimate).step
    stopping.close()
    with pytest.raises(heldin.HeldinError, match="not the cross-entropy of the outputs"):
        run(make(), loss, y, engine, temperature=True)


class Cosine(nn.Module):
    """Logits that do not grow with the last layer's weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(D, CLASSES).double()

    def forward(self, x: Tensor) -> Tensor:
        return 20 * F.normalize(self.layer(x), dim=1)


def test_a_layer_that_cannot_be_scaled() -> None:
    _, y = rows()
    stopping, weights = run(Cosine(), F.cross_entropy, y, "vmap", steps=20)
    assert stopping.temperature == 1
    stopping.close()

    model = Cosine()
    stopping, weights = run(model, F.cross_entropy, y, "vmap", 20, temperature=True)
    assert stopping.temperature > 1.05
    with pytest.warns(heldin.HeldinWarning, match="divide its outputs by stopping.temperature"):
        stopping.restore()
    assert torch.equal(model.layer.weight, weights[stopping.best_step or 0]["layer.weight"])
    stopping.close()


def test_a_frozen_last_layer_is_scaled_once() -> None:
    _, y = rows()
    model = network()
    with torch.no_grad():
        model[3].weight.mul_(5)
    model[3].requires_grad_(False)
    frozen = model[3].weight.clone()
    stopping, _ = run(model, F.cross_entropy, y, "vmap")
    assert stopping.temperature > 1.05
    for _ in range(2):
        stopping.restore()
        torch.testing.assert_close(model[3].weight, frozen / stopping.temperature)
    stopping.close()


def test_weights_are_not_changed_by_looking_at_the_last_layer() -> None:
    model = network()
    before = copy.deepcopy(model.state_dict())
    stopping = heldin.EarlyStopping(model, sgd(model), F.cross_entropy, rows())
    assert stopping.following.outcome.calibrates
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    stopping.close()


def test_temperature_is_one_of_three() -> None:
    with pytest.raises(heldin.HeldinError, match="temperature must be True, False or 'auto'"):
        run(network(), F.cross_entropy, rows()[1], temperature=1.5)


class LowRankHead(nn.Module):
    """A frozen linear layer and a low-rank adapter whose second matrix begins with zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.down, self.up = nn.Linear(4, 3), nn.Linear(4, 2), nn.Linear(2, 3)
        self.base.requires_grad_(False)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.up(self.down(x))
        return added + self.base(x)


def test_zeros_do_not_hide_a_part_of_the_outputs() -> None:
    torch.manual_seed(0)
    model = LowRankHead().double()
    before = copy.deepcopy(model.state_dict())
    batch = torch.randn(5, 4, dtype=torch.float64)
    assert not is_scalable(model, batch, lambda model, x: model(x))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    plain = nn.Linear(4, 3).double()
    nn.init.zeros_(plain.bias)
    assert is_scalable(plain, batch, lambda model, x: model(x))
