"""Readings: what is logged gives the criterion of every one, and its stop is the rule's own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import heldin
from heldin.cli.main import main
from heldin.lab.reproduce import EXPERIMENTS, spread
from heldin.lab.reproduce import survey as survey_module
from heldin.lab.reproduce.averages import Averages, key
from heldin.lab.reproduce.collected import collect
from heldin.lab.reproduce.descents import toy_paths, wdbc_paths
from heldin.lab.reproduce.experiment import Claim
from heldin.lab.reproduce.experiments import mnist as _mnist
from heldin.lab.reproduce.experiments import quadratic
from heldin.lab.reproduce.experiments.rmsprop import damped_readings
from heldin.lab.reproduce.fullsize import PLAN, TENTHS, make, tasks
from heldin.lab.reproduce.ledger import EPSILONS, Ledger, Log, criteria, first_above, smooth
from heldin.lab.reproduce.multiverse import (
    Universe,
    judge,
    read_universe,
    universe,
    write_universe,
)
from heldin.lab.reproduce.page import universes, write_page
from heldin.lab.reproduce.readings import (
    DIVISION,
    SMOOTHING,
    START,
    Choice,
    Value,
    ours,
    readings,
)
from heldin.lab.reproduce.run import Run
from heldin.lab.reproduce.runner import work
from heldin.lab.reproduce.spread import _every_step, toy_values, wdbc_values
from heldin.lab.reproduce.tables import at, least, read_log
from heldin.lab.reproduce.training import perceptron
from tests.support.small_data import TINY, data

np = pytest.importorskip("numpy")
pandas = pytest.importorskip("pandas")
for package in ("joblib", "matplotlib", "sklearn", "rich"):
    pytest.importorskip(package)

__all__ = ["data"]
_Quadratic = quadratic.Settings


def _net() -> torch.nn.Sequential:
    return perceptron([6, 5, 3], seed=1)


def _rows(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise; the first input is dead, the last hidden unit nearly so."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(12, 6, generator=generator)
    x[:, 0] = 0.0
    return x, torch.randint(0, 3, (12,), generator=generator)


@pytest.mark.parametrize("name", list(EXPERIMENTS))
def test_choices_are_complete(name: str) -> None:
    """Each choice has at least two values, each with a reason, and names and settings differ."""
    experiment = EXPERIMENTS[name]
    for settings in experiment.settings.values():
        choices = experiment.readings(settings)
        assert bool(choices) == (name not in ("sketch", "sketch2d"))
        assert len({choice.name for choice in choices}) == len(choices)
        for choice in choices:
            assert choice.question.endswith(".")
            assert len(choice.values) >= 2
            assert len({v.name for v in choice.values}) == len(choice.values)
            assert len({str(v.setting) for v in choice.values}) == len(choice.values)
            assert all(v.why for v in choice.values)
        assert next(iter(readings(choices))) == ours(choices)


def test_the_ledger_gives_the_criterion() -> None:
    model = _net()
    model[0].bias.data[-1] = -100.0  # a dead unit
    ledger = Ledger({name: p.numel() for name, p in model.named_parameters()})
    with heldin.observe(model) as seen:
        F.cross_entropy(model(_rows(1)[0]), _rows(1)[1]).backward()
    ledger.add(1, seen)
    log = ledger.arrays()
    for dead in ("out", "zero"):
        for groups in ("tensor", "all"):
            for correction in (None, "gaussian", "symmetric"):
                expected = heldin.evidence(seen, groups, correction=correction, dead=dead)
                found = criteria(log, dead, groups, correction)
                assert found == pytest.approx([expected.criterion], rel=1e-5, abs=1e-6)
    # with a constant in the variance: from the gradients of the samples, one by one
    gradients: dict[str, list[torch.Tensor]] = {name: [] for name in ledger.sizes}
    for x, y in zip(*_rows(1), strict=True):
        model.zero_grad()
        F.cross_entropy(model(x[None]), y[None]).backward()
        for name, p in model.named_parameters():
            assert p.grad is not None
            gradients[name].append(p.grad.double().clone())
    for epsilon in EPSILONS:
        values = []
        for each in map(torch.stack, gradients.values()):
            f = 12 * each.mean(0).square() / (each.var(0) + epsilon)
            values.append(1 - float(f.mean()))
        assert criteria(log, epsilon) == pytest.approx([sum(values) / len(values)], rel=1e-4)


def _with_epsilon(seen: Mapping[str, heldin.Moments], epsilon: float) -> dict[str, Any]:
    """Moments whose variance is larger by a constant."""
    return {
        name: heldin.Moments(m.total, m.squares + epsilon * (m.count - 1) / m.count**2, m.count)
        for name, m in seen.items()
    }


def test_each_simulated_stop_is_the_rules_own() -> None:
    """For every reading of the criterion: heldin's rule, in a training that goes from fit to noise.

    A rule does not change the path before its stop, so that one training serves all of them.
    """
    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    every = [_rows(step) for step in range(20)]  # in every step: in the end the gradient vanishes
    x, y = (torch.cat(each) for each in zip(*every, strict=True))
    log, rules, stops = Log(model), {}, {}
    for reading in readings([SMOOTHING, START, DIVISION]):
        division = DIVISION.setting(reading)
        rules[tuple(reading.values())] = (
            division,
            heldin.EvidenceStopping.paper(
                model,
                smoothing=SMOOTHING.setting(reading),
                start=START.setting(reading),
                dead=division if isinstance(division, str) else "out",
                every=10**6,
            ),
        )
    for step in range(1, 201):
        F.cross_entropy(model(x), y).backward()
        seen = log.after(step)
        for name, (division, rule) in rules.items():
            moments = seen if isinstance(division, str) else _with_epsilon(seen, division)
            if rule.take(moments) and name not in stops:
                stops[name] = float(step)
        optimizer.step()
        optimizer.zero_grad()
    arrays = log.arrays()
    for reading in readings([SMOOTHING, START, DIVISION]):
        raw = criteria(arrays, DIVISION.setting(reading))
        averaged = smooth(raw, SMOOTHING.setting(reading), START.setting(reading))
        stop = float(first_above(averaged, arrays["steps"]))
        assert stop == pytest.approx(stops.get(tuple(reading.values()), np.nan), nan_ok=True)
    assert len(rules) == 40
    assert len(stops) > 15
    assert len(set(stops.values())) >= 6
    for _, rule in rules.values():
        rule.close()
    log.close()


def test_a_runs_stop_is_that_of_our_reading(data: Path) -> None:
    tiny = replace(EXPERIMENTS["mnist-sgd"].settings["quick"], **TINY["mnist-sgd"])
    run = Run(1, replace(tiny, smoothing=0.5, steps=60), data=data)
    _mnist.train(run, rate=0.001, method="evidence")
    averaged = smooth(criteria(run.arrays, "out"), 0.5, 0.0)
    at = {int(step): value for step, value in zip(run.arrays["steps"], averaged, strict=True)}
    assert all(
        row["criterion"] == pytest.approx(at[int(row["step"])], rel=1e-4) for row in run.rows
    )
    marked = [row["step"] for row in run.rows if row["stop"]]
    simulated = float(first_above(averaged, run.arrays["steps"]))
    assert marked == ([] if np.isnan(simulated) else [simulated])


def test_averages_are_the_elementwise_rules() -> None:
    """At a rate of zero nothing changes the path, so that all readings are the rule's own."""
    model = _net()
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    log = Log(model, averages=Averages(sizes, every=40))
    rules = {}
    tried = [(0.99, 1.0, "out"), (0.99, 10.0, "zero"), (0.99, 10.0, "out"), (0.999, 1.0, "zero")]
    for smoothing, start, division in tried:
        for greedy in (False, True):
            rules[key(smoothing, start, division), greedy] = heldin.ElementwiseStopping(
                    torch.optim.SGD(model.parameters(), lr=0.0),
                    model, greedy=greedy, smoothing=smoothing, start=start, dead=division,
                )  # fmt: skip
    for step in range(1, 281):
        log.before(step)
        F.cross_entropy(model(_rows(step)[0]), _rows(step)[1]).backward()
        log.after(step)
        for rule in rules.values():
            rule.step()
        model.zero_grad()
    shares = log.arrays()["averages"]
    assert shares.shape == (8, 30, 4, 2)
    seen = set()
    for (k, greedy), rule in rules.items():
        expected = rule.stopped_fraction(by="tensor")
        assert shares[-1, k, :, int(greedy)] == pytest.approx(list(expected.values()), abs=1e-6)
        seen |= set(expected.values())
        rule.close()
    assert len(seen) > 5
    log.close()


