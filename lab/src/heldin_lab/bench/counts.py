"""Operations dispatched, and waits for the device, in a training step.

No GPU is needed for this: what a step dispatches is counted below PyTorch's dispatcher, and what
would make the host wait for a GPU is known by name. On a GPU, operations and waits are what
observing costs.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from heldin._private_torch import TorchDispatchMode

from .methods import METHODS
from .workloads import encoder

__all__ = ["Counts", "count_steps", "counted", "counts_table"]

# Operations whose result the host has to know before it can go on.
WAITING = {
    "_local_scalar_dense", "nonzero", "masked_select", "unique_dim", "_unique", "_unique2",
    "unique_consecutive", "equal", "bincount", "repeat_interleave", "is_nonzero",
}  # fmt: skip
LIMITS = {"heldin sampled": (1.3, 1), "heldin exact": (None, 2)}  # ratio of operations, waits


@dataclass
class Counts:
    """What one stretch of code has dispatched."""

    operations: int = 0
    waits: int = 0


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counted() -> Iterator[Counts]:
    """Count what is dispatched in a block.

    >>> import torch
    >>> with counted() as found:
    ...     x = torch.ones(3) + 1
    ...     number, numbers = float(x[0]), x.tolist()
    >>> found.operations, found.waits
    (4, 2)
    """
    found, counter = Counts(), _Counter()
    lists, tolist = 0, Tensor.tolist

    def listed(self: Tensor) -> Any:  # reads memory without an operation on a processor
        nonlocal lists
        lists += 1
        return tolist(self)

    Tensor.tolist = listed  # type: ignore[method-assign, assignment]
    try:
        with counter:
            yield found
    finally:
        Tensor.tolist = tolist  # type: ignore[method-assign]
        found.operations = counter.names.total()
        found.waits = sum(counter.names[name] for name in WAITING) + lists


def count_steps(
    methods: Sequence[str] = ("plain", *LIMITS),
    make: Callable[[], Any] = lambda: encoder(width=64, depth=12, length=16, batch=4),
    steps: int = 15,
) -> dict[str, list[Counts]]:
    """The counts of some steps of each method, after the graphs are known."""
    torch.manual_seed(0)
    model, x, y = make()
    found: dict[str, list[Counts]] = {}
    for method in methods:
        way = METHODS[method](model, x, y)
        found[method] = []
        with way.active():
            for _ in range(4):
                way.step()
            for _ in range(steps):
                with counted() as counts:
                    way.step()
                found[method].append(counts)
    return found


def counts_table(found: Mapping[str, Sequence[Counts]]) -> str:
    """A row for each method, with the limits that were set."""
    lines = [
        "| encoder of 12 layers, a step with a check | operations (median) | times plain | at most "
        "| waits (most) | at most | reached |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    plain = statistics.median(each.operations for each in found["plain"])
    for method, steps in found.items():
        operations = statistics.median(each.operations for each in steps)
        waits = max(each.waits for each in steps)
        ratio, most = LIMITS.get(method, (None, None))
        reached = ""
        if most is not None:
            fine = waits <= most and (ratio is None or operations <= ratio * plain)
            reached = "yes" if fine else "no"
        cells = [
            method, f"{operations:.0f}", f"{operations / plain:.2f}",
            "-" if ratio is None else f"{ratio:.2f}", str(waits),
            "-" if most is None else str(most), reached or "-",
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
