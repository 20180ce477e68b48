"""The path that is right for every op: call its node once per sample, the others blanked."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from heldin._private_torch import all_raw_saved, outputs_of
from heldin.capture.contributions import Contributions, Lazy, Rows
from heldin.capture.moments import upcast
from heldin.errors import NotObservable

from .use import OpUse, UseCache, keep_readable

__all__ = ["all_at_once", "generic"]


def generic(use: OpUse) -> Contributions:
    """Call the node with all samples but one blanked: slow, and right for any op."""
    for handle in all_raw_saved(use.node):
        keep_readable(handle)
    given = [i for i, grad in enumerate(use.grads) if grad is not None]
    if not given:  # an op of the user's above has stopped the gradient
        output = outputs_of(use.node)[0]
        zero = torch.zeros((), dtype=output.dtype, device=output.device)
        return Rows(upcast(zero).expand(use.m, *use.shape))
    call, at = use.node, use.argument
    blank: list[Tensor | None] = [None] * len(use.grads)
    if not callable(use.node):  # torch.autograd.Function
        call, at, blank = use.node.apply, _position(use), _zeros(use)

    def one(*grads: Tensor) -> Tensor:
        full: list[Tensor | None] = list(blank)
        for i, grad in zip(given, grads, strict=True):
            full[i] = grad
        out = call(*full)
        result = out[at] if isinstance(out, (tuple, list)) else out
        if result is None:  # the function says: no gradient
            result = torch.zeros(use.shape, dtype=grads[0].dtype, device=grads[0].device)
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
            return upcast(all_at_once(one, masked, use.cache, use.node.name() not in _NOT_BATCHED))

    return Lazy(compute, use.m, use.shape)


def _position(use: OpUse) -> int:
    """Where the backward of a `torch.autograd.Function` returns the gradient of an argument.

    The graph lists the arguments that are tensors, `backward` returns an entry for each argument.
    The two lists agree on those that need a gradient.
    """
    edges = [i for i, (child, _) in enumerate(use.node.next_functions) if child is not None]
    returned = [i for i, needed in enumerate(use.node.needs_input_grad) if needed]
    if len(edges) != len(returned):
        raise NotObservable(
            f"{use.node.name()}: which of the gradients that its backward returns belongs to which "
            "argument is not known. Pass its tensors first, or register a rule for it with "
            "heldin.ops.register_op_rule"
        )
    return returned[edges.index(use.argument)]


def _zeros(use: OpUse) -> list[Tensor | None]:
    """What a `torch.autograd.Function` gets for outputs that no gradient comes to."""
    outputs = outputs_of(use.node)
    return [
        torch.zeros(tuple(out.shape), dtype=out.dtype, device=out.device) if grad is None else None
        for grad, out in zip(use.grads, outputs, strict=True)
    ]


def all_at_once(
    one: Callable[..., Tensor], given: Sequence[Tensor], cache: UseCache, hopeful: bool = True
) -> Tensor:
    """`vmap` of a function, if it gives what the function gives; else one call after the other.

    Some ops have no batched backward, and that of some (cdist, for one) is wrong in PyTorch, so
    the two are compared once at each cache.
    """
    together: Tensor | None = None
    if hopeful and cache.batched is not False:
        try:
            with warnings.catch_warnings():  # an op without a batched form is only slower
                warnings.simplefilter("ignore")
                together = torch.vmap(one, randomness="same")(*given)
        except (RuntimeError, ValueError, AssertionError):
            cache.batched = False
    if together is not None and cache.batched:
        return together
    apart = torch.stack([one(*each) for each in zip(*given, strict=True)])
    if together is not None and bool(apart.isfinite().all()) and bool((apart != 0).any()):
        allowed = torch.finfo(given[0].dtype).eps ** 0.5 * float(apart.abs().max())
        cache.batched = bool(((together - apart).abs() <= allowed).all())
    # As from now on: a resumed run, whose first step this is, must not differ by a bit.
    return together if together is not None and cache.batched else apart


_NOT_BATCHED = ("MkldnnRnnLayerBackward0", "CudnnRnnBackward0")
