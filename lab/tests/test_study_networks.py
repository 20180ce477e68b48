"""The study on images, texts and fine-tuning: problems, networks, logs against the live rules."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
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

from heldin_lab.study import along as _along
from heldin_lab.study import networks as _networks
from heldin_lab.study import quality as _quality
from heldin_lab.study import rules as _rules
from heldin_lab.study import spec as _spec
from heldin_lab.study import tables as _tables
from heldin_lab.study.logged import LoggedRun
from tests.support import runs

MODELS = {"images": "cnn-augmented", "texts": "transformer", "tuning": "lora"}


@pytest.fixture(autouse=True)
def no_mnist(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No data folder, and no warning about BatchNorm."""
    monkeypatch.setenv("HELDIN_DATA", str(tmp_path / "nothing"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def task(kind: str, folder: Path) -> _networks.NetworkTask:
    if kind != "tuning":
        return _networks.network_task(kind, None, folder)  # type: ignore[arg-type]
    start = folder / _networks.PRETRAINED
    torch.manual_seed(5)
    torch.save(_networks.plain_network().state_dict(), start)
    return _networks.NetworkTask("digits-after-mnist", 1797, "tuning", None, start)


def spec_of(kind: str, chosen: _networks.NetworkTask) -> _spec.Spec:
    return _spec.Spec(chosen.name, 40, 0.1, MODELS[kind], "adam", seed=3, steps=8)


@pytest.mark.parametrize("kind", MODELS)
def test_the_log_is_what_the_live_rule_and_a_plain_loop_give(kind: str, tmp_path: Path) -> None:
    chosen = task(kind, tmp_path)
    spec = spec_of(kind, chosen)
    run = LoggedRun(spec, chosen, _along.log_network(spec, chosen))
    problem = chosen.problem(spec)
    torch.manual_seed(spec.seed)
    model = chosen.model(spec, problem)
    optimizer, rate = chosen.optimizer(spec, model)
    assert rate == run["rate"]
    data = (problem.x, problem.y)
    stopping = runs.FoldStopping(
        model, optimizer, problem.loss_fn, data, average="best", seed=spec.seed
    )
    for _, index, x in _along.batches_of(spec, chosen, problem):
        problem.loss_fn(model(x), problem.y[index]).backward()
        optimizer.step()
        optimizer.zero_grad()
        stopping.step(indices=index)
    assert stopping.history.columns()["step"] == [int(s) for s in run["fold_steps"]]
    if kind != "texts":  # dropout: the split's model draws from the same stream
        found = run["fold_curves"].mean(0)
        assert np.allclose(found, stopping.history.columns()["estimate"], rtol=1e-4)
        model.eval()
        with torch.no_grad():
            loss = float(problem.loss_fn(model(problem.x_test), problem.y_test))
        assert math.isclose(run["tested"][-1, 0], loss, rel_tol=1e-4)
    for name in _rules.NETWORK_RULES:
        outcome = _rules.replay(run, name)
        assert outcome is not None, name
        assert outcome.test_loss > 0
        assert 0 <= outcome.test_accuracy <= 1
        if name.startswith(("folds", "shadow")):
            assert outcome.standard_error > 0
            assert outcome.test_error > 0
    # weights and buffers were kept: the "average" of a single check is that check
    step = int(run["weight_steps"][-1])
    assert np.allclose(run.averaged({step: 1.0}), run.tested(step, None), rtol=1e-4)


def test_the_split_sees_its_rows_only(tmp_path: Path) -> None:
    chosen = task("images", tmp_path)  # with BatchNorm
    spec = spec_of("images", chosen)
    problem = chosen.problem(spec)
    split = _along._Split(spec, chosen, problem)
    assert len(split.held) == 8
    assert sorted(torch.cat([split.held, split.kept]).tolist()) == list(range(40))
    seen = {int(i) for _ in range(20) for i in next(split.stream)}
    assert seen <= set(split.kept.tolist())
    changed = chosen.problem(spec)
    changed.x[split.held] += 1
    pair = [_along._Split(spec, chosen, each) for each in (problem, changed)]
    for each in pair:
        each.step()
    for a, b in zip(pair[0].model.parameters(), pair[1].model.parameters(), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(pair[0].model.buffers(), pair[1].model.buffers(), strict=True):
        assert torch.equal(a, b)
    assert pair[0].losses()[0] != pair[1].losses()[0]
    assert pair[0].losses()[2] == pair[1].losses()[2]


def test_problems(tmp_path: Path) -> None:
    chosen = task("images", tmp_path)
    assert chosen.name == "digits"  # scikit-learn's, where there is no MNIST
    spec = spec_of("images", chosen)
    one, again = chosen.problem(spec), chosen.problem(spec)
    assert torch.equal(one.x, again.x)
    assert one.x.shape == (40, 1, 14, 14)
    assert len(one.x_test) == 1000
    flipped = float((one.y_test != one.y_clean).float().mean())
    assert 0.07 < flipped < 0.13
    texts = task("texts", tmp_path)
    piece = texts.problem(_spec.Spec(texts.name, 40, 0.0, "transformer", "adam", seed=3))
    assert torch.equal(piece.x[:, 1:], piece.y[:, :-1])
    assert torch.equal(piece.y_test, piece.y_clean)
    rows = {tuple(row) for row in torch.cat([piece.x, piece.x_test]).tolist()}
    assert len(rows) > 0.9 * (40 + len(piece.x_test))  # pieces do not overlap; some are blank
    net = texts.model(spec, piece).eval()
    assert isinstance(net, nn.Module)
    with torch.no_grad():  # no place sees what comes after it
        changed = piece.x[:2].clone()
        changed[:, -1] = (changed[:, -1] + 1) % piece.outputs
        before, after = net(piece.x[:2]), net(changed)
    assert torch.allclose(before[:, :, :-1], after[:, :, :-1], atol=1e-6)
    assert not torch.allclose(before[:, :, -1], after[:, :, -1])


def test_what_is_tuned(tmp_path: Path) -> None:
    chosen = task("tuning", tmp_path)
    problem = chosen.problem(spec_of("tuning", chosen))
    outputs = []
    trained = {}
    for way in _networks.KINDS["tuning"].models:
        model = chosen.model(_spec.Spec(chosen.name, 40, 0.0, way, "adam", seed=3), problem)
        with torch.no_grad():
            outputs.append(model(problem.x[:5]))
        trained[way] = [name for name, p in model.named_parameters() if p.requires_grad]
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])  # they start alike
    assert len(trained["all-weights"]) == 8
    assert trained["last-layer"] == ["9.weight", "9.bias"]
    assert trained["lora"] == ["7.down", "7.up", "9.down", "9.up"]
    with pytest.raises(heldin.HeldinError, match="heldin-lab data fetch mnist"):
        _networks.network_task("tuning", tmp_path / "nowhere", tmp_path)


def test_the_start_of_fine_tuning_is_trained_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mnist").mkdir()
    calls = []

    def some(data: Any) -> tuple[Tensor, Tensor]:
        calls.append(data)
        x, y = _networks.digits()
        return x, y

    monkeypatch.setattr(_networks, "_mnist", some)
    monkeypatch.setattr(_networks, "POOL", 1280)
    for _ in range(2):
        made = _networks.network_task("tuning", tmp_path, tmp_path)
    assert calls == [tmp_path]
    net = _networks.plain_network()
    assert made.start is not None
    net.load_state_dict(torch.load(made.start, weights_only=True))
    x, y = _networks.digits()
    with torch.no_grad():
        learnt = float(F.cross_entropy(net(x[:1280]), y[:1280]))
    assert learnt < 2.0  # of 2.3 at the start


def test_images_are_moved_by_a_pixel_at_most() -> None:
    x = torch.rand(50, 1, 6, 6)
    found = _networks.moved(x, torch.Generator().manual_seed(0))
    padded = F.pad(x, (1, 1, 1, 1))
    shifts = [padded[:, :, i : i + 6, j : j + 6] for i in range(3) for j in range(3)]
    same = torch.stack([(found == shift).flatten(1).all(1) for shift in shifts])
    assert bool((same.sum(0) == 1).all())
    assert int(same.any(1).sum()) == 9


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    arguments = ["study", "quality", "--task", "images", "--n", "40", "--steps", "4"]
    arguments += ["--runs", "1", "--data", str(tmp_path)]
    roles = ("confirmation", "development")
    for role in roles:
        assert _cli.main([*arguments, "--role", role, "--out", str(tmp_path / role)]) == 0
    keys = [next((tmp_path / role / "runs").glob("*.npz")).name for role in roles]
    assert keys[0] != keys[1]  # other seeds
    rows = _tables.read(tmp_path / "confirmation" / "results.csv")
    assert {row["rule"] for row in rows} == set(_rules.NETWORK_RULES)
    summary = _tables.read(tmp_path / "confirmation" / "summary.csv")
    assert {row["rule"]: row["cost"] for row in summary}["folds"] == 6.0
    assert "folds bagged patience" in capsys.readouterr().out
    out = ["--out", str(tmp_path / "other")]
    assert _cli.main([*arguments, *out, "--rules", "leave-one-out"]) == 2
    assert "unknown rule 'leave-one-out'" in capsys.readouterr().err


def test_plans_draw_from_the_ways_of_their_kind(tmp_path: Path) -> None:
    chosen = task("images", tmp_path)
    ways = _networks.KINDS["images"]
    specs = _quality.plan([chosen], ways.sizes, 30, 0, ways.steps, ways)
    assert {s.model for s in specs} == set(ways.models)
    assert {s.optimizer for s in specs} == set(ways.optimizers)
    assert {s.n for s in specs} == set(ways.sizes)
    with pytest.raises(heldin.HeldinError, match="expected tables, images, texts, tuning"):
        _quality.quality(kind="sounds", out=tmp_path)
