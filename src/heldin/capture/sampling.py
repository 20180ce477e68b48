"""Random blocks of coordinates, for the sampled estimator.

The criterion is a mean over coordinates, so a random block of them estimates it without bias. A
block is a tuple of slices. It is a function of the seed, the number of the draw, the parameter's
name and its recorded cost, so that every process and every resumed run draws the same coordinates.
In a model with more than `TENSORS` parameters, each draw takes the next `TENSORS` of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any
from zlib import crc32

from torch import Tensor

from heldin.state.schema import check_schema

__all__ = ["TENSORS", "Block", "Sampler"]

TENSORS = 32  # parameters per draw
ROWS = 32  # rows of a block of a matrix
# Approximate maximum number of activation elements to read per parameter:
VECTOR = 1 << 17  # for a vector (a bias, the scale of a norm)
MATRIX = 1 << 16  # for a matrix that multiplies sequences
FILTERS = 1 << 17  # for the filters of a convolution
# Minimum size of a block, whatever it costs: the ratios of neighbouring channels differ by more
# than their size, so that a mean over two of them is too noisy.
ENTRIES = 16  # entries of a vector
SIDES = 32  # rows and columns of a matrix, output and input channels of filters

Block = tuple[slice, ...]
Costs = tuple[int, bool]  # reads and spread, see `Sampler.block`
# The shape; size and width of each dimension that is cut; whether pieces are strided; a number
# for the layer.
Axes = tuple[Sequence[int], tuple[tuple[int, int], ...], bool, int]


def _scramble(number: int) -> int:
    """Return a pseudo-random number of 64 bits (the finaliser of splitmix64)."""
    number = (number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return number ^ (number >> 31)


def _piece(number: int, size: int, width: int, spread: bool) -> tuple[slice, float]:
    """Return a random slice of range(size) with about `width` indices, and their weight.

    The weight is the number of indices that each one represents; the weighted probability is the
    same for every index. A strided slice draws its start from the first stride, a contiguous one is
    drawn with a probability proportional to its length.
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
    """A sampler of at most `TENSORS` parameters and about `coordinates` coordinates of each."""

    def __init__(self, coordinates: int, seed: int = 0) -> None:
        self.coordinates, self.seed, self.draws = coordinates, seed, 0
        # The worst costs of each parameter in all steps so far, which decide the shape of its
        # blocks; those of the current step, where they are worse; and those of the steps since the
        # last draw, which the next draw adds to `costs`.
        self.costs: dict[str, Costs] = {}
        self.step_costs: dict[str, Costs] = {}
        self.pending_costs: dict[str, Costs] = {}
        # Whether several processes draw the same blocks. A parameter that is not in `costs` is then
        # observed whole until the processes have exchanged `step_costs`.
        self.shared_by_ranks = False
        self.whole: set[str] = set()  # parameters that cannot be sampled in blocks
        self._blocks: dict[str, tuple[Block, float]] = {}
        self._numbers: dict[int, int] = {}
        self._axes: dict[str, Axes] = {}
        self._turn: frozenset[str] | None = None
        self._drawn = False  # whether `_turn` belongs to the current draw

    # -- draws

    def close_step(self, redraw: bool) -> None:
        """Finish a step; with `redraw`, draw other parameters and coordinates for the next one."""
        for name, costs in self.step_costs.items():
            _note(self.pending_costs, name, *costs)
        self.step_costs = {}
        if redraw:
            for name, costs in self.pending_costs.items():
                _note(self.costs, name, *costs)
                self._axes.pop(name, None)
            self.pending_costs = {}
            self.draws += 1
            self._forget_draw()

    def _forget_draw(self) -> None:
        self._blocks, self._numbers, self._drawn = {}, {}, False

    def turn(self, trained: Callable[[], Sequence[str]]) -> frozenset[str] | None:
        """Return the parameters of the current draw; None means all of them.

        The first draw takes all parameters. Later ones cycle through them, in an order that
        depends on the seed.

        Args:
            trained: returns the names of all trained parameters; called once per draw.
        """
        if not self._drawn:
            self._drawn, self._turn = True, None
            names = trained() if self.draws else ()
            if len(names) > TENSORS:
                seed, start = self.seed, (self.draws - 1) * TENSORS
                order = sorted(names, key=lambda n: _scramble(crc32(n.encode()) << 32 ^ seed))
                turn = [order[(start + i) % len(order)] for i in range(TENSORS)]
                self._turn = frozenset(turn)
        return self._turn

    # -- blocks

    def note(self, name: str, reads: int, spread: bool) -> None:
        """Record the cost of a parameter in this step, if it is worse than recorded before."""
        old = self.costs.get(name)
        if old is None or reads > old[0] or (old[1] and not spread):
            _note(self.step_costs, name, reads, spread)

    def block(
        self, name: str, shape: Sequence[int], reads: int = 0, spread: bool = False
    ) -> tuple[Block | None, float]:
        """Return the parameter's block (None: all of it), and the weight of each coordinate.

        Args:
            name, shape: those of the parameter.
            reads: elements to read for each entry of a vector, each row or column of a matrix, each
                channel of filters.
            spread: whether a block may be strided, which is cheap if each sample has one row.
        """
        if name not in self.whole:
            self.note(name, reads, spread)
            if not self.shared_by_ranks and name not in self.costs:
                self.costs[name] = self.step_costs[name]
        return self.drawn(name, shape)

    def drawn(
        self, name: str, shape: Sequence[int], in_part: bool = False
    ) -> tuple[Block | None, float]:
        """Return block and weight of a parameter whose cost is known; else (None, 1.0).

        Parameters in `whole` have a block only if this is asked for (`in_part`).
        """
        drawn_block, measured = self._blocks.get(name), self._axes.get(name)
        if drawn_block is None or measured is None or measured[0] != shape:
            if name not in self.costs or (name in self.whole and not in_part):
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
            drawn_block = self._blocks[name] = tuple(pieces), stands_for
        return drawn_block

    def cutter(self, name: str, one: Sequence[int], other: Sequence[int]) -> Callable[..., Tensor]:
        """Return a function that cuts tensors of a parameter's shape to its block.

        The two shapes are those of the parameter and of its block, in any order; the function
        returns tensors that have the shape of the block unchanged.
        """
        whole = max(tuple(one), tuple(other), key=prod)
        block, _ = self.drawn(name, whole, in_part=True)
        assert block is not None
        return lambda tensor: tensor[block] if tuple(tensor.shape) == whole else tensor

    def _measure(self, name: str, shape: Sequence[int]) -> Axes:
        """Return the dimensions along which a parameter is cut, and the lengths of the pieces."""
        reads, spread = self.costs[name]
        if len(shape) == 4 and reads:
            widths, spread = self._filter_widths(shape, reads), False
        elif len(shape) > 1:
            widths = self._matrix_widths(shape, reads, spread)
        elif shape:
            widths = [min(self.coordinates, max(ENTRIES, VECTOR // reads) if reads else shape[0])]
        else:
            widths = []
        axes = tuple(zip(shape, widths, strict=False))
        if all(width >= size for size, width in axes):
            axes = ()
        # Weight and bias of a layer share their rows, so that these are read only once.
        key = crc32(name.rpartition(".")[0].encode()) << 32
        measured = self._axes[name] = (tuple(shape), axes, spread, key)
        return measured

    def _matrix_widths(self, shape: Sequence[int], reads: int, spread: bool) -> list[int]:
        size = prod(shape)
        sides = max(SIDES, MATRIX // reads) if reads and not spread else 2 * size
        if size <= self.coordinates and shape[0] + shape[1] <= sides:
            return []
        inner = size // (shape[0] * shape[1])
        height = min(shape[0], ROWS, sides // 2, max(1, self.coordinates // inner))
        return [height, min(sides - height, max(1, self.coordinates // (height * inner)))]

    def _filter_widths(self, shape: Sequence[int], reads: int) -> list[int]:
        """Return the widths of a block of filters: channels, and one kernel position or all."""
        taps = shape[2] * shape[3]
        channels = max(SIDES, FILTERS // reads)
        if prod(shape) <= self.coordinates and shape[0] + shape[1] * taps <= channels:
            return []
        height = min(shape[0], ROWS, channels // 2)
        if shape[1] * taps <= channels - height:
            return [height, *shape[1:]]
        return [height, max(1, min(channels - height, self.coordinates // height)), 1, 1]

    # -- saving

    def state_dict(self) -> dict[str, Any]:
        known, pending = (
            {name: list(costs) for name, costs in table.items()}
            for table in (self.costs, self.pending_costs)
        )
        return {"draws": self.draws, "known": known, "pending": pending}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_schema(state, STATE_SCHEMA, "sampler")
        self.draws, self.step_costs, self._axes = state["draws"], {}, {}
        self._forget_draw()
        self.costs, self.pending_costs = (
            {name: (reads, spread) for name, (reads, spread) in state[key].items()}
            for key in ("known", "pending")
        )
