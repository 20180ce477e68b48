"""Light shadows: each step on a random part of the rows of the batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from heldin.loop.randomness import mixed_seed

from .labels import visible

__all__ = ["LEVEL_ROWS", "RowDraw", "level_rows"]

LEVEL_ROWS = 64  # training rows of a shadow on which it is compared with the model
ENOUGH = 32  # of them, if all shadows have the same
STREAM = -5  # number of the random stream of the draws


class RowDraw:
    """Draws the rows of a batch that a light shadow is trained on.

    The draw depends on the seed, the step, the shadow, the batch of the step (gradients may be
    accumulated over several) and the rank, so no state has to be saved.
    """

    def __init__(self, share: float, seed: int) -> None:
        self.share, self._seed = share, seed  # of the rows of a batch; 1.0: nothing is drawn

    def __call__(
        self, visible: Tensor, step: int, shadow: int, batch: int = 0, rank: int = 0
    ) -> Tensor:
        """Return which of the visible rows (b,) of a batch are drawn, as booleans."""
        if self.share >= 1.0:
            return visible
        wanted = max(2, round(self.share * len(visible)))
        seed = mixed_seed(self._seed, STREAM, step, shadow, batch, rank)
        generator = torch.Generator().manual_seed(seed)
        order = torch.rand(len(visible), generator=generator, dtype=torch.float64)
        order = order.to(visible.device).masked_fill(~visible, 2.0)  # after all others
        drawn = torch.zeros_like(visible)
        drawn[order.argsort()[:wanted]] = True
        return drawn & visible


def level_rows(labels: Tensor, bad_rows: Sequence[int] = (), in_time: bool = False) -> list[Tensor]:
    """Return some training rows of every shadow, evenly spread, as many for each.

    The same ones for all shadows if enough rows are seen by all, so that the model is evaluated on
    them once. Rows in `bad_rows` have no finite loss.
    """
    labels = labels.cpu()
    usable = torch.ones(len(labels), dtype=torch.bool)
    usable[list(bad_rows)] = False
    shadows = int(labels.max()) + 1
    shared = ((labels < 0) & usable).nonzero().flatten()
    if len(shared) >= ENOUGH:
        return [_spread(shared, LEVEL_ROWS)] * shadows
    rows = [
        (visible(labels, number, in_time) & usable).nonzero().flatten() for number in range(shadows)
    ]
    count = min(len(each) for each in rows)
    return [_spread(each, min(LEVEL_ROWS, count)) for each in rows]


def _spread(rows: Tensor, most: int) -> Tensor:
    count = min(most, len(rows))
    return rows[torch.linspace(0, len(rows) - 1, count).round().long()]
