"""Intervals for means and metrics over held-out rows."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from heldin.crossval import Estimates, Interval, mean_interval, statistic_interval
from heldin.crossval import intervals as module
from heldin.crossval.intervals import resampled_rows, row_groups, studentised_ends
from heldin.errors import HeldinError


def long_tail(rows: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, generator=generator, dtype=torch.float64).exp()


def accuracy(outputs: Tensor, targets: Tensor) -> float:
    return float((outputs == targets).double().mean())


def ends(interval: Interval) -> tuple[float, float]:
    return interval.low, interval.high


@pytest.mark.parametrize(
    ("interval", "text"),
    [
        (Interval(0.484, 0.391, 0.574), "0.48 [0.39, 0.57]"),
        (Interval(12.34, 10.0, 15.0), "12.3 [10.0, 15.0]"),
        (Interval(0.00123, 0.00119, 0.00131), "0.00123 [0.00119, 0.00131]"),
        (Interval(12345.0, 11000.0, 15000.0), "1.23e+04 [1.1e+04, 1.5e+04]"),
        (Interval(0.48, math.nan, math.nan), "0.48"),
        (Interval(0.5, 0.5, 0.5), "0.50 [0.50, 0.50]"),
        (Interval(0.0763, 0.044, 0.217), "0.076 [0.044, 0.217]"),
        (Interval(0.5, 0.1, math.inf), "0.5 [0.1, inf]"),
    ],
)
def test_text(interval: Interval, text: str) -> None:
    assert str(interval) == text


def test_an_interval_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        Interval(0.5, 0.4, 0.6).low = 0.1  # type: ignore[misc]


def test_widened() -> None:
    interval = Interval(0.5, 0.4, 0.8, coverage=0.9)
    assert interval.widened(1) == Interval(0.5, pytest.approx(0.4), pytest.approx(0.8), 0.9)  # type: ignore[arg-type]
    wide = interval.widened(2, 0.3)
    assert ends(wide) == pytest.approx((0.5 - math.hypot(0.2, 0.3), 0.5 + math.hypot(0.6, 0.3)))
    assert math.isnan(Interval(0.5, math.nan, math.nan).widened(2).low)


# -- the mean


def plain_bootstrap_t(losses: list[float], seed: int) -> tuple[float, float]:
    """A slow twin: one resampling after the other, with the formulas of the textbook."""
    n = len(losses)
    mean = sum(losses) / n
    error = math.sqrt(sum((x - mean) ** 2 for x in losses) / (n - 1) / n)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(n, (999, n), generator=generator)
    ratios = []
    for rows in drawn.tolist():
        values = [losses[i] for i in rows]
        middle = sum(values) / n
        spread = math.sqrt(sum((x - middle) ** 2 for x in values) / (n - 1) / n)
        ratios.append((middle - mean) / spread)
    ratios.sort()
    return mean - ratios[974] * error, mean - ratios[24] * error


def test_the_plain_bootstrap_t_is_that_of_the_textbook() -> None:
    losses = long_tail(20)
    mean = losses.mean()
    low, high = studentised_ends(
        (losses - mean)[None], torch.ones(1, 20, dtype=torch.float64), reach=0, floor=0, seed=3
    )
    expected = plain_bootstrap_t(losses.tolist(), seed=3)
    assert (float(mean + low), float(mean + high)) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("rows", [2_000, 50_000])
def test_many_rows(rows: int) -> None:
    """Resamplings are drawn a part at a time; more than 2,000 rows are merged into blocks."""
    losses = long_tail(rows)
    interval = mean_interval(losses)
    normal_width = 3.92 * float(losses.std()) / math.sqrt(rows)
    assert 0.9 < (interval.high - interval.low) / normal_width < 1.3
    assert interval.value == pytest.approx(float(losses.mean()), rel=1e-12)


def test_blocks_do_not_follow_the_order_of_the_rows() -> None:
    """Every 2,000th row is the same: blocks of these would have the spread of single rows."""
    losses = long_tail(2_000).repeat(5)
    interval = mean_interval(losses)
    normal_width = 3.92 * float(losses.std()) / math.sqrt(10_000)
    assert 0.9 < (interval.high - interval.low) / normal_width < 1.3


@pytest.mark.parametrize("rows", [5, 20, 200])
def test_the_interval_moves_and_scales_with_the_losses(rows: int) -> None:
    losses = long_tail(rows)
    first, second = mean_interval(losses), mean_interval(3 * losses - 7)
    assert (second.value, *ends(second)) == pytest.approx(
        (3 * first.value - 7, 3 * first.low - 7, 3 * first.high - 7), rel=1e-9
    )
    assert first.low < first.value < first.high
    assert first.coverage is None


def test_a_higher_level_is_wider() -> None:
    losses = long_tail(30)
    widths = [i.high - i.low for i in (mean_interval(losses, level=p) for p in (0.5, 0.8, 0.95))]
    assert widths == sorted(widths)
    assert widths[0] < widths[1] < widths[2]


def test_the_upper_end_is_further_away_for_a_long_tail() -> None:
    interval = mean_interval(long_tail(30))
    assert interval.high - interval.value > 1.5 * (interval.value - interval.low)


def test_the_order_of_the_rows_matters_little_and_the_seed_is_used() -> None:
    losses = long_tail(40)
    assert mean_interval(losses, seed=1) == mean_interval(losses, seed=1)
    assert mean_interval(losses, seed=1) != mean_interval(losses, seed=2)
    assert mean_interval(losses.flip(0)).high == pytest.approx(mean_interval(losses).high, rel=0.2)


def test_any_type_and_a_graph() -> None:
    losses = long_tail(20).float().requires_grad_()
    assert mean_interval(losses) == mean_interval(losses.detach().double())


def test_rows_of_weight_zero_do_not_count() -> None:
    losses = long_tail(30)
    weights = torch.cat([torch.ones(20), torch.zeros(10)])
    assert mean_interval(losses, weights) == mean_interval(losses[:20])
    scaled, plain = mean_interval(losses, 5 * torch.ones(30)), mean_interval(losses)
    assert ends(scaled) == pytest.approx(ends(plain), rel=1e-9)


def test_a_row_of_a_large_weight_counts_more() -> None:
    losses = long_tail(30)
    weights = torch.ones(30).double()
    weights[losses.argmax()] = 5
    weighted = mean_interval(losses, weights)
    assert weighted.value == pytest.approx(float((weights * losses).sum() / weights.sum()))
    plain = mean_interval(losses)
    assert weighted.high - weighted.low > plain.high - plain.low


def test_groups_of_equal_rows_are_as_good_as_one_row_each() -> None:
    losses = long_tail(20)
    groups = torch.arange(20).repeat_interleave(4)
    grouped = mean_interval(losses.repeat_interleave(4), groups=groups)
    single = mean_interval(losses)
    assert (grouped.value, *ends(grouped)) == pytest.approx((single.value, *ends(single)))
    as_rows = mean_interval(losses.repeat_interleave(4))
    assert as_rows.high - as_rows.low < 0.7 * (grouped.high - grouped.low)


def test_groups_by_names() -> None:
    losses = long_tail(20)
    numbers = torch.arange(20) // 2
    names = [f"patient {i}" for i in numbers.tolist()]
    assert mean_interval(losses, groups=names) == mean_interval(losses, groups=numbers)


@pytest.mark.parametrize(
    "losses",
    [
        torch.ones(20),  # nothing differs
        torch.tensor([1.0, 2.0, 3.0, 4.0]),  # too few
        torch.cat([torch.ones(19), torch.tensor([torch.inf])]),
        torch.cat([torch.ones(19), torch.tensor([torch.nan])]),
    ],
)
def test_no_interval(losses: Tensor) -> None:
    interval = mean_interval(losses)
    assert all(math.isnan(end) for end in ends(interval))
    assert interval.value == float(losses.mean()) or math.isnan(interval.value)


def test_no_interval_where_all_groups_have_the_same_mean() -> None:
    losses, groups = torch.tensor([1.0, 3.0] * 10), torch.arange(20) // 2
    assert str(mean_interval(losses, groups=groups)) == "2"


def test_a_single_large_loss_gives_finite_ends() -> None:
    """Most resamplings without it have no spread."""
    losses = torch.zeros(20)
    losses[3] = 1
    interval = mean_interval(losses)
    assert 0.2 < interval.high < 0.8
    assert interval.low == 0  # the smallest loss


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"row_losses": torch.ones(3, 2)}, "shape \\(3, 2\\)"),
        ({"row_losses": torch.ones(0)}, "at least one row"),
        ({"row_losses": [1.0, 2.0]}, "got \\[1.0, 2.0\\]"),
        ({"weights": torch.ones(3)}, "weights has shape \\(3,\\)"),
        ({"weights": -torch.ones(8)}, "not negative"),
        ({"weights": torch.zeros(8)}, "not all of them 0"),
        ({"weights": torch.full((8,), torch.nan)}, "finite"),
        ({"groups": [1, 2]}, "groups has 2 entries, but there are 8 rows"),
        ({"level": 95}, "level must lie between 0 and 1, got 95"),
    ],
)
def test_mistakes_in_means(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(HeldinError, match=message):
        mean_interval(**{"row_losses": torch.rand(8), **arguments})


def test_coverage_on_long_tails() -> None:
    """Twenty lognormal losses: within two plain standard errors in 82 %, here in about 95 %."""
    samples = torch.stack([long_tail(20, seed) for seed in range(300)])
    truth = math.exp(0.5)
    held = [i.low <= truth <= i.high for i in map(mean_interval, samples)]
    assert 0.91 < sum(held) / 300 < 0.99


# -- resampled rows


def test_whole_groups_are_drawn() -> None:
    groups = row_groups(["a", "b", "a", "c", "b"], 5)
    assert groups.tolist() == [0, 1, 0, 2, 1]
    for rows in resampled_rows(groups, 50, seed=0):
        counts = torch.bincount(rows, minlength=5).tolist()
        assert counts[0] == counts[2]
        assert counts[1] == counts[4]
        assert counts[0] + counts[1] + counts[3] == 3


def test_single_rows_are_drawn_uniformly() -> None:
    counts = torch.zeros(10)
    for rows in resampled_rows(row_groups(None, 10), 2000, seed=0):
        counts += torch.bincount(rows, minlength=10)
    assert float((counts / 2000 - 1).abs().max()) < 0.1


# -- any metric


def test_percentiles_of_a_metric_agree_with_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    outputs, targets = long_tail(200, 1), long_tail(200, 2)

    def difference(outputs: Tensor, targets: Tensor) -> float:
        return float((outputs - targets).mean())

    interval = statistic_interval(difference, outputs, targets, resamplings=1999)
    twin = stats.bootstrap(
        ((outputs - targets).numpy(),), lambda x, axis: x.mean(axis), method="BCa", rng=0
    ).confidence_interval
    width = twin.high - twin.low
    assert interval.low == pytest.approx(twin.low, abs=0.1 * width)
    assert interval.high == pytest.approx(twin.high, abs=0.1 * width)


def test_students_quantile_agrees_with_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    for freedom in (4, 10, 19, 199):
        expected = stats.t.ppf(0.975, freedom)
        assert module._student(stats.norm.ppf(0.975), freedom) == pytest.approx(expected, rel=0.02)


def test_groups_make_a_metric_less_certain() -> None:
    generator = torch.Generator().manual_seed(0)
    right = torch.randint(2, (20,), generator=generator).repeat_interleave(5)
    ones, groups = torch.ones(100, dtype=torch.long), torch.arange(100) // 5
    single = statistic_interval(accuracy, right, ones)
    grouped = statistic_interval(accuracy, right, ones, groups)
    assert single.value == grouped.value
    assert grouped.high - grouped.low > 1.5 * (single.high - single.low)


@pytest.mark.parametrize("error", [ValueError, ZeroDivisionError, RuntimeError, HeldinError, None])
def test_resamplings_without_a_value_are_left_out(error: type[Exception] | None) -> None:
    """A precision is undefined without positive targets: in one of seven resamplings."""
    targets = torch.tensor([1, 1] + [0] * 28)
    outputs = torch.linspace(1, 0, 30, dtype=torch.float64)
    outputs[4] = 2.0

    def rank(outputs: Tensor, targets: Tensor) -> float:
        if targets.sum() == 0:
            if error is not None:
                raise error("one class")
            return math.nan
        return float((outputs[targets == 1][:, None] > outputs[targets == 0]).double().mean())

    interval = statistic_interval(rank, outputs, targets)
    assert interval.value == pytest.approx(54 / 56)
    assert 0.5 < interval.low < interval.value < interval.high <= 1
    too_few = torch.tensor([1] + [0] * 29)  # undefined in one of three
    interval = statistic_interval(rank, outputs, too_few)
    assert interval.value == pytest.approx(28 / 29)
    assert all(math.isnan(end) for end in ends(interval))


def test_other_errors_of_a_metric_are_raised() -> None:
    def broken(outputs: Tensor, targets: Tensor) -> float:
        raise KeyError("x")

    with pytest.raises(KeyError):
        statistic_interval(broken, torch.ones(8), torch.ones(8))


def test_no_interval_for_a_metric() -> None:
    ones = torch.ones(20)
    assert str(statistic_interval(accuracy, ones, ones)) == "1"  # 1 in every resampling
    assert str(statistic_interval(accuracy, ones[:4], torch.arange(4.0))) == "0.25"  # too few
    value = statistic_interval(lambda outputs, targets: math.nan, ones, ones)
    assert math.isnan(value.value)


def test_the_value_lies_within() -> None:
    """Also for a metric whose resampled values are all on one side: the largest output."""
    outputs = torch.arange(20.0)
    interval = statistic_interval(lambda outputs, targets: float(outputs.max()), outputs, outputs)
    assert interval.low <= interval.value == interval.high == 19


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"targets": torch.ones(7)}, "8 outputs, but 7 targets"),
        ({"groups": [1]}, "groups has 1 entries"),
        ({"level": 0}, "level"),
        ({"resamplings": 0}, "resamplings must be a whole number >= 1"),
    ],
)
def test_mistakes_in_metrics(arguments: dict[str, Any], message: str) -> None:
    defaults = {"function": accuracy, "outputs": torch.ones(8), "targets": torch.ones(8)}
    with pytest.raises(HeldinError, match=message):
        statistic_interval(**{**defaults, **arguments})


def test_a_perfect_score_has_an_interval() -> None:
    targets = torch.arange(50) % 2
    interval = statistic_interval(accuracy, targets, targets)
    assert [*interval] == pytest.approx([1.0, 1 - 4 / 50, 1.0])  # the rule of three
    wrong = statistic_interval(lambda o, t: 1 - accuracy(o, t), targets, targets)
    assert [*wrong] == pytest.approx([0.0, 0.0, 4 / 50])
    grouped = statistic_interval(accuracy, targets, targets, groups=torch.arange(50) // 5)
    assert grouped.low == pytest.approx(0.6)  # four groups of ten
    alike = torch.ones(50)
    assert math.isnan(statistic_interval(accuracy, alike, alike).low)  # no row could be of another


def test_rows_with_weights_are_drawn_with_them() -> None:
    outputs, targets = torch.arange(60) % 3, torch.arange(60) % 2
    weights = (torch.arange(60) < 30).double()

    def weighted(outputs: Tensor, targets: Tensor, weights: Tensor) -> float:
        return float(((outputs == targets) * weights).sum() / weights.sum())

    interval = statistic_interval(weighted, outputs, targets, weights=weights)
    assert interval.value == pytest.approx(float((outputs == targets)[:30].double().mean()))
    assert interval.low < interval.value < interval.high


def test_intervals_are_computed_when_asked_for() -> None:
    asked: list[str] = []

    def interval(name: str) -> Interval:
        asked.append(name)
        return Interval(1.0, 0.5, 1.5)

    estimates = Estimates({name: partial(interval, name) for name in ("loss", "f1")})
    assert "f1" in estimates
    assert [*estimates] == ["loss", "f1"]
    assert "accuracy" not in estimates
    assert not asked
    assert estimates["loss"] == estimates["loss"] == Interval(1.0, 0.5, 1.5)
    assert asked == ["loss"]
    assert estimates == dict(estimates)
    assert repr(estimates) == repr(dict(estimates))
    value, low, high = estimates["f1"]
    assert (value, low, high) == (1.0, 0.5, 1.5)
