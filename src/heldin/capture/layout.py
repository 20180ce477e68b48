"""The position of each sample's rows in a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

__all__ = ["Layout"]


@dataclass(frozen=True, eq=False)
class Layout:
    """The owner (sample number) of each element of a tensor.

    If the owner depends on the index along one dimension only (`dim`), `split` groups the rows by
    sample. Regular layouts, (index // inner) % m, are views; others are gathered.
    """

    m: int
    shape: tuple[int, ...]
    dim: int | None
    inner: int | None = None  # of a regular layout
    rows: Tensor | None = None  # (m, r): indices along dim, padded with shape[dim]
    explicit_owner: Tensor | None = None  # owners of a layout that is not regular
    _on_device: dict[tuple[str, torch.device], Tensor] = field(default_factory=dict)

    @classmethod
    def from_owners(cls, owner: Tensor, shape: Sequence[int], m: int) -> Layout:
        varying = [d for d, size in enumerate(owner.shape) if size > 1]
        shape = tuple(shape)
        owner = owner.long()
        if len(varying) != 1:
            return cls(m, shape, None, explicit_owner=owner)
        (dim,) = varying
        line = owner.flatten()
        size = len(line)
        if size % m == 0:
            changes = (line[1:] != line[:-1]).nonzero()
            inner = int(changes[0]) + 1
            if size % (m * inner) == 0 and torch.equal(line, torch.arange(size) // inner % m):
                return cls(m, shape, dim, inner)
        counts = torch.bincount(line, minlength=m)
        rows = torch.full((m, int(counts.max())), size)
        for sample in range(m):
            rows[sample, : int(counts[sample])] = (line == sample).nonzero().flatten()
        return cls(m, shape, dim, rows=rows, explicit_owner=owner)

    @cached_property
    def owner(self) -> Tensor:
        """The owner of each element, broadcastable to the shape."""
        if self.explicit_owner is not None:
            return self.explicit_owner
        assert self.dim is not None
        assert self.inner is not None
        line = torch.arange(self.shape[self.dim]) // self.inner % self.m
        return line.reshape([-1 if d == self.dim else 1 for d in range(len(self.shape))])

    def owner_on(self, device: torch.device) -> Tensor:
        return self._there("owner", self.owner, device)

    def _there(self, name: str, tensor: Tensor, device: torch.device) -> Tensor:
        """Return a tensor on a device, copied there once."""
        on_device = self._on_device.get((name, device))
        if on_device is None:
            on_device = self._on_device[name, device] = tensor.to(device)
        return on_device

    def split(self, tensor: Tensor, dim: int | None = None) -> Tensor:
        """Group the rows along a dimension by sample, (m, r, ...); the default is `self.dim`."""
        dim = self.dim if dim is None else dim
        assert dim is not None
        if self.rows is not None:
            front = tensor.movedim(dim, 0)
            blank = torch.cat([front, front.new_zeros(1, *front.shape[1:])])
            return blank[self._there("rows", self.rows, tensor.device)]
        assert self.inner is not None
        size = tensor.shape[dim]
        if size == self.m:
            return (tensor.movedim(dim, 0) if dim else tensor).unsqueeze(1)
        if dim == 0 and size == self.m * self.inner:
            return tensor.reshape(self.m, self.inner, *tensor.shape[1:])
        outer = size // (self.m * self.inner)
        parts: Tensor = tensor.unflatten(dim, (outer, self.m, self.inner))
        return parts.movedim((dim + 1, dim, dim + 2), (0, 1, 2)).flatten(1, 2)

    def mask(self, lo: int, hi: int, device: torch.device) -> Tensor:
        """Return masks of the elements of samples lo..hi-1, broadcastable to (hi - lo, *shape)."""
        samples = torch.arange(lo, hi, device=device).reshape(-1, *[1] * len(self.shape))
        return self.owner_on(device) == samples
