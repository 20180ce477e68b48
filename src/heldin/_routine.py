"""Steps like those before them: the same graph over the same parameters, all of linear layers.

A `Pass` finds out anew what it listens to and how, in some hundred lines of Python that take as
long as a whole training step of a small model. A `Routine` takes the place of passes that would
find what the last one found: `_routine.c` compares the graph, its leaves and what it has saved with
those, and reads the gradients. Whatever differs, the pass goes the usual way.
"""

from __future__ import annotations

import warnings
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor, is_legacy_batchedtensor

from ._errors import HeldinWarning
from ._graph import types_of
from ._kernels import KERNELS
from ._moments import usually
from ._rules import RULES
from ._shortcuts import Matrix, Spot, Vector

if TYPE_CHECKING:
    from ._calls import Call
    from ._pass import Held, Pass, Stored

__all__ = ["Routine", "is_batched", "routine"]

Pair = tuple[Matrix, Vector | None]
NODES = 64  # at most, as in `_routine.c`
NOWHERE = (0, 0, 0)
PLAIN = {"inputs": None}  # what Tensor.backward() adds
ADDMM, MM = "AddmmBackward0", "MmBackward0"  # the nodes of matrices


def is_batched(grad: Tensor) -> bool:
    """Whether this is the gradient of several passes at once."""
    return is_legacy_batchedtensor(grad) or is_functorch_wrapped_tensor(grad)


def _compiled() -> Any:
    """The type, if it was compiled and PyTorch has the table of functions that it needs."""
    table = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    if not KERNELS or table is None:
        return None
    make = import_module("heldin._compiled").routine
    return make(table, Tensor, nn.Parameter, torch._C._current_graph_task_id, is_batched)


_COMPILED = _compiled()


class Routine:
    """Serves one pass after the other, until there is one of another kind."""

    def __init__(self, done: Pass, pairs: Sequence[Pair], readers: Sequence[Any]) -> None:
        assert done.plan is not None
        spots = done.plan.blocks.spots
        graph, seen, blocks = done.graph, done.seen, done.plan.blocks
        leaves = tuple([graph.leaves.get(i) for i in range(len(graph.nodes))])
        self._compiled = _COMPILED(
            types_of(graph),
            array("q", graph.edges).tobytes(),
            leaves,
            tuple([() if leaf is None else tuple(leaf.shape) for leaf in leaves]),
            tuple(readers),
            tuple([spot.name for spot in spots]),
            tuple([spot.places[3] for spot in spots]),
            (blocks.part, *usually(done.plan.m, seen.reducing)),
        )
        self._seen, self._m, self._memory = seen, done.plan.m, blocks.memory
        self._key, self._reducing = done.calls[0].key, seen.reducing
        self._costs = None if seen.sampler is None else seen.sampler.known
        self._rules, self._names = (RULES[ADDMM], RULES[MM]), seen.names
        self._pairs = pairs
        self._moments = [(spot, partial(blocks.moments, spot)) for spot in spots]
        self._held: dict[str, Held] = {}
        self._place()
        # what is looked at as a whole is so in every step
        self._moves = any(spot.shape != spot.whole for pair in pairs for spot in pair if spot)

    def __reduce__(self) -> Any:
        """A copy of a rule has to find its own."""
        return type(None), ()

    def _place(self) -> None:
        """Say which blocks were drawn."""
        blocks = tuple([m.block + (NOWHERE if v is None else v.block) for m, v in self._pairs])
        self._compiled.place(blocks, tuple([(spot.size, spot.weight) for spot, _ in self._moments]))
        self._held = {spot.name: (moments, spot.weight) for spot, moments in self._moments}

    def _drawn(self) -> bool:
        """Draw other blocks; False: there is no room for them."""
        sampler = self._seen.sampler
        for pair in self._pairs:
            for spot in pair:
                if spot is not None and not (spot.draw(sampler) and spot.size <= spot.room):
                    return False
        self._place()
        return True

    def run(self, root: Any, args: Any, kwargs: Any, backward: Callable[..., None]) -> bool:
        """Run and observe a backward pass that is as the last one; False: it is not."""
        seen, calls = self._seen, self._seen.calls
        if seen.passes or seen.aiming or seen.careful or seen.reducing is not self._reducing:
            return False
        if seen.rows is not None or seen.truth is not None or seen.memory is not self._memory:
            return False
        if seen.sampler is not None and seen.sampler.known is not self._costs:
            return False
        if seen.names is not self._names:
            return False
        if len(calls.pending) != 1 or len(args) != 3 or kwargs != PLAIN:
            return False
        call, compiled = calls.pending[0], self._compiled
        if call.key != self._key or call.tracker is not None or len(call.ends) != 1:
            return False
        if (RULES.get(ADDMM), RULES.get(MM)) != self._rules or not isinstance(root, Tensor):
            return False
        seen.aiming = kept = True
        begun, found, end = False, None, call.ends[0][0]
        try:
            if (self._moves and not self._drawn()) or not compiled.begin(root.grad_fn, end):
                return False
            begun = True
            calls.passing += 1
            backward(root, *args, **kwargs)
            kept = any(args[1:])  # the graph is, for another pass
        except BaseException:
            call.release()
            raise
        finally:
            seen.aiming = False
            if begun:
                calls.passing -= 1
                found = compiled.end(kept)
        self._finish(found, call)
        return True

    def _finish(self, found: Any, call: Call) -> None:
        """Take in what was found; None: something went wrong."""
        seen, held = self._seen, self._held
        ratios, criteria, live, missing = found or ({}, {}, {}, list(held))
        plain = not seen.passes and seen.reducing is self._reducing
        if len(ratios) == len(held) and plain:
            seen.take(ratios, held, (criteria, live), self._m)
            return
        if not plain:  # a pass or a step inside this one: only sums add up
            ratios = {}
        done: dict[str, Stored] = {
            name: (*moments(), None, weight)
            for name, (moments, weight) in held.items()
            if name not in ratios and name not in missing
        }
        seen.add(done, ratios, {name: held[name] for name in ratios}, self._m, (call,))
        if found is None:
            seen.routine = None
            warnings.warn(
                "this backward pass is not observed: its gradients do not lie in memory as those "
                "of the passes before it did. The next ones are looked at anew",
                HeldinWarning,
                stacklevel=4,
            )


