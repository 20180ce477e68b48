"""EvidenceStopping: its values, its decision, faults, and what it leaves behind."""

from __future__ import annotations

import copy
import gc
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import heldin
from heldin._private_torch import forward_hooks
from heldin.criterion.average import Average, weight
from tests.support import runs
from tests.support.loops import Dial, data, net, slow_groups, watch

PLAIN_BACKWARD = torch.autograd.backward


@pytest.fixture(autouse=True)
def _nothing_left() -> Any:
    torch.manual_seed(0)
    yield
    if torch.autograd.backward is not PLAIN_BACKWARD:
        gc.collect()  # what was forgotten removes itself
    assert torch.autograd.backward is PLAIN_BACKWARD


def test_without_smoothing_the_value_is_equation_5() -> None:
    model, (x, y) = net(), data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with runs.EvidenceStopping(model, smoothing=0, across="mean") as stopping:
        for i in range(0, 64, 16):
            batch = x[i : i + 16], y[i : i + 16]
            expected = slow_groups(copy.deepcopy(model), [batch])
            F.cross_entropy(model(batch[0]), batch[1]).backward()
            stopping.step()
            assert stopping.evidence.groups == pytest.approx(expected, rel=1e-9)
            assert stopping.criterion == stopping.evidence.criterion
            assert stopping.criterion == pytest.approx(sum(expected.values()) / 4, rel=1e-9)
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("groups", ["tensor", {"0.weight": "a", "0.bias": "a"}])
def test_the_value_is_the_median_of_the_groups(groups: Any) -> None:
    """The paper's rule, and `heldin.evidence`, take their mean."""
    model, (x, y) = net(), data()
    if isinstance(groups, dict):
        groups = {name: groups.get(name, name) for name, _ in model.named_parameters()}
    found = []
    for made in (runs.EvidenceStopping, runs.EvidenceStopping.paper):
        with made(model, groups, smoothing=0.0) as stopping:
            F.cross_entropy(model(x), y).backward()
            stopping.step()
        values = sorted(stopping.evidence.groups.values())
        assert len(values) == (4 if groups == "tensor" else 3)
        middle = values[1] if len(values) == 3 else (values[1] + values[2]) / 2
        expected = (
            middle if stopping.rule.group_reduction == "median" else sum(values) / len(values)
        )
        assert stopping.criterion == pytest.approx(expected, rel=1e-12)
        found.append(stopping.criterion)
    assert found[0] != pytest.approx(found[1], rel=0.1)
    with heldin.observe(model) as seen:
        F.cross_entropy(model(x), y).backward()
    assert heldin.evidence(seen, groups, across="median").criterion == pytest.approx(found[0])
    assert heldin.evidence(seen, groups).criterion == pytest.approx(found[1])


def test_an_unknown_centre_is_refused() -> None:
    with pytest.raises(heldin.HeldinError, match=r"group_reduction must be one of .*'mode'"):
        runs.EvidenceStopping(net(), across="mode")
    with pytest.raises(heldin.HeldinError, match="across"):
        heldin.evidence({}, across="mode")  # type: ignore[arg-type]


def test_accumulated_micro_batches_are_one_step_of_equation_10() -> None:
    model, (x, y) = net(), data(60)
    expected = slow_groups(model, [(x, y)])
    with runs.EvidenceStopping(model, smoothing=0) as stopping:
        for i in range(0, 60, 20):
            (F.cross_entropy(model(x[i : i + 20]), y[i : i + 20]) / 3).backward()
        stopping.step()
        assert stopping.evidence.groups == pytest.approx(expected, rel=1e-9)
        assert stopping.evidence.count == 60


