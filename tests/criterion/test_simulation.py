"""The statistics of the criterion, by simulation: what theory says it is under known conditions."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import heldin
from heldin.criterion.masking import smoothed
from tests.support import runs

GENERATOR = torch.Generator()
Draw = Callable[[int, int], Tensor]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    GENERATOR.manual_seed(0)
    torch.manual_seed(0)


def normal(m: int, d: int) -> Tensor:
    return torch.randn(m, d, generator=GENERATOR)


def laplace(m: int, d: int) -> Tensor:
    u = torch.rand(m, d, generator=GENERATOR, dtype=torch.float64) - 0.5
    return -u.sign() * torch.log1p(-2 * u.abs())


def coin(m: int, d: int) -> Tensor:
    return torch.randint(0, 2, (m, d), generator=GENERATOR).float() * 2 - 1


def cauchy(m: int, d: int) -> Tensor:
    return torch.tan(math.pi * (torch.rand(m, d, generator=GENERATOR, dtype=torch.float64) - 0.5))


def moments(c: Tensor) -> heldin.Moments:
    return heldin.Moments(c.sum(0), c.square().sum(0), len(c))


# --- no signal -------------------------------------------------------------------------------


@pytest.mark.parametrize("m", [12, 20, 128])
def test_without_signal_f_is_an_f_variable(m: int) -> None:
    f = moments(normal(m, 150_000)).snr.double()
    mean = (m - 1) / (m - 3)
    variance = 2 * (m - 1) ** 2 * (m - 2) / ((m - 3) ** 2 * (m - 5))
    error = math.sqrt(variance / f.numel())
    assert abs(float(f.mean()) - mean) < 4 * error
    assert float(f.var()) == pytest.approx(variance, rel=0.15)
    assert mean - 1 > 3 * error  # the bias is visible at all


@pytest.mark.parametrize("m", [5, 12, 20])
def test_the_gaussian_correction_removes_the_bias(m: int) -> None:
    seen = {"w": moments(normal(m, 400_000))}
    assert heldin.evidence(seen, correction="gaussian").criterion == pytest.approx(0, abs=0.02)
    assert heldin.evidence(seen).criterion < -0.1


@pytest.mark.parametrize("draw", [normal, laplace, coin, cauchy])
@pytest.mark.parametrize("m", [2, 3, 5, 20])
def test_without_signal_q_has_mean_one_for_every_symmetric_law(draw: Draw, m: int) -> None:
    q = moments(draw(m, 200_000)).q.double()
    error = float(q.std()) / math.sqrt(q.numel())
    assert abs(float(q.mean()) - 1) < 4 * error
    assert float(q.max()) <= m * (1 + 1e-5)
    symmetric = heldin.evidence({"w": moments(draw(m, 200_000))}, correction="symmetric")
    assert abs(symmetric.criterion) < 6 * error


def test_minibatches_of_data_already_fitted() -> None:
    """The full gradient is zero; a batch of m of the M rows, without replacement."""
    m, population = 40, 200
    c = torch.randn(population, 60, generator=GENERATOR, dtype=torch.float64)
    c -= c.mean(0)
    f, q = [], []
    for _ in range(1500):
        rows = torch.randperm(population, generator=GENERATOR)[:m]
        f.append(float(moments(c[rows]).snr.mean()))
        q.append(float(moments(c[rows]).q.mean()))
    assert 1 - sum(q) / 1500 == pytest.approx((m - 1) / (population - 1), abs=0.02)
    assert 1 - sum(f) / 1500 == pytest.approx(m / population - 2 / (m - 3), abs=0.03)


@pytest.mark.parametrize(("b", "share"), [(0.99, 0.45), (0.999, 0.30)])
def test_elementwise_without_signal(b: float, share: float) -> None:
    """The share of weights that are off although every one of them is pure noise."""
    m, d = 120, 2500
    gamma = torch.distributions.Gamma(torch.tensor((m - 1) / 2), torch.tensor(0.5))
    average = torch.full((d,), (m - 1) / (m - 3))
    for _ in range(int(6 / (1 - b))):
        z = torch.randn(d)
        # Sum and sum of squares of m normal contributions, drawn without the contributions.
        seen = heldin.Moments(math.sqrt(m) * z, z.square() + gamma.sample((d,)), m)
        average = smoothed(average, seen, b, False, "out", None)
    off = float((average < 1).double().mean())
    assert off == pytest.approx(share, abs=0.045)


# --- stationary SGD --------------------------------------------------------------------------


class Quadratic(nn.Module):
    """Loss h/2 (w - x)^2 per coordinate, with a tensor of coordinates for each curvature h."""

    def __init__(self, curvatures: list[float], size: int) -> None:
        super().__init__()
        self.curvatures = curvatures
        self.w = nn.ParameterList(nn.Parameter(torch.zeros(size)) for _ in curvatures)

    def forward(self, x: Tensor) -> Tensor:  # (m, len(h), size) -> (m,)
        losses = [h / 2 * (w - x[:, i]) ** 2 for i, (h, w) in enumerate(self.pairs())]
        return torch.stack(losses).sum((0, 2))

    def pairs(self) -> list[tuple[float, Tensor]]:
        return list(zip(self.curvatures, self.w, strict=True))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("m", [16, 64])
def test_stationary_sgd_has_the_excess_of_its_step_size(m: int, momentum: float) -> None:
    """At the minimum E f = 2 / (2 - a h), whatever m; with momentum b about 1 + a h / (2 (1-b))."""
    rate = 1.0 if momentum == 0.0 else 0.05
    curvatures = [0.1, 0.5, 1.0]
    model = Quadratic(curvatures, 400)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum)
    sums: dict[str, float] = {}
    steps, burn_in = 150, 100
    options = {"smoothing": 0, "correction": "gaussian", "patience": 10**9}
    with runs.EvidenceStopping(model, **options) as stopping:  # type: ignore[arg-type]
        for step in range(steps + burn_in):
            model(torch.randn(m, 3, 400, generator=GENERATOR)).mean().backward()
            stopping.step()
            optimizer.step()
            optimizer.zero_grad()
            if step >= burn_in:
                for name, value in stopping.evidence.groups.items():
                    sums[name] = sums.get(name, 0.0) + (1 - value) / steps
    for i, h in enumerate(curvatures):
        a = rate * h
        excess = a / (2 * (1 - momentum)) if momentum else a / (2 - a)
        assert sums[f"w.{i}"] == pytest.approx(1 + excess, rel=0.06), h


def test_the_spread_of_the_criterion_is_that_of_its_effective_dimension() -> None:
    """Var T = 2 / D_eff: copies of a coordinate add nothing."""
    m, d, copies = 200, 8, 5
    values = []
    for _ in range(1500):
        c = normal(m, d).repeat(1, copies)
        values.append(heldin.evidence({"w": moments(c)}).criterion)
    assert float(torch.tensor(values).var()) == pytest.approx(2 / d, rel=0.12)