def test_a_sampled_log_agrees_with_the_exact_one(data: Path) -> None:
    tiny = replace(EXPERIMENTS["mnist-sgd"].settings["quick"], **TINY["mnist-sgd"])
    run = Run(0, replace(tiny, budget=2048), data=data)
    _mnist.train(run, rate=0.1, method="evidence")
    log = run.arrays
    assert list(log["exact_steps"]) == list(range(1, 21))  # the stretch at the beginning
    both = criteria(log, "out")[:20] - criteria(log, "out", exact=True)
    assert 0 < abs(both).mean() < 0.2


def test_readings_of_rmsprop() -> None:
    """From the optimiser's own averages, against Eq. 13 for each reading, weight by weight."""
    model = _net()
    rms = torch.optim.RMSprop(model.parameters(), lr=1e-3, alpha=0.9)
    for step in range(1, 6):
        F.cross_entropy(model(_rows(step)[0]), _rows(step)[1]).backward()
        rms.step()
        rms.zero_grad()
    v = torch.cat([rms.state[p]["square_avg"].flatten() for p in model.parameters()])
    threshold = 0.3
    found = damped_readings(rms, threshold)
    assert len(found) == 8
    for name, share in found.items():
        start, form, counted = name.split("/")[1:]
        started = v + (0.9**5 if start == "1" else 0.0)
        root = started.sqrt() + 1e-8 if "+ 1e-8" in form else (started + 1e-10).sqrt()
        if counted == "left out":
            root = root[v > 0]
        z = 1 / root
        assert share == pytest.approx(float((z / z.max() < threshold).double().mean()))
    assert len(set(found.values())) > 2


