"""Outputs along a run: what is logits, metrics, temperatures, and the texts about them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import heldin
from heldin import rules
from tests.support.outcome_runs import D, N, network, rows, sgd


def wrong(outputs: Tensor, targets: Tensor) -> float:
    return float((outputs.argmax(1) != targets).double().mean())


def stopping_of(model: nn.Module, engine: str = "dense", **options: Any) -> heldin.EarlyStopping:
    rule = rules.Folds(folds=4, engine=engine)  # type: ignore[arg-type]
    options = {"patience": None, "rule": rule, "optimizer": sgd(model)} | options
    return heldin.EarlyStopping(model, loss_fn=F.cross_entropy, data=rows(), **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    x, y = rows()
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def noisy(steps: int = 40, **options: Any) -> tuple[heldin.EarlyStopping, nn.Module]:
    """Train until the network is over-confident."""
    model = network()
    optimizer = sgd(model)
    stopping = stopping_of(model, optimizer=optimizer, **options)
    train(model, optimizer, steps)
    return stopping, model


def test_small_logits_are_no_probabilities() -> None:
    x, _ = rows()
    y = torch.ones(N, 1, dtype=torch.float64)
    y[::4] = 0
    model = nn.Linear(D, 1).double()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
        model.bias.add_(0.3)  # logits within [0, 1], of the right class for three rows of four
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    stopping = heldin.EarlyStopping(
        model, optimizer, nn.BCEWithLogitsLoss(), (x, y), "folds", metrics=["accuracy"]
    )
    assert stopping.estimates["accuracy"].value == 0.75
    record = stopping.record()
    assert record.estimates()["accuracy"].value == 0.75
    stopping.close()


def test_metrics_are_cross_fitted() -> None:
    stopping, _ = noisy(120, metrics=["neg_log_loss"])
    assert stopping.temperature > 1.05
    assert -stopping.estimates["neg_log_loss"].value == pytest.approx(
        stopping.estimates["loss"].value
    )
    held = stopping.out_of_fold  # at the temperature of all rows, which profits from the fit
    assert float(F.cross_entropy(held.outputs, held.targets)) < stopping.estimates["loss"].value
    stopping.close()


def test_metrics_with_sample_weight() -> None:
    weight = torch.linspace(0.1, 2, N, dtype=torch.float64)
    stopping = stopping_of(network(), sample_weight=weight, metrics=["accuracy"])
    held = stopping.out_of_fold
    right = (held.outputs.argmax(1) == held.targets).double()
    expected = float(right @ weight / weight.sum())
    assert stopping.estimates["accuracy"].value == pytest.approx(expected)
    stopping.close()
    with pytest.raises(heldin.HeldinError, match="'wrong' does not take the rows' weights"):
        stopping_of(network(), sample_weight=weight, metrics={"wrong": wrong})


def test_the_latest_and_the_best_check_are_logged() -> None:
    stopping, _ = noisy(metrics={"wrong": wrong}, temperature=False)
    outcome, values = stopping.following.outcome, stopping.metrics()
    assert values["heldin/best_wrong"] == stopping.estimates["wrong"].value
    assert values["heldin/wrong"] == outcome.value(len(stopping.history) - 1, "wrong")
    stopping.close()


def test_the_texts_of_a_finished_run_speak_of_one_check() -> None:
    stopping, model = noisy(120, patience="default", finish=True)
    inner, best = stopping.following, stopping.best_step
    assert best is not None
    assert best < 120
    plan = stopping.plan()
    lowest = [record.step for record in stopping.history].index(best)
    assert plan.temperature == inner.outcome.temperature(lowest) != stopping.temperature
    assert plan.rate_steps == pytest.approx(best * sgd(model).param_groups[0]["lr"])
    assert "kept weights: step 120 (the end)" in stopping.conclusion
    assert f"lowest estimate at step {best}" in stopping.conclusion
    assert "(the end); lowest estimate at " in stopping.model_card()
    stopping.close()


def test_a_conclusion_is_a_plain_sentence() -> None:
    model = network()
    optimizer, patience = sgd(model), heldin.Patience(1.0, 4, 1)
    stopping = stopping_of(model, optimizer=optimizer, patience=patience, metrics=["accuracy"])
    train(model, optimizer, 8)
    assert "stops by" in stopping.reason
    assert "stops by" not in stopping.conclusion
    train(model, optimizer, 200)
    assert stopping.should_stop
    pattern = (
        r"stopped after .*step \d+.*: no improvement since step \d+, estimated loss .*; "
        r"the chosen weights are .*step \d+.*; expect loss .*\], accuracy .*\]"
    )
    assert re.fullmatch(pattern, stopping.conclusion)
    stopping.close()


def test_a_reason_speaks_of_the_monitored_metric() -> None:
    stopping, _ = noisy(metrics=["accuracy"], monitor="accuracy")
    assert re.match(r"step \d+: accuracy 0\.\d+, best 0\.\d+ at step \d+", stopping.reason)
    stopping.close()


def test_a_loaded_state_has_its_own_estimates() -> None:
    """Results are kept until the next check; those of another run are not."""
    runs = []
    for seed in range(2):
        model = network()
        torch.manual_seed(seed)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.3 * torch.randn_like(p))
        runs.append(stopping_of(model, metrics={"wrong": wrong}))
    first, second = runs
    expected = {name: tuple(interval) for name, interval in first.estimates.items()}
    assert {name: tuple(interval) for name, interval in second.estimates.items()} != expected
    assert first.metrics() != second.metrics()
    second.load_state_dict(first.state_dict())
    assert {name: tuple(interval) for name, interval in second.estimates.items()} == expected
    assert first.metrics() == second.metrics()
    for stopping in runs:
        stopping.close()


def test_outputs_and_members_share_the_memory() -> None:
    model = network()
    size = sum(p.numel() for p in model.parameters()) * 8
    memory = 7 * size
    optimizer, rule = sgd(model), rules.Folds(folds=4, snapshot_memory=memory)
    stopping = stopping_of(model, optimizer=optimizer, rule=rule)
    train(model, optimizer, 60)
    inner = stopping.following
    outputs = sum(o.numel() * 8 for o in inner.outcome.state_dict()["outputs"].values())
    members = sum(v.numel() * 8 for m in inner.outcome.members for v in m.values())
    kept = len(inner._kept) * size
    assert outputs + members + kept <= memory or (members == 0 and len(inner._kept) == 1)
    stopping.close()


def test_memory_limits_outputs_of_a_rule_that_is_chosen() -> None:
    model = network()
    optimizer = sgd(model)
    memory = 5 * 4 * sum(p.nbytes for p in model.parameters())  # of five shadows
    whole, _ = noisy(60)
    stopping = heldin.EarlyStopping(
        model, optimizer, F.cross_entropy, rows(), memory=memory, patience=None
    )
    train(model, optimizer, 60)
    kept, everything = (each.following.outcome.outputs for each in (stopping, whole))
    assert (
        sum(o.nbytes for o in kept.values())
        <= memory // 2
        < sum(o.nbytes for o in everything.values())
    )
    assert stopping.following.best_number in kept


def test_losses_of_different_kinds_are_not_compared() -> None:
    x, _ = rows()
    runs = []
    for loss in (nn.MSELoss(), nn.L1Loss(), F.mse_loss):
        torch.manual_seed(0)
        model = nn.Linear(D, 1).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        runs.append(heldin.EarlyStopping(model, optimizer, loss, (x, x[:, :1]), "folds"))
    with pytest.raises(heldin.HeldinError, match="losses are different ones"):
        heldin.compare(runs[0], runs[1])
    assert heldin.compare(runs[0], runs[2]).difference == 0
    for run in runs:
        run.close()


def test_a_network_that_has_learnt_nothing_is_warned_of_once() -> None:
    x, _ = rows()
    y = torch.randint(0, 2, (N,), generator=torch.Generator().manual_seed(3))
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    stopping = heldin.EarlyStopping(
        model, optimizer, F.cross_entropy, (x, y), rules.Folds(folds=4), finish=True
    )
    for _ in range(300):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    with pytest.warns(heldin.HeldinWarning, match="learnt nothing that holds") as caught:
        stopping.restore()
    stopping.restore()
    assert len(caught) == 1
    stopping.close()


def test_committees_of_layers_that_cannot_be_scaled_are_calibrated() -> None:
    class Cosine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(D, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            return 20 * F.normalize(self.layer(x), dim=1)

    model = Cosine()
    optimizer = sgd(model)
    stopping = stopping_of(model, "vmap", optimizer=optimizer, temperature=True)
    train(model, optimizer, 20)
    with pytest.warns(heldin.HeldinWarning, match="divide its outputs"):
        stopping.restore()
    committee = stopping.committee()
    assert committee.temperature == stopping.temperature > 1
    x, _ = rows()
    held = stopping.out_of_fold
    inside = held.folds == 0
    own = committee.members[1](x[inside]) / committee.temperature
    torch.testing.assert_close(own, held.outputs[inside])
    stopping.close()
    plain = stopping_of(Cosine(), "vmap")
    assert "no temperature, as the last layer cannot be scaled exactly" in plain.conclusion
    assert repr(plain).endswith(", no temperature: the last layer cannot be scaled exactly>")
    plain.close()


def test_a_study_with_several_objectives_cannot_prune() -> None:
    optuna = pytest.importorskip("optuna")
    from heldin.optuna import pruning

    study = optuna.create_study(directions=["minimize", "maximize"])
    with pytest.raises(heldin.HeldinError, match="several objectives cannot prune"):
        pruning(study.ask())(stopping_of(network()))
