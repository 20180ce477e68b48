"""Committees: trained in lock-step, honest about rows out of fold, never worse than a constant."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import heldin
from heldin.rules.estimated.losses import RowLoss
from heldin.tables.assess import assess, prediction_losses
from heldin.tables.committee import Committee, Folds, drawn_folds, train_committee
from heldin.tables.mlp import build_network, constant_outputs, predictions, start_at

pytest.importorskip("sklearn")

import numpy as np
from scipy.special import expit
from sklearn import metrics
from sklearn.model_selection import GroupKFold, TimeSeriesSplit

from heldin.sklearn import LinearRegression, LogisticRegression, MLPClassifier, MLPRegressor

pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
QUICK: dict[str, Any] = {"max_iter": 60, "learning_rate_init": 0.02, "random_state": 0}
LOSSES = {
    "classes": nn.CrossEntropyLoss(),
    "two": nn.BCEWithLogitsLoss(),
    "numbers": nn.MSELoss(),
}


def rows(kind: str, n: int = 40, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Inputs, targets as a loss takes them, and the number of outputs."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, dtype=torch.float64, generator=generator)
    noisy = x[:, :1] + 0.5 * torch.randn(n, 1, dtype=torch.float64, generator=generator)
    if kind == "classes":
        return x, (noisy[:, 0] > -0.5).long() + (noisy[:, 0] > 0.5).long(), 3
    return x, (noisy > 0).double() if kind == "two" else noisy, 1


def signal(n: int = 120, seed: int = 0) -> tuple[Any, Any, Any]:
    """Inputs, noisy labels, noisy numbers."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, 4))
    score = 1.5 * X[:, 0] - X[:, 1]
    return X, (rng.random(n) < expit(score)).astype(int), score + rng.normal(size=n)


# -- training against plain loops


@pytest.mark.parametrize("kind", list(LOSSES))
@pytest.mark.parametrize("weighted", [False, True])
def test_members_take_the_steps_of_networks_trained_alone(kind: str, weighted: bool) -> None:
    x, y, size = rows(kind)
    n, members = len(x), 4
    weights = torch.linspace(0.5, 1.5, n, dtype=torch.float64) if weighted else None
    folds = drawn_folds(n, members, seed=1, folds=3)
    starts = [
        build_network([3, 5, size], "tanh", generator=torch.Generator().manual_seed(k))
        for k in range(members)
    ]
    twins = copy.deepcopy(starts)
    loss_fn = LOSSES[kind]
    optimizer = torch.optim.AdamW(starts[-1].parameters(), 0.01, weight_decay=0.3)
    with torch.no_grad():
        loss = RowLoss.of(loss_fn, starts[-1](x[:4]), y[:4])
    committee = Committee(starts, optimizer, loss, x, y, weights, folds, seed=0)
    order = torch.Generator().manual_seed(5)
    batches = [b for _ in range(5) for b in torch.randperm(n, generator=order).split(16)]
    committee.epoch(batches)
    assert committee.step == len(batches)
    for k, twin in enumerate(twins):
        own = torch.optim.AdamW(twin.parameters(), 0.01, weight_decay=0.3)
        for index in batches:
            seen = index[folds.sees[k, index]]
            own.zero_grad()
            losses = loss.per_row(twin(x[seen]), y[seen])
            (losses if weights is None else losses * weights[seen]).mean().backward()
            own.step()
        found = committee.weights_of(k)
        for name, parameter in twin.named_parameters():
            assert torch.allclose(found[name], parameter, atol=1e-9)
    # the last check: every row on the member that has not seen it
    if committee.history.last().step == committee.step:
        held = torch.empty(n, dtype=torch.float64)
        with torch.no_grad():
            for k, twin in enumerate(twins[:-1]):
                mine = folds.judges[k]
                held[mine] = loss.per_row(twin(x[mine]), y[mine])
        held = held if weights is None else held * weights
        assert committee.history.last().estimate == pytest.approx(float(held.mean()))
    else:
        pytest.fail("choose a number of steps that is on the grid of checks")


