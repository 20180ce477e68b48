"""The flow of owners through each ATen op: one small function per family of ops.

A function takes an `OpCall` (the tracker, the op's arguments by name and its outputs) and returns
the planes of each output (see `planes`). They must name at least the samples on which the output
depends. Ops without a function are decomposed by PyTorch. Without a decomposition, every output
element depends on everything the op has read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from heldin._private_torch import decompositions, overload_of, schema_of

from .planes import align, canonical, is_mixed, merge, ownerless, tensors_in

__all__ = [
    "Flow", "Op", "OpCall", "Owners", "everything", "failures", "flow", "flows", "join_rows",
    "joined", "op_of", "over", "pointwise",
]  # fmt: skip

P = TypeVar("P", Tensor, Tensor | None)
Owners = Sequence[Tensor | None]  # the planes of each output; None: holds no data
_TURNS = {"t", "transpose", "swapaxes", "swapdims", "squeeze", "unsqueeze", "as_strided"}


class Op:
    """Properties of an ATen overload, read once from its schema."""

    def __init__(self, func: Any) -> None:
        schema = schema_of(func)
        arguments = schema.arguments
        self.names = [a.name for a in arguments]
        self.defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
        aliases = [a for a in arguments if a.alias_info is not None]
        self.written = [a.name for a in aliases if a.alias_info.is_write]
        returned = [r.alias_info for r in schema.returns if r.alias_info is not None]
        self.is_view = any(not alias.is_write for alias in returned)
        self.name = func.overloadpacket.__name__
        self.base = self.name.removesuffix("_") if self.written else self.name
        self.turns = bool(self.written) and self.base in _TURNS
        self.pointwise = torch.Tag.pointwise in func.tags
        if self.written and not self.pointwise:  # only the out-of-place op may have the tag
            twin = getattr(torch.ops.aten, self.base, None)
            other = getattr(twin, overload_of(func), None)
            self.pointwise = other is not None and torch.Tag.pointwise in other.tags
        self.random = torch.Tag.nondeterministic_seeded in func.tags

    def bind(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        return {**self.defaults, **dict(zip(self.names, args, strict=False)), **kwargs}


op_of = lru_cache(maxsize=None)(Op)


class NoOwnersError(Exception):
    """An argument holds no data, so that another one must."""


@dataclass(frozen=True)
class OpCall:
    """One op that has read owned data: its arguments by name, and its outputs."""

    tracker: Any  # the `Tracker`, whose module imports this one
    func: Any
    op: Op
    args: dict[str, Any]
    outs: Sequence[Tensor]
    raw_arguments: tuple[Sequence[Any], dict[str, Any]]  # positional and keyword arguments

    @property
    def out(self) -> Tensor:
        return self.outs[0]

    def __getitem__(self, name: str) -> Any:
        return self.args[name]

    def owners(self, value: Any) -> Tensor | None:
        planes: Tensor | None = None
        if isinstance(value, Tensor):
            planes = self.tracker.owners(value)
        return planes

    def needed(self, name: str) -> Tensor:
        """Return the planes of an argument; without them, the flow ends with `everything`."""
        planes = self.owners(self.args[name])
        if planes is None:
            raise NoOwnersError
        return planes

    def owned(self, *values: Any) -> list[Tensor]:
        """Return the planes of all owned tensors among the values (default: all arguments)."""
        tensors = tensors_in(values or list(self.args.values()))
        return [p for t in tensors if (p := self.tracker.owners(t)) is not None]

    def full(self, tensor: Tensor, like: Tensor) -> Tensor:
        """Return the planes of a tensor in its shape, even if it holds no data."""
        planes = self.owners(tensor)
        planes = ownerless(tensor.shape, like, self.tracker.m) if planes is None else planes
        return planes.expand(-1, *tensor.shape)

    def moved_by(self, *index: Any) -> None:
        """Mark the trace as volatile if the index that moved rows may change."""
        if any(self.tracker.varies_per_batch(t) for t in tensors_in(index)):
            self.mark_volatile()

    def mark_volatile(self) -> None:
        """Mark the trace as valid for this batch only, because of this op."""
        self.tracker.mark_volatile(self.tracker.place(self.op.name))

    def note_mixing(self, op: str, cause: str) -> None:
        """Record that an op mixes samples though rows keep their owners."""
        self.tracker.mixing_ops.setdefault(self.tracker.place(op), cause)


failures: list[str] = []  # ops whose flow raised an error, for the tests
Flow = Callable[[OpCall], Owners]
FLOWS: dict[str, Flow] = {}


def flows(*names: str) -> Callable[[Flow], Flow]:
    """Register a function for the ATen ops with these names (in-place variants included)."""

    def register(function: Flow) -> Flow:
        FLOWS.update(dict.fromkeys(names, function))
        return function

    return register


def flow(call: OpCall) -> Owners:
    """Return the planes of the outputs of one op that has read owned data."""
    op = call.op
    function = FLOWS.get(op.base)
    if function is None and op.pointwise:
        function = pointwise
    if function is None and op.base.startswith(_SHAPE_ONLY):
        return [None] * len(call.outs)
    results = None
    try:
        results = function(call) if function else _decomposed(call)
    except NoOwnersError:
        pass
    except Exception as error:  # an unforeseen form of the op: use the safe fallback
        if len(failures) < 100:
            failures.append(f"{op.name}: {error!r}")
    return everything(call) if results is None else results


_SHAPE_ONLY = ("empty", "zeros", "ones", "full", "rand", "new_", "zero", "fill", "sym_", "arange")


def _decomposed(call: OpCall) -> Owners | None:
    """Run PyTorch's decomposition of an op on the same inputs, only to get its owners."""
    if call.op.written or call.op.random:
        return None
    decomposition = decompositions().get(call.func)
    if decomposition is None:
        return None
    try:
        with call.tracker:
            recomputed = tensors_in(decomposition(*call.raw_arguments[0], **call.raw_arguments[1]))
    except Exception:  # the decomposition does not accept these arguments
        return None
    if [t.shape for t in recomputed] != [t.shape for t in call.outs]:
        return None
    return [call.owners(t) for t in recomputed]


