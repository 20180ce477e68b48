"""The element-wise rule under every reading at once, for some weights, beside plain training.

Averages of f of fixed coordinates of each tensor are kept for every smoothing, start and treatment
of 0/0. Nothing is stopped: the shares are what the rule would say along the path of plain
training. A weight that stops changes the path of the others; the real runs of the rule show by how
much.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import torch
from torch import Tensor

from heldin.capture.moments import Moments, smallest_square

from .ledger import ratio
from .readings import DIVISION, ELEMENTWISE_SMOOTHING

__all__ = ["KEYS", "Averages", "key"]

STARTS = (1.0, 10.0, 100.0)  # 1 is c = 0 of Eq. 15
KEYS = tuple(
    product(
        (value.setting for value in ELEMENTWISE_SMOOTHING.values),
        STARTS,
        (value.setting for value in DIVISION.values),
    )
)


def key(smoothing: float, start: float, division: str | float) -> int:
    """The place of a reading.

    >>> key(0.99, 1.0, "out")
    0
    """
    return KEYS.index((smoothing, start, division))


class Averages:
    """Averages of f, and the shares of weights below 1: now, and ever.

    Args:
        sizes: number of coordinates by tensor.
        every: steps between records of the shares.
        budget: coordinates of each tensor, about.
    """

    def __init__(self, sizes: Mapping[str, int], every: int, budget: int = 4096) -> None:
        self.sizes, self.every, self.budget = dict(sizes), every, budget
        self._step = 0
        self._values = torch.zeros(0)  # readings x coordinates
        self._ever = torch.zeros(0, dtype=torch.bool)
        self._steps: list[int] = []
        self._rows: list[Tensor] = []
        self._smoothing = torch.tensor([b for b, _, _ in KEYS])[:, None]
        self._start = torch.tensor([s for _, s, _ in KEYS])[:, None]
        divisions = [value.setting for value in DIVISION.values]
        self._division = torch.tensor([divisions.index(d) for _, _, d in KEYS])
        self._out = torch.tensor([d == "out" for _, _, d in KEYS])[:, None]

    def add(self, seen: Mapping[str, Moments]) -> None:
        """Take in a step; the coordinates are the same in all steps."""
        self._step += 1
        each = [seen[name] for name in self.sizes]
        rows = []
        for value in DIVISION.values:
            epsilon = 0.0 if isinstance(value.setting, str) else value.setting
            rows.append(torch.cat([ratio(m, epsilon).flatten() for m in each]))
        f = torch.stack(rows).float().cpu()[self._division]
        live = torch.cat([(m.squares >= smallest_square(m.squares.dtype)).flatten() for m in each])
        if not self._values.numel():
            self._values = self._start.expand_as(f).clone()
            self._ever = torch.zeros_like(f, dtype=torch.bool)
        new = torch.lerp(f, self._values, self._smoothing)
        self._values = torch.where(self._out & ~live.cpu(), self._values, new)
        below = self._values < 1
        self._ever |= below
        if self._step == 1 or self._step % self.every == 0:
            counts = [m.total.numel() for m in each]
            shares = [
                torch.stack([part.float().mean(1) for part in flags.split(counts, 1)], 1)
                for flags in (below, self._ever)
            ]
            self._steps.append(self._step)
            self._rows.append(torch.stack(shares, -1))

    def arrays(self) -> dict[str, Any]:
        """Shares by record, reading, tensor, and whether now (0) or ever (1), as numpy arrays."""
        import numpy

        return {
            "averages_steps": numpy.array(self._steps, dtype="int32"),
            "averages": torch.stack(self._rows).numpy() if self._rows else numpy.zeros(0, "f4"),
        }

    def state_dict(self) -> dict[str, Any]:
        """Tensors and numbers only."""
        return {
            "step": self._step,
            "values": self._values,
            "ever": self._ever,
            "steps": self._steps,
            "rows": torch.stack(self._rows) if self._rows else torch.zeros(0),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self._step, self._steps = state["step"], list(state["steps"])
        self._values, self._ever = state["values"].cpu(), state["ever"].cpu()
        self._rows = list(state["rows"].cpu().unbind())
