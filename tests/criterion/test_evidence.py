"""The criterion: its formula, groups, and coordinates without evidence."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import heldin


def moments(contributions: Tensor) -> heldin.Moments:
    """From per-sample contributions (m, ...)."""
    return heldin.Moments(contributions.sum(0), contributions.square().sum(0), len(contributions))


def paper(contributions: Tensor) -> Tensor:
    """f_k = m g_k^2 / Sigma_k as the paper writes it."""
    m = len(contributions)
    return m * contributions.mean(0).square() / contributions.var(0)


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 40), st.integers(1, 9), st.floats(-3, 3), st.floats(1e-6, 1e6))
def test_the_ratio_is_the_papers(m: int, d: int, mean: float, scale: float) -> None:
    generator = torch.Generator().manual_seed(m * d)
    c = (torch.randn(m, d, generator=generator, dtype=torch.float64) + mean) * scale
    assert torch.allclose(moments(c).snr, paper(c), rtol=1e-7)


def test_the_criterion_is_equation_10() -> None:
    torch.manual_seed(0)
    model, x, y = nn.Linear(5, 1).double(), torch.randn(20, 5).double(), torch.randn(20, 1).double()
    with heldin.observe(model) as seen:
        F.mse_loss(model(x), y).backward()
    residual = 2 * (model(x) - y).detach()
    expected = {"weight": 1 - paper(residual * x).mean(), "bias": 1 - paper(residual).mean()}
    e = heldin.evidence(seen)
    assert e.groups["weight"] == pytest.approx(float(expected["weight"]), rel=1e-9)
    assert e.groups["bias"] == pytest.approx(float(expected["bias"]), rel=1e-9)
    assert e.criterion == pytest.approx(float(sum(expected.values())) / 2, rel=1e-9)
    assert e.count == 20
    assert e.live == {"weight": 5, "bias": 1}
    whole = heldin.evidence(seen, parameter_groups="all")
    joint = 1 - torch.cat([paper(residual * x), paper(residual)]).mean()
    assert whole.criterion == pytest.approx(float(joint), rel=1e-9)


def test_groups() -> None:
    torch.manual_seed(0)
    seen = {name: moments(torch.randn(9, 4)) for name in ("a.weight", "a.bias", "b.weight")}
    by_function = heldin.evidence(seen, parameter_groups=lambda name: name.split(".")[0])
    table = {"a.weight": "a", "a.bias": "a", "b.weight": "b"}
    assert heldin.evidence(seen, parameter_groups=table) == by_function
    assert set(by_function.groups) == {"a", "b"}
    with pytest.raises(heldin.HeldinError, match=r"'b\.weight' has no entry"):
        heldin.evidence(seen, parameter_groups={"a.weight": "a", "a.bias": "a"})
    with pytest.raises(heldin.HeldinError, match="groups: expected"):
        heldin.evidence(seen, parameter_groups="layer")  # type: ignore[arg-type]


def test_dead_coordinates_are_left_out() -> None:
    c = torch.randn(8, 4)
    c[:, 2] = 0
    m = moments(c)
    assert m.snr.isnan().tolist() == [False, False, True, False]
    e = heldin.evidence({"a": m, "b": moments(torch.zeros(8, 3))})
    assert e.live == {"a": 3}
    assert set(e.groups) == {"a"}
    alive = moments(c[:, [0, 1, 3]])
    assert e.criterion == pytest.approx(heldin.evidence({"a": alive}).criterion)


def test_one_live_sample_gives_one_and_equal_ones_the_formula() -> None:
    m = 12
    for j in (1, 2, 5):
        c = torch.zeros(m, 1, dtype=torch.float64)
        c[:j] = 0.7
        assert float(moments(c).snr) == pytest.approx(j * (m - 1) / (m - j))


def test_a_single_sample_is_no_evidence() -> None:
    model = nn.Linear(3, 2)
    with heldin.observe(model) as seen:
        model(torch.randn(1, 3)).sum().backward()
    assert seen["weight"].count == 1
    assert seen["weight"].snr.isnan().all()
    e = heldin.evidence(seen)
    assert math.isnan(e.criterion)
    assert e.groups == {}
    assert e.count == 1


def keys_of_attention(dtype: torch.dtype) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.MultiheadAttention(8, 2, batch_first=True).to(dtype)
    nn.init.normal_(model.in_proj_bias)
    return model, torch.randn(6, 16, 8, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_rounding_noise_is_dead(dtype: torch.dtype) -> None:
    """The key bias of attention has no influence: its gradient is rounding noise."""
    model, x = keys_of_attention(dtype)
    with heldin.observe(model) as seen:
        model(x, x, x, need_weights=False)[0].sin().sum().backward()
    f = seen["in_proj_bias"].snr
    assert f[8:16].isnan().all(), seen["in_proj_bias"].squares[8:16]
    assert not f[:8].isnan().any()
    assert not f[16:].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_bias_under_instance_norm_is_dead(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.InstanceNorm2d(3), nn.Tanh()).to(dtype)
    with heldin.observe(model) as seen:
        model(torch.randn(6, 2, 8, 8, dtype=dtype)).square().sum().backward()
    assert seen["0.bias"].snr.isnan().all(), seen["0.bias"].squares
    assert not seen["0.weight"].snr.isnan().any()
    assert set(heldin.evidence(seen).groups) == {"0.weight"}


def test_absent_tokens_are_dead() -> None:
    model = nn.Embedding(10, 3)
    with heldin.observe(model) as seen:
        model(torch.tensor([[1, 2], [2, 4]])).sin().sum().backward()
    assert (~seen["weight"].snr.isnan()).any(1).nonzero().flatten().tolist() == [1, 2, 4]


def test_huge_ratios_of_one_parameter_leave_the_others_alone() -> None:
    """Sums of many small parameters are formed together; one without noise must not spoil them."""
    torch.manual_seed(0)
    rows = {f"p{i}": torch.randn(8, 3, dtype=torch.float64) for i in range(8)}
    rows["p2"] = torch.ones(8, 3, dtype=torch.float64)  # the same from every sample: no noise
    given = {n: heldin.Moments(r.sum(0), r.square().sum(0), 8) for n, r in rows.items()}
    found = heldin.evidence(given).groups
    for name, moments in given.items():
        assert found[name] == pytest.approx(1 - float(moments.snr.mean()), rel=1e-12)
    assert found["p2"] < -1e14
