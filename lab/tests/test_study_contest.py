"""The study of the rules that people use."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from torch.nn import functional as F

from heldin_lab.study import contest, patience
from heldin_lab.study.data import tables
from heldin_lab.study.spec import Spec


def setting(steps: int = 60, dataset: str = "sk_wine") -> contest.Setting:
    spec = Spec(dataset, 50, 0.2, "hidden1", "adam", 3, steps)
    return contest.Setting(spec, {t.name: t for t in tables(None)}[dataset])


def test_path_is_that_of_a_loop_written_by_hand() -> None:
    run = contest.Run(setting().spec, setting().task)
    run.path()
    model, optimizer = run.setting.new()
    problem, order = run.setting.problem, run.setting.order()
    for _ in range(run.setting.epochs):
        for index in torch.randperm(50, generator=order).split(12):
            optimizer.zero_grad()
            F.cross_entropy(model(problem.x[index]), problem.y[index]).backward()
            optimizer.step()
    torch.testing.assert_close(run.states[-1], contest.snapshot(model))
    outputs = model(problem.x_test).detach()
    assert run.lines["no stopping"]["loss"] == pytest.approx(
        float(F.cross_entropy(outputs, problem.y_test)), rel=1e-5
    )
    assert run.lines["best on the path"]["loss"] <= run.lines["no stopping"]["loss"]


def test_held_out_model_never_sees_the_held_out_rows() -> None:
    one, other = setting(), setting()
    held = torch.arange(10)
    other.problem.y[held] = (other.problem.y[held] + 1) % 3
    models = [contest.HeldOut(each, held, 5) for each in (one, other)]
    for model in models:
        model.epoch()
    torch.testing.assert_close(models[0].states[1], models[1].states[1])
    assert models[0].curve[1] != models[1].curve[1]


def test_until_ends_where_the_rule_says_or_with_the_epochs() -> None:
    model = contest.HeldOut(setting(), torch.arange(10), 5)
    assert model.until(lambda curve: contest.Stop(1, 3) if len(curve) > 3 else None).end == 3
    assert len(model.states) == 4
    stop = model.until(lambda curve: None)
    assert stop.end == model.setting.epochs == len(model.states) - 1
    assert model.curve[stop.keep] == min(model.curve)


def test_every_rule_gives_finite_values_and_runs_are_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = contest.Ways(("hidden1",), ("adam",), (0.2,), (50,), 60)
    monkeypatch.setitem(contest.WAYS, "tables", ways)
    lines: list[str] = []
    for runs in (2, 2):
        out = contest.contest(
            "tables", None, tmp_path, runs=runs, seed=1, datasets="all", progress=lines.append
        )
    assert len(lines) == 2
    stored = contest.read_lines(out)
    assert len(stored) == 2
    for run in stored:
        rules = run["rules"]
        assert {"split", "split, calibrated", "five folds, refit", "heldin", "evidence"} <= set(
            rules
        )
        for values in rules.values():
            line = dict(zip(contest.UNITS, values, strict=True))
            assert line["loss"] is not None
            assert 0 <= line["accuracy"] <= 1
        value, low, high, true, error, tail = run["said"]["heldin"]
        assert low < value < high
        assert math.isclose(true, rules["heldin"][0])
        assert error > 0
        assert 0.05 < tail < 1


def test_committee_averages_probabilities() -> None:
    problem = setting().problem
    members = [torch.tensor([[2.0, 0.0, 0.0]]), torch.tensor([[0.0, 1.0, 0.0]])]
    outputs = contest.averaged(problem, members).softmax(1)
    torch.testing.assert_close(outputs, torch.stack(members).softmax(2).mean(0))


def test_runs_are_renewed_as_a_whole_or_in_part(tmp_path: Path) -> None:
    """The rivals stay, and so do heldin's rules that are not asked for."""
    spec = Spec("sk_wine", 50, 0.2, "hidden1", "adam", 3, 60)
    task = {t.name: t for t in tables(None)}["sk_wine"]
    run = contest.Run(spec, task)
    run.path()
    run.splits()
    run.decays()
    run.ours()
    line = contest._line(run)
    assert {"heldin, four shadows", "heldin, budget 6", "evidence, temperature"} < set(run.lines)
    assert {"heldin, three shadows", "evidence, smoothing 0.95"} < set(run.lines)
    assert run.lines["evidence, temperature"]["steps"] > run.lines["evidence"]["steps"]
    assert 1 / 3 <= line["majority"] < 1
    stale = {**line, "rules": {name: [9.0] * 6 for name in line["rules"]}, "said": {}}
    whole = contest.renewed(stale, task)
    part = contest.renewed(stale, task, ["heldin, one shadow"])
    for name, values in line["rules"].items():
        ours = name in ("heldin", "best on the path", "no stopping", "heldin, one shadow")
        rival = name.startswith(("split", "Prechelt", "three", "weight"))
        assert (whole["rules"][name][0] == 9.0) is rival
        assert (part["rules"][name][0] == values[0]) is ours or name == "heldin, committee"
    assert part["said"].keys() == {"heldin", "heldin, one shadow"}


