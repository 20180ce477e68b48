"""What cannot be observed is refused with a way out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import heldin
from tests.support.observe_runs import agree, net


@pytest.fixture(autouse=True)
def double_precision() -> Any:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_no_trainable_parameters() -> None:
    with pytest.raises(heldin.HeldinError, match="no parameter that requires a gradient"):
        heldin.observe(nn.Linear(2, 2).requires_grad_(False))
    with pytest.raises(heldin.HeldinError, match=r"torch\.nn\.Module"):
        heldin.observe(torch.sin)  # type: ignore[arg-type]


def test_parameters_used_outside_the_model() -> None:
    model, x = net(3, 3), torch.randn(4, 3)
    with heldin.observe(model), pytest.raises(heldin.NotObservable, match=r"'0\.weight'.*outside"):
        F.linear(model(x), model[0].weight).square().sum().backward()
    with heldin.observe(model), pytest.raises(heldin.NotObservable, match=r"0\.weight.*outside"):
        (model(x).sum() + F.linear(x, model[0].weight).square().sum()).backward()


def test_the_model_was_not_called() -> None:
    model, x = net(3, 2), torch.randn(4, 3)
    with heldin.observe(model), pytest.raises(heldin.NotObservable, match="call of the model"):
        F.linear(x, model[0].weight).sum().backward()


def test_a_pass_through_a_call_of_an_earlier_step() -> None:
    model, x = net(3, 2), torch.randn(4, 3)
    with heldin.observe(model) as seen:
        out = model(x)
        out.sin().sum().backward(retain_graph=True)
        seen.clear()
        with pytest.raises(heldin.NotObservable, match="add up losses"):
            out.cos().sum().backward()


def test_calls_of_different_size_in_one_pass() -> None:
    model = net(3, 2)
    with heldin.observe(model), pytest.raises(heldin.NotObservable, match="samples"):
        (model(torch.randn(4, 3)).sum() + model(torch.randn(5, 3)).sum()).backward()


def test_samples_mixed_before_a_parameter() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            return self.b((h @ h.t()).softmax(1) @ h)

    model, x = Model(), torch.randn(5, 3)
    with heldin.observe(model), pytest.raises(heldin.NotObservable, match=r"'b\..*mixed by mm"):
        model(x).sum().backward()


def test_reentrant_checkpoints() -> None:
    from torch.utils.checkpoint import checkpoint

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(checkpoint(self.a, x, use_reentrant=True))

    model, x = Model(), torch.randn(5, 3, requires_grad=True)
    with heldin.observe(model), pytest.raises(heldin.NotObservable, match="use_reentrant=False"):
        model(x).sum().backward()


def test_double_backward() -> None:
    model, x = net(3, 4, 1), torch.randn(5, 3, requires_grad=True)
    with heldin.observe(model):
        (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        with pytest.raises(heldin.NotObservable, match="call of the model"):
            grad.square().sum().backward()
    with heldin.observe(model):
        out = model(x)
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        with pytest.raises(heldin.NotObservable, match="outside"):
            (out.sum() + grad.square().sum()).backward()


def test_no_batch_among_the_arguments() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(3))

        def forward(self, n: int) -> Tensor:
            return self.w * n

    model = Model()
    with heldin.observe(model), pytest.raises(heldin.NotObservable, match="batch_dim"):
        model(3)


def test_an_unknown_graph_without_outputs_is_let_go_once() -> None:
    """The model branches on something that cannot be known beforehand, and returns only a loss."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.other = nn.Linear(3, 2), nn.Linear(3, 2), False

        def forward(self, x: Tensor) -> Tensor:
            return (self.b(x).tanh() if self.other else self.a(x)).square().sum()

    model, x = Model(), torch.randn(4, 3)
    with heldin.observe(model) as seen:
        model(x).backward()
        seen.clear()
        model.other = True
        with pytest.warns(heldin.HeldinWarning, match="not observed"):
            model(x).backward()
        assert len(seen) == 0
        assert seen.count == 0
        for _ in range(2):
            seen.clear()
            model(x).backward()
            agree(seen, model, model.b(x).tanh().square().sum(1))
