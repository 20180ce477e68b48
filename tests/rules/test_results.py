"""Metrics with intervals, records and committees of a run."""

from __future__ import annotations

import copy
import gc
import io
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import heldin
from heldin import rules
from heldin.crossval import statistic_interval
from tests.support.outcome_runs import CASES, D, N, network, rows, sgd
from tests.support.outcome_runs import trained as trained_on_batches

ENGINES = ("dense", "vmap", "replay", "batch_loss")


def wrong(outputs: Tensor, targets: Tensor) -> float:
    return float((outputs.argmax(1) != targets).double().mean())


def stopping_of(
    model: nn.Module, engine: str = "dense", optimizer: Any = None, **options: Any
) -> heldin.EarlyStopping:
    rule = rules.Folds(folds=4, engine=engine)  # type: ignore[arg-type]
    options = {"patience": None, "rule": rule} | options
    optimizer = optimizer or sgd(model)
    return heldin.EarlyStopping(model, optimizer, F.cross_entropy, rows(), **options)


def trained(model: nn.Module, steps: int = 30, **options: Any) -> heldin.EarlyStopping:
    x, y = rows()
    optimizer = sgd(model)
    stopping = stopping_of(model, optimizer=optimizer, **options)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return stopping


# -- metrics


@pytest.mark.parametrize("engine", ENGINES)
def test_metrics_are_those_of_the_pooled_outputs(engine: str) -> None:
    stopping, _ = trained_on_batches(
        CASES[engine], metrics={"wrong": wrong, "auc": "roc_auc_ovr"}, temperature=False
    )
    held = stopping.out_of_fold
    expected = statistic_interval(wrong, held.outputs, held.targets)
    assert stopping.estimates["wrong"] == expected
    assert expected.low < expected.value < expected.high
    from sklearn.metrics import roc_auc_score

    auc = roc_auc_score(held.targets, held.outputs.softmax(1), multi_class="ovr")
    assert stopping.estimates["auc"].value == pytest.approx(auc)
    assert stopping.metrics()["heldin/best_wrong"] == expected.value
    assert f", wrong {expected.value:.4g}, auc {auc:.4g}>" in repr(stopping)
    assert [*stopping.estimates] == ["loss", "wrong", "auc"]
    stopping.close()
    assert stopping.estimates["wrong"] == expected


def test_intervals_are_over_groups() -> None:
    groups = [i // 4 for i in range(N)]
    model = network()
    stopping = trained(model, groups=groups, metrics={"wrong": wrong})
    held = stopping.out_of_fold
    by_groups = statistic_interval(wrong, held.outputs, held.targets, groups)
    assert stopping.estimates["wrong"] == by_groups
    assert by_groups != statistic_interval(wrong, held.outputs, held.targets)
    assert torch.equal(torch.as_tensor(stopping.record().groups), torch.tensor(groups))
    stopping.close()


def test_the_interval_of_the_loss_is_wider_than_that_of_the_rows() -> None:
    model = network()
    stopping = trained(model, temperature=False)
    interval = stopping.estimates["loss"]
    of_rows = heldin.crossval.mean_interval(stopping.record().row_losses)
    assert interval.value == of_rows.value == pytest.approx(stopping.following.estimate)
    assert interval.low < of_rows.low < of_rows.high < interval.high
    stopping.close()


def test_an_interval_of_squares_does_not_go_below_zero() -> None:
    x = torch.randn(25, 2, generator=torch.Generator().manual_seed(0))
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = (x, x[:, :1] + (torch.arange(25.0) == 3)[:, None])  # one row has nearly all of the loss
    stopping = heldin.EarlyStopping(model, optimizer, nn.MSELoss(), rows)
    stopping.fit(batch_size=5, max_epochs=40)
    interval = stopping.estimates["loss"]
    assert 0 <= interval.low < interval.value < interval.high
    stopping.close()


def test_a_report_shows_the_metrics() -> None:
    pytest.importorskip("jinja2")
    model = network()
    stopping = trained(model, metrics={"share of wrong rows": wrong})
    ends = str(stopping.estimates["share of wrong rows"]).partition(" ")[2]
    shown = ends.strip("[]").replace(", ", " to ")
    cells = re.search(r'<th scope="row">share of wrong rows</th>(.*?)</tr>', stopping.report())
    assert cells is not None
    assert f"<td>{shown}</td>" in cells[1]
    stopping.close()


# -- resuming


@pytest.mark.parametrize("engine", ENGINES)
def test_a_resumed_run_has_the_same_outputs(engine: str) -> None:
    options: dict[str, Any] = {"metrics": {"wrong": wrong}}
    whole, _ = trained_on_batches(CASES[engine], **options)
    half, model = trained_on_batches(CASES[engine], steps=6, **options)
    file = io.BytesIO()
    torch.save(half.state_dict(), file)
    file.seek(0)
    saved = model.state_dict(), torch.load(file, weights_only=True)
    other, _ = trained_on_batches(CASES[engine], after=6, saved=saved, **options)
    assert torch.equal(other.out_of_fold.outputs, whole.out_of_fold.outputs)
    assert other.estimates == whole.estimates
    assert other.temperature == whole.temperature
    for stopping in (whole, half, other):
        stopping.close()


def test_a_state_of_a_run_that_monitors_something_else_is_refused() -> None:
    model = network()
    one = stopping_of(model, metrics={"wrong": wrong, "right": lambda o, t: 1 - wrong(o, t)})
    two = stopping_of(
        network(), metrics={"right": lambda o, t: 1 - wrong(o, t)}, monitor="right", mode="max"
    )
    with pytest.raises(heldin.HeldinError, match="saved with monitor='loss'"):
        two.load_state_dict(one.state_dict())
    one.close()
    two.close()


# -- committees


@pytest.mark.parametrize("engine", ENGINES)
def test_a_committee_averages_the_restored_model_and_its_shadows(engine: str) -> None:
    stopping, model = trained_on_batches(CASES[engine], temperature=False)
    stopping.restore()
    stopping.close()
    committee = stopping.committee()
    assert len(committee.members) == 5
    x, _ = rows()
    held = stopping.out_of_fold
    with torch.no_grad():
        for fold, member in enumerate(committee.members[1:]):
            inside = held.folds == fold
            torch.testing.assert_close(
                member(x[held.rows[inside]]), held.outputs[inside], rtol=1e-9, atol=1e-11
            )
        assert torch.equal(committee.members[0](x), model(x))
        mean = torch.stack([member(x).softmax(1) for member in committee.members]).mean(0)
        torch.testing.assert_close(committee(x).softmax(1), mean)
    before = committee(x)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert torch.equal(committee(x), before)


def test_a_committee_shares_weights_that_are_not_trained() -> None:
    model = network()
    model[0].requires_grad_(False)
    x, y = rows()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.3)
    stopping = heldin.EarlyStopping(model, optimizer, F.cross_entropy, (x, y), "folds")
    with stopping:
        for _ in range(20):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    members = stopping.committee().members
    assert all(member[0].weight is model[0].weight for member in members)
    assert len({member[3].weight.data_ptr() for member in members}) == 6


