"""The scikit-learn estimators against plain loops, and with scikit-learn's own tools."""

from __future__ import annotations

import importlib
import pickle
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import heldin
from heldin.tables.mlp import ACTIVATIONS, ManualBackprop, build_network
from heldin.tables.trainer import Trainer, TrainingConfig

pytest.importorskip("sklearn")

import numpy as np
from scipy import sparse
from sklearn.base import clone
from sklearn.datasets import load_iris
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import heldin.sklearn.base as base
import heldin.sklearn.data as data
from heldin.sklearn import LinearRegression, LogisticRegression, MLPClassifier, MLPRegressor

pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")

RULES = ["auto", "folds", "shadow", "leave-one-out", "evidence", "validation", False]
QUICK: dict[str, Any] = {"max_iter": 30, "learning_rate_init": 0.03, "random_state": 0}


def classes(n: int = 60, kinds: int = 3, seed: int = 0) -> tuple[Any, Any]:
    """Noisy classes."""
    generator = np.random.default_rng(seed)
    X = generator.normal(size=(n, 4))
    scores = X[:, :1] * np.linspace(-2, 2, kinds) + generator.gumbel(size=(n, kinds))
    return X, scores.argmax(1)


def numbers(n: int = 60, outputs: int = 1, seed: int = 0) -> tuple[Any, Any]:
    """A noisy linear relation."""
    generator = np.random.default_rng(seed)
    X = generator.normal(size=(n, 4))
    y = X @ generator.normal(size=(4, outputs)) + 0.5 * generator.normal(size=(n, outputs)) + 2
    return X, y[:, 0] if outputs == 1 else y


# -- the passes against autograd


@settings(max_examples=20, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 5), min_size=2, max_size=4),
    activation=st.sampled_from(sorted(ACTIVATIONS)),
    batches=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    bias=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_passes_agree_with_autograd(
    sizes: list[int], activation: str, batches: list[int], bias: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    model = build_network(sizes, activation, bias=bias, generator=generator)
    twin = build_network(sizes, activation, bias=bias)
    twin.load_state_dict(model.state_dict())
    passes = ManualBackprop(model, observe=True)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.0)
    x = [torch.randn(m, sizes[0], dtype=torch.float64, generator=generator) for m in batches]
    y = [torch.randn(m, sizes[-1], dtype=torch.float64, generator=generator) for m in batches]
    with heldin.observe(twin) as seen:
        for a, b in zip(x, y, strict=True):
            outputs = passes.forward(a)
            assert torch.allclose(outputs, twin(a))
            passes.backward(2 * (outputs - b))
            optimizer.zero_grad()
            (twin(a) - b).square().sum().backward()
            optimizer.step()  # at no rate: its gradients are used, not thrown away
            for p, q in zip(model.parameters(), twin.parameters(), strict=True):
                assert p.grad is not None
                assert q.grad is not None
                assert torch.allclose(p.grad * len(a), q.grad, atol=1e-12)
    for name, moments in passes.moments().items():
        assert moments.count == sum(batches) == seen[name].count
        assert torch.allclose(moments.total, seen[name].total, atol=1e-12)
        assert torch.allclose(moments.squares, seen[name].squares, atol=1e-12)
    assert passes.count == 0
    assert not passes.total.any()
    assert not passes.squares.any()


# -- the trainer against plain loops


def twins(
    rows: int, config: TrainingConfig, weights: Any = None
) -> tuple[Trainer, nn.Sequential, Any, Any]:
    """A trainer, and a model in the same state for a plain loop."""
    X, y = classes(rows, 2)
    x, t = torch.from_numpy(X), torch.from_numpy(y)[:, None].double()
    generator = torch.Generator().manual_seed(1)
    model = build_network([4, 6, 1], "tanh", generator=generator)
    twin = build_network([4, 6, 1], "tanh")
    twin.load_state_dict(model.state_dict())
    return Trainer(model, nn.BCEWithLogitsLoss(), x, t, weights, config, 0), twin, x, t


