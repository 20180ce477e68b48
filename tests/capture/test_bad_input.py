"""What training throws at an observation: broken numbers, changing shapes, errors, odd models."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

import heldin
from heldin.capture import plan_cache
from tests.support import inside, runs
from tests.support.bad_input_models import agree, net


@pytest.fixture(autouse=True)
def double_precision() -> Any:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def right(seen: Any, model: nn.Module, count: int = 5) -> None:
    """The next step is observed as it should be."""
    seen.clear()
    model.zero_grad()
    x = torch.randn(count, 3)
    model(x).sin().sum().backward()
    assert seen.count == count
    agree(seen, model, model(x).sin().sum(1))
    seen.clear()


@settings(deadline=None, max_examples=25)
@given(
    st.sampled_from([math.nan, math.inf, -math.inf, 1e300]),
    st.integers(0, 4),
    st.sampled_from(["exact", "sampled"]),
)
def test_a_broken_sample_is_named_and_the_next_step_is_right(
    value: float, row: int, estimator: Any
) -> None:
    model = net()
    with heldin.observe(model, estimator=estimator) as seen:
        right(seen, model)
        x = torch.randn(5, 3)
        x[row, 1] = value
        model(x).square().sum().backward()
        found = heldin.evidence(seen)
        if not math.isfinite(value):
            assert "0.weight" in found.nonfinite
            assert "0.weight" not in found.groups
        assert all(math.isfinite(v) for v in found.groups.values())
        right(seen, model)


@pytest.mark.parametrize("seed", [math.nan, math.inf])
def test_a_broken_loss_neither_stops_nor_poisons_the_average(seed: float) -> None:
    model, x = net(), torch.randn(8, 3)
    with runs.EvidenceStopping(model, arming=None, warmup=9) as stopping:
        for step in range(6):
            model.zero_grad()
            loss = model(x).sin().sum()
            (loss * seed if step == 3 else loss).backward()
            before = stopping.criterion
            stopping.step()
            if step == 3:
                assert stopping.criterion == before
                assert "inf or nan" in stopping.reason
        assert math.isfinite(stopping.criterion)
        assert [math.isnan(r.raw) for r in stopping.history] == [i == 3 for i in range(6)]


def test_an_empty_batch_shows_nothing_and_breaks_nothing() -> None:
    model = net()
    with heldin.observe(model) as seen:
        for _ in range(2):
            model(torch.randn(0, 3)).sum().backward()
            assert seen.count == 0
            assert heldin.evidence(seen).criterion != heldin.evidence(seen).criterion  # nan
            right(seen, model)


def test_an_empty_batch_among_others_changes_no_sum() -> None:
    model, x = net(), torch.randn(6, 3)
    with heldin.observe(model) as seen:
        for part in (x[:3], x[3:3], x[3:]):
            model(part).sin().sum().backward()
    assert seen.count == 6
    agree(seen, model, model(x).sin().sum(1))


def test_an_empty_batch_is_a_step_without_a_value() -> None:
    model = net()
    with runs.EvidenceStopping(model) as stopping:
        for count in (5, 0, 5):
            model(torch.randn(count, 3)).sin().sum().backward()
            stopping.step()
        assert [r.count for r in stopping.history] == [5, 0, 5]
        assert [math.isnan(r.raw) for r in stopping.history] == [False, True, False]


@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(1, 9), min_size=3, max_size=10), st.booleans())
def test_the_batch_size_may_change_at_every_step(sizes: list[int], sequence: bool) -> None:
    model = net()
    with heldin.observe(model) as seen:
        for size in sizes:
            seen.clear()
            x = torch.randn(size, 1 + size % 3, 3) if sequence else torch.randn(size, 3)
            model(x).sin().sum().backward()
            assert seen.count == size
            agree(seen, model, model(x).sin().flatten(1).sum(1))


def test_what_is_learnt_about_shapes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_cache, "KINDS", 8)
    model, twice = net(), nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    with heldin.observe(model) as seen, heldin.observe(twice) as both:
        for size in [*range(2, 26), *range(2, 26)]:
            right(seen, model, size)
            x = torch.randn(size, 3)
            both.clear()
            twice(twice(x)).sin().sum().backward()
            agree(both, twice, twice(twice(x)).sin().sum(1))
        for known in (inside.collector(seen).plan_cache, inside.collector(both).plan_cache):
            assert len(known) <= 8
            assert max(len(table) for table in vars(known).values()) <= 18


def test_parameters_may_be_turned_on_and_off() -> None:
    model = net()
    with heldin.observe(model) as seen:
        for step in range(12):
            model[0].requires_grad_(step % 2 == 0)
            model[2].bias.requires_grad_(step % 3 == 0)
            right(seen, model)


class Fragile(nn.Module):
    """Fails where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.fail = nn.Linear(3, 4), nn.Linear(4, 2), ""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).tanh()
        if self.fail == "forward":
            raise RuntimeError("on purpose")
        if self.fail == "interrupt":
            raise KeyboardInterrupt
        out = self.b(h)
        if self.fail == "backward":
            h.register_hook(self._break)
        return out

    def _break(self, grad: Tensor) -> Tensor:
        raise RuntimeError("on purpose")


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("estimator", ["exact", "sampled", "microbatch"])
@pytest.mark.parametrize("fail", ["forward", "interrupt", "backward"])
def test_after_an_error_the_next_step_is_right(fail: str, estimator: Any, known: bool) -> None:
    model = Fragile()
    with heldin.observe(model, estimator=estimator) as seen:
        for _ in range(3 if known else 0):
            model(torch.randn(5, 3)).sin().sum().backward()
        seen.clear()
        for _ in range(2):
            model.fail = fail
            with pytest.raises((RuntimeError, KeyboardInterrupt)):
                model(torch.randn(5, 3)).sin().sum().backward()
            assert (len(seen), seen.count) == (0, 0)
            model.fail = ""
            if estimator == "exact":
                right(seen, model)
            else:
                model.zero_grad()
                model(torch.randn(5, 3)).sin().sum().backward()
                assert seen.count == (5 if estimator == "sampled" else 1)
                seen.clear()