def test_a_committee_without_its_model() -> None:
    stopping, model = trained_on_batches(CASES["dense"])
    stopping.restore()
    stopping.close()
    kept = copy.deepcopy(model)
    del model
    gc.collect()
    with pytest.raises(heldin.HeldinError, match="pass the restored model"):
        stopping.committee()
    assert len(stopping.committee(kept).members) == 5


def test_committees_of_regression_average_outputs() -> None:
    x, _ = rows()
    model = nn.Linear(D, 1).double()
    stopping = heldin.EarlyStopping(
        model, torch.optim.SGD(model.parameters(), lr=0.01), nn.MSELoss(), (x, x[:, :1]), "folds"
    )
    stopping.fit(max_epochs=20)
    committee = stopping.committee()
    outputs = [member(x) for member in committee.members]
    torch.testing.assert_close(committee(x), torch.stack(outputs).mean(0))


# -- comparing


def test_two_runs_are_compared_row_by_row() -> None:
    runs = []
    for rate in (0.3, 0.003):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        x, y = rows()
        stopping = heldin.EarlyStopping(
            model, optimizer, F.cross_entropy, (x, y), "folds", metrics=["accuracy"]
        )
        with stopping:
            for _ in range(30):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
        runs.append(stopping)
    comparison = heldin.compare(*runs)
    losses = [run.record().row_losses for run in runs]
    assert comparison.difference == pytest.approx(float((losses[0] - losses[1]).mean()))
    assert comparison["loss"].a == pytest.approx(runs[0].estimates["loss"].value)
    assert comparison["accuracy"].b == pytest.approx(runs[1].estimates["accuracy"].value)
    assert comparison.probability > 0.9


def test_runs_with_other_folds_are_not_compared() -> None:
    runs = [stopping_of(network(), seed=seed) for seed in (0, 1)]
    with pytest.raises(heldin.HeldinError, match="different folds"):
        heldin.compare(*runs)
    for run in runs:
        run.close()


def test_rules_without_shadows_have_no_record() -> None:
    model = network()
    stopping = heldin.EarlyStopping(model, sgd(model), rule="evidence")
    with pytest.raises(heldin.HeldinError, match=r"record: .* has no models"):
        stopping.record()
    stopping.close()


# -- choosing by a metric


def test_a_metric_chooses_the_check() -> None:
    checks: list[float] = []  # a fingerprint of the outputs at each

    def wave(outputs: Tensor, targets: Tensor) -> float:
        """Largest at the fourth check."""
        fingerprint = float(outputs.sum())
        if fingerprint not in checks:
            checks.append(fingerprint)
        return -abs(checks.index(fingerprint) - 3.0)

    model = network()
    weights = {0: copy.deepcopy(model.state_dict())}
    optimizer = sgd(model)
    options: dict[str, Any] = {"monitor": "wave", "mode": "max", "temperature": False}
    stopping = stopping_of(model, optimizer=optimizer, metrics={"wave": wave}, **options)
    x, y = rows()
    for step in range(1, 31):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        weights[step] = copy.deepcopy(model.state_dict())
    best = stopping.history[3].step
    assert stopping.best_step == best
    assert len(checks) == len(stopping.history)
    stopping.restore()
    assert all(torch.equal(weights[best][name], v) for name, v in model.state_dict().items())
    stopping.close()


