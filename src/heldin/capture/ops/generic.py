"""The generic path, correct for every op: call its node once per sample, the others zeroed."""

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
    """Call the node with the gradients of all samples but one zeroed: slow, correct for any op."""
    for handle in all_raw_saved(use.node):
        keep_readable(handle)
    with_gradient = [i for i, grad in enumerate(use.grads) if grad is not None]
    if not with_gradient:  # a custom op above has returned no gradient
        output = outputs_of(use.node)[0]
        zero = torch.zeros((), dtype=output.dtype, device=output.device)
        return Rows(upcast(zero).expand(use.m, *use.shape))
    call, at = use.node, use.argument
    blank: list[Tensor | None] = [None] * len(use.grads)
    if not callable(use.node):  # torch.autograd.Function
        call, at, blank = use.node.apply, _position(use), _zeros(use)

    def one(*grads: Tensor) -> Tensor:
        full: list[Tensor | None] = list(blank)
        for i, grad in zip(with_gradient, grads, strict=True):
            full[i] = grad
        out = call(*full)
        result = out[at] if isinstance(out, (tuple, list)) else out
        if result is None:  # the function returned no gradient
            result = torch.zeros(use.shape, dtype=grads[0].dtype, device=grads[0].device)
        assert isinstance(result, Tensor)
        if result.is_sparse:
            result = result.to_dense()
        return result.sum_to_size(use.shape) if tuple(result.shape) != use.shape else result

    def compute(lo: int, hi: int) -> Tensor:
        masked = []
        for i in with_gradient:
            grad, layout = use.grads[i], use.layouts[i]
            assert grad is not None
            if layout is None:  # no sample owns this output, so its gradient is dropped
                masked.append(torch.zeros_like(grad).expand(hi - lo, *grad.shape))
            else:
                masked.append(grad * layout.mask(lo, hi, grad.device))
        with torch.no_grad():
            return upcast(all_at_once(one, masked, use.cache, use.node.name() not in _NOT_BATCHED))

    return Lazy(compute, use.m, use.shape)


def _position(use: OpUse) -> int:
    """Return the index of an argument's gradient in the result of a custom function's backward.

    The graph lists the arguments that are tensors, `backward` returns an entry for each argument.
    The two lists agree on the arguments that need a gradient.
    """
    edges = [i for i, (child, _) in enumerate(use.node.next_functions) if child is not None]
    returned = [i for i, needed in enumerate(use.node.needs_input_grad) if needed]
    if len(edges) != len(returned):
        raise NotObservable(
            f"{use.node.name()}: the gradients that its backward returns cannot be matched to its "
            "arguments. Pass tensors as its first arguments, or register a rule for it with "
            "heldin.ops.register_op_rule"
        )
    return returned[edges.index(use.argument)]


def _zeros(use: OpUse) -> list[Tensor | None]:
    """Return zeros for the outputs of a `torch.autograd.Function` that get no gradient."""
    outputs = outputs_of(use.node)
    return [
        torch.zeros(tuple(out.shape), dtype=out.dtype, device=out.device) if grad is None else None
        for grad, out in zip(use.grads, outputs, strict=True)
    ]


def all_at_once(
    one: Callable[..., Tensor], batches: Sequence[Tensor], cache: UseCache, hopeful: bool = True
) -> Tensor:
    """Apply a function to every entry, with `vmap` if it agrees with single calls.

    Some ops have no batched backward, and that of some ops (cdist, for instance) is wrong in
    PyTorch, so both are compared once per cache.
    """
    batched_result: Tensor | None = None
    if hopeful and cache.batched is not False:
        try:
            with warnings.catch_warnings():  # vmap warns of slow fallbacks
                warnings.simplefilter("ignore")
                batched_result = torch.vmap(one, randomness="same")(*batches)
        except (RuntimeError, ValueError, AssertionError):
            cache.batched = False
    if batched_result is not None and cache.batched:
        return batched_result
    single_results = torch.stack([one(*arguments) for arguments in zip(*batches, strict=True)])
    if (
        batched_result is not None
        and bool(single_results.isfinite().all())
        and bool((single_results != 0).any())
    ):
        allowed = torch.finfo(batches[0].dtype).eps ** 0.5 * float(single_results.abs().max())
        cache.batched = bool(((batched_result - single_results).abs() <= allowed).all())
    # A resumed run uses the batched result in this step, and must get the same bits.
    return batched_result if batched_result is not None and cache.batched else single_results


_NOT_BATCHED = ("MkldnnRnnLayerBackward0", "CudnnRnnBackward0")
