"""The learning-rate view of the supplement: factors against the steps that optimisers make."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import heldin
from heldin_lab.reproduce.damping import fraction_below, rmsprop_factors
from tests.support.loops import data, net

CASES: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.RMSprop, {"lr": 0.01, "alpha": 0.9}),
    (torch.optim.RMSprop, {"lr": 0.01, "alpha": 0.9, "centered": True, "eps": 1e-3}),
    (torch.optim.Adam, {"lr": 0.01, "betas": (0.0, 0.9)}),
    (torch.optim.Adam, {"lr": 0.01, "betas": (0.0, 0.9), "amsgrad": True}),
    (torch.optim.AdamW, {"lr": 0.01, "betas": (0.0, 0.9), "weight_decay": 0.0}),
    (torch.optim.NAdam, {"lr": 0.01, "betas": (0.0, 0.9)}),
]


@pytest.mark.parametrize(("kind", "options"), CASES)
@pytest.mark.parametrize("wrap", [False, True])
def test_factors_are_the_steps_per_gradient(kind: Any, options: Any, wrap: bool) -> None:
    torch.manual_seed(0)
    model, (x, y) = net(), data()
    optimizer: Any = kind(model.parameters(), **options)
    if wrap:
        optimizer = heldin.ElementwiseStopping(optimizer, model)
    for _ in range(4):
        optimizer.zero_grad()
        rows = torch.randint(0, 64, (16,))
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        optimizer.step()
    rates: dict[str, Tensor] = {}
    for name, p in model.named_parameters():
        assert p.grad is not None
        rates[name] = (before[name] - p.detach()) / p.grad
    largest = max(float(r.nan_to_num(0).max()) for r in rates.values())
    factors = rmsprop_factors(optimizer, model)
    assert set(factors) == set(rates)
    for name, f in factors.items():
        used = ~rates[name].isnan()
        assert torch.allclose(f[used], rates[name][used] / largest, rtol=1e-6), name
    assert max(float(f.nan_to_num(0).max()) for f in factors.values()) == 1.0
    flat = torch.cat([f.flatten() for f in factors.values()])
    flat = flat[~flat.isnan()]
    for threshold in (0.3, 0.1, 0.01):
        expected = float((flat < threshold).double().mean())
        assert fraction_below(factors, threshold) == pytest.approx(expected)
    by = fraction_below(factors, 0.1, by="tensor")
    assert by["0.bias"] == pytest.approx(float((factors["0.bias"] < 0.1).double().mean()))
    if wrap:
        optimizer.close()


def test_weights_without_a_gradient_do_not_set_the_scale() -> None:
    model = nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.RMSprop(model.parameters())
    model(torch.tensor([[2.0, 0.0, 4.0]])).sum().backward()
    optimizer.step()
    factors = rmsprop_factors(optimizer)["0.0"][0]
    assert factors[0] == 1.0
    assert factors[1].isnan()
    assert factors[2].item() == pytest.approx(0.5)
    assert fraction_below({"w": factors}, 0.75) == 0.5


def test_names() -> None:
    model = nn.Linear(3, 1)
    for parameters, names in (
        (model.named_parameters(), {"weight", "bias"}),
        (model.parameters(), {"0.0", "0.1"}),
    ):
        optimizer = torch.optim.Adam(parameters)
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        assert set(rmsprop_factors(optimizer)) == names
        assert set(rmsprop_factors(optimizer, model)) == {"weight", "bias"}


def test_mistakes() -> None:
    model = nn.Linear(3, 1)
    with pytest.raises(heldin.HeldinError, match="got Adadelta"):
        rmsprop_factors(torch.optim.Adadelta(model.parameters()))
    with pytest.raises(heldin.HeldinError, match="no step yet"):
        rmsprop_factors(torch.optim.Adam(model.parameters()))
    with pytest.raises(heldin.HeldinError, match=r"threshold must lie in \(0, 1\)"):
        fraction_below({}, 1.0)
    with pytest.raises(heldin.HeldinError, match="by must be"):
        fraction_below({}, 0.5, by="layer")  # type: ignore[call-overload]