def over(planes: P, dims: Sequence[int], keep: bool = True) -> P:
    """Return the owners after a reduction over some dimensions."""
    if planes is None:
        return None
    ndim = planes.dim() - 1
    where = sorted({d % ndim + 1 for d in dims}) if ndim else []
    return planes.amax(where, keepdim=keep) if where else planes


def joined(parts: Sequence[Tensor | None], ndim: int) -> Tensor | None:
    real = [align(p, ndim) for p in parts if p is not None]
    return canonical(merge(real)) if real else None


@flows(
    "native_dropout", "bernoulli", "masked_fill", "where", "clone", "_prelu_kernel",
    "rrelu_with_noise", "tril", "triu", "lerp", "hardswish", "polar", "complex", "real", "imag",
    "_conj", "poisson", "normal", "binomial", "isclose",
    "fake_quantize_per_tensor_affine_cachemask",
)  # fmt: skip
def pointwise(call: OpCall) -> Owners:
    tensors = [t for t in tensors_in(list(call.args.values())) if call.owners(t) is not None]
    parts = [align(p, call.out.dim()) for p in call.owned(tensors)]
    return [join_rows(call, parts, [t.requires_grad for t in tensors])] * len(call.outs)


def join_rows(call: OpCall, parts: Sequence[Tensor], differentiable: Sequence[bool]) -> Tensor:
    """Merge planes, except that rows keep their owners when they meet certain mixed operands.

    These are a mixed operand that all rows share (a statistic of the batch, which is reported), and
    a mixed operand without a gradient (a mask).
    """
    first = parts[0]
    if all(p is first or (p.shape == first.shape and torch.equal(p, first)) for p in parts[1:]):
        return first
    merged = merge(parts)
    mixed = [bool(is_mixed(p).any()) for p in parts]
    if any(mixed) and not all(mixed):
        rows = merge([p for p, bad in zip(parts, mixed, strict=True) if not bad])
        varying = [d for d in range(1, rows.dim()) if rows.shape[d] > 1]
        inside = not torch.is_grad_enabled() and _inside_function()
        beside = [
            (p, d or inside) for p, d, bad in zip(parts, differentiable, mixed, strict=True) if bad
        ]
        shared = all(not d or all(p.shape[v] == 1 for v in varying) for p, d in beside)
        if varying and shared and not bool(is_mixed(rows).any()):
            if any(d for _, d in beside):
                call.note_mixing(call.op.name, "statistics of the batch")
            return canonical(rows)
    return canonical(merged)


def _inside_function() -> bool:
    """Return whether the forward of a `torch.autograd.Function` is running.

    No tensor in it requires a gradient, yet its outputs may pass gradients to everything that it
    has read. From PyTorch 2.15 on, `apply` has no Python frame, so the stack is searched for
    `forward`.
    """
    kinds, codes = [torch.autograd.Function], set()
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        codes.add(getattr(kind.forward, "__code__", None))
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code not in codes:
        frame = frame.f_back
    return frame is not None


def everything(call: OpCall) -> Owners:
    """Return the safe fallback: every output depends on everything that was read."""
    flat = [p.reshape(p.shape[0], -1).amax(1) for p in call.owned()]
    union = merge(flat)
    return [union.reshape(-1, *[1] * out.dim()) for out in call.outs]
