"""How each autograd node's per-sample contributions are computed.

`generic` is right for every op: it calls the node once per sample, on the incoming gradient with
the other samples blanked. The rules below it say the same for common ops at a fraction of the cost.
A rule is a function of a `Use` that returns a part (see `_parts`), or None where it does not fit;
the decorator line registers it for a node name. Nothing else has to be told about it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ._layout import Layout
from ._parts import Filters, Lazy, Outer, Owned, Part, Rows, Scattered, wide
from ._sampling import Sampler

__all__ = [
    "RULES",
    "Site",
    "Use",
    "all_at_once",
    "along",
    "contributions",
    "generic",
    "keep_readable",
    "narrowed",
    "noise",
    "rule",
]


@dataclass
class Site:
    """What is known about one argument of one node, from one step to the next; None: nothing.

    Attributes:
        clean: whether no sum over rows is nothing but rounding noise.
        batched: whether `vmap` of the node gives what the node itself gives.
        along: the dimension of the output, from the end, along which a vector lies; 0: none.
        sums: the dimensions that `Use.per_sample_sum` takes sums over, by its `axis`.
        shortcut: see `_shortcuts`; False: there is none.
    """

    clean: bool | None = None
    batched: bool | None = None
    along: int | None = None
    sums: dict[int | None, list[int] | None] = field(default_factory=dict)
    shortcut: Any = None


@dataclass
class Use:
    """A parameter meets data: an autograd node about to run, seen from one of its inputs.

    Attributes:
        node: the autograd node; `saved` and `option` read what it has kept.
        grads: the incoming gradients, one per output of the op (None where there is none).
        layouts: where each sample's rows lie in them.
        argument: number of the op's differentiable input that the parameter reaches.
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
    site: Site = field(default_factory=Site)

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
        """A tensor that the op saved for its backward pass."""
        keep_readable(getattr(self.node, f"_raw_saved_{name}", None))
        tensor: Tensor = getattr(self.node, f"_saved_{name}")
        return tensor

    def option(self, name: str) -> Any:
        """A number, flag or list that the op saved."""
        return getattr(self.node, f"_saved_{name}")

    def per_sample_sum(self, values: Tensor, axis: int | None = None) -> Part:
        """Sum values of the output's shape over all that the argument is broadcast over.

        `axis` is the dimension of the output where the argument's shape begins (default: as in
        broadcasting, aligned at the end).
        """
        layout, values, site = self.layout, wide(values), self.site
        rows = None
        if axis not in site.sums:
            rows = layout.split(values)
            site.sums[axis] = self._summed_over(values, rows, axis)
        over = site.sums[axis]
        if over is None:
            return self._owned(values, axis)
        if rows is None:
            rows = layout.split(values)  # (m, r, the other dimensions)
        summed = rows.sum(over) if over else rows
        if over and not site.clean:
            step = max(1, PIECE * layout.m // max(1, rows.numel()))  # samples at a time
            sizes = torch.cat([part.abs().sum(over) for part in rows.split(step)])
            summed = self._without_noise(summed, sizes, rows.numel() // max(1, summed.numel()))
        return Rows(summed.reshape(layout.m, *self.shape), own=bool(over))

    def _spread(self, values: Tensor, axis: int | None) -> tuple[int, list[int]]:
        """Where the argument's shape begins in that of the output, and it with ones elsewhere."""
        start = values.dim() - len(self.shape) if axis is None else axis
        shape = [1] * values.dim()
        shape[start : start + len(self.shape)] = self.shape
        return start, shape

    def _summed_over(self, values: Tensor, rows: Tensor, axis: int | None) -> list[int] | None:
        """Dimensions of the rows to sum over; None: the argument has an entry for each row."""
        _, shape = self._spread(values, axis)
        layout = self.layout
        assert layout.dim is not None
        if shape[layout.dim] != 1:
            return None
        kept = [d for d in range(values.dim()) if d != layout.dim]
        over = [1] if rows.shape[1] > 1 else []
        return over + [i + 2 for i, d in enumerate(kept) if shape[d] == 1 and values.shape[d] > 1]

    def _owned(self, values: Tensor, axis: int | None) -> Part:
        start, shape = self._spread(values, axis)
        over = [d for d in range(values.dim()) if shape[d] == 1 and values.shape[d] > 1]
        whole = values.sum(over, keepdim=True) if over else values
        ones = [d for d in range(values.dim()) if not start <= d < start + len(self.shape)]
        owner = self.layout.owner.to(values.device)
        for d in reversed(ones):
            owner = owner.squeeze(d)
        return Owned(whole.reshape(self.shape), owner, self.layout.m)

    def _without_noise(self, summed: Tensor, size: Tensor, terms: int) -> Tensor:
        """Nothing but rounding noise is no evidence (the key biases of attention, for one).

        Whether sums vanish is a matter of the model, not of the batch: where none of a whole
        vector's does, none will.
        """
        faint = summed.abs() <= noise(self.grad.dtype, terms) * size
        if self.site.clean is None and bool(size.isfinite().all() & (size > 0).any()):
            self.site.clean = not bool((faint & (size > 0)).any())
        return summed.masked_fill(faint, 0.0)


PIECE = 1 << 20  # elements of temporary sums
Rule = Callable[[Use], Part | Tensor | None]
RULES: dict[str, Rule] = {}


def rule(*nodes: str) -> Callable[[Rule], Rule]:
    """Register a fast rule for autograd nodes with these names.

    The rule gets a `heldin.ops.OpUse` and returns the per-sample contributions to its argument: a
    tensor (m, *shape), or None to leave this case to the generic path. It must agree with the
    generic path; `heldin.verify` on a model that uses the op shows whether it does.

    >>> import heldin, torch
    >>> @heldin.ops.register_op_rule("SinBackward0")
    ... def sine(use):
    ...     values = use.grad * use.saved("self").cos()      # the shape of the output
    ...     return use.per_sample_sum(values)                # (m, *use.shape), or None
    """

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(nodes, function))
        return function

    return register


def contributions(use: Use) -> Part:
    """The per-sample contributions to the argument of a use, the fastest way that is known."""
    function = RULES.get(use.node.name())
    layout, grad = use.layouts[0], use.grads[0]
    if function is not None and layout is not None and layout.dim is not None:
        if grad is not None and not grad.is_complex():  # the rules know nothing of conjugates
            part = function(use)
            if isinstance(part, Tensor):
                part = Rows(wide(part))
            if part is not None:
                return part
    return generic(use)


# --- looking at a few entries of a vector ----------------------------------------------------

# Rules whose argument is a vector along one dimension of the output, seen from the end or at 1.
_ALONG_LAST = {
    "AddmmBackward0", "AddBackward0", "SubBackward0", "MulBackward0", "DivBackward0",
    "NativeLayerNormBackward0",
}  # fmt: skip
_ALONG_CHANNELS = {"ConvolutionBackward0", "NativeBatchNormBackward0"}


@dataclass
class _Narrow(Use):
    """A use of which only some entries along one dimension are looked at."""

    at: int = -1  # the dimension, from the end
    whole: int = 0  # its size
    start: int = 0  # of the piece, which has use.shape[0] entries

    def saved(self, name: str) -> Tensor:
        tensor = super().saved(name)
        at = 0 if tensor.dim() == 1 else self.at  # statistics of channels are vectors
        if tensor.dim() >= -at and tensor.shape[at] == self.whole:
            return tensor.narrow(at, self.start, self.shape[0])
        return tensor


def narrowed(use: Use, sampler: Sampler, name: str) -> Use:
    """The use of a vector, cut down to its sampled block before anything is read."""
    grad, site = use.grads[0], use.site
    if grad is None:
        return use
    at = site.along
    if at is None:
        at = site.along = along(use, grad)
    if at == 0:
        return use
    size = use.shape[0]
    reads = grad.numel() // size
    if site.clean is None:
        sampler.note(name, reads, False)
        return use
    block, _ = sampler.block(name, use.shape, reads)
    if block is None:
        return use
    start, width = block[0].start, block[0].stop - block[0].start
    part = grad.narrow(at, start, width)
    return _Narrow(use.node, [part], use.layouts, use.argument, (width,), site, at, size, start)


def along(use: Use, grad: Tensor) -> int:
    """The dimension of the output, from the end, along which a vector lies; 0: none."""
    layout, node = use.layouts[0], use.node.name()
    if layout is None or layout.dim is None:
        return 0
    at = -1 if node in _ALONG_LAST else 1 - grad.dim() if node in _ALONG_CHANNELS else 0
    fits = at != 0 and grad.shape[at] == use.shape[0] and layout.dim != grad.dim() + at
    return at if fits else 0


# --- the generic path ------------------------------------------------------------------------


def generic(use: Use) -> Part:
    """Call the node with all samples but one blanked: slow, and right for any op."""
    for name in dir(use.node):
        if name.startswith("_raw_saved_"):
            keep_readable(getattr(use.node, name))
    given = [i for i, grad in enumerate(use.grads) if grad is not None]
    if not given:  # an op of the user's above has stopped the gradient
        output = use.node._input_metadata[0]
        zero = torch.zeros((), dtype=output.dtype, device=output.device)
        return Rows(wide(zero).expand(use.m, *use.shape))
    call = use.node if callable(use.node) else use.node.apply  # torch.autograd.Function

    def one(*grads: Tensor) -> Tensor:
        full: list[Tensor | None] = [None] * len(use.grads)
        for i, grad in zip(given, grads, strict=True):
            full[i] = grad
        out = call(*full)
        result = out[use.argument] if isinstance(out, (tuple, list)) else out
        assert isinstance(result, Tensor)
        if result.is_sparse:
            result = result.to_dense()
        return result.sum_to_size(use.shape) if tuple(result.shape) != use.shape else result

    def compute(lo: int, hi: int) -> Tensor:
        masked = []
        for i in given:
            grad, layout = use.grads[i], use.layouts[i]
            assert grad is not None
            if layout is None:  # nothing of this output is owned: it must not carry a gradient
                masked.append(torch.zeros_like(grad).expand(hi - lo, *grad.shape))
            else:
                masked.append(grad * layout.mask(lo, hi, grad.device))
        with torch.no_grad():
            return wide(all_at_once(one, masked, use.site, use.node.name() not in _NOT_BATCHED))

    return Lazy(compute, use.m, use.shape)


def all_at_once(
    one: Callable[..., Tensor], given: Sequence[Tensor], site: Site, hopeful: bool = True
) -> Tensor:
    """`vmap` of a function, if it gives what the function gives; else one call after the other.

    Some ops have no batched backward, and that of some (cdist, for one) is wrong in PyTorch, so
    the two are compared once at each site.
    """
    together: Tensor | None = None
    if hopeful and site.batched is not False:
        try:
            with warnings.catch_warnings():  # an op without a batched form is only slower
                warnings.simplefilter("ignore")
                together = torch.vmap(one, randomness="same")(*given)
        except (RuntimeError, ValueError, AssertionError):
            site.batched = False
    if together is not None and site.batched:
        return together
    apart = torch.stack([one(*each) for each in zip(*given, strict=True)])
    if together is not None and bool(apart.isfinite().all()) and bool((apart != 0).any()):
        allowed = torch.finfo(given[0].dtype).eps ** 0.5 * float(apart.abs().max())
        site.batched = bool(((together - apart).abs() <= allowed).all())
    # As from now on: a resumed run, whose first step this is, must not differ by a bit.
    return together if together is not None and site.batched else apart


_NOT_BATCHED = ("MkldnnRnnLayerBackward0", "CudnnRnnBackward0")


class _Sticky(dict[int, Any]):
    """A checkpointed tensor's handles, which a first read would otherwise use up."""

    def __setitem__(self, key: int, value: Any) -> None:
        if value is not None:
            super().__setitem__(key, value)


def keep_readable(raw: Any) -> None:
    """Let a tensor saved under non-reentrant activation checkpointing be read more than once."""
    holder = getattr(raw, "data", None)
    handles = getattr(holder, "handles", None)
    if isinstance(handles, dict) and not isinstance(handles, _Sticky):
        holder.handles = _Sticky(handles)  # type: ignore[union-attr]


def noise(dtype: torch.dtype, terms: int) -> float:
    """Size, relative to its terms, below which a sum is taken for rounding error.

    Rounding errors are independent: relative to the terms, that of a sum falls with the root of
    their number, as the sum itself does. The factor for single and double precision was measured
    on the key biases of attention; half precision has no room for as large a one.
    """
    eps: float = torch.finfo(dtype).eps
    factor = 128.0 if eps < 1e-6 else 8.0
    return factor * eps / math.sqrt(terms)


# --- matrices --------------------------------------------------------------------------------


def _matrix(use: Use, left: str, right: str, argument: int, scale: float = 1.0) -> Part | None:
    """out = left @ right: contributions to one of the two, whose rows or columns are samples."""
    if use.layout.dim == 0 and argument == 1:
        kept = use.saved(left)
        x, delta = use.layout.split(_dense(kept)), use.layout.split(use.grad)
        return Outer(x if scale == 1 else x * scale, delta, _spreads(x, kept))
    if use.layout.dim == 1 and argument == 0:
        kept = use.saved(right)
        x, delta = use.layout.split(_dense(kept), 1), use.layout.split(use.grad)
        return Outer(delta, x if scale == 1 else x * scale, _spreads(x, kept))
    return None


def _spreads(x: Tensor, kept: Tensor) -> bool:
    """Neighbours in the data (pixels, say) are alike, hidden units are not; one row is cheap."""
    return x.shape[1] == 1 and not kept.requires_grad


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


@rule("MmBackward0")
def _mm(use: Use) -> Part | None:
    return _matrix(use, "self", "mat2", use.argument)


@rule("AddmmBackward0", "SparseAddmmBackward0")
def _addmm(use: Use) -> Part | None:
    if use.argument == 0:
        beta = use.option("beta")
        return use.per_sample_sum(use.grad if beta == 1 else use.grad * beta)
    return _matrix(use, "mat1", "mat2", use.argument - 1, use.option("alpha"))


@rule("BmmBackward0")
def _bmm(use: Use) -> Part | None:
    """(b, n, k) @ (b, k, p): samples are the rows of every product, or the products themselves."""
    if use.argument == 1 and use.layout.dim == 1:
        x = use.layout.split(use.saved("self"), 1)  # (m, r, b, k)
        delta = use.layout.split(use.grad)  # (m, r, b, p)
    elif use.argument == 0 and use.layout.dim == 2:
        x = use.layout.split(use.grad)  # (m, r, b, n)
        delta = use.layout.split(use.saved("mat2"), 2)  # (m, r, b, k)
    elif use.layout.dim == 0:
        grad = wide(use.grad)
        other = wide(use.saved("mat2" if use.argument == 0 else "self")).mT
        values = grad @ other if use.argument == 0 else other @ grad
        return Owned(values, use.layout.owner.to(values.device), use.m)
    else:
        return None
    x, delta = wide(x), wide(delta)

    def compute(lo: int, hi: int) -> Tensor:
        return torch.einsum("irbk,irbp->ibkp", x[lo:hi], delta[lo:hi])

    return Lazy(compute, use.m, use.shape)


# --- elementwise -----------------------------------------------------------------------------


@rule("AddBackward0")
def _add(use: Use) -> Part | None:
    alpha = use.option("alpha") if use.argument == 1 else 1
    return use.per_sample_sum(use.grad if alpha == 1 else use.grad * alpha)


@rule("SubBackward0")
def _sub(use: Use) -> Part | None:
    return use.per_sample_sum(use.grad if use.argument == 0 else use.grad * -use.option("alpha"))


@rule("ExpandBackward0")
def _expand(use: Use) -> Part | None:
    return use.per_sample_sum(use.grad)


@rule("MulBackward0")
def _mul(use: Use) -> Part | None:
    other = use.saved("other" if use.argument == 0 else "self")
    return use.per_sample_sum(wide(use.grad) * other)


@rule("DivBackward0")
def _div(use: Use) -> Part | None:
    return use.per_sample_sum(wide(use.grad) / use.saved("other")) if use.argument == 0 else None


@rule("PreluKernelBackward0")
def _prelu(use: Use) -> Part | None:
    if use.argument != 1:
        return None
    x = use.saved("self")
    return use.per_sample_sum(torch.where(x > 0, 0.0, wide(use.grad) * x))


# --- normalisation ---------------------------------------------------------------------------


@rule("NativeLayerNormBackward0")
def _layer_norm(use: Use) -> Part | None:
    if use.argument == 2:
        return use.per_sample_sum(use.grad)
    x = wide(use.saved("input"))
    return use.per_sample_sum(wide(use.grad) * ((x - use.saved("result1")) * use.saved("result2")))


@rule("NativeGroupNormBackward0")
def _group_norm(use: Use) -> Part | None:
    if use.argument == 2:
        return use.per_sample_sum(use.grad, axis=1)
    x = wide(use.saved("input"))
    n, groups = x.shape[0], use.option("group")
    mean, rstd = (wide(use.saved(name)).reshape(n, groups, 1) for name in ("result1", "result2"))
    centred = ((x.reshape(n, groups, -1) - mean) * rstd).reshape(x.shape)
    return use.per_sample_sum(wide(use.grad) * centred, axis=1)


@rule("NativeBatchNormBackward0")
def _batch_norm(use: Use) -> Part | None:
    if use.argument == 2:
        return use.per_sample_sum(use.grad, axis=1)
    x = wide(use.saved("input"))
    if use.option("training"):
        mean, rstd = use.saved("result1"), use.saved("result2")
    else:
        mean = use.saved("running_mean")
        rstd = (use.saved("running_var") + use.option("eps")).rsqrt()
    column = (1, -1, *[1] * (x.dim() - 2))
    centred = (x - mean.reshape(column)) * rstd.reshape(column)
    return use.per_sample_sum(wide(use.grad) * centred, axis=1)


# --- convolution, embedding ------------------------------------------------------------------


@rule("ConvolutionBackward0")
def _convolution(use: Use) -> Part | None:
    if use.layout.dim != 0:
        return None
    if use.argument == 2:
        return use.per_sample_sum(use.grad, axis=1)
    if use.argument != 1:
        return None
    x, grad = use.layout.split(use.saved("input")), use.layout.split(use.grad)
    weight = use.saved("weight")
    settings = [list(use.option(name)) for name in ("stride", "padding", "dilation")]
    if weight.dim() == 4 and use.option("groups") == 1 and not use.option("transposed"):
        named = dict(zip(("stride", "padding", "dilation"), settings, strict=True))
        return Filters(grad, x, weight.shape[2:], named)
    tail = [use.option("transposed"), list(use.option("output_padding")), use.option("groups")]

    def compute(lo: int, hi: int) -> Tensor:
        each = [
            torch.ops.aten.convolution_backward(
                grad[i], x[i], weight, None, *settings, *tail, [False, True, False]
            )[1]
            for i in range(lo, hi)
        ]
        return wide(torch.stack(each))

    return Lazy(compute, use.m, use.shape)


@rule("EmbeddingBackward0")
def _embedding(use: Use) -> Part | None:
    index = use.saved("indices")
    if use.option("scale_grad_by_freq") or use.layout.dim == use.grad.dim() - 1:
        return None
    size = use.shape[0]
    padding = use.option("padding_idx")  # -1 (none) may read as 2^64 - 1
    if 0 <= padding < size:
        index = torch.where(index == padding, size, index)
    return Scattered(
        use.layout.split(index).flatten(1),
        use.layout.split(use.grad).flatten(1, -2),
        size,
    )
