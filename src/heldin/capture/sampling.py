"""Which parameters, and which coordinates of each, are looked at, if not all of them.

The criterion is a mean over coordinates, so a random block of them estimates it without bias. A
block is a tuple of slices; it is a function of the seed, the number of the draw, the parameter's
name and of what reading it has cost before, so that every process and every resumed run looks at
the same coordinates. A model with more than `TENSORS` parameters is looked at in turns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any
from zlib import crc32

from torch import Tensor

from heldin.state.schema import check_schema

__all__ = ["TENSORS", "Block", "Sampler"]

TENSORS = 32  # parameters that one draw looks at
ROWS = 32  # rows of a block of a matrix
# How many elements of the activations are read, at most or so:
VECTOR = 1 << 17  # for a vector (a bias, the scale of a norm)
MATRIX = 1 << 16  # for a matrix that multiplies sequences
FILTERS = 1 << 17  # for the filters of a convolution
# But never fewer than this, however much there is to read: the ratios of neighbouring channels
# differ by their own size and more, and a mean over two of them says nothing.
ENTRIES = 16  # entries of a vector
SIDES = 32  # rows and columns of a matrix, output and input channels of filters

Block = tuple[slice, ...]
Costs = tuple[int, bool]  # reads and spread, see `Sampler.block`
# The shape; size and width of each dimension that is cut; whether pieces are spread; a number for
# the layer.
Axes = tuple[Sequence[int], tuple[tuple[int, int], ...], bool, int]


def _scramble(number: int) -> int:
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
        return slice(0, size, 1), 1.0
    if spread:
        step = -(-size // width)
        return slice(number % step, size, step), float(step)
    start = number % size // width * width
    stop = min(size, start + width)
    return slice(start, stop, 1), size / (stop - start)


def _note(costs: dict[str, Costs], name: str, reads: int, spread: bool) -> None:
    old = costs.get(name)
    costs[name] = (reads, spread) if old is None else (max(reads, old[0]), spread and old[1])


COSTS = {str: [(int, bool)]}
STATE_SCHEMA = {"draws": int, "known": COSTS, "pending": COSTS}


class Sampler:
    """Draws at most `TENSORS` parameters, and a block of about `budget` coordinates of each.

    Attributes:
        known: `reads` and `spread` of each parameter, which decide the shape of its blocks: the
            least favourable of all steps so far.
        noted: those of the step under way, where they are less favourable.
        pending: those of the steps since the last draw, known from the next one on.
        agreeing: several processes draw together. A parameter that is not known is taken whole
            until they have told each other what they noted.
        whole: parameters that cannot be looked at in part.
    """

    def __init__(self, budget: int, seed: int = 0) -> None:
        self.budget, self.seed, self.draws = budget, seed, 0
        self.known: dict[str, Costs] = {}
        self.noted: dict[str, Costs] = {}
        self.pending: dict[str, Costs] = {}
        self.agreeing = False
        self.whole: set[str] = set()
        self._blocks: dict[str, tuple[Block, float]] = {}
        self._numbers: dict[int, int] = {}
        self._axes: dict[str, Axes] = {}
        self._turn: frozenset[str] | None = None
        self._drawn = False  # whether `_turn` holds for this draw

    # -- draws

    def close_step(self, redraw: bool) -> None:
        """A step is over; with `redraw`, other parameters and coordinates from now on."""
        if self.noted:
            for name, (reads, spread) in self.noted.items():
                _note(self.pending, name, reads, spread)
            self.noted = {}
        if redraw:
            if self.pending:
                for name, (reads, spread) in self.pending.items():
                    _note(self.known, name, reads, spread)
                    self._axes.pop(name, None)
                self.pending = {}
            self.draws += 1
            self._forget_draw()

    def _forget_draw(self) -> None:
        self._blocks, self._numbers, self._drawn = {}, {}, False

    def turn(self, trained: Callable[[], Sequence[str]]) -> frozenset[str] | None:
        """The parameters that this draw looks at; None: all of them.

        The first draw looks at all parameters. The next ones go through them in turns, in an order
        that the seed decides.

        Args:
            trained: gives the names of all parameters that are trained; called once per draw.
        """
        if not self._drawn:
            self._drawn, self._turn = True, None
            names = trained() if self.draws else ()
            if len(names) > TENSORS:
                order = sorted(names, key=self._place_in_order)
                start = (self.draws - 1) * TENSORS
                turn = [order[(start + i) % len(order)] for i in range(TENSORS)]
                self._turn = frozenset(turn)
        return self._turn

    def _place_in_order(self, name: str) -> int:
        return _scramble(crc32(name.encode()) << 32 ^ self.seed)

    # -- blocks

    def note(self, name: str, reads: int, spread: bool) -> None:
        """Note what reading a parameter takes in this step, if it is more than was known."""
        old = self.known.get(name)
        if old is None or reads > old[0] or (old[1] and not spread):
            _note(self.noted, name, reads, spread)

    def block(
        self, name: str, shape: Sequence[int], reads: int = 0, spread: bool = False
    ) -> tuple[Block | None, float]:
        """The parameter's block (None: all of it), and how many coordinates each one stands for.

        Args:
            name: the parameter's.
            shape: its shape.
            reads: how many elements have to be read for each entry of a vector, each row or column
                of a matrix, each channel of filters.
            spread: whether coordinates may lie apart (cheap if each sample has one row).
        """
        if name not in self.whole:
            self.note(name, reads, spread)
            if not self.agreeing and name not in self.known:
                self.known[name] = self.noted[name]
        return self.drawn(name, shape)

    def drawn(
        self, name: str, shape: Sequence[int], in_part: bool = False
    ) -> tuple[Block | None, float]:
        """The same, of a parameter that is known; all of any other.

        `in_part`: also where the parameter has turned out to be one that is looked at as a whole.
        """
        known, measured = self._blocks.get(name), self._axes.get(name)
        if known is None or measured is None or measured[0] != shape:
            if name not in self.known or (name in self.whole and not in_part):
                return None, 1.0
            if measured is None or measured[0] != shape:  # another parameter may take its name
                measured = self._measure(name, shape)
            _, axes, spread, key = measured
            if not axes:
                return None, 1.0
            number = self._numbers.get(key)
            if number is None:
                number = self._numbers[key] = _scramble(key ^ (self.seed * 0x10001) ^ self.draws)
            pieces, stands_for, bits = [], 1.0, 32 if len(axes) < 3 else 16
            for size, width in axes:
                piece, weight = _piece(number & ((1 << bits) - 1), size, width, spread)
                pieces.append(piece)
                stands_for *= weight
                number >>= bits
            known = self._blocks[name] = tuple(pieces), stands_for
        return known

    def cutter(self, name: str, one: Sequence[int], other: Sequence[int]) -> Callable[..., Tensor]:
        """Cuts tensors that are of a whole parameter to its block; others are of it already.

        Args:
            name: the parameter's.
            one, other: its shape, and that of its block, or the other way round.
        """
        whole = max(tuple(one), tuple(other), key=prod)
        block, _ = self.drawn(name, whole, in_part=True)
        assert block is not None
        return lambda tensor: tensor[block] if tuple(tensor.shape) == whole else tensor

    def _measure(self, name: str, shape: Sequence[int]) -> Axes:
        """Along which dimensions a parameter is cut, and how long the pieces are."""
        reads, spread = self.known[name]
        if len(shape) == 4 and reads:
            widths, spread = self._of_filters(shape, reads), False
        elif len(shape) > 1:
            widths = self._of_matrix(shape, reads, spread)
        elif shape:
            widths = [min(self.budget, max(ENTRIES, VECTOR // reads) if reads else shape[0])]
        else:
            widths = []
        axes = tuple(zip(shape, widths, strict=False))
        if all(width >= size for size, width in axes):
            axes = ()
        # the weight and the bias of a layer share their rows: these are read but once
        key = crc32(name.rpartition(".")[0].encode()) << 32
        found = self._axes[name] = (tuple(shape), axes, spread, key)
        return found

    def _of_matrix(self, shape: Sequence[int], reads: int, spread: bool) -> list[int]:
        size = prod(shape)
        sides = max(SIDES, MATRIX // reads) if reads and not spread else 2 * size
        if size <= self.budget and shape[0] + shape[1] <= sides:
            return []
        inner = size // (shape[0] * shape[1])
        height = min(shape[0], ROWS, sides // 2, max(1, self.budget // inner))
        return [height, min(sides - height, max(1, self.budget // (height * inner)))]

    def _of_filters(self, shape: Sequence[int], reads: int) -> list[int]:
        """Output channels, input channels, and one place in the kernel or all of them."""
        taps = shape[2] * shape[3]
        channels = max(SIDES, FILTERS // reads)
        if prod(shape) <= self.budget and shape[0] + shape[1] * taps <= channels:
            return []
        height = min(shape[0], ROWS, channels // 2)
        if shape[1] * taps <= channels - height:
            return [height, *shape[1:]]
        return [height, max(1, min(channels - height, self.budget // height)), 1, 1]

    # -- saving

    def state_dict(self) -> dict[str, Any]:
        """Numbers and strings only."""
        known = {name: list(costs) for name, costs in self.known.items()}
        pending = {name: list(costs) for name, costs in self.pending.items()}
        return {"draws": self.draws, "known": known, "pending": pending}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        check_schema(state, STATE_SCHEMA, "sampler")
        self.draws, self.noted, self._axes = state["draws"], {}, {}
        self._forget_draw()
        self.known = {name: (reads, spread) for name, (reads, spread) in state["known"].items()}
        self.pending = {name: (reads, spread) for name, (reads, spread) in state["pending"].items()}