def test_steps_of_several_passes_after_steps_of_one() -> None:
    """Exact evidence of a large layer: all passes since the last step count."""
    model, x = nn.Linear(1200, 1000).double(), torch.randn(32, 1200, dtype=torch.float64)
    with runs.EvidenceStopping(model, estimator="exact") as stopping:
        found = []
        for passes in (2, 1, 2, 1, 1, 1, 4, 4, 1):
            for part in x.chunk(passes):
                model(part).square().sum().backward()
            stopping.step()
            found.append(stopping.evidence.criterion)
    assert max(found) - min(found) < 1e-9


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_window_pools_the_samples_of_its_steps(reduction: Any) -> None:
    model, (x, y) = net(), data(44)
    batches = [(x[i : i + 20], y[i : i + 20]) for i in (0, 20, 40)]  # the last one has four
    expected = slow_groups(model, batches)
    with runs.EvidenceStopping(model, smoothing=0, window=3, reduction=reduction) as stopping:
        for i, (a, b) in enumerate(batches):
            assert len(stopping.history) == 0
            scale = 2.0**i
            (F.cross_entropy(model(a), b, reduction=reduction) * scale).backward()
            stopping.step(scale=scale)
        assert stopping.evidence.count == 44
        assert stopping.evidence.groups == pytest.approx(expected, rel=1e-9)
        assert stopping.history[0].step == 3


def test_a_window_counts_samples_that_did_not_touch_a_parameter() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 1), "b": nn.Linear(2, 1)}).double()
    holder = nn.Module()
    holder.parts = model
    holder.forward = lambda x, part: model[part](x)
    x = torch.randn(6, 2).double()
    with runs.EvidenceStopping(holder, smoothing=0, window=2) as stopping:
        for part in ("a", "b"):
            holder(x, part).square().sum().backward()
            stopping.step()
    for part in ("a", "b"):
        c = 2 * model[part](x).detach() * x
        padded = torch.cat([c, torch.zeros_like(c)])
        f = 12 * padded.mean(0) ** 2 / padded.var(0)
        group = f"parts.{part}.weight"
        assert stopping.evidence.groups[group] == pytest.approx(float(1 - f.mean()), rel=1e-9)


@settings(deadline=None, max_examples=40)
@given(
    st.floats(0, 0.999),
    st.lists(st.tuples(st.floats(-1e3, 1), st.integers(2, 300)), min_size=1, max_size=20),
)
def test_the_average_is_the_weighted_mean_it_says(b: float, rows: list[tuple[float, int]]) -> None:
    average = Average(b)
    for n in range(1, len(rows) + 1):
        average.add(rows[n - 1][0], weight(rows[n - 1][1], None))
        ages = [b ** (n - 1 - i) * weight(rows[i][1], None) for i in range(n)]
        expected = sum(w * rows[i][0] for i, w in enumerate(ages)) / sum(ages)
        assert average.value == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_with_equal_batches_the_average_is_bias_corrected() -> None:
    dial, values = Dial(), [-3.0, -1.0, 0.5, -2.0]
    with runs.EvidenceStopping(dial, smoothing=0.8) as stopping:
        plain = 0.0
        for t, value in enumerate(values, 1):
            dial.show(value)
            stopping.step()
            plain = 0.8 * plain + 0.2 * value
            assert stopping.criterion == pytest.approx(plain / (1 - 0.8**t))


def test_a_small_batch_counts_by_its_size() -> None:
    def last(times: int, **options: Any) -> float:
        dial = Dial()
        with runs.EvidenceStopping(dial, smoothing=0.5, **options) as stopping:
            dial.show(-1.0, times=60)
            stopping.step()
            dial.show(0.5, times=times)
            stopping.step()
            return stopping.criterion

    assert last(60) == pytest.approx((0.5 * -1 + 0.5) / 1.5)
    ratio = weight(60, None) / weight(120, None)
    assert last(30) == pytest.approx((0.5 * -1 + ratio * 0.5) / (0.5 + ratio))
    assert last(2) == pytest.approx(-1.0)  # four samples: f has no variance
    assert last(2, weighted=False) == pytest.approx(last(60))
    assert last(30, correction="symmetric") > last(2, correction="symmetric") > -1.0


def test_stops_at_the_first_crossing_and_keeps_it() -> None:
    dial = Dial()
    stopping = runs.EvidenceStopping(dial, smoothing=0)
    flags = []
    for value in (-9.0, -1.0, 0.25, -9.0, 0.9):
        dial.show(value)
        flags.append(stopping.step())
    assert flags == [False, False, True, True, True]
    assert stopping.stopped_step == 3
    assert stopping.reason == "step 3: criterion 0.25 > 0, check 1 of 1"
    assert [r.step for r in stopping.history] == [1, 2, 3, 4, 5]
    stopping.close()