def test_folds_are_drawn_anew() -> None:
    folds = drawn_folds(20, 11, seed=0)
    assert len(folds) == 11
    assert folds.sees[-1].all()
    assert torch.equal(folds.judges, ~folds.sees)
    assert folds.judges.sum(0).tolist() == [2] * 20  # twice five folds
    assert not torch.equal(folds.sees[:5], folds.sees[5:10])
    groups = torch.arange(20) // 4
    for row in drawn_folds(20, 6, 0, groups).judges:
        assert all(len(row[groups == g].unique()) == 1 for g in range(5))
    classes = torch.tensor([0] * 15 + [1] * 5)
    assert drawn_folds(20, 6, 0, stratify=classes).judges[:5, 15:].sum(1).tolist() == [1] * 5


def test_rows_that_a_member_neither_sees_nor_judges() -> None:
    splits = [
        (torch.as_tensor(a), torch.as_tensor(b))
        for a, b in TimeSeriesSplit(3).split(np.zeros((12, 1)))
    ]
    folds = Folds.of(splits, 12, 4)
    for sees, judges in zip(folds.sees[:-1], folds.judges[:-1], strict=True):
        assert sees.nonzero().max() < judges.nonzero().min()
    assert folds.judged.tolist() == [False] * 3 + [True] * 9


# -- what rows out of fold say


@pytest.mark.parametrize("kind", list(LOSSES))
def test_losses_of_predictions_are_those_of_outputs(kind: str) -> None:
    x, y, size = rows(kind)
    outputs = torch.randn(len(x), size, dtype=torch.float64)
    loss_fn = LOSSES[kind]
    found = prediction_losses(loss_fn, predictions(loss_fn, outputs), y)
    assert float(found.mean()) == pytest.approx(float(loss_fn(outputs, y)))


@pytest.mark.parametrize("kind", list(LOSSES))
def test_the_constant_is_the_best_constant(kind: str) -> None:
    x, y, size = rows(kind)
    weights = torch.linspace(0.2, 1.8, len(x), dtype=torch.float64)
    loss_fn = LOSSES[kind]
    best = constant_outputs(loss_fn, y, size, weights)
    model = build_network([3, 4, size], "relu", generator=torch.Generator().manual_seed(0))
    start_at(model, best)
    assert torch.allclose(model(x), best.expand(len(x), size))

    def loss(outputs: torch.Tensor) -> float:
        shown = predictions(loss_fn, outputs.expand(len(x), size))
        return float((prediction_losses(loss_fn, shown, y) * weights).mean())

    for number in range(size):
        for move in (-0.01, 0.01):
            other = best.clone()
            other[number] += move
            assert loss(other) > loss(best)


def test_a_class_that_is_missing_has_a_share() -> None:
    shares = constant_outputs(nn.CrossEntropyLoss(), torch.tensor([0, 0, 2]), 3, None).exp()
    assert shares.sum() == pytest.approx(1)
    assert 0 < shares[1] < shares[2]
    assert constant_outputs(nn.BCEWithLogitsLoss(), torch.ones(4, 1), 1, None).isfinite().all()


def test_the_share_is_the_best_one_and_the_estimate_that_of_the_mean() -> None:
    generator = torch.Generator().manual_seed(0)
    n, members = 4000, 6
    folds = drawn_folds(n, members, seed=0)
    truth = torch.randn(n, 1, dtype=torch.float64, generator=generator)
    y = truth + 0.1 * torch.randn(n, 1, dtype=torch.float64, generator=generator)
    noise = torch.randn(members, n, 1, dtype=torch.float64, generator=generator)
    found = assess(
        nn.MSELoss(),
        truth + noise,  # a member alone is right by half, so half of it is the best
        torch.zeros(members, 1, dtype=torch.float64),
        folds.judges,
        y,
        None,
        together=True,
    )
    assert found.share == pytest.approx(0.5, abs=0.1)
    assert found.constant == pytest.approx(float(y.square().mean()))
    mean = found.share * (truth + noise).mean(0)
    assert found.estimate == pytest.approx(float((mean - y).square().mean()), rel=0.15)
    alone = assess(
        nn.MSELoss(), truth + noise, torch.zeros(members, 1), folds.judges, y, None, together=False
    )
    judged = torch.where(folds.judges.unsqueeze(-1), truth + noise, 0.0).sum(0)
    assert torch.allclose(alone.predictions, found.share * judged)
    assert alone.estimate == pytest.approx(float((found.share * judged - y).square().mean()))
    assert alone.estimate > found.estimate
    useless = assess(
        nn.MSELoss(), 3 * noise, torch.zeros(members, 1), folds.judges, y, None, together=True
    )
    assert useless.share <= 0.05