def test_the_plan_is_resumed(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {**TINY["mnist-sgd"], "travel": None, "budget": None}
    plan = (
        replace(TENTHS[0], changes={**small, "rates": (0.03,)}, seeds=1),
        replace(PLAN[2], changes={**TINY["greedy"], "travel": None, "rates": (0.005, 0.01)}),
    )
    lines: list[str] = []
    make(plan, tmp_path, data, tell=lines.append)
    assert len(lines) == 4
    assert lines[-1].startswith("all runs")
    found = [task for _, task in tasks(plan, tmp_path, data)]
    assert [task.finished for task in found] == [True] * 3
    assert "table" in read_log(found[1].table)
    assert not read_log(found[0].table)
    make(plan, tmp_path, data, tell=lines.append)
    assert len(lines) == 5  # nothing was run again


# --- all seeds at once, and the page ---------------------------------------------------------


def test_descents_are_the_experiments() -> None:
    """All seeds at once against one after the other with heldin's rule, stops included."""
    s = replace(EXPERIMENTS["wdbc"].settings["quick"], steps=240)
    paths = {
        method: wdbc_paths(
            method,
            scaling="both",
            by="train",
            settings=[(0.1, 0.001), (0.0, s.rate)],
            steps=240,
            seeds=2,
            dtype=torch.float64,
        )[1]
        for method in ("validation", "evidence")
    }
    values = wdbc_values(
        paths["validation"], paths["evidence"], _every_step(paths["evidence"], 0.9, 0.0, "out"), 240
    )
    tables: dict[int, dict[str, Any]] = {}
    for seed in range(2):
        for method in paths:
            run = Run(seed, s)
            EXPERIMENTS["wdbc"].run(run, method=method)
            tables.setdefault(seed, {})[method] = pandas.DataFrame(run.rows)
    claims = EXPERIMENTS["wdbc"].claims(s)
    for place, claim in enumerate(claims):
        expected = [claim.value(tables[seed]) for seed in range(2)]
        assert values[place] == pytest.approx(expected, rel=2e-3, nan_ok=True), claim.text
    t = replace(EXPERIMENTS["toy"].settings["quick"], steps=150, test=500)
    toys = []
    for seed in range(2):
        run = Run(seed, EXPERIMENTS["toy"].settings["quick"].__class__(steps=150))
        EXPERIMENTS["toy"].run(run)
        toys.append(pandas.DataFrame(run.rows))
    path = toy_paths(reach=t.reach, frequency=0.5, noise=1.0, initial=0.0, steps=150, seeds=2)
    for claim, found in zip(EXPERIMENTS["toy"].claims(t), toy_values(path, 150), strict=True):
        expected = [claim.value({"descent": table}) for table in toys]
        assert found == pytest.approx(expected, rel=1e-4), claim.text


def test_quadratics_in_closed_form(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"dimension": 30, "steps": 60}
    monkeypatch.setattr(quadratic, "Settings", lambda: _Quadratic(**small))  # type: ignore[arg-type]
    first = next(spread.quadratic(2))
    assert first[0] == {"start": "opposite", "eigenvalues": "ours"}
    for place, kind in enumerate(quadratic.SPECTRA):
        expected = []
        for seed in range(2):
            run = Run(seed, _Quadratic(**small))  # type: ignore[arg-type]
            quadratic.descend(run, kind, "opposite")
            table = pandas.DataFrame(run.rows)
            expected.append(at(table, "test_loss") / least(table, "test_loss"))
        assert first[1][place] == pytest.approx(expected, rel=1e-3)


def _universe() -> Universe:
    """A claim that depends on one of two choices."""
    choices = (
        Choice("a", "?", (Value("x", "", 0), Value("y", "", 1))),
        Choice("b", "?", (Value("u", "", 0), Value("v", "", 1))),
    )
    claim = Claim("low", "low", lambda tables: 0.0, most=1.32, beside=1.1)
    values = [
        (reading, [[1.2 if reading["a"] == "x" else 1.4, 1.0, float("nan")]])
        for reading in readings(choices)
    ]
    return universe("toy", "", [claim], choices, values)


def test_shares_of_readings(tmp_path: Path) -> None:
    found = _universe()
    judged = judge(found, 0)
    assert (judged.share, judged.beside) == (0.5, 0.0)  # 2 of 3 seeds with x, 1 of 3 with y
    assert (judged.choice, judged.spread) == ("a", (0.0, 1.0))
    assert judged.verdict == "holds under some readings"
    assert judged.ours == (2, 1, pytest.approx(1.1))
    write_universe(tmp_path / "u.csv", found)
    again = read_universe(tmp_path / "u.csv")
    assert again.by_choice(0) == found.by_choice(0)
    assert judge(again, 0).ours == judged.ours


@pytest.fixture
def surveyed(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The store of a survey of tiny runs, all sizes among them."""
    rates = {"rates": (0.03, 0.05)}
    plain = {"travel": None, "budget": None}
    plan = (
        replace(PLAN[0], changes={**TINY["mnist-sgd"], **plain, **rates, "budget": 2048},
                parts=("rate 0.03, validation", "rate 0.03, evidence")),
        replace(PLAN[2], changes={**TINY["greedy"], **plain, "rates": (0.005, 0.01)}),
    )  # fmt: skip
    tenths = tuple(
        replace(t, seeds=1, changes={**TINY["mnist-sgd"], **plain, **t.changes, "every": 4,
                                     "widths": (784, 12, 10)})
        for t in TENTHS
    )  # fmt: skip
    monkeypatch.setattr(survey_module, "PLAN", plan)
    monkeypatch.setattr(survey_module, "TENTHS", tenths)
    runs = tmp_path / "runs"
    make((*plan, *tenths), runs, data, tell=lambda line: None)
    for name in survey_module.REPLAYED:
        tiny = replace(EXPERIMENTS[name].settings["quick"], **TINY[name])
        if name == "rmsprop":
            tiny = replace(tiny, smoothing=0.99)  # one of the readings
        monkeypatch.setitem(
            EXPERIMENTS, name, replace(EXPERIMENTS[name], settings={"quick": tiny, "full": tiny})
        )
    for name in ("runs", "checkpoints"):
        (runs / "quick" / name).mkdir(parents=True)
    for task in survey_module.quick_tasks(runs / "quick", seeds=1):
        work(replace(task, data=str(data)))
    store = tmp_path / "docs" / "results" / "page"
    survey_module.survey(survey_module.REPLAYED, runs, store)
    return store


def test_a_survey_becomes_a_page(surveyed: Path) -> None:
    found = universes(surveyed)
    sizes = {(u.experiment, u.size) for u in found}
    assert ("mnist-sgd", "full size") in sizes
    assert ("mnist-sgd", "a tenth of the width") in sizes
    assert ("mnist-sgd", "a tenth of the width, pixels and initial weights varied") in sizes
    assert {("sector", "quick preset"), ("rmsprop", "quick preset")} <= sizes
    real = {u.experiment: u for u in found if u.size.endswith("real runs")}
    assert [len(real[name].claims) for name in ("greedy", "rmsprop")] == [1, 2]
    varied = next(u for u in found if u.size.endswith("varied"))
    assert len(varied.rows) == 40 * 4
    page = surveyed.parent.parent / "page.md"
    write_page(page, surveyed, "the command")
    text = page.read_text()
    for heading in ("Four figures", "Every claim", "What the paper does not say", "misread"):
        assert heading in text
    assert "full-sgd | rate 0.03, evidence | 0 | 24 | 24" in text
    assert "the correlation" in text  # of sampled and exact
    for image in re.findall(r"!\[.*?\]\((figures/page/readings.*?)\)", text):
        assert (page.parent / image).stat().st_size < 200_000
    for line in text.splitlines():
        if line.startswith("| mnist-sgd"):
            assert len(re.findall(r"(?<!\\)\|", line)) == 8


def test_an_unfinished_run_is_looked_at(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = (
        replace(
            PLAN[0],
            changes={**TINY["mnist-sgd"], "travel": None, "rates": (0.03,)},
            parts=("rate 0.03, evidence",),
        ),
    )
    (task,) = (replace(task, pause=0.0) for _, task in tasks(plan, tmp_path, data))
    for name in ("runs", "checkpoints"):
        (task.folder / name).mkdir(parents=True)
    tick = Run._tick

    def dies(self: Run, step: int, parts: Any) -> None:
        tick(self, step, parts)
        if step == 22:
            raise KeyboardInterrupt

    monkeypatch.setattr(Run, "_tick", dies)
    with pytest.raises(KeyboardInterrupt):
        work(task)
    found = collect([task])[0]["rate 0.03, evidence"]
    assert (found.finished, found.steps, found.total) == (False, 22, 24)
    assert len(criteria(found.log, "out")) == 22
    assert len(criteria(found.log, "out", exact=True)) == 20
    assert "test_loss" in found.table


def test_readings_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    arguments = ["reproduce", "--readings", "--docs", str(page)]
    assert main(arguments) == 2
    assert "no readings are stored" in capsys.readouterr().err
    assert main(["reproduce", "sketch", *arguments[1:]]) == 2
    assert "'sketch' has no readings" in capsys.readouterr().err
    (tmp_path / "results" / "page").mkdir(parents=True, exist_ok=True)
    write_universe(tmp_path / "results" / "page" / "readings-toy-seeds.csv", _universe())
    assert main(arguments) == 0
    assert "Made by `heldin reproduce --readings --docs page.md`" in page.read_text()
    assert main(["reproduce", "toy", "--plan"]) == 2
    assert "--plan takes no names" in capsys.readouterr().err
