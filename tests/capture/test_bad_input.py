"""What training throws at an observation: broken numbers, changing shapes, errors, odd models."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import rnn
from torch.utils._python_dispatch import _get_current_dispatch_mode

import heldin
from heldin.capture import knowledge
from tests.support.cases import Fn
from tests.support.truth import error, truth


@pytest.fixture(autouse=True)
def double_precision() -> Any:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def agree(seen: Any, model: nn.Module, losses: Tensor) -> None:
    expected = truth(model, losses)
    assert set(seen) == set(expected)
    worst = error(seen, expected, 1e-12)
    assert max(worst.values()) < 1e-9, worst


def right(seen: Any, model: nn.Module, count: int = 5) -> None:
    """The next step is observed as it should be."""
    seen.clear()
    model.zero_grad()
    x = torch.randn(count, 3)
    model(x).sin().sum().backward()
    assert seen.count == count
    agree(seen, model, model(x).sin().sum(1))
    seen.clear()


# --- broken numbers --------------------------------------------------------------------------


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
    with heldin.EvidenceStopping(model, arming=None, warmup=9) as stopping:
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


# --- batches of any size ---------------------------------------------------------------------


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
    with heldin.EvidenceStopping(model) as stopping:
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
    monkeypatch.setattr(knowledge, "KINDS", 8)
    model, twice = net(), nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    with heldin.observe(model) as seen, heldin.observe(twice) as both:
        for size in [*range(2, 26), *range(2, 26)]:
            right(seen, model, size)
            x = torch.randn(size, 3)
            both.clear()
            twice(twice(x)).sin().sum().backward()
            agree(both, twice, twice(twice(x)).sin().sum(1))
        for known in (seen._collector.knowledge, both._collector.knowledge):
            assert len(known) <= 8
            assert max(len(table) for table in vars(known).values()) <= 18


# --- parameters turned on and off ------------------------------------------------------------


def test_parameters_may_be_turned_on_and_off() -> None:
    model = net()
    with heldin.observe(model) as seen:
        for step in range(12):
            model[0].requires_grad_(step % 2 == 0)
            model[2].bias.requires_grad_(step % 3 == 0)
            right(seen, model)


# --- errors ----------------------------------------------------------------------------------


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
    with heldin.EvidenceStopping(model) as stopping:
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


# --- several observations --------------------------------------------------------------------


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
        with heldin.EvidenceStopping(model, budget=4) as stopping:
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


# --- what must not pass in silence -----------------------------------------------------------


class Tanh(torch.autograd.Function):
    """Leaves PyTorch on its way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.tensor(x.tolist()).tanh()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * (1 - x.tanh().square())


def packed() -> Any:
    return rnn.pack_padded_sequence(torch.randn(3, 4, 3), torch.tensor([4, 2, 1]), batch_first=True)


def linear(width: int = 2) -> nn.Module:
    return nn.Linear(3, width)


@pytest.mark.parametrize(
    ("model", "batch", "message"),
    [
        (
            lambda: Fn(lambda s, x: s.b(Tanh.apply(s.a(x))), a=linear(3), b=linear()),
            lambda: torch.randn(4, 3),
            r"'[ab]\.bias' gets a gradient, but meets nothing.*out of PyTorch",
        ),
        (
            lambda: Fn(lambda s, x: torch.stack([s.w * float(row.sum()) for row in x]), w=(3,)),
            lambda: torch.randn(4, 3),
            r"'w' gets a gradient, but meets nothing",
        ),
        (
            lambda: Fn(lambda s, p: s.a(p.data), a=linear()),
            packed,
            "packed sequence.*pack them in forward",
        ),
        (
            lambda: Fn(
                lambda s, x: s.a(torch.nested.as_nested_tensor(list(x))).to_padded_tensor(0.0),
                a=linear(),
            ),
            lambda: torch.randn(4, 5, 3),
            "nested tensors.*padded",
        ),
    ],
    ids=["out of PyTorch", "numbers of Python", "packed", "nested"],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_cannot_be_followed_is_refused(
    model: Callable[[], nn.Module], batch: Callable[[], Any], message: str
) -> None:
    made = model()
    with heldin.observe(made), pytest.raises(heldin.NotObservable, match=message):
        made(batch()).sin().sum().backward()


def test_a_name_in_batch_dim_that_no_argument_has() -> None:
    with pytest.raises(heldin.HeldinError, match=r"names 'mask', .*no argument .*\(input\)"):
        heldin.observe(nn.Linear(3, 2), batch_dim={"mask": None})


def test_complex_parameters_are_refused_unless_left_out() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 2)
            self.w = nn.Parameter(torch.randn(2, dtype=torch.complex128))

        def forward(self, x: Tensor) -> Tensor:
            return (self.a(x) * self.w).abs()

    model, x = Model(), torch.randn(4, 3)
    with pytest.raises(heldin.NotObservable, match=r"'w' is complex.*view_as_complex"):
        heldin.observe(model)
    with heldin.observe(model, parameters=lambda name: name != "w") as seen:
        model(x).sin().sum().backward()
    expected = truth(model.a, model(x).sin().sum(1))
    worst = error(seen, {f"a.{n}": sums for n, sums in expected.items()}, 1e-12)
    assert max(worst.values()) < 1e-9


