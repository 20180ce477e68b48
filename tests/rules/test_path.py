"""Folds: which weights are kept, saved and restored."""

from __future__ import annotations

import io
import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import heldin
from heldin._private_torch import forward_hooks
from heldin.rules import policy as _curves
from tests.support import runs
from tests.support.folds_runs import MODELS, OPTIMIZERS, data, minibatches, train_once
from tests.support.reading import curves, rule_state


def overfitting(n: int = 40, d: int = 30) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, d, generator=generator, dtype=torch.float64)
    return x, x[:, :1] + torch.randn(n, 1, generator=generator, dtype=torch.float64)


def fit(steps: int, **options: Any) -> tuple[Any, Any, list[Tensor]]:
    torch.manual_seed(0)
    x, y = overfitting()
    model = nn.Linear(30, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    stopping = runs.FoldStopping(model, optimizer, F.mse_loss, (x, y), **options)
    path = [model.weight.detach().clone()]
    for _ in range(steps):
        stop = train_once(stopping, model, optimizer, x, y)
        path.append(model.weight.detach().clone())
        if stop:
            break
    return stopping, model, path


@pytest.mark.parametrize(("shadows", "held"), [(None, 20), (2, 8), (1, 4)])
@pytest.mark.parametrize("general", [False, True])
def test_each_rule_says_how_many_rows_its_error_rests_on(
    shadows: int | None, held: int, general: bool
) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(20, 3), torch.randn(20, 1)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    how: dict[str, Any] = {"loss_fn": nn.MSELoss()}
    if general:
        how = {
            "batch_loss": lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
            "eval_loss": lambda model, batch: (model(batch[0]) - batch[1]).square()[:, 0],
        }
    stopping = runs.FoldStopping(model, optimizer, data=(x, y), shadows=shadows, **how)
    (curve,) = curves(stopping)
    assert len(curve) == held
    seen = stopping.history[0].training_loss  # nan for copies that have not trained yet
    assert math.isnan(seen) == general
    assert (
        stopping.history[stopping.best_number].standard_error
        == _curves.mean_and_error(curve, held / 16, 0.2, seen)[1]
    )


def test_rows_that_shadows_miss_widen_the_error_unless_another_loss_is_estimated() -> None:
    """A gap of a training loss and another kind of loss would say nothing."""
    losses = torch.tensor([0.5, 1.0, 4.0, 0.5, 1.5], dtype=torch.float64)
    plain = _curves.mean_and_error(losses)[1]
    wide = _curves.mean_and_error(losses, missing=0.2, training_loss=0.5)[1]
    assert math.isclose(wide, math.hypot(plain, 0.2 * (1.5 - 0.5)))
    for seen in (2.0, math.nan):  # no gap, and an unknown one
        assert _curves.mean_and_error(losses, missing=0.2, training_loss=seen)[1] == plain
    torch.manual_seed(0)
    x, y = torch.randn(20, 3), torch.randn(20, 1)
    found = []
    same = lambda model, batch: (model(batch[0]) - batch[1]).square()[:, 0] / 10  # noqa: E731
    for eval_loss in (None, same, lambda model, batch: 10 * same(model, batch)):
        torch.manual_seed(1)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        stopping = runs.FoldStopping(
            model,
            optimizer,
            data=(x, y),
            batch_loss=lambda model, batch: F.mse_loss(model(batch[0]), batch[1]) / 10,
            eval_loss=eval_loss,
        )
        for _ in range(50):
            F.mse_loss(model(x), y).div(10).backward()
            optimizer.step()
            optimizer.zero_grad()
            stopping.step(indices=range(20))
        held = 20 / 16
        curve, last = curves(stopping)[-1], stopping.history[-1]
        assert last.estimate > last.training_loss
        without = _curves.mean_and_error(curve, held)[1]
        found.append(last.standard_error > without)
    assert found == [True, True, False]


def test_the_band_covers_what_it_should() -> None:
    """Least squares with Gaussian noise, five folds: the loss of the fit to all rows is known."""
    generator = torch.Generator().manual_seed(0)
    fold = torch.arange(60) % 5
    off = []
    for _ in range(300):
        x = torch.randn(60, 5, generator=generator, dtype=torch.float64)
        y = x[:, :1] + torch.randn(60, 1, generator=generator, dtype=torch.float64)
        fits = [torch.linalg.lstsq(x[fold != k], y[fold != k]).solution for k in range(5)]
        losses = [(x[fold == k] @ w - y[fold == k]).square()[:, 0] for k, w in enumerate(fits)]
        middle, error = _curves.mean_and_error(torch.cat(losses), 60 / 48)
        slope = torch.linalg.lstsq(x, y).solution
        slope[0] -= 1
        off.append(abs(middle - 1 - float(slope.square().sum())) / error)
    within = [sum(value <= width for value in off) / 300 for width in (1, 2)]
    assert 0.63 < within[0] < 0.83  # a plain standard error covers 0.60 and 0.88
    assert within[1] > 0.92


def test_patience_stops_and_restores_the_best() -> None:
    stopping, model, path = fit(3000, average="best", patience=heldin.Patience(2.0, 200, 3))
    table = stopping.history.columns()
    best = min(range(len(table["step"])), key=lambda i: table["estimate"][i])
    assert stopping.best_step == table["step"][best]
    assert stopping.estimate == table["estimate"][best]
    assert stopping.history[stopping.best_number].standard_error == table["standard_error"][best]
    assert stopping.should_stop
    assert stopping.stopped_step == len(path) - 1
    last = next(s for s in table["step"] if s >= 2 * stopping.best_step + 200)
    assert stopping.stopped_step == last
    assert not torch.equal(model.weight, path[stopping.best_step])
    stopping.restore()
    assert torch.equal(model.weight, path[stopping.best_step])
    assert "lowest" in stopping.reason
    assert stopping.metrics()["heldin/best_step"] == stopping.best_step
    assert stopping.metrics()["heldin/should_stop"] == 1.0


def test_bagged_weights_are_the_average_by_votes() -> None:
    stopping, model, path = fit(400, patience=None)
    shares = stopping.shares
    assert math.isclose(sum(shares.values()), 1)
    assert len(shares) > 1
    losses = torch.stack(curves(stopping), dim=1)
    assert losses.shape == (40, len(stopping.history))
    torch.testing.assert_close(
        losses.mean(0), torch.tensor(stopping.history.columns()["estimate"], dtype=torch.float64)
    )
    stopping.restore()
    expected = sum(share * path[step] for step, share in stopping.shares.items())
    torch.testing.assert_close(model.weight.detach(), expected)


def test_restore_takes_the_last_weights_into_account() -> None:
    stopping, model, path = fit(7, average="best")  # still improving, and 7 is not on the grid
    assert stopping.history[-1].step == 6
    stopping.restore()
    assert stopping.history[-1].step == 7
    assert torch.equal(model.weight, path[7])


def test_memory_thins_the_checkpoints_and_keeps_the_best() -> None:
    each = 31 * 8
    full, _, _ = fit(500, patience=None)
    thin, model, path = fit(500, patience=None, memory=6 * each)
    assert len(rule_state(full)["kept"]) == len(full.history)
    kept = rule_state(thin)["kept"]
    assert len(kept) == 6
    steps = [thin.history[i].step for i in sorted(kept)]
    assert thin.best_step in steps
    assert thin.best_step == full.best_step
    thin.restore()
    expected = sum(share * path[step] for step, share in thin.shares.items())
    torch.testing.assert_close(model.weight.detach(), expected)
    none, _, _ = fit(50, patience=None, memory=0)
    assert len(rule_state(none)["kept"]) == 1


def test_context_manager_restores_unless_an_error_passes() -> None:
    x, y = overfitting()
    model = nn.Linear(30, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with runs.FoldStopping(model, optimizer, F.mse_loss, (x, y), average="best") as stopping:
        for _ in range(1000):
            train_once_more = train_once(stopping, model, optimizer, x, y)
        last = model.weight.detach().clone()
        assert train_once_more
    assert not torch.equal(model.weight, last)
    assert not forward_hooks(model)
    assert stopping.best_step > 0  # still readable
    model = nn.Linear(30, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    broken = runs.FoldStopping(model, optimizer, F.mse_loss, (x, y))
    train_once(broken, model, optimizer, x, y)
    before = model.weight.detach().clone()
    with pytest.raises(ZeroDivisionError), broken:
        raise ZeroDivisionError
    assert torch.equal(model.weight, before)
    assert not forward_hooks(model)


def test_integer_buffers_survive_restoring() -> None:
    torch.manual_seed(0)
    x, y = overfitting()
    model = nn.Sequential(nn.Linear(30, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with runs.FoldStopping(model, optimizer, F.mse_loss, (x, y)) as stopping:
        for _ in range(40):
            train_once(stopping, model, optimizer, x, y)
    assert model[1].num_batches_tracked in [record.step for record in stopping.history]


def test_a_run_that_diverges_keeps_the_last_good_weights() -> None:
    torch.manual_seed(0)
    x, y = overfitting()
    model = nn.Linear(30, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e10)
    stopping = runs.FoldStopping(model, optimizer, F.mse_loss, (x, y))
    start = model.weight.detach().clone()
    for _ in range(60):
        train_once(stopping, model, optimizer, x, y)
    assert not model.weight.isfinite().all()
    with pytest.warns(heldin.HeldinWarning, match="never fell below"):
        stopping.restore()
    assert stopping.best_step == 0
    assert torch.equal(model.weight, start)


@pytest.mark.parametrize("name", ["relu", "tied", "batchnorm"])
def test_a_resumed_run_goes_on_bit_for_bit(name: str) -> None:
    x, y = data()
    batches = minibatches(8, 40)

    def parts() -> tuple[Any, Any, Any]:
        torch.manual_seed(3)
        model = MODELS[name]().double()
        optimizer = OPTIMIZERS["adam"](model.parameters())
        return model, optimizer, runs.FoldStopping(model, optimizer, F.mse_loss, (x, y), 3)

    def go(model: Any, optimizer: Any, stopping: Any, some: list[Tensor]) -> None:
        for index in some:
            train_once(stopping, model, optimizer, x[index], y[index])

    whole = parts()
    go(*whole, batches)
    first = parts()
    go(*first, batches[:17])
    file = io.BytesIO()
    torch.save([part.state_dict() for part in first], file)
    file.seek(0)
    second = parts()
    for part, state in zip(second, torch.load(file, weights_only=True), strict=True):
        part.load_state_dict(state)
    go(*second, batches[17:])
    assert str(second[2].history.columns()) == str(whole[2].history.columns())  # nan at first
    assert torch.equal(second[2].backend.held_out(), whole[2].backend.held_out())
    for stopping in (whole[2], second[2]):
        stopping.restore()
    for a, b in zip(whole[0].parameters(), second[0].parameters(), strict=True):
        assert torch.equal(a, b)
    damaged = first[2].state_dict() | {"curves": None}
    before = second[2].state_dict()["curves"]
    with pytest.raises(heldin.HeldinError, match="incomplete or damaged"):
        second[2].load_state_dict(damaged)
    assert torch.equal(second[2].state_dict()["curves"], before)
    model, optimizer, _ = parts()
    other = runs.FoldStopping(model, optimizer, F.mse_loss, (x, y), 4)
    shadow = runs.LeaveOneOutStopping(model, optimizer, F.mse_loss, (x, y))
    with pytest.raises(heldin.HeldinError, match="saved with folds=3"):
        other.load_state_dict(first[2].state_dict())
    with pytest.raises(heldin.HeldinError, match="state of a FoldStopping"):
        shadow.load_state_dict(first[2].state_dict())


def test_nothing_is_printed_warned_or_left_behind(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stopping, model, _ = fit(30)
    state = torch.random.get_rng_state()
    checks = len(stopping.history)
    stopping.restore()  # after a check of the last step
    assert len(stopping.history) == checks + 1
    assert torch.equal(state, torch.random.get_rng_state())
    del stopping
    assert not forward_hooks(model)
    assert capsys.readouterr() == ("", "")


def test_the_history_leaves_by_all_ways(tmp_path: Any) -> None:
    pytest.importorskip("matplotlib")
    import matplotlib

    matplotlib.use("Agg")
    stopping, _, _ = fit(3000)
    axes = stopping.history.plot(errors=3)
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert any("covered" in label for label in labels)
    assert any("chosen step" in label for label in labels)
    with pytest.raises(heldin.HeldinError, match="errors must be 2 or 3"):
        stopping.history.plot(errors=1)
    stopping.history.to_csv(tmp_path / "history.csv")
    lines = (tmp_path / "history.csv").read_text().splitlines()
    assert lines[0] == "step,estimate,standard_error,training_loss"
    assert len(lines) == len(stopping.history) + 1
    matplotlib.pyplot.close("all")


def test_the_training_loss_is_that_of_the_model() -> None:
    stopping, model, _ = fit(6)
    x, y = overfitting()
    with torch.no_grad():
        assert math.isclose(
            stopping.history[-1].training_loss, float(F.mse_loss(model(x), y)), rel_tol=1e-12
        )


@pytest.mark.parametrize("engine", ["dense", "replay"])
def test_a_shadow_left_with_one_row_skips_a_batch_normalisation(engine: str) -> None:
    """One row has no variance: its shadow waits, with weights and buffers as they were."""
    torch.manual_seed(0)
    x, y = torch.randn(12, 3).double(), torch.randn(12, 1).double()
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    folds = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2, 0, 1, 2])
    with runs.FoldStopping(
        model, optimizer, F.mse_loss, (x, y), folds=folds, patience=None, engine=engine
    ) as stopping:
        before = [stopping.backend.weights_of(k) for k in range(3)]
        before = [{n: t.clone() for n, t in each.items()} for each in before]
        index = torch.tensor([0, 1, 2, 3])  # the first shadow may see the last row only
        F.mse_loss(model(x[index]), y[index]).backward()
        optimizer.step()
        stopping.step(indices=index)
        moved = [
            any(not torch.equal(t, then[n]) for n, t in stopping.backend.weights_of(k).items())
            for k, then in enumerate(before)
        ]
        assert moved == [False, True, True]


@pytest.mark.parametrize("frozen", [False, True])
def test_one_row_is_enough_where_a_batch_normalisation_takes_it(frozen: bool) -> None:
    """An image has many values in a channel, and a frozen one takes no statistics."""
    torch.manual_seed(0)
    x = torch.randn(10, 1, 4, 4).double()
    y = 3 * x.flatten(1)[:, :1]
    norm = nn.BatchNorm1d(16) if frozen else nn.BatchNorm2d(1)
    model = nn.Sequential(
        *((nn.Flatten(), norm) if frozen else (norm, nn.Flatten())), nn.Linear(16, 1)
    ).double()
    if frozen:
        norm.eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    folds = torch.arange(10) % 2
    with runs.FoldStopping(
        model, optimizer, F.mse_loss, (x, y), folds=folds, engine="replay", patience=None
    ) as stopping:
        before = [stopping.backend.weights_of(k)["2.weight"].clone() for k in range(2)]
        index = torch.tensor([0, 1])  # each shadow may see one of them
        F.mse_loss(model(x[index]), y[index]).backward()
        optimizer.step()
        stopping.step(indices=index)
        for k in range(2):
            assert not torch.equal(stopping.backend.weights_of(k)["2.weight"], before[k])