def test_patience_counts_consecutive_checks() -> None:
    values = [-9, 0.1, 0.1, -0.1, 0.1, 0.1, 0.1, 0.1]
    dial = Dial()
    assert watch(runs.EvidenceStopping(dial, smoothing=0, patience=3), dial, values) == 7


def test_a_check_without_a_value_neither_counts_nor_breaks_patience() -> None:
    values = [-9, 0.1, math.nan, 0.1]
    dial = Dial()
    assert watch(runs.EvidenceStopping(dial, smoothing=0, patience=2), dial, values) == 4


def test_warmup_is_in_steps() -> None:
    dial = Dial()
    values = [-9.0, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1]
    assert watch(runs.EvidenceStopping(dial, smoothing=0, warmup=4), dial, values) == 5
    stopping = runs.EvidenceStopping(dial, smoothing=0, warmup=5, every=2)
    assert watch(stopping, dial, [-9.0, *values]) == 6


def test_every_observes_every_so_many_steps_and_the_others_not_at_all() -> None:
    dial = Dial()
    with runs.EvidenceStopping(dial, smoothing=0, every=3) as stopping:
        for step in range(1, 10):
            observed = torch.autograd.backward is not PLAIN_BACKWARD
            assert observed == bool(forward_hooks(dial)) == (step % 3 == 0)
            dial.show(-float(step))
            stopping.step()
    assert [(r.step, round(r.raw, 9)) for r in stopping.history] == [(3, -3), (6, -6), (9, -9)]


def test_windows_of_every_so_many_steps() -> None:
    dial = Dial()
    with runs.EvidenceStopping(dial, smoothing=0, every=2, window=3) as stopping:
        for _ in range(12):
            dial.show(-1.0)
            stopping.step()
    assert [(r.step, r.count) for r in stopping.history] == [(6, 6), (12, 6)]


def test_no_stop_on_a_plateau_before_anything_was_seen() -> None:
    noise = torch.randn(400, generator=torch.Generator().manual_seed(1)).tolist()
    plateau = [-0.05 + 0.2 * z for z in noise]
    learning = [*plateau, -5.0, -20.0, -5.0, *[0.2] * 60]
    dial = Dial()
    assert watch(runs.EvidenceStopping.paper(dial), dial, plateau) is not None
    assert watch(runs.EvidenceStopping(dial), dial, plateau) is None
    stop = watch(runs.EvidenceStopping(dial), dial, learning)
    assert stop is not None
    assert stop > 403


def test_noise_that_was_fitted_stops_though_no_signal_was_seen() -> None:
    dial = Dial()
    stop = watch(runs.EvidenceStopping(dial), dial, [t / 100 for t in range(100)])
    assert stop is not None
    assert 50 < stop < 100


@pytest.mark.parametrize("dead", ["out", "zero"])
def test_dead_coordinates_do_not_stop(dead: Any) -> None:
    """One coordinate with f = 9 among nine that no sample touches."""
    model = nn.Linear(10, 1, bias=False)
    x = torch.zeros(2, 10)
    x[:, 0] = torch.tensor([1.0, 2.0])
    with runs.EvidenceStopping(model, smoothing=0, arming=None, dead=dead) as stopping:
        model(x).sum().backward()
        assert stopping.step() == (dead == "zero")
    assert stopping.criterion == pytest.approx(-8 if dead == "out" else 1 - 9 / 10, rel=1e-5)
    assert stopping.evidence.live == {"weight": 1}


def test_corrections() -> None:
    c = torch.randn(12, 6, dtype=torch.float64) + 0.3
    seen = {"w": heldin.Moments(c.sum(0), c.square().sum(0), 12)}
    f = 12 * c.mean(0) ** 2 / c.var(0)
    q = c.sum(0) ** 2 / c.square().sum(0)
    assert torch.allclose(q, f * 12 / (11 + f))
    gaussian = heldin.evidence(seen, correction="gaussian").criterion
    assert gaussian == pytest.approx(float(1 - f.mean() * 9 / 11))
    symmetric = heldin.evidence(seen, correction="symmetric").criterion
    assert symmetric == pytest.approx(float(1 - q.mean()))
    few = {"w": heldin.Moments(c[:3].sum(0), c[:3].square().sum(0), 3)}
    assert math.isnan(heldin.evidence(few, correction="gaussian").criterion)
    assert math.isfinite(heldin.evidence(few, correction="symmetric").criterion)


