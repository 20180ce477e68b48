"""Embeddings: tables whose rows are selected by an index."""

from __future__ import annotations

import torch
from torch import Tensor

from heldin.capture.contributions import CHUNK, Contributions
from heldin.capture.moments import upcast
from heldin.capture.sampling import Block

from .use import OpUse, register_op_rule


@register_op_rule("EmbeddingBackward0")
def _embedding(use: OpUse) -> Contributions | None:
    index = use.saved("indices")
    if use.option("scale_grad_by_freq") or use.layout.dim == use.grad.dim() - 1:
        return None
    size = use.shape[0]
    padding = use.option("padding_idx")  # -1 (none) may read as 2^64 - 1
    if 0 <= padding < size:
        index = torch.where(index == padding, size, index)
    rows = use.layout.split(index).flatten(1)
    return Scattered(rows, use.layout.split(use.grad).flatten(1, -2), size)


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
            return super().moments(total)
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
