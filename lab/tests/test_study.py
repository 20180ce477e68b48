"""The study: rivals on cases worked by hand, replay against the live rules, tables, the command."""

from __future__ import annotations

import csv
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import heldin
from heldin_lab.cli import main as _cli

np = pytest.importorskip("numpy")
pytest.importorskip("sklearn")
pytest.importorskip("joblib")

from heldin_lab.study import data as _data
from heldin_lab.study import quality as _quality
from heldin_lab.study import report as _report
from heldin_lab.study import rivals as _rivals
from heldin_lab.study import rules as _rules
from heldin_lab.study import run as _run
from heldin_lab.study import spec as _spec
from heldin_lab.study import tables as _tables
from heldin_lab.study import witnesses as _witnesses
from heldin_lab.study.logged import LoggedRun
from heldin_lab.study.rivals import Stop
from tests.support import inside, runs

# -- rivals, by hand


def test_patience_keeps_the_minimum_before_it_gave_up() -> None:
    assert _rivals.patience([5, 4, 3, 4, 5, 1], checks=2) == Stop(2, 4)
    assert _rivals.patience([5, 4, 3, 4, 2, 3], checks=2) is None
    assert _rivals.patience([1, 1, 1], checks=2) == Stop(0, 2)  # a tie is no improvement


def test_generalisation_loss() -> None:
    # GL: 0, 0, 4, 6 %
    assert _rivals.generalisation_loss([2.0, 1.0, 1.04, 1.06], alpha=5) == Stop(1, 3)
    assert _rivals.generalisation_loss([2.0, 1.0, 1.04, 1.06], alpha=7) is None
    # only the minimum so far counts
    assert _rivals.generalisation_loss([1.0, 1.06, 0.5], alpha=5) == Stop(0, 1)


def test_progress_quotient() -> None:
    # strips of 2: P = 1000 (1.5 / (2 * 0.5) - 1) = 500, then 1000 (0.9 / (2 * 0.4) - 1) = 125;
    # GL there: 0, then 100 (0.7 / 0.5 - 1) = 40; quotients 0 and 0.32
    losses, training = [1.0, 0.5, 0.6, 0.7], [1.0, 0.5, 0.5, 0.4]
    assert _rivals.progress_quotient(losses, training, alpha=0.31, strip=2) == Stop(1, 3)
    assert _rivals.progress_quotient(losses, training, alpha=0.33, strip=2) is None
    # no progress at all: any rise stops, no rise does not
    assert _rivals.progress_quotient([1.0, 1.1], [0.5, 0.5], alpha=9, strip=2) == Stop(0, 1)
    assert _rivals.progress_quotient([1.0, 1.0], [0.5, 0.5], alpha=9, strip=2) is None


def test_gradient_disparity() -> None:
    # distances of (0, 0), (3, 4), (6, 8): 5, 10, 5
    value = _rivals.disparity(torch.tensor([[0.0, 0.0], [3.0, 4.0], [6.0, 8.0]]))
    assert math.isclose(value, 20 / 3, rel_tol=1e-6)
    rising = [1.0, 2.0, 3.0, 2.0, 2.5, 2.6, 2.7]
    assert _rivals.disparity_total(rising, rises=3) == Stop(4, 4)
    assert _rivals.disparity_consecutive(rising, rises=3) == Stop(6, 6)
    assert _rivals.disparity_consecutive(rising, rises=4) is None


def test_pooled_evidence() -> None:
    # contributions (1, 0), (3, 2): g = (2, 1), S = (2, 2): 2 * 5 / 4
    total, squares = torch.tensor([4.0, 2.0]), torch.tensor([10.0, 4.0])
    assert _rivals.pooled_evidence(total, squares, 2) == 2.5
    assert _rivals.pooled_evidence(torch.ones(1) * 2, torch.ones(1) * 2, 2) == math.inf


def test_label_wave() -> None:
    changes = [8.0, 4.0, 6.0, 2.0, 3.0, 7.0, 9.0]
    # moving averages of 2: 8, 6, 5, 4, 2.5, 5, 8
    assert _rivals.label_wave(changes, window=2, epochs=2) == Stop(4, 6)
    assert _rivals.label_wave(changes, window=2, epochs=3) is None