def test_the_papers_rule() -> None:
    values = [-3.0, -1.0, 0.4, 0.5, 0.6, 0.7, *[0.8] * 20]

    def by_hand(average: float) -> tuple[int, float]:
        for t, value in enumerate(values, 1):
            average = 0.5 * average + 0.5 * value
            if average > 0:
                return t, average
        raise AssertionError

    dial = Dial()
    for start in (0.0, -100.0):
        stopping = runs.EvidenceStopping.paper(dial, smoothing=0.5, start=start)
        step, average = by_hand(start)
        assert watch(stopping, dial, values) == step
        assert stopping.criterion == pytest.approx(average)
    assert by_hand(0.0)[0] < by_hand(-100.0)[0]
    corrected = runs.EvidenceStopping(dial, smoothing=0.5, arming=None)
    assert watch(corrected, dial, values) == by_hand(0.0)[0]
    later = runs.EvidenceStopping.paper(dial, smoothing=0.5, warmup=10)
    assert watch(later, dial, values) == 11


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("window", [1, 2])
def test_inf_and_nan_are_recorded_and_harmless(bad: float, window: int) -> None:
    def run(values: list[float]) -> runs.EvidenceStopping:
        dial = Dial()
        with runs.EvidenceStopping(dial, smoothing=0.5, window=window) as stopping:
            for value in values:
                if math.isfinite(value):
                    dial.show(value)
                else:
                    dial(torch.tensor([value, 1.0]).double()).sum().backward()
                assert not stopping.step()
        return stopping

    clean, spoilt = run([-5, -5, -2, -2]), run([-5, -5, bad, bad, -2, -2])
    assert clean.criterion == spoilt.criterion
    record = spoilt.history[2 // window]
    assert record.nonfinite == ("weight",)
    assert math.isnan(record.raw)
    assert record.criterion == clean.history[1 // window].criterion


class Two(nn.Module):
    """Two weights, the second with a gain on its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(1))
        self.b = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor, gain: float) -> torch.Tensor:
        return self.a * x + self.b * (gain * x)


def test_a_step_with_one_bad_parameter_has_no_value() -> None:
    """The other groups' mean would be another quantity than the one that is averaged."""
    model, x = Two(), torch.tensor([1.0, 2.0, 4.0])
    with runs.EvidenceStopping(model) as stopping:
        for gain in (1.0, math.nan):
            model(x, gain).sum().backward()
            stopping.step()
    good, bad = stopping.history
    assert bad.nonfinite == stopping.evidence.nonfinite == ("b",)
    assert math.isfinite(stopping.evidence.criterion)
    assert math.isnan(bad.raw)
    assert stopping.criterion == good.raw


def test_the_reason_names_the_parameter_with_a_nan() -> None:
    dial = Dial()
    with runs.EvidenceStopping(dial) as stopping:
        dial(torch.tensor([math.nan, 1.0]).double()).sum().backward()
        stopping.step()
        assert stopping.reason == "step 1: no value, inf or nan in the contributions to 'weight'"
        assert math.isnan(stopping.criterion)


def test_a_bad_step_in_a_window_is_left_out() -> None:
    dial = Dial()
    with runs.EvidenceStopping(dial, smoothing=0, window=2) as stopping:
        dial(torch.tensor([math.nan, 1.0]).double()).sum().backward()
        stopping.step()
        dial.show(-3.0)
        stopping.step()
    assert stopping.criterion == pytest.approx(-3.0)
    assert stopping.history[0].nonfinite == ("weight",)


def test_a_single_sample_is_skipped() -> None:
    dial = Dial()
    with runs.EvidenceStopping(dial, smoothing=0.5) as stopping:
        dial.show(-3.0)
        stopping.step()
        dial(torch.ones(1).double()).sum().backward()
        stopping.step()
    assert stopping.criterion == pytest.approx(-3.0)
    assert "a single sample has no variance" in stopping.reason


def test_step_before_any_backward_is_an_error_but_a_skipped_batch_is_not() -> None:
    dial = Dial()
    with runs.EvidenceStopping(dial) as stopping:
        with pytest.raises(heldin.HeldinError, match="no backward pass through the model was seen"):
            stopping.step()
        dial.show(-1.0)
        assert not stopping.step()
        assert not stopping.step()
        assert "no backward pass was seen" in stopping.reason
    with pytest.raises(heldin.HeldinError, match="after close"):
        stopping.step()


def test_a_skipped_batch_in_the_first_window_is_no_error() -> None:
    dial = Dial()
    with runs.EvidenceStopping(dial, window=2, smoothing=0) as stopping:
        dial.show(-1.0)
        stopping.step()
        stopping.step()
    assert stopping.criterion == pytest.approx(-1.0)
    assert stopping.history[0].count == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"smoothing": 1.0}, r"smoothing must be a number in \[0, 1\), got 1.0"),
        ({"smoothing": -0.1}, "smoothing must be"),
        ({"smoothing": "0.9"}, "smoothing must be"),
        ({"window": 0}, "window must be a whole number >= 1, got 0"),
        ({"window": 1.5}, "window must be a whole number"),
        ({"patience": 0}, "checks must be"),
        ({"warmup": -1}, "warmup must be a whole number >= 0"),
        ({"every": 0}, "check_every must be"),
        ({"arming": -1.0}, "arm_threshold must be"),
        ({"arming": math.nan}, "arm_threshold must be"),
        ({"parameter_groups": "layer"}, "parameter_groups must be 'tensor', 'all'"),
        ({"parameter_groups": {"0.weight": "a"}}, "'0.bias' has no entry"),
        ({"correction": "student"}, r"correction must be one of \(None, 'gaussian', 'symmetric'\)"),
        ({"dead": "skip"}, "dead_coordinates must be one of"),
        ({"reduction": "none"}, r"loss_reduction must be one of \('mean', 'sum'\)"),
        ({"history": 1}, "history must be"),
    ],
)
def test_bad_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(heldin.HeldinError, match=message):
        runs.EvidenceStopping(net(), **options)


