"""Compute frozen modules once for the model and all of its shadows.

Where the first modules of a model are frozen (a linear probe, tuning of the last blocks), a shadow
would compute what the model has computed for the same rows in the same step, and at every check
what it has computed at the last one. Outputs are reused where the arguments of a call are, value
for value, rows of a call whose outputs are at hand. At steps 1, 2, 4, 8, ... they are computed
again and compared; a module whose outputs differ (rows that influence each other, random numbers)
is not reused any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from heldin._private_torch import BatchNorm, Dropout, tree_map
from heldin.loop.batches import bytes_in, equal, tensors_in
from heldin.loop.hooks import record_calls, replaced_forwards

__all__ = ["FrozenOutputs", "frozen_modules"]

DROPOUTS = (Dropout, nn.RNNBase, nn.MultiheadAttention)
AGREEMENT = {torch.float64: 1e-9, torch.float32: 1e-4}  # relative, of outputs of other batches
COARSE = 2e-2  # for lower precision

Call = tuple[tuple[Any, dict[str, Any]], Any]  # arguments and keyword arguments; the output


def frozen_modules(model: nn.Module, trained: set[int]) -> list[nn.Module]:
    """Return the largest modules that have parameters, none of which is trained (by `id`)."""
    parameters = list(model.parameters())
    if not any(id(p) in trained for p in parameters):
        return [model] if parameters else []
    return [each for child in model.children() for each in frozen_modules(child, trained)]


class FrozenOutputs:
    """Outputs of frozen modules in the calls of the loop's step and of the checks.

    trained: numbers (`id`) of the parameters that training changes; memory: bytes of outputs of
    held-out rows that may be kept.
    """

    def __init__(self, model: nn.Module, trained: set[int], memory: int) -> None:
        self._modules = [m for m in frozen_modules(model, trained) if m is not model]
        self._memory = memory
        self._calls: dict[nn.Module, list[Call]] = {}  # of the loop since its last step
        self._held: dict[tuple[nn.Module, int], Call] = {}  # by block of held-out rows
        self._selections: list[tuple[int, Tensor, int]] = []  # of the parts of a shadow's batches
        self._compares = False
        self.reused = 0  # calls that were not computed
        self._release = record_calls(self._modules, self._record)

    def _record(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if _is_deterministic(module):
            self._calls.setdefault(module, []).append(((args, kwargs), output))

    def select(self, parts: Sequence[tuple[int, Tensor, int]], compares: bool) -> None:
        """Say which rows of the loop's batches the parts of a shadow's batches are.

        parts: number of the batch, places of the rows in it, and its number of rows; compares:
        whether to compute the outputs again and compare them.
        """
        self._selections, self._compares = list(parts), compares

    def forget(self) -> None:
        """Forget the calls of the loop: its step is over."""
        self._calls, self._selections = {}, []

    @contextmanager
    def for_part(self, number: int) -> Iterator[None]:
        """Reuse outputs of the loop's call in the calls for a part of a shadow's batches."""
        if not self._calls or number >= len(self._selections):
            yield
            return
        place, rows, size = self._selections[number]

        def forward(original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
            calls, output = self._calls.get(module, ()), None
            if place < len(calls):
                arguments, whole = calls[place]
                if _is_selection((args, kwargs), arguments, rows, size):
                    output = _selected(whole, rows, size)
            if output is not None and not self._compares:
                self.reused += 1
                return output
            computed = original(*args, **kwargs)
            if output is not None and not _is_close(computed, output):
                self._modules = [each for each in self._modules if each is not module]
                self._calls.pop(module, None)
            return computed

        with replaced_forwards(self._modules, forward):
            yield

    @contextmanager
    def for_block(self, number: int) -> Iterator[None]:
        """Reuse outputs of earlier checks in the calls for a block of held-out rows."""
        seen: set[nn.Module] = set()

        def forward(original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
            key, is_first = (module, number), module not in seen
            if is_first and key in self._held and _is_same((args, kwargs), self._held[key][0]):
                self.reused += 1
                return tree_map(Tensor.clone, self._held[key][1])
            output = original(*args, **kwargs)
            if is_first and _is_deterministic(module):
                self._memory += bytes_in(self._held.pop(key, None))
                call = tree_map(Tensor.detach, ((args, dict(kwargs)), output))
                if bytes_in(call) <= self._memory:
                    self._memory -= bytes_in(call)
                    self._held[key] = call
            seen.add(module)  # a second call of a block has other arguments
            return output

        with replaced_forwards(self._modules, forward):
            yield

    def close(self) -> None:
        self._release()
        self._modules, self._calls, self._held, self._selections = [], {}, {}, []


def _is_deterministic(module: nn.Module) -> bool:
    """Return whether a module neither draws random numbers nor changes its buffers, in its mode."""
    for each in module.modules():
        if isinstance(each, BatchNorm) and each.training:
            return False
        if isinstance(each, DROPOUTS) and each.training:
            rate = getattr(each, "p", getattr(each, "dropout", 0.0))
            if rate:
                return False
    return True


def _selected(tree: Any, index: Tensor, size: int) -> Any:
    """Return the rows of an output; None if a tensor has no row for each sample."""
    if any(t.dim() == 0 or len(t) != size for t in tensors_in(tree)):
        return None
    return tree_map(lambda t: t.index_select(0, index.to(t.device)), tree)


def _is_selection(tree: Any, whole: Any, index: Tensor, size: int) -> bool:
    """Return whether arguments are rows of other arguments; what has no rows must be the same."""

    def rows_of(tensor: Tensor) -> Tensor:
        has_rows = tensor.dim() > 0 and len(tensor) == size
        return tensor.index_select(0, index.to(tensor.device)) if has_rows else tensor

    return _is_same(tree, tree_map(rows_of, whole))


def _is_same(one: Any, other: Any) -> bool:
    """Return whether arguments that carry no gradient are the same."""
    return equal(one, other, objects=True) and not any(t.requires_grad for t in tensors_in(one))


def _is_close(one: Any, other: Any) -> bool:
    """Return whether outputs agree up to rounding."""
    computed, reused = list(tensors_in(one)), list(tensors_in(other))
    for a, b in zip(computed, reused, strict=False):
        close = AGREEMENT.get(a.dtype, COARSE)
        scale = float(a.detach().abs().max()) if a.numel() else 0.0
        if a.shape != b.shape or not torch.allclose(a, b, rtol=close, atol=close * scale):
            return False
    return len(computed) <= len(reused)