def test_alignment() -> None:
    # W = (1, 0): cosines of -slope * feature with it, worked out below
    slopes = torch.tensor([[-1.0], [-1.0], [2.0], [-3.0]])
    features = torch.tensor([[1.0, 0.0], [3.0, 4.0], [1.0, 0.0], [0.0, 2.0]])
    a = np.array([1.0, 0.6, -1.0, 0.0])
    centred = a - a.mean()
    kurtosis = (centred**4).mean() / (centred**2).mean() ** 2 - 3
    expected = a.mean() / (kurtosis + 1.2) if kurtosis > -1.2 else math.nan
    found = _rivals.alignment(slopes, features, torch.tensor([[1.0, 0.0]]))
    assert math.isclose(found, expected, rel_tol=1e-6) or (math.isnan(found) and kurtosis <= -1.2)
    same = torch.ones(3, 1)
    assert math.isnan(_rivals.alignment(same, same, same[:1]))
    assert _rivals.best_alignment([math.nan, 0.2, 0.5, 0.1]) == Stop(2, 3)


# -- a log, and the rules live on the same run


def table() -> _data.Table:
    return next(t for t in _data.tables(None) if t.name == "sk_wdbc")


@pytest.fixture(scope="module", params=["sgd", "gd"])
def logged(request: Any) -> LoggedRun:
    spec = _spec.Spec("sk_wdbc", 80, 0.4, "hidden1", request.param, seed=3, steps=450)
    return LoggedRun(spec, table(), _run.log(spec, table()))


def live(run: LoggedRun, make: Any, after: bool) -> tuple[Any, nn.Module, _data.Problem, int]:
    """The same run with one rule attached, stopped by it."""
    spec = run.spec
    problem = _data.Problem.cut(run.task, spec.n, spec.noise, 1, spec.seed)
    model = _spec.network(spec, problem.x.shape[1], problem.outputs)
    optimizer = _spec.optimizer_of(spec, model, float(run["rate"]))
    stopping = make(model, optimizer, problem)
    stream = _spec.minibatches(
        torch.arange(spec.n), spec.batch, torch.Generator().manual_seed(1000 * spec.seed)
    )
    taken = 0
    for _ in range(spec.steps):
        index = next(stream)
        problem.loss_fn(model(problem.x[index]), problem.y[index]).backward()
        if not after and stopping.step():
            break
        optimizer.step()
        optimizer.zero_grad()
        taken += 1
        if after and stopping.step():
            break
    return stopping, model, problem, taken


def loss_of(model: nn.Module, problem: _data.Problem) -> float:
    with torch.no_grad():
        return float(problem.loss_fn(model(problem.x_test), problem.y_test))


def hidden_fold(run: LoggedRun) -> Tensor:
    return torch.tensor(run["fold_label"] == 0)


def shadow_at_logged_checks(run: LoggedRun) -> Any:
    """Make the live rule of one shadow; the log has the checks of five folds, which are fewer."""

    def make(m: nn.Module, o: torch.optim.Optimizer, p: _data.Problem) -> runs.FoldFollower:
        stopping = runs.ShadowStopping(
            m, o, p.loss_fn, (p.x, p.y), hidden_fold(run), average="best", patience=STUDIED
        )
        checks = {int(step) for step in run["fold_steps"]}
        inside.check_at(stopping, checks)
        return stopping

    return make