@pytest.mark.parametrize("solver", ["adam", "sgd"])
def test_evidence_is_that_of_a_plain_loop(solver: str) -> None:
    config = TrainingConfig(solver, alpha=0.3, batch_size=16, learning_rate_init=0.02, max_iter=200)
    trainer, twin, x, t = twins(50, config)
    outcome = trainer.run("evidence")
    groups = [
        {"params": [twin[0].weight, twin[2].weight], "weight_decay": 0.3 / 16},
        {"params": [twin[0].bias, twin[2].bias]},
    ]
    optimizer: torch.optim.Optimizer = (
        torch.optim.Adam(groups, 0.02)
        if solver == "adam"
        else torch.optim.SGD(groups, 0.02, momentum=0.9, nesterov=True)
    )
    order = torch.Generator().manual_seed(0)
    criteria = []
    # 50 rows in batches of 16: four steps, the last of two rows
    with heldin.EvidenceStopping(twin, window=4, estimator="exact") as stopping:
        while not stopping.should_stop:
            for index in torch.randperm(50, generator=order).split(16):
                optimizer.zero_grad()
                nn.functional.binary_cross_entropy_with_logits(twin(x[index]), t[index]).backward()
                stopping.step()
                optimizer.step()
            criteria.append(stopping.criterion)
    assert outcome.stopped
    assert outcome.rule == "evidence"
    assert outcome.evidence is not None
    assert outcome.evidence == pytest.approx(criteria, rel=1e-9, abs=1e-9)
    assert outcome.epochs == len(criteria) == len(outcome.losses)
    assert outcome.steps == 4 * len(criteria)
    for p, q in zip(trainer.model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(p, q, atol=1e-9)


def test_leave_one_out_is_that_of_a_plain_loop() -> None:
    weights = torch.rand(40, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    weights = weights / weights.mean()
    config = TrainingConfig(batch_size=16, learning_rate_init=0.02, max_iter=10)
    trainer, twin, x, t = twins(40, config, weights)
    outcome = trainer.run("leave-one-out")
    groups = [
        {"params": [twin[0].weight, twin[2].weight]},
        {"params": [twin[0].bias, twin[2].bias]},
    ]
    optimizer = torch.optim.Adam(groups, 0.02)
    order = torch.Generator().manual_seed(0)
    loss_fn = nn.BCEWithLogitsLoss()
    with heldin.LeaveOneOutStopping(
        twin, optimizer, loss_fn, (x, t), sample_weight=weights
    ) as stopping:
        for _ in range(10):
            for index in torch.randperm(40, generator=order).split(16):
                optimizer.zero_grad()
                rows = nn.functional.binary_cross_entropy_with_logits(
                    twin(x[index]), t[index], reduction="none"
                )
                (rows[:, 0] * weights[index]).mean().backward()
                optimizer.step()
                stopping.step(indices=index)
    assert not outcome.stopped
    assert outcome.estimate == pytest.approx(stopping.estimate, rel=1e-9)
    assert outcome.best_step == stopping.best_step
    for p, q in zip(trainer.model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(p, q, atol=1e-9)


def test_folds_are_those_of_one_call() -> None:
    config = TrainingConfig(batch_size=16, learning_rate_init=0.02, max_iter=400)
    trainer, twin, x, t = twins(50, config)
    outcome = trainer.run("folds")
    optimizer = torch.optim.Adam(twin.parameters(), 0.02)
    with heldin.FoldStopping(twin, optimizer, nn.BCEWithLogitsLoss(), (x, t)) as stopping:
        stopping.train(16, generator=torch.Generator().manual_seed(0))
    assert outcome.stopped
    assert outcome.steps == stopping.stopped_step
    assert outcome.best_step == stopping.best_step
    assert outcome.estimate == pytest.approx(stopping.estimate, rel=1e-9)
    for p, q in zip(trainer.model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(p, q, atol=1e-9)


def test_auto_falls_back_to_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "MEMORY", 1000)
    model = MLPClassifier((5,), **QUICK).fit(*classes())
    assert model.stopping_rule_ == "evidence"
    assert "more than 1,000" in model.stopping_choice_
    assert len(model.members_) == 1
    with pytest.raises(heldin.HeldinError, match="use early_stopping='evidence'"):
        model.set_params(early_stopping="folds").fit(*classes())


def test_rates_follow_their_schedules() -> None:
    trainer, *_ = twins(
        20, TrainingConfig("sgd", learning_rate="invscaling", power_t=0.5, max_iter=3)
    )
    trainer.run("none")
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(1e-3 / 61**0.5)
    config = TrainingConfig(
        "sgd", learning_rate="adaptive", tol=1e9, n_iter_no_change=1, max_iter=1000
    )
    trainer, *_ = twins(20, config)
    outcome = trainer.run("none")
    assert outcome.stopped
    # 1e-3 / 5^5 is the first rate that is not above 1e-6
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(1e-3 / 5**5)


# -- the estimators


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_trains(rule: Any) -> None:
    X, y = classes(80)
    model = MLPClassifier((8,), early_stopping=rule, **{**QUICK, "max_iter": 300}).fit(X, y)
    assert model.score(X, y) > 0.6
    expected = {"auto": "folds", False: "none"}.get(rule, rule)
    assert model.stopping_rule_ == expected
    assert len(model.loss_curve_) == model.n_iter_
    assert model.loss_curve_[-1] < model.loss_curve_[0]
    assert (model.evidence_curve_ is not None) == (expected == "evidence")
    if expected == "evidence":
        assert len(model.evidence_curve_) == model.n_iter_
    estimates = expected in ("folds", "shadow", "leave-one-out")
    assert (model.estimate_curve_ is not None) == estimates
    if estimates:
        lowest = min(model.estimate_curve_)
        assert model.estimate_ == pytest.approx(lowest, rel=0.1)
        assert model.estimate_error_ > 0
        assert model.best_step_ < model.n_steps_


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", [LogisticRegression, MLPRegressor])
def test_a_weight_is_a_number_of_copies(kind: Any, rule: Any) -> None:
    X, y = classes(30)
    times = np.random.default_rng(0).integers(0, 4, len(X))
    model = kind(early_stopping=rule, **{**QUICK, "max_iter": 12}, batch_size=10)
    by_copies = model.fit(X.repeat(times, 0), y.repeat(times)).predict(X)
    order = np.random.default_rng(1).permutation(len(X))
    by_weight = model.fit(X[order], y[order], sample_weight=times[order]).predict(X)
    np.testing.assert_array_equal(by_copies, by_weight)


@pytest.mark.parametrize("rule", ["folds", "shadow"])
def test_a_table_with_few_distinct_rows_is_learnt(rule: Any) -> None:
    """Four cells, 300 rows: a fold must not take every copy of a cell away."""
    rng = np.random.default_rng(0)
    X = rng.integers(0, 2, (300, 2)).astype(float)
    y = (rng.random(300) < 0.1 + 0.8 * (X[:, 0] != X[:, 1])).astype(int)
    model = MLPClassifier((8,), early_stopping=rule, learning_rate_init=0.02, random_state=0)
    model.fit(X, y)
    assert model.best_step_ > 50
    likely = model.predict_proba(X)[np.arange(300), y]
    assert -np.log(likely).mean() < 0.4  # 0.33 is the noise, 0.69 knows nothing


def test_order_is_kept_without_shuffling() -> None:
    X, y = numbers(30)
    X[7], y[7] = X[3], y[3]
    options = {**QUICK, "max_iter": 1, "shuffle": False, "batch_size": 5}
    model = MLPRegressor(
        (4,),
        "tanh",
        solver="sgd",
        momentum=0.0,
        early_stopping=False,
        alpha=0.0001,
        standardize=False,
        **options,
    )
    found = model.fit(X, y).coefs_
    seed = int(np.random.RandomState(0).randint(2**31))
    twin = build_network([4, 4, 1], "tanh", generator=torch.Generator().manual_seed(seed))
    weights = [p for name, p in twin.named_parameters() if name.endswith("weight")]
    x, t = torch.from_numpy(X), torch.from_numpy(y)[:, None]
    with torch.no_grad():
        twin[2].weight.zero_()
        twin[2].bias.fill_(y.mean())
    for start in range(0, 30, 5):
        twin.zero_grad()
        loss = nn.functional.mse_loss(twin(x[start : start + 5]), t[start : start + 5])
        penalty = sum(w.square().sum() for w in weights) * (0.0001 / 5 / 2)
        (loss + penalty).backward()
        with torch.no_grad():
            for p in twin.parameters():
                assert p.grad is not None
                p -= 0.03 * p.grad
    for mine, theirs in zip(found, weights, strict=True):
        np.testing.assert_allclose(mine, theirs.detach().T.numpy(), rtol=1e-10)


def test_class_weights_are_sample_weights() -> None:
    X, y = classes(60, 3)
    y = np.array(["a", "b", "c"])[y]
    by_hand = np.select([y == "a", y == "b"], [3.0, 0.5], 1.0)
    model = LogisticRegression(**QUICK)
    expected = model.fit(X, y, sample_weight=by_hand).predict_proba(X)
    weights = {"a": 3.0, "b": 0.5, "c": 1.0}
    found = model.set_params(class_weight=weights).fit(X, y).predict_proba(X)
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    balanced = 60 / 3 / np.array([(y == label).sum() for label in y])
    expected = model.set_params(class_weight=None).fit(X, y, balanced).predict_proba(X)
    found = model.set_params(class_weight="balanced").fit(X, y).predict_proba(X)
    np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_shapes_of_targets() -> None:
    X, y = classes(60, 4)
    model = MLPClassifier((5,), **QUICK).fit(X, y)
    assert model.predict_proba(X).shape == (60, 4)
    np.testing.assert_allclose(model.predict_proba(X).sum(1), 1)
    np.testing.assert_allclose(np.exp(model.predict_log_proba(X)), model.predict_proba(X))
    labels = np.stack([y > 0, y > 1, y > 2], 1).astype(int)
    model.fit(X, labels)
    assert set(np.unique(model.predict(X))) <= {0, 1}
    assert model.predict(X).shape == model.predict_proba(X).shape == (60, 3)
    assert (model.predict(X) == labels).mean() > 0.6
    several = MLPRegressor((5,), **QUICK).fit(*numbers(60, 2))
    assert several.predict(X).shape == (60, 2)
    assert LinearRegression(**QUICK).fit(*numbers(60, 2)).coef_.shape == (2, 4)
    line = LinearRegression(**QUICK).fit(*numbers(60))
    assert line.coef_.shape == (4,)
    assert np.ndim(line.intercept_) == 0
    np.testing.assert_allclose(line.predict(X), X @ line.coef_ + line.intercept_, rtol=1e-6)
    two = LogisticRegression(**QUICK).fit(X, y > 1)
    np.testing.assert_allclose(two.decision_function(X), X @ two.coef_[0] + two.intercept_[0])
    assert ((two.decision_function(X) > 0) == two.predict(X)).all()
    assert LogisticRegression(**QUICK).fit(X, y).decision_function(X).shape == (60, 4)


@pytest.mark.parametrize("kind", [MLPClassifier, LogisticRegression])
def test_sparse_inputs(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    X, y = classes(60)
    X = X * (X > 0)
    dense = kind(**QUICK, early_stopping="evidence").fit(X, y)
    thin = kind(**QUICK, early_stopping="evidence").fit(sparse.csr_array(X), y)
    np.testing.assert_array_equal(dense.predict_proba(X), thin.predict_proba(X))
    np.testing.assert_allclose(thin.predict_proba(sparse.csr_array(X)), thin.predict_proba(X))
    monkeypatch.setattr(data, "DENSE", 0)  # as if it were too large
    large = kind(**QUICK).fit(sparse.csr_matrix(X), y)
    assert large.stopping_rule_ == "evidence"
    assert large.score(sparse.csr_matrix(X), y) > 0.5
    for rule in ("validation", False):
        kind(**QUICK, early_stopping=rule).fit(sparse.csr_matrix(X), y)
    with pytest.raises(ValueError, match=r"early_stopping='folds' needs dense rows"):
        kind(**QUICK, early_stopping="folds").fit(sparse.csr_matrix(X), y)


def test_partial_fit_goes_on() -> None:
    X, y = classes(40, 2)
    options = {**QUICK, "shuffle": False, "batch_size": 10}
    model = MLPClassifier((5,), **options)
    with pytest.raises(ValueError, match="classes must be passed"):
        model.partial_fit(X, y)
    for _ in range(3):
        model.partial_fit(X, y, classes=[0, 1])
    options |= {"activation": "relu"}  # which `partial_fit` takes by itself, for rows without end
    trainer_like = MLPClassifier((5,), **{**options, "max_iter": 3}, early_stopping=False)
    whole = trainer_like.fit(X, y)
    assert model.n_iter_ == whole.n_iter_ == 3
    for mine, theirs in zip(model.coefs_, whole.coefs_, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-12)
    np.testing.assert_allclose(model.loss_curve_, whole.loss_curve_)
    again = pickle.loads(pickle.dumps(model)).partial_fit(X, y)
    model.partial_fit(X, y)
    np.testing.assert_array_equal(again.coefs_[0], model.coefs_[0])
    with pytest.raises(ValueError, match="labels that are not among"):
        model.partial_fit(X, y + 1)
    del options["activation"]
    line = LinearRegression(**options).partial_fit(X, y).partial_fit(X, y)
    assert line.n_iter_ == 2
    assert line.loss_curve_[1] < line.loss_curve_[0]


def test_warm_start_goes_on() -> None:
    X, y = classes()
    for model in (MLPClassifier((5,), **QUICK), LogisticRegression(**QUICK)):
        model.set_params(warm_start=True, early_stopping=False)
        first = model.fit(X, y).loss_
        before = model.predict_proba(X)
        model.set_params(max_iter=1, learning_rate_init=1e-12).fit(X, y)
        np.testing.assert_allclose(model.predict_proba(X), before, atol=1e-8)
        assert model.loss_ == pytest.approx(first, rel=1e-6)
    with pytest.raises(ValueError, match="features"):
        model.fit(X[:, :2], y)
    network = MLPClassifier((5,), warm_start=True, **QUICK).fit(X, y)
    with pytest.raises(ValueError, match="set warm_start=False"):
        network.set_params(hidden_layer_sizes=(6,)).fit(X, y)


def test_tools_of_scikit_learn() -> None:
    X, y = load_iris(return_X_y=True)
    model = make_pipeline(StandardScaler(), MLPClassifier((8,), **QUICK))
    assert cross_val_score(model, X, y, cv=3).mean() > 0.85
    grid = {"mlpclassifier__early_stopping": ["evidence", "validation"]}
    search = GridSearchCV(model, grid, cv=2).fit(X, y)
    assert search.best_score_ > 0.8
    best = search.best_estimator_
    again = pickle.loads(pickle.dumps(best))
    np.testing.assert_array_equal(again.predict_proba(X), best.predict_proba(X))
    assert again[-1].history_ is not None


def test_linear_models_do_not_mind_units() -> None:
    X, y = numbers(60)
    options = {**QUICK, "max_iter": 400, "solver": "sgd", "momentum": 0.0, "tol": 0.0}
    model = LinearRegression(**options, early_stopping=False).fit(X, y)
    exact = np.linalg.lstsq(np.hstack([X, np.ones((60, 1))]), y, rcond=None)[0]
    np.testing.assert_allclose(model.coef_, exact[:4], atol=0.02)
    np.testing.assert_allclose(model.intercept_, exact[4], atol=0.02)
    units = np.array([1e-3, 1.0, 1e4, 10.0])
    for kind, target, factor in ((LinearRegression, y, 1e5), (LogisticRegression, y > 2, 1)):
        model = kind(shuffle=False, **QUICK)  # rows would be sorted by contents, and folds differ
        plain, scaled = clone(model).fit(X, target), model
        scaled.fit(X * units + 100 * units, target * factor)
        assert scaled.best_step_ == plain.best_step_
        # to a share of the targets' spread: Adam makes something of the rounding of zero gradients
        found, expected = scaled.predict(X * units + 100 * units), plain.predict(X) * factor
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-3 * np.std(expected))
    bare = LinearRegression(fit_intercept=False, **QUICK).fit(X, y)
    assert bare.intercept_ == 0
    np.testing.assert_allclose(bare.predict(X), X @ bare.coef_)


def test_rows_that_are_all_equal() -> None:
    for kind in (MLPRegressor, LinearRegression):
        model = kind(**{**QUICK, "max_iter": 300}).fit(np.ones((6, 2)), np.full(6, 3.0))
        np.testing.assert_allclose(model.predict(np.ones((2, 2))), 3.0, atol=0.1)


def test_single_precision_stays() -> None:
    X, y = classes()
    model = MLPClassifier((5,), **QUICK).fit(X.astype(np.float32), y)
    assert model.coefs_[0].dtype == np.float32
    assert model.predict_proba(X.astype(np.float32)).dtype == np.float32


@pytest.mark.filterwarnings("ignore::heldin.HeldinWarning")  # two epochs are not enough
def test_the_global_random_stream_is_left_alone() -> None:
    before = torch.random.get_rng_state()
    for rule in RULES:
        MLPClassifier((5,), **{**QUICK, "max_iter": 2}, early_stopping=rule).fit(*classes())
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"solver": "lbfgs"}, "lbfgs has no steps to stop at"),
        ({"early_stopping": "always"}, "early_stopping must be one of 'auto', 'folds'"),
        ({"hidden_layer_sizes": (5, 0)}, "hidden_layer_sizes must be whole numbers above 0"),
        ({"activation": "gelu"}, "activation must be one of"),
        ({"alpha": -1}, "alpha must be a number >= 0"),
        ({"batch_size": 0}, "batch_size must be 'auto' or"),
        ({"max_iter": 1.5}, "max_iter must be a whole number"),
        ({"shuffle": 1}, "shuffle must be True or False"),
        ({"momentum": True}, "momentum must be a number"),
        ({"solver": "sgd", "learning_rate": "adaptive"}, "use early_stopping=False"),
        ({"validation_fraction": 0.0}, "between 0 and 1"),
    ],
)
def test_bad_parameters_are_named(parameters: dict[str, Any], message: str) -> None:
    model = MLPClassifier(**parameters)
    with pytest.raises(heldin.HeldinError, match=message) as caught:
        model.fit(*classes())
    assert isinstance(caught.value, ValueError)


