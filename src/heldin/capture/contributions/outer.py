"""Contributions to a matrix that multiplies data: outer products of inputs and gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from heldin.capture.moments import upcast
from heldin.capture.sampling import Block

from .base import CHUNK, Contributions, chunked

__all__ = ["Outer"]

CACHE = 1 << 18  # elements of a matrix per strip, to fit the processor's cache


class Outer(Contributions):
    """Contributions left_i^T right_i (over r rows) to a matrix that multiplies data."""

    def __init__(self, left: Tensor, right: Tensor, spread: bool = False) -> None:
        self.left, self.right, self.spread = left, right, spread  # (m, r, a), (m, r, b)
        self.m, self.rows = left.shape[0], left.shape[1]
        self.reads = self.m * self.rows if self.rows > 1 else 0  # one row per sample is cheap
        self.shape = (left.shape[2], right.shape[2])

    @classmethod
    def join(cls, parts: Sequence[Outer]) -> Outer:
        """Join several uses of a matrix into one with more rows."""
        left = torch.cat([part.left for part in parts], 1)
        return cls(left, torch.cat([part.right for part in parts], 1))

    def transposed(self) -> Outer:
        """Return the contributions to the transposed matrix."""
        return Outer(self.right, self.left, self.spread)

    def samples(self, lo: int, hi: int) -> Tensor:
        return upcast(self.left[lo:hi]).mT @ upcast(self.right[lo:hi])

    def restrict(self, block: Block) -> Contributions:
        return Outer(self.left[:, :, block[0]], self.right[:, :, block[1]])

    def moments(self, total: Tensor | None, room: Tensor | None = None) -> tuple[Tensor, Tensor]:
        left, right = upcast(self.left), upcast(self.right)
        if self.rows == 1:
            left, right = left.squeeze(1), right.squeeze(1)
            if total is None:
                total = left.mT @ right
            return total, torch.mm(left.square().mT, right.square(), out=room)
        if self.m * self.numel <= CHUNK // 8:
            products = left.mT @ right
            return products.sum(0) if total is None else total, products.square_().sum(0)
        if left.device.type != "cpu":
            first, squares = chunked(self.samples, self.m, self.numel)
            return first if total is None else total, squares
        if total is None:
            total = left.flatten(0, 1).mT @ right.flatten(0, 1)
        squares = left.new_empty(self.shape) if room is None else room
        self._squares_in_strips(left, right, squares)
        return total, squares

    def _squares_in_strips(self, left: Tensor, right: Tensor, squares: Tensor) -> None:
        """Sum (left_i^T right_i)^2 over samples, in strips of rows that fit the cache."""
        a, b = self.shape
        height = max(1, CACHE // b)
        work = left.new_empty(min(a, height), b)
        for top in range(0, a, height):
            out = squares[top : top + height]
            product = work[: len(out)]
            strip = left[:, :, top : top + height].mT
            torch.mm(strip[0], right[0], out=product)
            torch.mul(product, product, out=out)
            for i in range(1, self.m):
                torch.mm(strip[i], right[i], out=product)
                out.addcmul_(product, product)