def test_rivals_of_other_programs_are_added_to_stored_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        contest.WAYS, "tables", contest.Ways(("hidden1",), ("adam",), (0.2,), (50,), 60)
    )
    whole = {"datasets": "all", "runs": 1, "seed": 1, "progress": lambda _: None}
    (stored,) = contest.read_lines(contest.contest("tables", None, tmp_path, **whole))
    added = {"eight bagged folds", "eight bagged folds, calibrated", "task-vector growth"}
    added |= {"GradStop"}
    rules = {name: values for name, values in stored["rules"].items() if name not in added}
    (tmp_path / "tables.jsonl").write_text(json.dumps(stored | {"rules": rules}) + "\n")
    out = contest.contest("tables", None, tmp_path, **whole, more=True)
    (line,) = contest.read_lines(out)
    assert line.keys() == stored.keys()
    assert line["rules"].keys() == rules.keys() | added
    for name, values in stored["rules"].items():
        assert line["rules"][name][:5] == values[:5]  # and the seconds of old ones
        assert name in added or line["rules"][name] == values


def test_bagged_models_see_all_rows_but_their_own_and_vote() -> None:
    run = contest.Run(setting(steps=600).spec, setting().task)
    run.path()
    run.bags()
    plain, scaled = (
        run.lines[name] for name in ("eight bagged folds", "eight bagged folds, calibrated")
    )
    assert plain["accuracy"] == scaled["accuracy"]
    assert plain["loss"] != scaled["loss"]
    epochs = run.setting.epochs
    assert 8 * 4 <= plain["steps"] <= 8 * 4 * epochs  # 44 rows are four batches


def test_gradstop_takes_the_gradient_of_every_row() -> None:
    run = contest.Run(setting().spec, setting().task)
    run.path()
    model = run.setting.new()[0].eval()
    contest.load(model, run.states[7])
    problem, rows = run.setting.problem, []
    for x, y in zip(problem.x, problem.y, strict=True):
        loss = F.cross_entropy(model(x[None]), y[None])
        slopes = torch.autograd.grad(loss, list(model.parameters()))
        rows.append(torch.cat([slope.flatten() for slope in slopes]))
    found = torch.stack(rows).double()
    mean, variance = found.mean(0), found.var(0)
    known = variance > 0
    statistic = 50 * (mean[known] ** 2 / variance[known]).sum()
    expected = chi2.sf(float(statistic), int(known.sum()))
    assert run.credible(7) == pytest.approx(expected, abs=1e-3)
    assert run.credible(0) < 0.01  # training has not begun
    run.draw()
    assert run.lines["GradStop"]["steps"] % run.setting.epoch_steps == 0


def test_task_vector_grows_until_it_does_not() -> None:
    run = contest.Run(setting(steps=120).spec, setting().task)
    run.path()
    run.growth()
    assert run.lines["task-vector growth"]["steps"] == run.total  # it grows by more than 0.5 %
    run.states[20:] = [run.states[20]] * (run.total - 19)
    run.growth()
    assert run.lines["task-vector growth"]["steps"] == (4 + 10) * run.setting.epoch_steps


def test_sizes_and_steps_of_a_plan_can_be_given(tmp_path: Path) -> None:
    out = contest.contest(
        "tables", None, tmp_path, runs=1, seed=1, datasets="all", sizes=[60], steps=30,
        only=["heldin, one shadow"], progress=lambda _: None,
    )  # fmt: skip
    (line,) = contest.read_lines(out)
    assert (line["spec"]["n"], line["spec"]["steps"]) == (60, 30)
    assert {"split, refit", "heldin", "heldin, one shadow"} < line["rules"].keys()
    assert not line["rules"].keys() & {"five folds, refit", "heldin, two shadows", "evidence"}


def test_short_patience_and_windows() -> None:
    curves = torch.tensor([[3.0, 1.0, 2.0, 2.5, 2.6, 2.7]] * 4).double()
    steps = [0, 10, 20, 30, 40, 50]
    assert patience.replay(steps, curves, patience.Short(2, 2), 10.0) == (3, 1)
    assert patience.replay(steps, curves, patience.Short(4, 2), 10.0) == (4, 1)
    shares = patience.window_shares({0: 0.5, 20: 0.5}, steps)
    assert shares == pytest.approx({0: 0.5, 10: 1 / 6, 20: 1 / 6, 30: 1 / 6})


def test_patience_is_logged_and_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ways = contest.Ways(("hidden1",), ("adam",), (0.2,), (50,), 60)
    monkeypatch.setitem(patience.WAYS, "tables", ways)
    patience.log("tables", None, tmp_path, runs=2, seed=1, which="all", steps=None)
    out = tmp_path / "patience.json"
    monkeypatch.setattr(
        "sys.argv", ["patience", "replay", "--folder", str(tmp_path), "--out", str(out)]
    )
    with np.load(next(tmp_path.glob("tables/*.npz"))) as stored:
        assert len(np.unique(stored["ends"][:, 0])) > 5  # other weights at every end
        assert not np.allclose(stored["ends"][:, 0], stored["windows"][:, 0])
        assert not np.allclose(stored["ends"][:, 0], stored["present"][:, 0])
    patience.main()
    text = out.with_suffix(".md").read_text()
    for name in patience.PATIENCES:
        assert f"| tables | {name} | 2 |" in text
    assert f"| tables | {patience.DEFAULT}, window | 2 |" in text
    assert text in capsys.readouterr().out