def test_bad_models() -> None:
    with pytest.raises(heldin.HeldinError, match="no parameter that requires a gradient"):
        runs.EvidenceStopping(net().requires_grad_(False))
    with pytest.raises(heldin.HeldinError, match=r"expected a torch\.nn\.Module"):
        runs.EvidenceStopping([nn.Linear(2, 2)])


def test_metrics_are_flat_floats() -> None:
    model, (x, y) = net(), data()
    with runs.EvidenceStopping(model, parameter_groups=lambda name: name.split(".")[0]) as stopping:
        assert stopping.metrics() == {
            "heldin/count": 0.0,
            "heldin/armed": 0.0,
            "heldin/should_stop": 0.0,
        }
        F.cross_entropy(model(x), y).backward()
        stopping.step()
        metrics = stopping.metrics()
    assert {"heldin/criterion", "heldin/raw", "heldin/group/0", "heldin/group/3"} <= set(metrics)
    assert all(type(value) is float for value in metrics.values())


def test_removing_leaves_the_model_as_it_was() -> None:
    model = net()
    stopping = runs.EvidenceStopping(model)
    assert forward_hooks(model)
    stopping.close()
    stopping.close()
    assert not forward_hooks(model)
    assert torch.autograd.backward is PLAIN_BACKWARD


def test_a_forgotten_one_removes_itself() -> None:
    model = net()
    stopping = runs.EvidenceStopping(model)
    del stopping
    gc.collect()
    assert not forward_hooks(model)


def test_training_is_untouched() -> None:
    def train(watched: bool) -> list[torch.Tensor]:
        torch.manual_seed(3)
        model, (x, y) = net(dropout=0.5), data()
        optimizer = torch.optim.Adam(model.parameters())
        stopping = runs.EvidenceStopping(model, every=2, patience=99) if watched else None
        for _ in range(6):
            rows = torch.randint(0, 64, (16,))
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            if stopping is not None:
                stopping.step()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach() for p in model.parameters()]

    for plain, watched in zip(train(False), train(True), strict=True):
        assert torch.equal(plain, watched)
