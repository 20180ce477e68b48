"""Jacobians of outputs by weights, as leave-one-out needs them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import heldin
from heldin.rules import jacobians as _jacobians
from tests.support import runs
from tests.support.leave_one_out_runs import SGD, normal


class Branching(nn.Module):
    """No vmap: what it does depends on the data."""

    whole = False

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 4)
        self.norm = nn.LayerNorm(4)
        self.last, self.scale = nn.Linear(4, 3), nn.Parameter(torch.full((3, 1), 0.7))
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.norm(self.inner(x).tanh())
        h = self.inner(h @ self.inner.weight).sin()
        h = F.linear(h, self.last.weight * self.scale, self.last.bias)
        return h if self.whole or bool(h.square().sum() > 0) else 2 * h


class Fixed(Branching):
    """The same function without the branch."""

    whole = True


def test_captured_jacobians_are_those_of_torch_func() -> None:
    torch.manual_seed(3)
    model = Fixed().double()
    names = [name for name, _ in model.named_parameters()]
    x, directions = normal(6, 5), normal(6 * 2, 3).view(6, 2, 3)
    expected = _jacobians.jacobians_by_vmap(model, names, [x], directions)
    found = _jacobians.jacobians_by_capture(model, names, [x], directions)
    assert list(found) == names
    for name in names:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-10, atol=1e-13)
    only = _jacobians.jacobians_by_capture(model, names[:1], [x], directions)
    torch.testing.assert_close(only[names[0]], expected[names[0]])
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_a_model_that_torch_func_cannot_map_is_captured() -> None:
    x, y = normal(20, 5), normal(20, 3, seed=1)
    results = []
    for kind, way in (
        (Branching, _jacobians.jacobians_by_capture),
        (Fixed, _jacobians.jacobians_by_vmap),
    ):
        torch.manual_seed(4)
        model = kind().double()
        optimizer = SGD([p for n, p in model.named_parameters() if n != "unused"], lr=0.1)
        stopping = runs.LeaveOneOutStopping(model, optimizer, F.mse_loss, (x, y))
        names = [name for name, _ in model.named_parameters() if name != "unused"]
        assert _jacobians.jacobian_method(model, names, [x]) is way
        for _ in range(20):
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            stopping.step()
        results.append(torch.tensor(stopping.history.columns()["estimate"]))
    torch.testing.assert_close(*results, rtol=1e-9, atol=0)


def test_a_model_without_derivatives_by_samples_is_refused() -> None:
    class Hiding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(5, 1)

        def forward(self, x: Tensor) -> Tensor:
            h = x.detach().requires_grad_()
            result: Tensor = checkpoint(self.inner, h, use_reentrant=True)
            return result

    x, y = normal(20, 5), normal(20, 1, seed=1)
    model = Hiding().double()
    with pytest.raises(heldin.HeldinError, match=r"neither through.*rule='folds'"):
        runs.LeaveOneOutStopping(model, SGD(model.parameters(), lr=0.1), F.mse_loss, (x, y))
