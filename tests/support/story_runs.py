"""What the tests of stories share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from heldin.capture.collector import Collector
from heldin.capture.observation import Observation
from tests.support import inside, runs

ESTIMATORS = [
    {"estimator": "exact"},
    {"estimator": "sampled"},  # all of these small tensors
    {"estimator": "sampled", "coordinates": 8},  # other parts of them in each step
]


estimators = pytest.mark.parametrize("estimator", ESTIMATORS, ids=["exact", "sampled", "blocks"])


STEPS = 8


LATE = (3, 6)  # when something else happens; by then the graph is known


class Life:
    """A model, its rule and its data; `step` is one training step."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, **settings: Any) -> None:
        torch.manual_seed(0)
        self.model = model.to(dtype)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.5)
        self.dtype, self.compared = dtype, 0
        self.tolerance = 1e-9 if dtype is torch.float64 else 1e-4
        self.rule = runs.EvidenceStopping(model, **settings)
        self.twin = Collector(model, with_reference=True)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def batch(self, m: int = 12, features: int = 7) -> tuple[Tensor, Tensor]:
        return torch.randn(m, features, dtype=self.dtype), torch.randn(m, 3, dtype=self.dtype)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.model(x) - y).square().mean()

    def compare_totals(self) -> None:
        """Where hooks of the user's would also run in passes of our own: sums are gradients."""
        for name, parameter in self.model.named_parameters():
            total = inside.collector(self.rule).sums[name].total
            if total.shape == parameter.shape:
                assert parameter.grad is not None
                assert torch.allclose(total, parameter.grad, rtol=self.tolerance), name
        self.twin.clear()

    def clear(self) -> None:
        self.rule._seen.clear(redraw=False)
        self.twin.clear()

    def decide(self) -> None:
        """Compare what the rule has seen with single backward passes, and let it decide."""
        collector = inside.collector(self.rule)
        for name, (total, squares) in self.twin.reference.items():
            block: Any = ()
            if collector.sampler is not None:
                block = collector.sampler.drawn(name, tuple(total.shape))[0] or ()
            if not bool(squares.isfinite().all()) or name not in collector.sums:
                continue
            found = collector.sums[name]  # without what a penalty adds to all samples
            size = float(squares.abs().max()) ** 0.5 + 1e-30
            assert torch.allclose(found.total, total[block], atol=self.tolerance * size), name
            assert torch.allclose(found.squares, squares[block], atol=self.tolerance * size**2)
            self.compared += 1
        self.twin.clear()
        self.rule.step()

    def close(self) -> None:
        self.decide()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.loss(*self.batch()).backward()
        self.close()


def deep() -> nn.Module:
    last = nn.Linear(5, 3, bias=False)
    return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 5), nn.ReLU(), last)


def lived(
    story: Callable[[Life, int], None],
    make: Callable[[], nn.Module] = deep,
    dtype: torch.dtype = torch.float64,
    **settings: Any,
) -> Life:
    life = Life(make(), dtype, **settings)
    with life.rule, Observation(life.twin):
        for number in range(STEPS):
            story(life, number) if number in LATE else life.step()
    assert life.compared >= 4, "nothing was tested"
    return life
