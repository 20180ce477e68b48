"""Contributions to the rows of a table that an index selects (embeddings)."""

from __future__ import annotations

import torch
from torch import Tensor

from heldin.capture.moments import upcast
from heldin.capture.sampling import Block

from .base import CHUNK, Contributions

__all__ = ["Scattered"]


class Scattered(Contributions):
    """Contributions values[i, r] to row index[i, r] of a table; the index `size` is ignored."""

    def __init__(self, index: Tensor, values: Tensor, size: int) -> None:
        self.index, self.values, self.size = index, values, size  # (m, r), (m, r, d)
        self.m = index.shape[0]
        self.shape = (size, values.shape[2])

    def samples(self, lo: int, hi: int) -> Tensor:
        values = upcast(self.values[lo:hi])
        table = values.new_zeros(hi - lo, self.size + 1, values.shape[2])
        where = self.index[lo:hi, :, None].expand_as(values)
        return table.scatter_add_(1, where, values)[:, : self.size]

    def restrict(self, block: Block) -> Contributions:
        rows, columns = block
        lo, hi, step = rows.indices(self.size)
        size = len(range(lo, hi, step))
        place = (self.index - lo) // step
        inside = (self.index >= lo) & (self.index < hi) & ((self.index - lo) % step == 0)
        return Scattered(torch.where(inside, place, size), self.values[:, :, columns], size)

    def moments(self, total: Tensor | None, room: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Sum equal (sample, row) pairs, then square; no shape depends on the data."""
        if self.m * self.numel <= CHUNK // 8:
            contributions = self.samples(0, self.m)
            return contributions.sum(0), contributions.square().sum(0)
        values = upcast(self.values).flatten(0, 1)
        samples = torch.arange(self.m, device=self.index.device)[:, None]
        keys, order = torch.sort((samples * (self.size + 1) + self.index).flatten())
        starts = torch.ones_like(keys)  # 1 where a new (sample, row) begins
        starts[1:] = keys[1:] != keys[:-1]
        segment = starts.cumsum(0) - 1
        sums = torch.zeros_like(values).index_add_(0, segment, values[order])
        # The row of every segment; unused segments add zeros to row `size`.
        rows = torch.full_like(keys, self.size).scatter_(0, segment, keys % (self.size + 1))
        first = values.new_zeros(self.size + 1, values.shape[1]).index_add_(0, rows, sums)
        second = torch.zeros_like(first).index_add_(0, rows, sums.square_())
        return first[: self.size], second[: self.size]