# -- estimators


def test_all_networks_predict() -> None:
    X, labels, numbers = signal()
    model = MLPClassifier((6,), **QUICK).fit(X, labels)
    assert len(model.members_) == 6
    assert model.coefs_[0] is model.members_[-1][0][0]
    scaled = np.clip((X - X.mean(0)) / X.std(0), -4, 4)

    def outputs(layers: Any, units: Any) -> Any:
        (first, one), (second, two) = layers
        return units(scaled @ first + one) @ second + two

    def relu(values: Any) -> Any:
        return np.maximum(values, 0)

    assert model.activation_ == "tanh"
    shares = np.mean([expit(outputs(layers, np.tanh)) for layers in model.members_], axis=0)
    np.testing.assert_allclose(model.predict_proba(X)[:, 1:], shares, rtol=1e-9)
    assert not np.allclose(model.members_[0][0][0], model.members_[1][0][0])
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again.predict_proba(X), model.predict_proba(X))
    line = MLPRegressor((6,), **QUICK).fit(X, numbers)
    assert line.activation_ == "relu"
    mean = np.mean([outputs(layers, relu)[:, 0] for layers in line.members_], axis=0)
    np.testing.assert_allclose(line.predict(X), mean, rtol=1e-9)
    assert line.loss_ == pytest.approx(np.mean((mean - numbers) ** 2), rel=1e-4)
    assert len(MLPClassifier((6,), committee=11, **QUICK).fit(X, labels).members_) == 11
    alone = MLPClassifier((6,), committee=1, **QUICK).fit(X, labels)
    assert len(alone.members_) == 1
    assert alone.stopping_rule_ == "folds"