def test_ctrl_c_under_two_observations() -> None:
    model = Fragile()
    with heldin.observe(model) as outer, heldin.observe(model) as inner:
        for size in (4, 5, 6):
            model.fail = "interrupt"
            with pytest.raises(KeyboardInterrupt):
                model(torch.randn(size, 3))
            model.fail = ""
            inner.clear()
            right(outer, model, size)
            assert inner.count == size
    assert _get_current_dispatch_mode() is None


def test_an_error_in_a_step_is_not_a_step() -> None:
    model = Fragile()
    with runs.EvidenceStopping(model) as stopping:
        for step in range(8):
            model.fail = ["", "forward", "", "backward"][step % 4]
            model.zero_grad()
            try:
                model(torch.randn(5, 3)).sin().sum().backward()
            except RuntimeError:
                continue
            stopping.step()
        assert [r.count for r in stopping.history] == [5, 5, 5, 5]
        assert all(math.isfinite(r.raw) for r in stopping.history)


@pytest.mark.parametrize("other", ["exact", "sampled", "microbatch"])
def test_one_model_observed_twice_and_nested(other: Any) -> None:
    model = net()
    with heldin.observe(model) as outer:
        right(outer, model)
        with heldin.observe(model, estimator=other) as inner:
            x = torch.randn(5, 3)
            model(x).sin().sum().backward()
            agree(outer, model, model(x).sin().sum(1))
            assert inner.count == (1 if other == "microbatch" else 5)
        assert inner.count == (1 if other == "microbatch" else 5)
        right(outer, model)


def test_a_part_observed_inside_its_whole() -> None:
    model = net()
    with heldin.observe(model) as whole, heldin.observe(model[2]) as part:
        x = torch.randn(5, 3)
        model(x).sin().sum().backward()
        agree(whole, model, model(x).sin().sum(1))
        agree(part, model[2], model(x).sin().sum(1))


def test_two_threads_train_their_own_models() -> None:
    def train(seed: int) -> list[float]:
        torch_random = torch.Generator().manual_seed(seed)
        model = net()
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.randn(p.shape, generator=torch_random))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        values = []
        with runs.EvidenceStopping(model, coordinates=4) as stopping:
            for _ in range(40):
                x = torch.randn(6 + seed, 3, generator=torch_random)
                optimizer.zero_grad()
                F.mse_loss(model(x), x[:, :2]).backward()
                stopping.step()
                optimizer.step()
                values.append(stopping.evidence.criterion)
        return values

    alone = [train(seed) for seed in range(2)]
    found: dict[int, list[float]] = {}
    threads = [
        threading.Thread(target=lambda seed=seed: found.update({seed: train(seed)}))
        for seed in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found.get(seed) for seed in range(2)] == alone
