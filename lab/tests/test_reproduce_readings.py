"""Readings: what is logged gives the criterion of every one, and its stop is the rule's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import heldin
from heldin_lab.reproduce import EXPERIMENTS
from heldin_lab.reproduce.averages import Averages, key
from heldin_lab.reproduce.experiments import mnist as _mnist
from heldin_lab.reproduce.experiments.rmsprop import damped_readings
from heldin_lab.reproduce.fullsize import PLAN, TENTHS, make, tasks
from heldin_lab.reproduce.ledger import EPSILONS, Ledger, Log, criteria, first_above, smooth
from heldin_lab.reproduce.readings import (
    DIVISION,
    SMOOTHING,
    START,
    ours,
    readings,
)
from heldin_lab.reproduce.run import Run
from heldin_lab.reproduce.tables import read_log
from heldin_lab.reproduce.training import perceptron
from small_data import TINY, data
from tests.support import runs

np = pytest.importorskip("numpy")
for package in ("joblib", "matplotlib", "pandas", "sklearn", "rich"):
    pytest.importorskip(package)

__all__ = ["data"]


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
            assert not choice.added
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
            runs.EvidenceStopping.paper(
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
    assert lines == [
        "0 of 3 runs are finished",
        "tenth-sgd: rate 0.03, validation, seed 0: finished",
        "tenth-sgd: rate 0.03, evidence, seed 0: finished",
        "full-greedy: rate 0.005, greedy, seed 0: finished",
        "all runs of the plan are finished",
    ]
    found = [task for _, task in tasks(plan, tmp_path, data)]
    assert [task.finished for task in found] == [True] * 3
    assert "table" in read_log(found[1].table)
    assert not read_log(found[0].table)
    lines.clear()
    make(plan, tmp_path, data, tell=lines.append)
    assert lines == ["3 of 3 runs are finished", "all runs of the plan are finished"]