@pytest.mark.parametrize(
    "forward",
    [
        lambda s, x: s.a(x).square().mean().sqrt(),
        lambda s, x: s.a(x).mean(0).square().sum(),
        lambda s, x: s.a(x).cumsum(0).sin().sum(),
        lambda s, x: torch.stack([s.a(x).mean(), s.a(x).std()]).square().sum(),
    ],
    ids=["root of a mean", "mean of features", "running sum", "standard deviation"],
)
def test_samples_mixed_inside_a_model_that_returns_its_loss(forward: Any) -> None:
    model, x = Fn(forward, a=linear()), torch.randn(5, 3)
    with heldin.observe(model) as seen:
        with pytest.warns(heldin.errors.MixedSamplesWarning, match="the loss mixes"):
            model(x).backward()
        model(x).backward()  # said once
    assert torch.allclose(seen["a.weight"].total, model.a.weight.grad)


def test_losses_that_do_not_mix_inside_a_model_are_not_reported() -> None:
    y = torch.tensor([0, 1, -100, 1, 0])
    for forward in (
        lambda s, x: F.cross_entropy(s.a(x), y, weight=torch.tensor([0.3, 0.9])),
        lambda s, x: F.mse_loss(s.a(x), x[:, :2]) / 3 + s.a.weight.square().sum(),
        lambda s, x: s.a(x).square().sum(1).topk(2).values.mean(),
        lambda s, x: torch.stack([s.a(x).square().mean(), s.a(x).exp().mean()]).sum(),
    ):
        model = Fn(forward, a=linear())
        with heldin.observe(model):
            model(torch.randn(5, 3)).backward()


def test_a_penalty_with_a_root_of_its_own() -> None:
    model, x = net(), torch.randn(5, 3)
    with heldin.observe(model) as seen:
        for _ in range(2):
            seen.clear()
            loss, penalty = model(x).sin().sum(), model[0].weight.square().sum()
            torch.autograd.backward([loss, penalty])
    agree(seen, model, model(x).sin().sum(1) + model[0].weight.square().sum() / 5)


# --- rounding noise --------------------------------------------------------------------------


@pytest.mark.parametrize("length", [8, 512, 2048])
def test_long_sums_in_half_precision_are_not_taken_for_noise(length: int) -> None:
    model = nn.Linear(4, 16).float()
    x, z = torch.randn(2, 8, length, 16, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16), heldin.observe(model) as seen:
        (model(x[..., :4]).float() * z).sum().backward()
    each = z.bfloat16().double().sum(1)
    assert torch.allclose(seen["bias"].squares.double(), each.square().sum(0), rtol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_key_biases_carry_no_evidence(dtype: torch.dtype) -> None:
    noisy = 0
    for seed in range(4):
        torch.manual_seed(seed)
        layer = nn.MultiheadAttention(16, 2, batch_first=True).to(dtype)
        x = torch.randn(8, 32, 16, dtype=dtype)
        with heldin.observe(layer) as seen:
            layer(x, x, x)[0].sin().mean().backward()
        squares = seen["in_proj_bias"].squares
        noisy += int((squares[16:32] > 0).sum())
        assert (squares[:16] > 0).all()
        assert (squares[32:] > 0).all()
    assert noisy == 0
