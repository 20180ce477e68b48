"""The use of a parameter in an op, and the rules that turn it into contributions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from heldin._private_torch import raw_saved, saved
from heldin.capture.contributions import Contributions, Owned, Rows
from heldin.capture.layout import Layout
from heldin.capture.moments import upcast

__all__ = ["OP_RULES", "OpUse", "UseCache", "keep_readable", "register_op_rule"]

PIECE = 1 << 20  # elements of temporary sums


@dataclass
class UseCache:
    """Properties of one argument of one node that last from step to step; None: not known yet."""

    no_cancellation: bool | None = None  # whether sums over rows exceed their rounding errors
    batched: bool | None = None  # whether `vmap` of the node agrees with the node itself
    along: int | None = None  # dimension of the output, from the end, of a vector; 0: none
    # The dimensions over which `OpUse.per_sample_sum` sums, by its `axis`.
    sums: dict[int | None, list[int] | None] = field(default_factory=dict)


@dataclass
class OpUse:
    """One place where a parameter enters an op: the op's autograd node, just before it runs.

    Attributes:
        node: the autograd node; `saved` and `option` read its saved values.
        grads: the incoming gradients, one per output of the op (None where there is none).
        layouts: the position of each sample's rows in them.
        argument: index of the op's differentiable input that the parameter reaches.
        shape: shape of that input.

    >>> import heldin
    >>> @heldin.ops.register_op_rule("SinBackward0")
    ... def sine(use: heldin.ops.OpUse):
    ...     return use.per_sample_sum(use.grad * use.saved("self").cos())
    """

    node: Any
    grads: Sequence[Tensor | None]
    layouts: Sequence[Layout | None]
    argument: int
    shape: tuple[int, ...]
    cache: UseCache = field(default_factory=UseCache)

    @property
    def grad(self) -> Tensor:
        """The gradient of the first output."""
        assert self.grads[0] is not None
        return self.grads[0]

    @property
    def layout(self) -> Layout:
        """The layout of the first output."""
        assert self.layouts[0] is not None
        return self.layouts[0]

    @property
    def m(self) -> int:
        return next(layout.m for layout in self.layouts if layout is not None)

    def saved(self, name: str) -> Tensor:
        """Return a tensor that the op saved for its backward pass."""
        keep_readable(raw_saved(self.node, name))
        tensor: Tensor = saved(self.node, name)
        return tensor

    def option(self, name: str) -> Any:
        """Return a number, flag or list that the op saved."""
        return saved(self.node, name)

    def per_sample_sum(self, values: Tensor, axis: int | None = None) -> Contributions:
        """Sum values of the output's shape over the dimensions along which the argument broadcasts.

        Args:
            values: one value per element of the output.
            axis: the dimension of the output where the argument's shape begins (default: aligned
                at the end, as in broadcasting).
        """
        layout, values, cache = self.layout, upcast(values), self.cache
        rows = None
        if axis not in cache.sums:
            rows = layout.split(values)
            cache.sums[axis] = self._summed_over(values, rows, axis)
        over = cache.sums[axis]
        if over is None:
            return self._owned(values, axis)
        if rows is None:
            rows = layout.split(values)  # (m, r, the other dimensions)
        summed = rows.sum(over) if over else rows
        if over and not cache.no_cancellation:
            step = max(1, PIECE * layout.m // max(1, rows.numel()))  # samples at a time
            sizes = torch.cat([part.abs().sum(over) for part in rows.split(step)])
            summed = self._without_noise(summed, sizes, rows.numel() // max(1, summed.numel()))
        return Rows(summed.reshape(layout.m, *self.shape))

    def _spread(self, values: Tensor, axis: int | None) -> tuple[int, list[int]]:
        """Return where the argument's shape begins in the output's, and it padded with ones."""
        start = values.dim() - len(self.shape) if axis is None else axis
        shape = [1] * values.dim()
        shape[start : start + len(self.shape)] = self.shape
        return start, shape

    def _summed_over(self, values: Tensor, rows: Tensor, axis: int | None) -> list[int] | None:
        """Return the dimensions of the rows to sum over; None if the argument varies by row."""
        shape, dim = self._spread(values, axis)[1], self.layout.dim
        assert dim is not None
        if shape[dim] != 1:
            return None
        other_dims = [d for d in range(values.dim()) if d != dim]
        over = [i + 2 for i, d in enumerate(other_dims) if shape[d] == 1 and values.shape[d] > 1]
        return [1, *over] if rows.shape[1] > 1 else over

    def _owned(self, values: Tensor, axis: int | None) -> Contributions:
        start, shape = self._spread(values, axis)
        over = [d for d in range(values.dim()) if shape[d] == 1 and values.shape[d] > 1]
        whole = values.sum(over, keepdim=True) if over else values
        owner = self.layout.owner_on(values.device)
        for d in reversed(range(values.dim())):
            if not start <= d < start + len(self.shape):
                owner = owner.squeeze(d)
        return Owned(whole.reshape(self.shape), owner, self.layout.m)

    def _without_noise(self, summed: Tensor, size: Tensor, terms: int) -> Tensor:
        """Set sums to zero that are only rounding noise (the key biases of attention, say).

        Rounding errors are independent: relative to the terms, the error of a sum falls with the
        square root of their number. The factor for single and double precision was measured on the
        key biases of attention; half precision is too coarse for the same factor. Whether sums
        cancel depends on the model, not on the batch: if no sum of a whole vector does, later steps
        skip the test.
        """
        eps: float = torch.finfo(self.grad.dtype).eps
        noise = (128.0 if eps < 1e-6 else 8.0) * eps / math.sqrt(terms)
        faint = summed.abs() <= noise * size
        if self.cache.no_cancellation is None and bool(size.isfinite().all() & (size > 0).any()):
            self.cache.no_cancellation = not bool((faint & (size > 0)).any())
        return summed.masked_fill(faint, 0.0)


class _Sticky(dict[int, Any]):
    """The handles of a checkpointed tensor, which keep their values after the first read."""

    def __setitem__(self, key: int, value: Any) -> None:
        if value is not None:
            super().__setitem__(key, value)


def keep_readable(raw: Any) -> None:
    """Allow a tensor of non-reentrant activation checkpointing to be read more than once."""
    holder = getattr(raw, "data", None)
    handles = getattr(holder, "handles", None)
    if isinstance(handles, dict) and not isinstance(handles, _Sticky):
        holder.handles = _Sticky(handles)  # type: ignore[union-attr]


OpRule = Callable[[OpUse], Contributions | Tensor | None]
OP_RULES: dict[str, OpRule] = {}  # by the name of the autograd node


def register_op_rule(*nodes: str) -> Callable[[OpRule], OpRule]:
    """Register a fast rule for autograd nodes with these names.

    The rule gets a `heldin.ops.OpUse` and returns one gradient of its argument per sample: the
    result of `use.per_sample_sum`, or a tensor (samples, *use.shape). If it returns None, the
    generic path is used. Both must agree, which `heldin.verify` checks on a model with the op.

    >>> import heldin, torch
    >>> @heldin.ops.register_op_rule("SinBackward0")
    ... def sine(use):
    ...     values = use.grad * use.saved("self").cos()      # the shape of the output
    ...     return use.per_sample_sum(values)                # one row per sample
    """

    def register(function: OpRule) -> OpRule:
        OP_RULES.update(dict.fromkeys(nodes, function))
        return function

    return register
