"""The path that is right for every op: call its node once per sample, the others blanked."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from heldin.capture.contributions import Contributions, Lazy, Rows
from heldin.capture.moments import upcast

from .use import OpUse, UseCache, keep_readable

__all__ = ["all_at_once", "generic"]


def generic(use: OpUse) -> Contributions:
    """Call the node with all samples but one blanked: slow, and right for any op."""
    for name in dir(use.node):
        if name.startswith("_raw_saved_"):
            keep_readable(getattr(use.node, name))
    given = [i for i, grad in enumerate(use.grads) if grad is not None]
    if not given:  # an op of the user's above has stopped the gradient
        output = use.node._input_metadata[0]
        zero = torch.zeros((), dtype=output.dtype, device=output.device)
        return Rows(upcast(zero).expand(use.m, *use.shape))
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
            return upcast(all_at_once(one, masked, use.cache, use.node.name() not in _NOT_BATCHED))

    return Lazy(compute, use.m, use.shape)


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
