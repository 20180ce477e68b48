"""The scikit-learn estimators against plain loops, and with scikit-learn's own tools."""

from __future__ import annotations

import importlib
import pickle
import sys
from typing import Any

import pytest
import torch
from torch import nn

import heldin

pytest.importorskip("sklearn")

import numpy as np
from scipy import sparse
from sklearn.datasets import load_iris
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import heldin.sklearn.base as base
from heldin.sklearn import MLPClassifier, MLPRegressor
from heldin.sklearn.base import WHOLE_EPOCHS
from heldin.sklearn.training import Trainer, build_network
from tests.support import runs

pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")

RULES = ["auto", "folds", "evidence", "validation", False]
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


# -- the trainer against plain loops


def twins(
    rows: int, solver: str = "sgd", **options: Any
) -> tuple[Trainer, nn.Sequential, Any, Any]:
    """A trainer, and a model in the same state for a plain loop."""
    options = {"weight_decay": 0.0, "learning_rate_init": 1e-3, **options}
    estimator = MLPClassifier(solver=solver, **options)
    X, y = classes(rows, 2)
    x, t = torch.from_numpy(X), torch.from_numpy(y)[:, None].double()
    generator = torch.Generator().manual_seed(1)
    model = build_network([4, 6, 1], "tanh", generator=generator)
    twin = build_network([4, 6, 1], "tanh")
    twin.load_state_dict(model.state_dict())
    return Trainer(model, nn.BCEWithLogitsLoss(), x, t, None, estimator, 0), twin, x, t