def routine(done: Pass) -> Routine | None:
    """A routine for passes like this one, if all that it took were shortcuts to linear layers."""
    plan, graph, seen = done.plan, done.graph, done.seen
    if _COMPILED is None or plan is None or seen.reducing is None or seen.careful:
        return None
    if plan.blocks is None or done.inputs is not None or len(graph.nodes) > NODES:
        return None
    if len(done.roots) != 1 or len(done.calls) != 1 or len(done.calls[0].ends) != 1:
        return None
    if done.done or len(done.ratios) < len(plan.leaves) or types_of(graph) is None:
        return None
    if any(leaf.dim() > 2 or not seen.knows(leaf) for leaf in graph.leaves.values()):
        return None
    pairs = [_pair(spots) for _, spots in plan.spots or ()]
    known = [pair for pair in pairs if pair is not None]
    if len(known) < len(pairs):
        return None
    positions = [position for position, _ in plan.spots or ()]
    return Routine(done, known, [_reader(*each) for each in zip(positions, known, strict=True)])


def _pair(spots: Sequence[Spot | None]) -> Pair | None:
    """The matrix and the vector of a linear layer with one row for each sample."""
    matrix = vector = None
    for spot in spots:
        if isinstance(spot, Matrix) and matrix is None:
            matrix = spot
        elif isinstance(spot, Vector) and vector is None and not spot.kept:
            vector = spot
        else:
            return None
    found = [spot for spot in (matrix, vector) if spot is not None]
    if matrix is None or any(spot.rows > 1 or not spot.full for spot in found):
        return None
    return matrix, vector


def _reader(position: int, pair: Pair) -> Any:
    """What `_routine.c` has to know of a node."""
    matrix, vector = pair
    scales = [spot.scale for spot in pair if spot is not None and spot.scale]
    out, width = matrix.whole if matrix.flip else matrix.whole[::-1]
    total, squares, _, ratios = matrix.places
    places = NOWHERE if vector is None else (*vector.places[:2], vector.places[3])
    return (
        position, matrix.m, width, out, 8 * matrix.dtype.itemsize, int(matrix.flip),
        matrix.name, "" if vector is None else vector.name,
        "_raw_saved_" + matrix.saved, tuple(scales), (total, squares, ratios), places,
    )  # fmt: skip