def test_bad_data_is_named() -> None:
    X, y = classes(12)
    model = MLPClassifier((5,), **QUICK)
    with pytest.raises(ValueError, match="only one class"):
        model.fit(X, np.zeros(12))
    with pytest.raises(ValueError, match=r"(?i)sample weights"):
        model.fit(X, y, sample_weight=np.zeros(12))
    with pytest.raises(ValueError, match="n_samples=1"):
        MLPRegressor().fit(X[:1], y[:1])
    with pytest.raises(ValueError, match="is not two"):
        MLPClassifier(early_stopping="validation").fit(X, y)
    with pytest.raises(ValueError, match="class_weight is for one class per row"):
        MLPClassifier(class_weight="balanced").fit(X, np.stack([y > 0, y > 1], 1).astype(int))
    rough = {"early_stopping": False, "standardize": False}
    with pytest.raises(ValueError, match="not finite"):
        MLPRegressor((5,), solver="sgd", **rough, **QUICK).fit(X * 1e150, y)


def test_an_end_without_a_stop_is_said() -> None:
    with pytest.warns(ConvergenceWarning, match="max_iter=2 epochs were over"):
        MLPClassifier((5,), max_iter=2).fit(*classes())


def test_verbose_prints(capsys: pytest.CaptureFixture[str]) -> None:
    MLPClassifier((5,), **{**QUICK, "max_iter": 2}, verbose=True).fit(*classes())
    out = capsys.readouterr().out
    assert out.startswith("Iteration 1, loss = ")
    assert "estimated loss" in out


def test_verbose_may_be_a_function() -> None:
    told: list[tuple[int, float, str]] = []
    options = {**QUICK, "max_iter": 2, "early_stopping": False}
    model = MLPClassifier((5,), **options, verbose=lambda *news: told.append(news)).fit(*classes())
    assert [epoch for epoch, _, _ in told] == [1, 2]
    assert [loss for _, loss, _ in told] == model.loss_curve_


def test_missing_scikit_learn_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("heldin.sklearn")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ImportError, match=r"pip install 'heldin\[sklearn\]'"):
        importlib.import_module("heldin.sklearn")