STUDIED = heldin.Patience(2.0, 200, 3)  # of the stored studies
LIVE: dict[str, Any] = {
    "folds patience": lambda run: (
        lambda m, o, p: runs.FoldStopping(
            m, o, p.loss_fn, (p.x, p.y), average="best", patience=STUDIED, seed=run.spec.seed
        )
    ),
    "folds bagged patience": lambda run: (
        lambda m, o, p: runs.FoldStopping(
            m, o, p.loss_fn, (p.x, p.y), patience=STUDIED, seed=run.spec.seed
        )
    ),
    "shadow patience": shadow_at_logged_checks,
    "auto": lambda run: (
        lambda m, o, p: runs.stopping(
            "auto", m, o, p.loss_fn, (p.x, p.y), patience=STUDIED, seed=run.spec.seed
        )
    ),
    "64 probes": lambda run: (
        lambda m, o, p: runs.LeaveOneOutStopping(
            m, o, p.loss_fn, (p.x, p.y), 64, average="best", patience=None, seed=run.spec.seed
        )
    ),
    "leave-one-out patience": lambda run: (
        lambda m, o, p: runs.LeaveOneOutStopping(
            m,
            o,
            p.loss_fn,
            (p.x, p.y),
            average="best",
            patience=heldin.Patience(2.0, 200, 5),
            seed=run.spec.seed,
        )
    ),
}


@pytest.mark.parametrize("name", LIVE)
def test_a_replayed_rule_ends_where_the_live_one_does(logged: LoggedRun, name: str) -> None:
    stopping, model, problem, taken = live(logged, LIVE[name](logged), after=True)
    stopping.restore()
    outcome = _rules.replay(logged, name)
    assert outcome is not None
    models = {"folds": 6, "auto": 6, "shadow": 2}.get(name.split()[0], 1)
    assert outcome.steps_spent == models * taken
    if "bagged" not in name and name != "auto":
        assert outcome.stop_step == stopping.best_step
        assert math.isclose(outcome.estimate, stopping.estimate, rel_tol=1e-5)
        error = stopping.history[stopping.best_number].standard_error
        # the live rule looks at other training rows than the five folds that were logged
        assert math.isclose(outcome.standard_error, error, rel_tol=1e-2)
        assert math.isclose(outcome.test_loss, loss_of(model, problem), rel_tol=1e-5)
    else:  # the object draws by its own seed
        assert math.isclose(outcome.test_loss, loss_of(model, problem), rel_tol=0.05)


EVIDENCE: dict[str, Any] = {
    "evidence (paper)": lambda run: lambda m, o, p: runs.EvidenceStopping.paper(m),
    "evidence": lambda run: (
        lambda m, o, p: runs.EvidenceStopping(m, across="mean", estimator="exact")
    ),
    "evidence, median": lambda run: lambda m, o, p: runs.EvidenceStopping(m, estimator="exact"),
    "evidence, epochs": lambda run: (
        lambda m, o, p: runs.EvidenceStopping(
            m, window=int(run["window"]), smoothing=0.8, across="mean", estimator="exact"
        )
    ),
    "evidence, epochs, median": lambda run: (
        lambda m, o, p: runs.EvidenceStopping(m, window=int(run["window"]), estimator="exact")
    ),
}


@pytest.mark.parametrize("name", EVIDENCE)
def test_replayed_evidence_stops_where_the_live_rule_does(logged: LoggedRun, name: str) -> None:
    stopping, _, _, taken = live(logged, EVIDENCE[name](logged), after=False)
    outcome = _rules.replay(logged, name)
    assert outcome is not None
    assert outcome.fired == stopping.should_stop
    assert outcome.stop_step == taken
    stopping.close()


