"""Which coordinates of each parameter are looked at, if not all of them.

The criterion is a mean over coordinates, so a random block of them estimates it without bias. A
block is a tuple of slices; it is a function of the seed, the number of the draw and the parameter's
name alone, so that every process and every resumed run looks at the same coordinates.
"""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

__all__ = ["Block", "Sampler"]

ROWS = 64  # rows of a block of a matrix
READS = 1 << 17  # elements of an activation that are read for a vector (a bias, a norm's scale)

Block = tuple[slice, ...]


def _mixed(number: int) -> int:
    """A number of 64 bits that looks random (the finaliser of splitmix64)."""
    number = (number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return number ^ (number >> 31)


def _piece(number: int, size: int, width: int, spread: bool) -> tuple[slice, float]:
    """A random part of range(size), about `width` long, and how many indices each one stands for.

    Every index is as likely as any other, weighted by what it stands for: spread out, the start is
    drawn from the first step; in one piece, the piece is drawn by its length.
    """
    if width >= size:
        return slice(0, size), 1.0
    if spread:
        step = -(-size // width)
        return slice(number % step, size, step), float(step)
    start = number % size // width * width
    stop = min(size, start + width)
    return slice(start, stop), size / (stop - start)


class Sampler:
    """Draws a block of about `budget` coordinates per parameter; smaller ones are taken whole."""

    def __init__(self, budget: int, seed: int = 0) -> None:
        self.budget, self.seed, self.draws = budget, seed, 0
        self._blocks: dict[str, tuple[Block | None, float]] = {}
        self._keys: dict[str, int] = {}

    def redraw(self) -> None:
        """Other coordinates from now on."""
        self.draws += 1
        self._blocks = {}

    def block(
        self, name: str, shape: Sequence[int], reads: int = 0, spread: bool = False
    ) -> tuple[Block | None, float]:
        """The parameter's block (None: all of it), and how many coordinates each one stands for.

        Args:
            name: the parameter's.
            shape: its shape; blocks are cut along the first two dimensions.
            reads: how many elements have to be read for each entry of a vector.
            spread: whether coordinates may lie apart (cheap if each sample has one row).
        """
        known = self._blocks.get(name)
        if known is None:
            known = self._blocks[name] = self._draw(name, shape, reads, spread)
        return known

    def _draw(
        self, name: str, shape: Sequence[int], reads: int, spread: bool
    ) -> tuple[Block | None, float]:
        size = 1
        for extent in shape:
            size *= extent
        width = self.budget
        if len(shape) == 1 and reads:
            width = min(width, max(16, READS // reads))
        if size <= width:
            return None, 1.0
        key = self._keys.get(name)
        if key is None:
            key = self._keys[name] = crc32(name.encode()) << 32
        number = _mixed(key ^ (self.seed * 0x10001) ^ self.draws)
        if len(shape) == 1:
            piece, weight = _piece(number, shape[0], width, spread)
            return (piece,), weight
        kernel = size // (shape[0] * shape[1])
        height = min(shape[0], ROWS, max(1, width // kernel))
        rows, above = _piece(number & 0xFFFFFFFF, shape[0], height, spread)
        across = max(1, width // (height * kernel))
        columns, beside = _piece(number >> 32, shape[1], across, spread)
        return (rows, columns), above * beside
