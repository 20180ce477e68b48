"""Gradient flow, the path that gradient descent with a small rate follows, with fewer gradients.

Steps of gradient descent are bounded by the sharpness, the largest curvature of the loss. Several
gradients combined with the coefficients of Chebyshev polynomials allow stretches that grow with
the square of their number: the method RKC of van der Houwen and Sommeijer (1980), of first order
and strongly damped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Sharpness", "advance", "coefficients", "ends", "reach", "stages_for"]

DAMPING = 1.0  # stiff directions shrink at least by half in a stretch
MARGIN = 1.3  # by which the sharpness may be larger than estimated


def _chebyshev(stages: int) -> tuple[list[float], float, float]:
    """Chebyshev polynomials at w0 > 1, w0 itself, and the scale w1 of the argument."""
    w0 = 1 + DAMPING / stages**2
    values, slopes = [1.0, w0], [0.0, 1.0]
    for _ in range(2, stages + 1):
        slopes.append(2 * values[-1] + 2 * w0 * slopes[-1] - slopes[-2])
        values.append(2 * w0 * values[-1] - values[-2])
    return values, w0, values[stages] / slopes[stages]


def coefficients(stages: int) -> list[tuple[float, float, float]]:
    """Of each stage: factors of the stage before, of the one before that, and of the gradient.

    >>> coefficients(1)  # a step of gradient descent
    [(1.0, 0.0, 1.0)]
    """
    t, w0, w1 = _chebyshev(stages)
    others = [
        (2 * w0 * t[j - 1] / t[j], -t[j - 2] / t[j], 2 * w1 * t[j - 1] / t[j])
        for j in range(2, stages + 1)
    ]
    return [(1.0, 0.0, w1 / w0), *others]


def reach(stages: int) -> float:
    """The largest product of stretch and sharpness that is stable.

    >>> [round(reach(stages), 1) for stages in (1, 2, 10)]
    [1.5, 5.3, 125.9]
    """
    _, w0, w1 = _chebyshev(stages)
    return (w0 + 1) / w1


def stages_for(stretch: float, sharpness: float) -> int:
    """The least number of gradients, two or more, with which a stretch is stable.

    >>> stages_for(0.01, 20.0), stages_for(1.0, 100.0)
    (2, 11)
    """
    stages = 2
    while reach(stages) < MARGIN * stretch * sharpness:
        stages += 1
    return stages


@torch.no_grad()
def advance(
    weights: Sequence[Tensor],
    gradient: Callable[[], Sequence[Tensor]],
    stretch: float,
    stages: int,
) -> None:
    """Move weights along the flow w' = -gradient(w), in place.

    Args:
        weights: of a model.
        gradient: of the loss at the weights as they are; called once for each stage.
        stretch: of time: rate times steps of gradient descent.
        stages: number of gradients, see `stages_for`.

    >>> w = torch.tensor([1.0], dtype=torch.float64)
    >>> advance([w], lambda: [w.clone()], 0.1, 3)  # w' = -w
    >>> round(float(w), 4)  # exp(-0.1) is 0.9048
    0.902
    """
    before = now = [w.clone() for w in weights]
    for newer, older, slope in coefficients(stages):
        slopes = gradient()
        after = [
            newer * y + older * x - slope * stretch * g
            for x, y, g in zip(before, now, slopes, strict=True)
        ]
        before, now = now, after
        for w, value in zip(weights, now, strict=True):
            w.copy_(value)


class Sharpness:
    """The largest curvature of a loss along a path, by power iteration; a part of checkpoints.

    The direction of one place is where the next one begins.

    >>> w = torch.tensor([1.0, 1.0], requires_grad=True)
    >>> sharpness = Sharpness()
    >>> value = sharpness.at([w], lambda: 0.5 * (3 * w[0] ** 2 + w[1] ** 2), rounds=20)
    >>> round(value, 3)
    3.0
    """

    def __init__(self) -> None:
        self._direction: list[Tensor] = []

    def at(self, weights: Sequence[Tensor], loss: Callable[[], Tensor], rounds: int) -> float:
        """Look at some place.

        Args:
            weights: that need gradients.
            loss: at these weights.
            rounds: of the iteration; ten times as many in the first place.
        """
        if not self._direction:
            generator = torch.Generator().manual_seed(0)
            self._direction = [
                torch.randn(w.shape, generator=generator, dtype=w.dtype).to(w.device)
                for w in weights
            ]
            rounds *= 10
        gradients = torch.autograd.grad(loss(), weights, create_graph=True)
        size = 0.0
        for _ in range(rounds):
            products = zip(gradients, self._direction, strict=True)
            along = torch.stack([(g * v).sum() for g, v in products]).sum()
            curved = torch.autograd.grad(along, weights, retain_graph=True)
            size = float(torch.stack([c.square().sum() for c in curved]).sum().sqrt())
            self._direction = [c / max(size, 1e-30) for c in curved]
        return size

    def state_dict(self) -> dict[str, Any]:
        """The direction."""
        return {"direction": self._direction}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._direction = list(state["direction"])


def ends(steps: int, shortest: int = 5, longest: int = 1000, growth: float = 0.1) -> list[int]:
    """Steps at which stretches end: each is as long as a share of what lies before it.

    >>> ends(200)
    [1, 6, 11, 16, 21, 26, 31, 36, 41, 46, 51, 56, 61, 67, 73, 80, 88, 96, 105, 115, 126, 138, 151, 166, 182, 200]
    """  # noqa: E501
    found = [1]
    while found[-1] < steps:
        length = min(longest, max(shortest, int(growth * found[-1])))
        found.append(min(steps, found[-1] + length))
    return found
