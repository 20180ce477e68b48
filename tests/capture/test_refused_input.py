"""What cannot be followed is refused; losses that mix samples; half precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import rnn

import heldin
from tests.support.bad_input_models import agree, net
from tests.support.cases import Fn
from tests.support.truth import error, truth


@pytest.fixture(autouse=True)
def double_precision() -> Any:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


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
            r"'[ab]\.bias' gets a gradient, but meets nothing.*leave PyTorch",
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


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_refused_by_name(layout: Any) -> None:
    rows = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], layout=layout)
    model = nn.Linear(3, 2)
    with heldin.observe(model):
        for call in (lambda: model(rows), lambda: model(input=rows)):
            with pytest.raises(heldin.NotObservable, match="'input' of the model is a nested"):
                call()


def test_rows_of_several_samples_are_said_aloud() -> None:
    """As packing=True and padding_free=True of TRL put them there."""

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.places = nn.Embedding(9, 3), nn.Embedding(5, 3)

        def forward(self, ids: Tensor, position_ids: Tensor) -> Tensor:
            return self.words(ids) + self.places(position_ids)

    model = Words()
    ids = torch.randint(0, 9, (1, 7))
    with heldin.observe(model) as seen:
        model(ids, position_ids=torch.arange(7).clamp(max=4)[None]).sum().backward()
        seen.clear()
        with pytest.warns(heldin.HeldinWarning, match=r"several samples lie in one row"):
            model(ids, position_ids=torch.tensor([[0, 1, 2, 0, 1, 0, 1]])).sum().backward()
        assert seen.count == 1


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 2)
        self.w = nn.Parameter(torch.randn(2, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return (self.a(x) * self.w).abs()


def test_complex_parameters_are_refused_where_single_entries_are_looked_at() -> None:
    model = Turned()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(heldin.NotObservable, match=r"'w' is complex.*view_as_complex"):
        heldin.ElementwiseStopping(optimizer, model)
    only = [*model.a.parameters()]
    with heldin.ElementwiseStopping(
        torch.optim.SGD(only, lr=0.1), model, parameters=lambda name: name != "w"
    ) as stopping:
        model(torch.randn(4, 3)).sin().sum().backward()
        stopping.step()


@pytest.mark.parametrize("estimator", ["exact", "sampled"])
@pytest.mark.parametrize("m", [1, 4])
def test_complex_parameters_with_a_penalty_and_several_passes(estimator: Any, m: int) -> None:
    model, x = Turned(), torch.randn(m, 3)
    with heldin.observe(model, estimator=estimator) as seen:
        for _ in range(3):
            seen.clear()
            model.zero_grad()
            out = model(x)
            out.sin().sum().backward(retain_graph=True)
            (out.square().sum() + (model.w.abs() ** 2).sum()).backward()
            losses = model(x).sin().sum(1) + model(x).square().sum(1)
            expected = truth(model, losses + (model.w.abs() ** 2).sum() / m)
            assert seen["w"].total.shape == (2, 2)
            assert max(error(seen, expected, 1e-12).values()) < 1e-9


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
    assert torch.allclose(seen["a.weight"].total, model.a.weight.grad)  # type: ignore[arg-type]


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


def test_a_separate_loss_of_a_part_that_is_not_observed() -> None:
    model, x, data = net(), torch.randn(5, 3), torch.randn(7, 3)
    with heldin.observe(model, parameters=lambda name: name.startswith("2")) as seen:
        loss, other = model(x).sin().sum(), model[0](data).sum()
        torch.autograd.backward([loss, other])
    with heldin.observe(model, parameters=lambda name: name.startswith("2")) as expected:
        model(x).sin().sum().backward()
    assert sorted(seen) == sorted(expected) == ["2.bias", "2.weight"]
    assert all(torch.equal(seen[name].squares, expected[name].squares) for name in seen)


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
