"""When training ends, and which check is the best: decisions on curves."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import heldin
from heldin.rules import policy
from heldin.rules import policy as _curves
from heldin.rules.policy import (
    Patience,
    best_check,
    matched_checks,
    next_check,
    worse_beyond_doubt,
)

PATIENCE = Patience(2.0, 200, 3, errors=2.0)


OLD = Patience(2.0, 200, 3)


DEFAULT = policy.PATIENCE


def run(curve: Any, noise: float, patience: Patience, epoch: int = 4, seed: int = 0) -> int:
    """Return the step at which a run with a mean curve (a function of the step) would stop."""
    generator = torch.Generator().manual_seed(seed)
    level = 3 * torch.rand(60, generator=generator, dtype=torch.float64)
    curves: list[Tensor] = []
    steps = [0]
    while steps[-1] < 20_000:
        step = steps[-1]
        jitter = noise * torch.randn(60, generator=generator, dtype=torch.float64)
        curves.append(level + curve(step) + jitter)
        best = best_check(torch.stack([c.mean() for c in curves]))
        if patience.stops(steps, best, torch.stack(curves, 1), step / epoch):
            return step
        steps.append(next_check(step, 1.2))
    return steps[-1]


def u_shape(best: float, rise: float) -> Any:
    def curve(step: int) -> float:
        return rise * abs(torch.log(torch.tensor((step + 1) / best)).item())

    return curve


def test_a_clear_rise_ends_the_run_soon_after_twice_the_best_step() -> None:
    stop = run(u_shape(40, 1.0), 0.05, PATIENCE)
    assert 80 <= stop <= 110
    assert run(u_shape(40, 1.0), 0.05, OLD) >= 270


def test_a_flat_curve_waits_for_the_slack() -> None:
    """Noise alone makes no rise beyond doubt, except by chance: the best check was chosen."""
    stops = [run(lambda step: -0.02 * (step > 10), 0.3, PATIENCE, seed=seed) for seed in range(20)]
    assert sum(stop >= 200 for stop in stops) >= 17


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("rise", [0.0, 0.1, 1.0])
def test_never_later_than_without(rise: float, seed: int) -> None:
    curve = u_shape(30, rise)
    old = run(curve, 0.2, OLD, seed=seed)
    assert run(curve, 0.2, PATIENCE, seed=seed) <= old
    assert run(curve, 0.2, DEFAULT, seed=seed) <= old


def test_a_fall_within_its_noise_does_not_keep_a_run_alive() -> None:
    """The curve falls for ever by next to nothing, as it can with a temperature of its own."""

    def curve(step: int) -> float:
        return max(0.0, 1 - step / 100) - 1e-4 * torch.log1p(torch.tensor(float(step))).item()

    for seed in range(10):
        assert run(curve, 0.01, DEFAULT, seed=seed) < 600
    assert run(curve, 1e-6, DEFAULT) == run(curve, 1e-6, OLD) > 10_000  # beyond its noise


def test_patience_counts_from_the_first_check_that_is_as_good() -> None:
    generator = torch.Generator().manual_seed(0)
    curves = torch.randn(50, 1, generator=generator) + 0.1 * torch.randn(50, 6, generator=generator)
    curves = curves - curves.mean(0) + torch.tensor([1.0, 0.5, 0.004, 0.003, 0.0, 0.2])
    assert DEFAULT.reference(4, curves) == 2
    assert OLD.reference(4, curves) == DEFAULT.reference(4, None) == 4
    curves[:, 1] = torch.nan
    assert DEFAULT.reference(4, curves) == 2


@pytest.mark.parametrize("dip", [1, 2, 3])
def test_a_transient_at_the_start_does_not_end_the_run(dip: int) -> None:
    """Worse beyond doubt after a dip at steps 1 to 3; the real descent begins at step 60."""

    def curve(step: int) -> float:
        if step < 60:
            return 0.5 if step != dip else 0.0
        return -2 * min(1.0, (step - 60) / 100) + 2 * max(0.0, (step - 160) / 300)

    assert run(curve, 0.01, PATIENCE, epoch=1) > 160
    assert run(curve, 0.01, DEFAULT, epoch=1) > 160


def test_no_stop_in_the_first_epochs() -> None:
    """The best check lies in the first epoch, or fewer than four epochs have passed."""
    falling = torch.linspace(0, 1, 6, dtype=torch.float64).expand(30, 6)
    late = falling + 0.01 * torch.randn(30, 6, generator=torch.Generator().manual_seed(0)).double()
    assert PATIENCE.beyond_doubt(100, 40, late, epochs=4.0)
    assert not PATIENCE.beyond_doubt(100, 40, late, epochs=3.9)
    assert not PATIENCE.beyond_doubt(100, 12, late, epochs=8.0)  # step 12 is in the first epoch
    assert not PATIENCE.beyond_doubt(79, 40, late, epochs=8.0)  # not twice the best step
    assert not PATIENCE.beyond_doubt(100, 40, late[:, :3], epochs=8.0)  # two checks only
    assert not OLD.beyond_doubt(100, 40, late, epochs=8.0)


def test_both_of_the_last_checks_must_be_worse() -> None:
    curves = torch.tensor([[1.0, 2.0, 2.0, 2.0]] * 5).double()
    curves += 0.01 * torch.randn(5, 4, generator=torch.Generator().manual_seed(0)).double()
    assert worse_beyond_doubt(curves, 2.0)
    curves[:, -2] = curves[:, 0]
    assert not worse_beyond_doubt(curves, 2.0)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_losses_that_are_no_numbers_are_no_rise(bad: float) -> None:
    curves = torch.tensor([[1.0, 2.0, 2.0, bad]] * 5)
    assert not worse_beyond_doubt(curves, 2.0)


def problem() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 20, dtype=torch.float64, generator=generator)
    return x, x[:, :1] + torch.randn(60, 1, dtype=torch.float64, generator=generator)


def started(patience: Any) -> tuple[Any, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    x, y = problem()
    model = nn.Linear(20, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    stopping: Any = heldin.EarlyStopping(
        model, optimizer, nn.MSELoss(), (x, y), "folds", patience=patience
    )
    return stopping, model, optimizer


def trained(patience: Any, steps: int) -> Any:
    stopping, model, optimizer = started(patience)
    go_on(stopping, model, optimizer, steps)
    return stopping


def go_on(stopping: Any, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    x, y = problem()
    for _ in range(steps):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        if stopping.should_stop:
            break


def test_reason_says_when_the_run_ends_at_the_latest() -> None:
    stopping = trained(OLD, 150)
    limit = re.search(r"stops by step (\d+)", stopping.reason)
    assert limit is not None
    best = stopping.best_step
    stopping.close()
    stopping = trained(OLD, 2000)
    assert stopping.best_step == best  # so that the stop is where it was announced
    assert stopping.stopped_step == int(limit[1]) >= 2 * best + 200
    assert "stops by" not in stopping.reason
    stopping.close()


def test_a_run_ends_before_its_slack() -> None:
    early, late = trained(Patience(2.0, 200, 3, errors=0.1), 2000), trained(OLD, 2000)
    assert 2 * early.best_step <= early.stopped_step < 2 * early.best_step + 200
    assert early.stopped_step < late.stopped_step
    early.close()
    late.close()


class Noisy(nn.Module):
    """A model that learns nothing more: its weights leave the best ones at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :1] + self.shift