@pytest.mark.parametrize("solver", ["adam", "sgd"])
def test_evidence_is_that_of_a_plain_loop(solver: str) -> None:
    options = {"alpha": 0.3, "batch_size": 16, "learning_rate_init": 0.02, "max_iter": 200}
    trainer, twin, x, t = twins(50, solver, **options)
    trainer.run(WHOLE_EPOCHS)
    groups: list[dict[str, Any]] = [
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
    with runs.EvidenceStopping(twin, window=4, estimator="exact") as stopping:
        while not stopping.should_stop:
            for index in torch.randperm(50, generator=order).split(16):
                optimizer.zero_grad()
                nn.functional.binary_cross_entropy_with_logits(twin(x[index]), t[index]).backward()
                stopping.step()
                optimizer.step()
            criteria.append(stopping.criterion)
    assert trainer.stopped
    assert trainer.rule == "evidence"
    assert trainer.evidence is not None
    assert trainer.evidence == pytest.approx(criteria, rel=1e-9, abs=1e-9)
    assert trainer.epochs == len(criteria) == len(trainer.losses)
    assert trainer.steps == 4 * len(criteria)
    for p, q in zip(trainer.model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(p, q, atol=1e-9)


def test_auto_falls_back_to_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "MEMORY", 1000)
    model = MLPClassifier((5,), **QUICK).fit(*classes())
    assert model.stopping_rule_ == "evidence"
    assert "more than 1,000" in model.stopping_choice_
    with pytest.raises(heldin.HeldinError, match="use early_stopping='evidence'"):
        model.set_params(early_stopping="folds").fit(*classes())


def test_rates_follow_their_schedules() -> None:
    trainer, *_ = twins(20, learning_rate="invscaling", power_t=0.5, max_iter=3)
    trainer.run("none")
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(1e-3 / 61**0.5)
    options: dict[str, Any] = {"tol": 1e9, "n_iter_no_change": 1, "max_iter": 1000}
    trainer, *_ = twins(20, learning_rate="adaptive", **options)
    trainer.run("none")
    assert trainer.stopped
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
    estimates = expected == "folds"
    assert (model.estimate_curve_ is not None) == estimates
    if estimates:
        lowest = min(model.estimate_curve_)
        assert model.estimate_ == pytest.approx(lowest, rel=0.1)
        assert model.estimate_error_ > 0
        assert model.best_step_ < model.n_steps_


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", [MLPClassifier, MLPRegressor])
def test_a_weight_is_a_number_of_copies(kind: Any, rule: Any) -> None:
    X, y = classes(30)
    times = np.random.default_rng(0).integers(0, 4, len(X))
    model = kind(early_stopping=rule, **{**QUICK, "max_iter": 12}, batch_size=10)
    by_copies = model.fit(X.repeat(times, 0), y.repeat(times)).predict(X)
    order = np.random.default_rng(1).permutation(len(X))
    by_weight = model.fit(X[order], y[order], sample_weight=times[order]).predict(X)
    np.testing.assert_array_equal(by_copies, by_weight)


def test_a_table_with_few_distinct_rows_is_learnt() -> None:
    """Four cells, 300 rows: a fold must not take every copy of a cell away."""
    rng = np.random.default_rng(0)
    X = rng.integers(0, 2, (300, 2)).astype(float)
    y = (rng.random(300) < 0.1 + 0.8 * (X[:, 0] != X[:, 1])).astype(int)
    model = MLPClassifier((8,), learning_rate_init=0.02, random_state=0)
    model.fit(X, y)
    assert model.best_step_ > 50
    likely = model.predict_proba(X)[np.arange(300), y]
    assert -np.log(likely).mean() < 0.4  # 0.33 is the noise, 0.69 knows nothing


def test_order_is_kept_without_shuffling() -> None:
    X, y = numbers(30)
    X[7], y[7] = X[3], y[3]
    options: dict[str, Any] = {**QUICK, "max_iter": 1, "shuffle": False, "batch_size": 5}
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
        last = twin.get_submodule("2")
        last.get_parameter("weight").zero_()
        last.get_parameter("bias").fill_(y.mean())
    for start in range(0, 30, 5):
        twin.zero_grad()
        loss = nn.functional.mse_loss(twin(x[start : start + 5]), t[start : start + 5])
        penalty = sum(w.square().sum() for w in weights) * (0.0001 / 5 / 2)
        (loss + penalty).backward()
        with torch.no_grad():
            for p in twin.parameters():
                assert p.grad is not None
                p.sub_(p.grad, alpha=0.03)
    for mine, theirs in zip(found, weights, strict=True):
        np.testing.assert_allclose(mine, theirs.detach().T.numpy(), rtol=1e-10)


def test_class_weights_are_sample_weights() -> None:
    X, y = classes(60, 3)
    y = np.array(["a", "b", "c"])[y]
    by_hand = np.select([y == "a", y == "b"], [3.0, 0.5], 1.0)
    model = MLPClassifier((), **QUICK)
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
    line = MLPRegressor((), standardize=False, **QUICK).fit(*numbers(60))
    assert [part.shape for part in (*line.coefs_, *line.intercepts_)] == [(4, 1), (1,)]
    np.testing.assert_allclose(line.predict(X), (X @ line.coefs_[0] + line.intercepts_[0])[:, 0])


def test_sparse_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = MLPClassifier
    X, y = classes(60)
    X = X * (X > 0)
    dense = kind(**QUICK, early_stopping="evidence").fit(X, y)
    thin = kind(**QUICK, early_stopping="evidence").fit(sparse.csr_array(X), y)
    np.testing.assert_array_equal(dense.predict_proba(X), thin.predict_proba(X))
    np.testing.assert_allclose(thin.predict_proba(sparse.csr_array(X)), thin.predict_proba(X))
    monkeypatch.setattr(base, "DENSE", 0)  # as if it were too large
    large = kind(**QUICK).fit(sparse.csr_matrix(X), y)
    assert large.stopping_rule_ == "evidence"
    assert large.score(sparse.csr_matrix(X), y) > 0.5
    for rule in ("validation", False):
        kind(**QUICK, early_stopping=rule).fit(sparse.csr_matrix(X), y)
    with pytest.raises(ValueError, match=r"early_stopping='folds' needs dense rows"):
        kind(**QUICK, early_stopping="folds").fit(sparse.csr_matrix(X), y)


def test_partial_fit_goes_on() -> None:
    X, y = classes(40, 2)
    options: dict[str, Any] = {**QUICK, "shuffle": False, "batch_size": 10}
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
    line = MLPRegressor((), **options).partial_fit(X, y).partial_fit(X, y)
    assert line.n_iter_ == 2
    assert line.loss_curve_[1] < line.loss_curve_[0]


def test_warm_start_goes_on() -> None:
    X, y = classes()
    for model in (MLPClassifier((5,), **QUICK), MLPClassifier((), **QUICK)):
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


def test_rows_that_are_all_equal() -> None:
    for hidden in ((100,), ()):
        model = MLPRegressor(hidden, **{**QUICK, "max_iter": 300}).fit(
            np.ones((6, 2)), np.full(6, 3.0)
        )
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
        ({"solver": "lbfgs"}, "solver='lbfgs' has no steps to stop at"),
        ({"early_stopping": "always"}, "'early_stopping' parameter of MLPClassifier must be"),
        ({"hidden_layer_sizes": (5, 0)}, "hidden_layer_sizes must be whole numbers above 0"),
        ({"activation": "gelu"}, "'activation' parameter of MLPClassifier must be a str among"),
        ({"alpha": -1}, r"must be a float in the range \[0.0, inf\). Got -1 instead"),
        ({"batch_size": 0}, "'batch_size' parameter of MLPClassifier must be"),
        ({"max_iter": 1.5}, "must be an int in the range"),
        ({"shuffle": 1}, "must be an instance of 'bool'"),
        ({"solver": "sgd", "learning_rate": "adaptive"}, "use early_stopping=False"),
        ({"validation_fraction": 1.0}, r"in the range \[0.0, 1.0\)"),
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
    rough: dict[str, Any] = {"early_stopping": False, "standardize": False}
    with pytest.raises(ValueError, match="not finite"):
        MLPRegressor((5,), solver="sgd", **rough, **QUICK).fit(X * 1e150, y)


def test_an_end_without_a_stop_is_said() -> None:
    with pytest.warns(ConvergenceWarning, match="max_iter=2 epochs were over") as caught:
        MLPClassifier((5,), max_iter=2, random_state=0).fit(*classes())
    assert caught[0].filename == __file__  # it points to the call of fit


def test_verbose_prints(capsys: pytest.CaptureFixture[str]) -> None:
    MLPClassifier((5,), **{**QUICK, "max_iter": 2}, verbose=True).fit(*classes())
    out = capsys.readouterr().out
    assert out.startswith("Iteration 1, loss = ")
    assert "estimated loss" in out


def test_verbose_may_be_a_function() -> None:
    told: list[tuple[int, float, str]] = []
    options: dict[str, Any] = {**QUICK, "max_iter": 2, "early_stopping": False}
    model = MLPClassifier((5,), **options, verbose=lambda *news: told.append(news)).fit(*classes())
    assert [epoch for epoch, _, _ in told] == [1, 2]
    assert [loss for _, loss, _ in told] == model.loss_curve_


def test_missing_scikit_learn_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("heldin.sklearn")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ImportError, match=r"pip install 'heldin\[sklearn\]'"):
        importlib.import_module("heldin.sklearn")


def test_an_accuracy_of_one_has_an_interval() -> None:
    """Three rows more may be wrong with none of them in the sample."""
    x = np.repeat([[-5.0], [5.0]], 30, axis=0) + np.linspace(0, 1, 60)[:, None]
    model = MLPClassifier(random_state=0, max_iter=400).fit(x, np.repeat([0, 1], 30))
    interval = model.estimates_["accuracy"]
    assert interval.value == interval.high == 1
    assert 0.85 < interval.low < 1