def test_the_log_is_what_separate_computation_gives(logged: LoggedRun) -> None:
    """Splits, disparity, alignment and pooled evidence at their first values, from scratch."""
    spec = logged.spec
    problem = _data.Problem.cut(logged.task, spec.n, spec.noise, 1, spec.seed)
    model = _spec.network(spec, problem.x.shape[1], problem.outputs)
    params = list(model.parameters())

    def gradient(index: Tensor, scale: Any = 1.0) -> Tensor:
        losses = F.binary_cross_entropy_with_logits(
            model(problem.x[index]), problem.y[index], reduction="none"
        )
        spread = losses.detach().std() if scale == "std" else 1.0
        grads = torch.autograd.grad((losses / spread).mean(), params)
        return torch.cat([g.flatten() for g in grads])

    size = min(32, spec.n // 5)
    order = torch.randperm(spec.n, generator=torch.Generator().manual_seed(7 * spec.seed + 3))
    batches = order[: 5 * size].view(5, size)
    pairs = torch.stack([gradient(b, "std") for b in batches])
    assert math.isclose(logged["epoch_values"][0, 0], _rivals.disparity(pairs), rel_tol=1e-4)

    stream = _spec.minibatches(
        torch.arange(spec.n), spec.batch, torch.Generator().manual_seed(1000 * spec.seed)
    )
    each = torch.stack([gradient(i[None]) for i in next(stream)])
    g = each.mean(0)
    expected = float(spec.batch * g.square().sum() / each.var(0).sum())
    assert math.isclose(logged["pooled"][0], expected, rel_tol=1e-4)

    last = model[-1]
    assert isinstance(last, nn.Linear)
    cosines = []
    for i in range(spec.n):
        (by_weight,) = torch.autograd.grad(
            F.binary_cross_entropy_with_logits(model(problem.x[[i]]), problem.y[[i]]), last.weight
        )
        weight = last.weight.detach().flatten()
        cosines.append(float(F.cosine_similarity(-by_weight.flatten(), weight, 0)))
    a = np.array(cosines) - np.mean(cosines)
    excess = float((a**4).mean() / (a**2).mean() ** 2 - 3)
    value = np.mean(cosines) / (excess + 1.2) if excess > -1.2 else math.nan
    assert np.isclose(logged["epoch_values"][0, 2], value, rtol=1e-4, equal_nan=True)


def test_splits_are_separate_models(logged: LoggedRun) -> None:
    spec = logged.spec
    problem = _data.Problem.cut(logged.task, spec.n, spec.noise, 1, spec.seed)
    for number, share in enumerate(_witnesses.SPLITS):
        model = _spec.network(spec, problem.x.shape[1], problem.outputs)
        optimizer = _spec.optimizer_of(spec, model, float(logged["rate"]))
        generator = torch.Generator().manual_seed(1000 * spec.seed + number + 1)
        order = torch.randperm(spec.n, generator=generator)
        count = round(share * spec.n)
        held, kept = order[:count], order[count:]
        size = len(kept) if spec.optimizer == "gd" else spec.batch
        stream = _spec.minibatches(kept, size, generator)
        epoch = int(logged["window"])
        for _ in range(3 * epoch):
            index = next(stream)
            optimizer.zero_grad()
            problem.loss_fn(model(problem.x[index]), problem.y[index]).backward()
            optimizer.step()
        with torch.no_grad():
            valid = float(problem.loss_fn(model(problem.x[held]), problem.y[held]))
            train = float(problem.loss_fn(model(problem.x[kept]), problem.y[kept]))
        assert math.isclose(logged["split_values"][3, 0, number], valid, rel_tol=1e-4)
        assert math.isclose(logged["split_values"][3, 2, number], train, rel_tol=1e-4)


def test_every_rule_gives_an_outcome_that_holds_together(logged: LoggedRun) -> None:
    outcomes = {name: _rules.replay(logged, name) for name in _rules.RULES}
    oracle = outcomes["oracle"]
    assert oracle is not None
    assert oracle.regret == 1.0
    for name, outcome in outcomes.items():
        assert outcome is not None, name
        assert outcome.test_loss > 0
        assert 0 <= outcome.test_accuracy <= 1
        assert outcome.seconds >= 0
        assert 0 <= outcome.stop_step <= logged.spec.steps
        same_path = not name.startswith(("split", "Prechelt")) or "refit" in name
        if same_path and "bagged" not in name and "committee" not in name:
            assert outcome.regret >= 1.0
    last = outcomes["last iterate"]
    assert last is not None
    assert last.stop_step == logged.spec.steps
    refit, plain = outcomes["split 20 % refit"], outcomes["split 20 %"]
    assert refit is not None
    assert plain is not None
    assert refit.stop_step == plain.stop_step
    assert refit.steps_spent == plain.steps_spent + plain.stop_step


def test_rules_for_classes_pass_over_numbers() -> None:
    spec = _spec.Spec("sk_diabetes", 50, 0.0, "linear", "adam", seed=1, steps=40)
    source = next(t for t in _data.tables(None) if t.name == "sk_diabetes")
    run = LoggedRun(spec, source, _run.log(spec, source))
    assert _rules.replay(run, "label wave") is None
    assert _rules.replay(run, "gradient-weight alignment") is None
    assert _rules.replay(run, "gradient disparity t1") is not None


# -- problems


def test_problems_are_cut_as_promised() -> None:
    source = table()
    one = _data.Problem.cut(source, 60, 0.2, 1, seed=4)
    again = _data.Problem.cut(source, 60, 0.2, 1, seed=4)
    other = _data.Problem.cut(source, 60, 0.2, 1, seed=5)
    assert torch.equal(one.x, again.x)
    assert torch.equal(one.y_test, again.y_test)
    assert not torch.equal(one.x, other.x)
    assert len(one.x) == 60
    assert len(one.x_test) == 509
    assert float(one.x.mean(0).abs().max()) < 0.05
    assert float(one.x_test.abs().max()) <= _data.CLIP
    flipped = float((one.y_test != one.y_clean).float().mean())
    assert 0.13 < flipped < 0.27
    wide = _data.Problem.cut(source, 60, 0.0, 2, seed=4)
    assert wide.x.shape[1] == 30 + 465
    digits = next(t for t in _data.tables(None) if t.name == "sk_digits")
    many = _data.Problem.cut(digits, 60, 0.4, 2, seed=4)
    assert many.x.shape[1] == 64 + _data.MOST_PRODUCTS
    assert many.outputs == 10
    assert many.y.dtype == torch.long
    assert bool((many.y_test[many.y_test != many.y_clean] < 10).all())


def test_roles_and_plans_are_fixed() -> None:
    roles = {t.name: _data.role(t.name) for t in _data.tables(None)}
    assert roles == {
        "sk_wine": "confirmation",
        "sk_digits": "development",
        "sk_iris": "development",
        "sk_wdbc": "confirmation",
        "sk_diabetes": "development",
    }
    specs = _quality.plan(_data.tables(None), [50, 200], 20, seed=1)
    assert specs == _quality.plan(_data.tables(None), [50, 200], 20, seed=1)
    assert len({spec.key for spec in specs}) == 20
    assert {spec.n for spec in specs} == {50, 200}
    small = {"sk_wine", "sk_iris"}
    assert not [spec for spec in specs if spec.n == 200 and spec.dataset in small]
    counts = [sum(s.dataset == name for s in specs if s.n == 50) for name in roles]
    assert max(counts) - min(counts) <= 1
    with pytest.raises(heldin.HeldinError, match="no dataset has 5000 training rows"):
        _quality.plan(_data.tables(None), [5000], 20, seed=1)


def test_bad_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(heldin.HeldinError, match=r"no \.npz file"):
        _data.tables(tmp_path)
    np.savez(tmp_path / "a.npz", X=np.ones((3, 2)), y=np.ones(3))
    with pytest.raises(heldin.HeldinError, match=r"a\.npz lacks task"):
        _data.tables(tmp_path)


# -- tables


def rows_of(regrets: dict[str, list[float]]) -> list[dict[str, Any]]:
    rows = []
    for rule, values in regrets.items():
        for i, regret in enumerate(values):
            rows.append(
                {
                    "dataset": f"d{i // 2}",
                    "n": 50,
                    "noise": 0.0,
                    "model": "linear",
                    "optimizer": "gd",
                    "seed": i,
                    "rule": rule,
                    "regret": regret,
                    "fired": i != 0,
                    "steps_spent": 10 * i,
                    "cost": 0.5 * i,
                    "stop_step": 9 if rule == "oracle" else 10 * i + 4,
                    "test_accuracy": 0.5,
                    "test_loss": 1.0,
                    "estimate": 1.0 + 0.14 * i if rule == "folds" else math.nan,
                    "standard_error": 0.08,
                    "test_error": 0.06,
                }
            )
    return rows


def test_summaries_are_the_statistics_they_name() -> None:
    rows = rows_of({"split 20 %": [1.2, 1.0, 1.5, 2.0], "folds": [1.0, 1.0, 2.0, 1.0]})
    base, folds = _tables.summarise(rows, resamples=200)
    assert math.isclose(folds["gm"], 2 ** (1 / 4))
    assert math.isclose(base["gm"], 3.6 ** (1 / 4))
    assert folds["median"] == 1.0
    assert folds["p90"] == 2.0
    assert base["median"] == 1.2
    assert base["p90"] == 2.0
    assert folds["worst"] == 2.0
    assert folds["win_rate"] == (1 + 0.5 + 0 + 1) / 4
    assert folds["never_fired"] == 0.25
    assert folds["datasets"] == 2
    assert folds["cost"] == 0.75
    # the datasets have mean log regrets 0 and log(2) / 2: draws lie between
    assert folds["gm_low"] == 1.0
    assert math.isclose(folds["gm_high"], math.sqrt(2))
    wide = rows_of({"split 20 %": [1 + 0.01 * i for i in range(21)]})
    (line,) = _tables.summarise(wide, resamples=5)
    assert math.isclose(line["median"], 1.10)
    assert math.isclose(line["p90"], 1.18)
    diverged = rows_of({"split 20 %": [1.0, 1.0], "folds": [math.nan, 1.0]})
    assert _tables.summarise(diverged, resamples=5)[1]["worst"] == 1000.0
    late = rows_of({"split 20 %": [1.0] * 3, "oracle": [1.0] * 3})  # stops at 4, 14, 24; best at 9
    assert [line["stop_ratio"] for line in _tables.summarise(late, resamples=5)] == [1.5, 1.0]
    assert math.isnan(folds["stop_ratio"])
    # estimates off by 0, 1.4, 2.8 and 4.2 standard errors
    assert (folds["within_1"], folds["within_2"], folds["within_3"]) == (0.25, 0.5, 0.75)
    assert math.isclose(folds["log_bias"], (math.log(1.14) + math.log(1.28)) / 2)
    assert math.isnan(base["within_1"])
    alone = rows_of({"split 20 %": [1.2, 1.0], "folds": [1.0, 2.0]})  # one dataset: runs are drawn
    assert _tables.summarise(alone, resamples=200)[1]["gm_high"] == 2.0


def test_the_critical_difference_is_that_of_the_textbook() -> None:
    # Demsar (2006), section 3.2.4: four classifiers on 14 datasets, mean ranks, CD 1.25 at 0.05
    ranks = np.tile([3.143, 2.0, 2.893, 1.964], (14, 1))
    means, p, distance = _report.critical_difference(ranks)
    assert np.allclose(means, [3.143, 2.0, 2.893, 1.964])
    assert math.isclose(distance, 1.25, abs_tol=0.005)
    assert 0.02 < p < 0.03  # chi-squared 9.28 with 3 degrees of freedom


def test_tables_survive_the_disk(tmp_path: Path) -> None:
    rows = rows_of({"folds": [1.25, 2.0]})
    columns = ("dataset", "n", "rule", "regret", "fired")
    _tables.write(tmp_path / "t.csv", rows, columns)
    assert _tables.read(tmp_path / "t.csv") == [{k: row[k] for k in columns} for row in rows]


# -- the command


def folder_of_tables(path: Path) -> Path:
    generator = np.random.default_rng(0)
    for name in ("one", "two", "three"):
        x = generator.standard_normal((160, 4))
        y = (x[:, 0] + generator.standard_normal(160) > 0).astype(int)
        np.savez(path / f"{name}.npz", X=x, y=y, task=np.array("clf"))
    return path


def test_the_command_writes_all_it_promises_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rich")
    data = folder_of_tables(tmp_path)
    out = tmp_path / "out"
    arguments = ["study", "quality", "--data", str(data), "--n", "50", "--steps", "30"]
    arguments += ["--role", "all", "--out", str(out)]
    assert _cli.main([*arguments, "--runs", "2"]) == 0
    first = {p.name: p.stat().st_mtime_ns for p in (out / "runs").glob("*.npz")}
    assert len(first) == 2
    assert _cli.main([*arguments, "--runs", "3"]) == 0
    second = {p.name: p.stat().st_mtime_ns for p in (out / "runs").glob("*.npz")}
    assert len(second) == 3
    assert first.items() <= second.items()  # nothing was trained twice
    with open(out / "results.csv", newline="") as file:
        reader = csv.DictReader(file)
        assert tuple(reader.fieldnames or ()) == _tables.COLUMNS
        rows = list(reader)
    assert {row["rule"] for row in rows} == set(_rules.RULES)
    assert len({row["seed"] for row in rows}) == 3
    with open(out / "summary.csv", newline="") as file:
        fields = csv.DictReader(file).fieldnames or []
    for name in ("gm", "median", "p90", "worst", "win_rate", "never_fired"):
        assert {name, f"{name}_low", f"{name}_high"} <= set(fields)
    page = (out / "report.html").read_text()
    for part in ("critical difference", "regret: test loss", "<svg", "folds bagged", "within 2"):
        assert part in page
    assert "folds bagged" in capsys.readouterr().out
    assert _cli.main([*arguments, "--runs", "3", "--rules", "folds,last iterate"]) == 0
    with open(out / "results.csv", newline="") as file:
        assert {r["rule"] for r in csv.DictReader(file)} == {"split 20 %", "folds", "last iterate"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rules", "magic"], "unknown rule 'magic'"),
        (["--n", "ten"], "--n: expected numbers"),
        (["--data", "nowhere"], "no .npz file in 'nowhere'"),
        (["--n", "100000", "--role", "all"], "no dataset has 100000 training rows"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("HELDIN_DATA", raising=False)
    out = ["--out", str(tmp_path)]
    assert _cli.main(["study", "quality", *out, *arguments]) == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert len(errors.strip().splitlines()) == 1


def test_runs_are_the_same_in_other_processes(tmp_path: Path) -> None:
    data = folder_of_tables(tmp_path)
    options: dict[str, Any] = {"sizes": [50], "runs": 2, "steps": 10, "datasets": "all"}
    here = _quality.quality(data, out=tmp_path / "a", **options)
    there = _quality.quality(data, out=tmp_path / "b", jobs=2, **options)
    assert [line["gm"] for line in here] == [line["gm"] for line in there]


@pytest.mark.filterwarnings("ignore")
def test_a_dask_cluster_carries_the_study(tmp_path: Path) -> None:
    distributed = pytest.importorskip(
        "distributed", reason="dask.distributed is not installed: make setup"
    )
    import joblib

    data = folder_of_tables(tmp_path)
    options: dict[str, Any] = {"sizes": [50], "runs": 2, "steps": 10, "datasets": "all"}
    here = _quality.quality(data, out=tmp_path / "a", **options)
    with (
        distributed.LocalCluster(
            n_workers=1, threads_per_worker=1, processes=False, dashboard_address=None
        ) as cluster,
        distributed.Client(cluster),
        joblib.parallel_config(backend="dask"),
    ):
        there = _quality.quality(data, out=tmp_path / "b", jobs=-1, **options)
    assert [line["gm"] for line in here] == [line["gm"] for line in there]


def test_importing_heldin_imports_nothing_of_the_study() -> None:
    import subprocess

    code = "import heldin, sys; heldin.EarlyStopping; print(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    loaded = set(result.stdout.split())
    assert "heldin.rules.folds" in loaded
    assert not loaded & {"joblib", "rich", "sklearn", "matplotlib", "heldin_lab.study"}


# -- agreement of sampled and exact


def test_agreement_of_sampled_and_exact(tmp_path: Path) -> None:
    from heldin_lab.study import agreement as _agreement

    lines = _agreement.agreement(tmp_path, models=["mlp"], seeds=1, steps=8, budgets=(64, 1 << 20))
    small, everything = lines
    assert small["difference"] > 1e-3
    assert everything["difference"] < 1e-4  # a budget above every size is exact
    assert everything["moved"] == 0
    assert "| mlp | 64 |" in (tmp_path / "agreement.md").read_text()
    assert (tmp_path / "agreement.png").exists()
    assert len(_tables.read(tmp_path / "agreement.csv")) == 2