EPOCH_RULES: dict[str, Any] = {
    "stacked": heldin.rules.Folds(folds=3),
    "replay": heldin.rules.Folds(folds=3, engine="replay"),
    "one shadow": "shadow",
    "leave-one-out": "leave-one-out",
}


@pytest.mark.parametrize("names_epochs", [True, False])
@pytest.mark.parametrize("rule", EPOCH_RULES)
@pytest.mark.parametrize("patience", [1, 5])
def test_a_whole_number_is_a_number_of_epochs(patience: int, rule: str, names_epochs: bool) -> None:
    """Long after the start, where checks of the grid are 12 epochs apart."""
    epoch, turn = 4, 240  # steps; the loop moves away from the optimum after the turn
    x = torch.randn(40, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = x[:, :1] + 1
    model = Noisy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    stopping = heldin.EarlyStopping(
        model, optimizer, nn.MSELoss(), (x, y), EPOCH_RULES[rule], patience=patience
    )
    steps, limits = 0, {}

    def one_epoch() -> None:
        nonlocal steps
        for rows in torch.arange(40).split(40 // epoch):
            if stopping.should_stop:
                return
            steps += 1
            optimizer.param_groups[0]["lr"] = 0.001 if steps <= turn else -0.001
            optimizer.zero_grad()
            F.mse_loss(model(x[rows]), y[rows]).backward()
            optimizer.step()
            limits[steps] = re.search(r"stops by step (\d+)", stopping.reason)

    if names_epochs:
        for _ in stopping.epochs(1000):
            one_epoch()
    else:
        with stopping:
            while not stopping.should_stop and steps < 4000:
                one_epoch()
    best, stop = stopping.best_step, stopping.stopped_step
    assert best is not None
    assert stop is not None
    assert turn - 2 * epoch <= best <= turn + 2 * epoch
    assert stop == best + patience * epoch
    limit = limits[stop - 1]
    assert limit is not None
    assert int(limit[1]) == stop


def test_epochs_of_a_validation_set_with_checks_in_steps() -> None:
    x = torch.randn(40, 2, dtype=torch.float64)
    rows = torch.utils.data.TensorDataset(x, x[:, :1] + 1)
    loader = torch.utils.data.DataLoader(rows, 10)
    model = Noisy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    optimizer.param_groups[0]["lr"] = -0.001
    rule = heldin.rules.Validation(data=loader, check_every=2)
    options: Any = {"rule": rule, "patience": 3}
    stopping = heldin.EarlyStopping(model, optimizer, nn.MSELoss(), loader, **options)
    steps = 0
    for _ in stopping.epochs(100):
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            steps += 1
            if stopping.should_stop:
                break
    assert steps == 2 + 3 * 4  # the first check is the best one
    with pytest.raises(heldin.HeldinError, match=r"check_every.*needs the DataLoader"):
        heldin.EarlyStopping(model, optimizer, nn.MSELoss(), **options)


def test_a_resumed_run_keeps_its_patience_in_epochs() -> None:
    stops = []
    for resumed in (False, True):
        stopping, model, optimizer = started(3)
        go_on(stopping, model, optimizer, 37)
        if resumed:
            state = stopping.state_dict()
            stopping.close()
            model.zero_grad()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            x, y = problem()
            stopping = heldin.EarlyStopping(
                model, optimizer, nn.MSELoss(), (x, y), "folds", patience=3
            )
            stopping.load_state_dict(state)
        go_on(stopping, model, optimizer, 2000)
        stops.append((stopping.stopped_step, stopping.best_step))
        stopping.close()
    assert stops[0] == stops[1]
    assert stops[0][0] == stops[0][1] + 3


def test_the_kept_step_is_the_middle_of_step_and_training_loss() -> None:
    steps = [2**i - 1 for i in range(9)]
    # The shadows are two checks behind the model.
    model = [2.0**-i for i in range(9)]
    shadows = [1.0, 1.0, *model[:-2]]
    matched = matched_checks(steps, list(zip(shadows, model, strict=True)), range(9))
    assert matched == [0, 0, 1, 2, 3, 4, 5, 6, 7]
    # Only some weights are there: the nearest one is taken.
    matched = matched_checks(steps, list(zip(shadows, model, strict=True)), [0, 5, 8])
    assert matched == [0, 0, 0, 0, 5, 5, 5, 5, 8]


def test_a_loss_that_the_model_never_reaches_counts_as_the_last_check() -> None:
    steps = [0, 1, 3, 7, 15]
    levels = [(1.0, 1.0), (0.1, 0.9), (0.1, 0.8), (0.1, 0.7), (0.1, 0.6)]
    assert matched_checks(steps, levels, range(5)) == [0, 2, 3, 3, 4]


def test_losses_that_are_no_numbers_are_survived() -> None:
    steps = [0, 1, 3, 7]
    levels = [(1.0, 1.0), (math.nan, 0.5), (0.0, math.inf), (math.inf, 0.0)]
    assert all(check in range(4) for check in matched_checks(steps, levels, range(4)))


def test_votes_follow_the_bootstrap() -> None:
    generator = torch.Generator().manual_seed(0)
    curves = torch.randn(20, 6, generator=generator, dtype=torch.float64)
    found = _curves.bootstrap_shares(curves, resamples=50, seed=3)
    draws = torch.randint(20, (50, 20), generator=torch.Generator().manual_seed(3))
    expected = torch.zeros(6, dtype=torch.float64)
    for draw in draws:
        expected[curves[draw].mean(0).argmin()] += 1 / 50
    torch.testing.assert_close(found, expected)
    fewer = _curves.bootstrap_shares(
        curves, 50, 3, held_per_trained=1.5
    )  # 20 / 2.5 rows in each draw
    expected = torch.zeros(6, dtype=torch.float64)
    for draw in torch.randint(20, (50, 8), generator=torch.Generator().manual_seed(3)):
        expected[curves[draw].mean(0).argmin()] += 1 / 50
    torch.testing.assert_close(fewer, expected)
    curves[3, 2] = math.inf
    curves[4, 1] = math.nan
    again = _curves.bootstrap_shares(curves, 50, 3)
    assert again[1] == again[2] == 0
    assert math.isclose(float(again.sum()), 1)
    assert _curves.bootstrap_shares(torch.full((3, 2), math.nan)).tolist() == [1, 0]


def test_the_standard_error_is_that_of_the_held_out_rows_and_of_the_training_rows() -> None:
    losses = torch.tensor([0.5, 1.0, 4.0, 0.5, 1.5], dtype=torch.float64)
    middle, error = _curves.mean_and_error(losses, held_per_trained=1.25)
    assert middle == 1.5
    squares = [1.0, 0.25, 6.25, 1.0, 0.0]  # the largest loss counts twice, m - 3 = 2
    assert math.isclose(error, math.sqrt((sum(squares) + 6.25) / 2 * (1 / 5 + 1.25 / 5 / 2)))
    assert math.isnan(_curves.mean_and_error(losses[:1])[1])
    assert _curves.mean_and_error(torch.ones(2))[1] == 0.0


def test_patience_needs_time_and_checks() -> None:
    rule = heldin.Patience(2.0, 0, 3)
    assert not rule.is_exhausted(step=10, best=5, since=2)
    assert rule.is_exhausted(step=10, best=5, since=3)
    assert not rule.is_exhausted(step=9, best=5, since=9)
