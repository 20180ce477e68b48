"""Where the rows of each sample lie in a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["Layout"]


@dataclass(frozen=True, eq=False)
class Layout:
    """Owners of the elements of a tensor, in a form that is cheap to use.

    If the owner depends on the index along one dimension only (`dim`), `split` brings the rows of
    each sample together. Regular layouts, (index // inner) % m, are views; others are gathered.
    """

    m: int
    shape: tuple[int, ...]
    owner: Tensor  # broadcastable to shape
    dim: int | None
    inner: int | None  # of a regular layout
    rows: Tensor | None = field(default=None)  # (m, r): indices along dim; shape[dim] is a blank

    @classmethod
    def of(cls, owner: Tensor, shape: Sequence[int], m: int) -> Layout:
        varying = [d for d, size in enumerate(owner.shape) if size > 1]
        shape = tuple(shape)
        owner = owner.long()
        if len(varying) != 1:
            return cls(m, shape, owner, None, None)
        (dim,) = varying
        line = owner.flatten()
        size = len(line)
        if size % m == 0:
            changes = (line[1:] != line[:-1]).nonzero()
            inner = int(changes[0]) + 1
            if size % (m * inner) == 0 and torch.equal(line, torch.arange(size) // inner % m):
                return cls(m, shape, owner, dim, inner)
        counts = torch.bincount(line, minlength=m)
        rows = torch.full((m, int(counts.max())), size)
        for sample in range(m):
            rows[sample, : int(counts[sample])] = (line == sample).nonzero().flatten()
        return cls(m, shape, owner, dim, None, rows)

    @property
    def per_sample(self) -> int:
        """Rows that each sample has along the dimension."""
        assert self.dim is not None
        return self.shape[self.dim] // self.m if self.rows is None else self.rows.shape[1]

    def split(self, tensor: Tensor, dim: int | None = None) -> Tensor:
        """(m, r, ...): the rows of each sample along a dimension (default: the layout's own)."""
        dim = self.dim if dim is None else dim
        assert dim is not None
        if self.rows is not None:
            front = tensor.movedim(dim, 0)
            blank = torch.cat([front, front.new_zeros(1, *front.shape[1:])])
            return blank[self.rows.to(tensor.device)]
        assert self.inner is not None
        size = tensor.shape[dim]
        if size == self.m:
            return (tensor.movedim(dim, 0) if dim else tensor).unsqueeze(1)
        if dim == 0 and size == self.m * self.inner:
            return tensor.reshape(self.m, self.inner, *tensor.shape[1:])
        outer = size // (self.m * self.inner)
        parts = tensor.reshape(
            *tensor.shape[:dim], outer, self.m, self.inner, *tensor.shape[dim + 1 :]
        )
        return parts.movedim((dim + 1, dim, dim + 2), (0, 1, 2)).flatten(1, 2)

    def mask(self, lo: int, hi: int, device: torch.device) -> Tensor:
        """(hi - lo, ...), broadcastable to the shape: true where a sample owns the element."""
        samples = torch.arange(lo, hi).reshape(-1, *[1] * len(self.shape))
        return (self.owner == samples).to(device)