@pytest.mark.parametrize(
    ("rows", "committee", "members", "missed"),
    [(100, "auto", 11, 10), (101, "auto", 6, 21), (100, 3, 3, 50), (100, 6, 6, 20), (60, 1, 1, 6)],
)
def test_every_row_is_new_to_a_network(
    rows: int, committee: Any, members: int, missed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to a hundred rows a tenth of them is missed, or as few as the number asked for allows."""
    X, _, numbers = signal(rows)
    drawn = []

    def spy(trainer: Any, starts: Any, folds: Any, **options: Any) -> Any:
        drawn.append(folds)
        return train_committee(trainer, starts, folds, **options)

    monkeypatch.setattr("heldin.sklearn.base.train_committee", spy)
    model = MLPRegressor((4,), committee=committee, **QUICK).fit(X, numbers)
    assert len(model.members_) == members
    assert np.isfinite(model.oof_predictions_).all()
    assert int((~drawn[0].sees).sum(1).max()) == missed


def test_units_are_bounded_for_few_rows_of_classes() -> None:
    X, labels, numbers = signal(301)
    options = {**QUICK, "max_iter": 2, "learning_rate_init": 1e-3}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        few = MLPClassifier((4,), **options).fit(X[:300], labels[:300])
        many = MLPClassifier((4,), **options).fit(X, labels)
        asked = MLPClassifier((4,), activation="logistic", **options).fit(X, labels)
        line = MLPRegressor((4,), **options).fit(X[:100], numbers[:100])
        parts = MLPClassifier((4,), **options).partial_fit(X[:50], labels[:50], classes=[0, 1])
    found = [model.activation_ for model in (few, many, asked, line, parts)]
    assert found == ["tanh", "relu", "logistic", "relu", "relu"]


def test_a_hundred_thousand_rows() -> None:
    """Checks look at some of the rows, and every row still has its prediction out of fold."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(100_000, 4)).astype(np.float32)
    y = X[:, 0] + rng.normal(size=100_000) > 0
    options = {"max_iter": 2, "batch_size": 5000, "random_state": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = MLPClassifier((4,), learning_rate_init=0.05, **options).fit(X, y)
    assert model.oof_predictions_.shape == (100_000, 2)
    value, low, high = model.estimates_["accuracy"]
    assert 0.7 < low < value < high < 0.8
    assert high - low < 0.02


def test_standardised_inputs_are_trained_in_single_precision() -> None:
    """What is kept, and what is predicted, has the precision of the inputs."""
    X, labels, numbers = signal()
    model = MLPRegressor((6,), **QUICK).fit(X, 1e8 + numbers)
    assert {part.dtype for layers in model.members_ for layer in layers for part in layer} == {
        np.dtype(np.float64)
    }
    first = model.members_[0][0][0]
    np.testing.assert_array_equal(first, first.astype(np.float32))
    plain = MLPRegressor((6,), **QUICK).fit(X, numbers)
    np.testing.assert_allclose(model.predict(X) - 1e8, plain.predict(X), atol=0.05)
    raw = MLPClassifier((6,), standardize=False, **QUICK).fit(X, labels).coefs_[0]
    assert (raw != raw.astype(np.float32)).any()


def test_warm_start_goes_on_with_every_member() -> None:
    X, labels, _ = signal()
    model = MLPClassifier((6,), warm_start=True, **QUICK).fit(X, labels)
    before = [layers[0][0].copy() for layers in model.members_]
    model.set_params(max_iter=1, learning_rate_init=1e-12).fit(X, labels)
    for old, layers in zip(before, model.members_, strict=True):
        np.testing.assert_allclose(layers[0][0], old, atol=1e-8)


@pytest.mark.parametrize("kind", [MLPClassifier, MLPRegressor, LogisticRegression])
def test_noise_is_predicted_by_a_constant(kind: Any) -> None:
    rng = np.random.default_rng(1)
    X, y = rng.normal(size=(60, 20)), rng.random(60) < 0.3
    y = y.astype(float) if kind is MLPRegressor else y
    with pytest.warns(heldin.HeldinWarning, match="no better than a constant"):
        model = kind(**QUICK).fit(X, y)
    assert model.shrinkage_ == 1
    new = 100 * rng.normal(size=(5, 20))
    found = model.predict(new) if kind is MLPRegressor else model.predict_proba(new)[:, 1]
    np.testing.assert_allclose(found, y.mean(), rtol=1e-6)


def test_linear_models_start_at_the_constant() -> None:
    X, labels, _ = signal()
    rare = labels * (np.arange(len(labels)) % 4 == 0)
    model = LogisticRegression(early_stopping=False, max_iter=1, learning_rate_init=1e-12)
    model.fit(X, rare)
    np.testing.assert_allclose(model.predict_proba(X)[:, 1], rare.mean(), rtol=1e-6)


# -- rows out of fold


def test_predictions_out_of_fold_have_the_order_of_the_rows() -> None:
    X, labels, numbers = signal()
    weights = np.ones(len(X))
    weights[[3, 8]] = 0, 2
    for kind, y in ((MLPClassifier, labels), (MLPRegressor, numbers), (LinearRegression, numbers)):
        model = kind(**QUICK).fit(X, y, sample_weight=weights)
        found = model.oof_predictions_
        assert len(found) == len(X)
        gone = np.isnan(found).reshape(len(X), -1).any(1)
        assert np.flatnonzero(gone).tolist() == [3]
        order = np.random.default_rng(0).permutation(len(X))
        again = kind(**QUICK).fit(X[order], y[order], sample_weight=weights[order])
        np.testing.assert_allclose(again.oof_predictions_, found[order], rtol=1e-6)
        said = found[:, 1] if kind is MLPClassifier else found
        assert np.corrcoef(said[~gone], y[~gone])[0, 1] > 0.4
    assert MLPClassifier(early_stopping="evidence", **QUICK).fit(X, labels).oof_predictions_ is None


def test_a_prediction_out_of_fold_does_not_know_its_row() -> None:
    """Labels are in no relation to inputs that tell every row: in-sample fits are perfect."""
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(80, 40)), rng.normal(size=80)
    model = MLPRegressor((30,), committee=1, max_iter=300, random_state=0)
    with pytest.warns(heldin.HeldinWarning, match="no better than a constant"):
        model.fit(X, y)
    assert abs(np.corrcoef(model.oof_predictions_, y)[0, 1]) < 0.6


def test_scores_are_those_of_scikit_learn() -> None:
    X, labels, numbers = signal()
    model = MLPClassifier((6,), **QUICK).fit(X, labels)
    shares, found = model.oof_predictions_, model.estimates_
    assert found["accuracy"].value == pytest.approx(
        metrics.accuracy_score(labels, shares.argmax(1))
    )
    assert found["auc"].value == pytest.approx(metrics.roc_auc_score(labels, shares[:, 1]))
    said, happened = model.calibration_curve_
    assert len(said) == len(happened) <= 10
    line = MLPRegressor((6,), **QUICK).fit(X, numbers)
    predicted = line.oof_predictions_
    root = metrics.mean_squared_error(numbers, predicted) ** 0.5
    assert line.estimates_["rmse"].value == pytest.approx(root)
    assert line.estimates_["r2"].value == pytest.approx(metrics.r2_score(numbers, predicted))
    for interval in [*found.values(), *line.estimates_.values()]:
        assert interval.low < interval.value < interval.high
    three = np.digitize(numbers, [-1, 1])
    several = MLPClassifier((6,), **QUICK).fit(X, three)
    expected = metrics.roc_auc_score(three, several.oof_predictions_, multi_class="ovr")
    assert several.estimates_["auc"].value == pytest.approx(expected)


@pytest.mark.filterwarnings("ignore:.*no better than a constant")
def test_groups_are_kept_together() -> None:
    """Rows come in fours that are nearly equal; what is learnt of one is of no use elsewhere."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(30, 5))
    X = np.repeat(centres, 4, 0) + 0.01 * rng.normal(size=(120, 5))
    y = np.repeat(rng.normal(size=30), 4)
    groups = np.repeat([f"patient {i}" for i in range(30)], 4)
    options = {"max_iter": 200, "learning_rate_init": 0.02, "random_state": 0}
    blind = MLPRegressor((30,), **options).fit(X, y)
    aware = MLPRegressor((30,), **options).fit(X, y, groups=groups)
    assert aware.estimate_ > 1.5 * blind.estimate_
    split = MLPRegressor((30,), cv=GroupKFold(3), **options).fit(X, y, groups=groups)
    assert len(split.members_) == 4
    with pytest.raises(heldin.HeldinError, match="all rows are in one group"):
        MLPRegressor((30,), **options).fit(X, y, groups=np.zeros(120))
    assert split.estimate_ > 1.5 * blind.estimate_


def test_folds_may_be_in_the_order_of_time() -> None:
    X, labels, _ = signal()
    model = MLPClassifier((6,), cv=TimeSeriesSplit(4), **QUICK).fit(X, labels)
    assert len(model.members_) == 5
    assert np.isnan(model.oof_predictions_[:24]).all()
    assert np.isfinite(model.oof_predictions_[24:]).all()
    assert len(MLPClassifier((6,), cv=3, **QUICK).fit(X, labels).members_) == 4


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"committee": 2}, "committee must be 'auto', 1, or a whole number above 2"),
        ({"committee": 6, "early_stopping": "evidence"}, "committee=6 needs folds"),
        ({"cv": 3, "early_stopping": "shadow"}, "cv=3 needs folds"),
        ({"cv": 1}, "cv must be None, a number of folds"),
        ({"alpha": 0.1, "weight_decay": 0.1}, "give one of them"),
        ({"standardize": 1}, "standardize must be True or False"),
    ],
)
def test_what_cannot_be_is_refused(parameters: dict[str, Any], message: str) -> None:
    X, labels, _ = signal(30)
    with pytest.raises(heldin.HeldinError, match=message):
        MLPClassifier((4,), **parameters).fit(X, labels)
    with pytest.raises(heldin.HeldinError, match="groups need folds"):
        MLPClassifier((4,), early_stopping="evidence").fit(X, labels, groups=labels)