def test_mode_is_known_by_the_name() -> None:
    for name, best in (("accuracy", max), ("error", min)):
        model = network()
        metric = "accuracy" if name == "accuracy" else wrong
        stopping = trained(model, metrics={name: metric}, monitor=name)
        monitored = stopping.following.outcome.state_dict()["monitored"]
        assert stopping.metrics()[f"heldin/best_{name}"] == best(monitored)
        assert stopping.metrics()[f"heldin/{name}"] == monitored[-1]
        assert best(monitored) != monitored[0]
        stopping.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"monitor": "f1"}, "monitor must be one of 'loss', 'wrongness'"),
        ({"monitor": "wrongness"}, "unknown whether a larger 'wrongness'"),
        ({"monitor": "wrongness", "mode": "up"}, "mode must be 'min' or 'max'"),
        ({"mode": "max"}, "would look for the largest loss"),
    ],
)
def test_a_monitor_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(heldin.HeldinError, match=message):
        stopping_of(network(), metrics={"wrongness": wrong}, **options)


# -- plans


def test_a_plan_is_a_run_to_repeat() -> None:
    x, y = rows()
    model = network()
    optimizer = sgd(model)
    stopping = heldin.EarlyStopping(
        model, optimizer, F.cross_entropy, (x, y), rules.Folds(folds=4, average="best")
    )
    for _ in stopping.epochs(60):
        for part in torch.arange(N).split(20):
            stopping.note_batch((x[part], y[part]), part)
            optimizer.zero_grad()
            F.cross_entropy(model(x[part]), y[part]).backward()
            optimizer.step()
    plan = stopping.plan()
    assert plan.steps == stopping.best_step
    assert plan.epochs == -(-plan.steps // 2)
    again = network()
    optimizer = sgd(again)
    for step in range(plan.steps):
        part = torch.arange(N).split(20)[step % 2]
        optimizer.zero_grad()
        F.cross_entropy(again(x[part]), y[part]).backward()
        optimizer.step()
    torch.testing.assert_close(again(x) / plan.temperature, model(x))


def test_there_is_no_plan_before_a_stop() -> None:
    model = network()
    stopping = heldin.EarlyStopping(model, sgd(model), rule="evidence")
    with pytest.raises(heldin.HeldinError, match="no best step yet"):
        stopping.plan()
    stopping.close()


@pytest.mark.parametrize(
    "rule", [heldin.rules.Folds(shadows=1), heldin.rules.LeaveOneOut(probes=8)]
)
def test_a_state_of_other_held_out_rows_is_refused(rule: Any) -> None:
    """Outputs of its rows would be paired with the targets of others."""
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    rows = x, (x[:, 0] > 0).long()

    def made(seed: int) -> heldin.EarlyStopping:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return heldin.EarlyStopping(
            model, optimizer, nn.CrossEntropyLoss(), rows, rule, seed=seed, metrics=["accuracy"]
        )

    one, other = made(0), made(1)
    with pytest.raises(heldin.HeldinError, match="use the same seed"):
        other.load_state_dict(one.state_dict())
    made(0).load_state_dict(one.state_dict())


def test_a_resumed_run_knows_that_its_loss_is_of_another_kind() -> None:
    """At step 0 label smoothing cannot be told from the cross-entropy: all logits are zero."""
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(3))
    rows, loss_fn = (x, (x[:, 0] > 0).long()), nn.CrossEntropyLoss(label_smoothing=0.1)

    def made() -> tuple[nn.Module, Any, heldin.EarlyStopping]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        for parameter in model[2].parameters():
            nn.init.zeros_(parameter)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        return model, optimizer, heldin.EarlyStopping(model, optimizer, loss_fn, rows, "folds")

    def train(model: nn.Module, optimizer: Any, first: int, last: int) -> None:
        for step in range(first, last):
            chosen = torch.randperm(60, generator=torch.Generator().manual_seed(step))[:15]
            optimizer.zero_grad()
            loss_fn(model(rows[0][chosen]), rows[1][chosen]).backward()
            optimizer.step()

    whole, half, resumed = made(), made(), made()
    train(*whole[:2], 0, 60)
    train(*half[:2], 0, 30)
    for new, old in zip(resumed, half, strict=True):
        new.load_state_dict(old.state_dict())
    train(*resumed[:2], 30, 60)
    assert whole[2].following.uncalibrated
    assert resumed[2].temperature == whole[2].temperature == 1
    assert resumed[2].estimates == whole[2].estimates


def test_an_empty_list_of_state_says_nothing() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    heldin.EarlyStopping(model, optimizer, rule="evidence", state=[]).close()
