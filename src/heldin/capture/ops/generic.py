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

from .use import OP_RULES, OpUse, keep_readable

__all__ = ["batched_or_single", "contributions", "generic"]

_NOT_BATCHED = ("MkldnnRnnLayerBackward0", "CudnnRnnBackward0")


def contributions(use: OpUse) -> Contributions:
    """Return the per-sample contributions to the argument of a use, by its rule if it has one."""
    function = OP_RULES.get(use.node.name())
    layout, grad = use.layouts[0], use.grads[0]
    if function is not None and layout is not None and layout.dim is not None:
        if grad is not None and not grad.is_complex():  # the rules do not conjugate
            part = function(use)
            if isinstance(part, Tensor):
                part = Rows(upcast(part))
            if part is not None:
                return part
    return generic(use)


def generic(use: OpUse) -> Contributions:
    """Call the node with the gradients of all samples but one zeroed: slow, correct for any op."""
    for handle in all_raw_saved(use.node):
        keep_readable(handle)
    outputs = outputs_of(use.node)
    with_gradient = [i for i, grad in enumerate(use.grads) if grad is not None]
    if not with_gradient:  # a custom op above has returned no gradient
        zero = torch.zeros((), dtype=outputs[0].dtype, device=outputs[0].device)
        return Rows(upcast(zero).expand(use.m, *use.shape))
    call, at = use.node, use.argument
    blank: list[Tensor | None] = [None] * len(use.grads)
    if not callable(use.node):  # torch.autograd.Function
        call, at = use.node.apply, _position(use)
        blank = [
            torch.zeros(tuple(o.shape), dtype=o.dtype, device=o.device) if grad is None else None
            for grad, o in zip(use.grads, outputs, strict=True)
        ]

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

        def batched() -> list[Tensor]:
            with warnings.catch_warnings():  # vmap warns of slow fallbacks
                warnings.simplefilter("ignore")
                return [torch.vmap(one, randomness="same")(*masked)]

        def single() -> list[Tensor]:
            return [torch.stack([one(*grads) for grads in zip(*masked, strict=True)])]

        cache = use.cache
        trusted = False if use.node.name() in _NOT_BATCHED else cache.batched
        with torch.no_grad():
            (result,), cache.batched = batched_or_single(batched, single, trusted)
        return upcast(result)

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


def batched_or_single(
    batched: Callable[[], Sequence[Tensor]],
    single: Callable[[], Sequence[Tensor]],
    trusted: bool | None,
) -> tuple[Sequence[Tensor], bool | None]:
    """Return the results of a batched function if they agree with those for single samples.

    Some ops have no batched backward, and that of some ops (cdist, for instance) is wrong in
    PyTorch, so both are compared once.

    Args:
        batched, single: return the same tensors for all samples.
        trusted: whether they agreed in an earlier call; None: they were not compared.

    Returns:
        The results, and `trusted` for the next call.
    """
    results = None
    if trusted is not False:
        try:
            results = batched()
        except (RuntimeError, ValueError, AssertionError):
            trusted = False
    if results is not None and trusted:
        return results, True
    single_results = single()
    if results is not None and all(bool(each.isfinite().all()) for each in single_results):
        if any(bool((each != 0).any()) for each in single_results):
            trusted = all(map(_agree, results, single_results))
    # A resumed run uses the batched result in this step, and must get the same bits.
    return (results if results is not None and trusted else single_results), trusted


def _agree(one: Tensor, other: Tensor) -> bool:
    allowed = torch.finfo(other.dtype).eps ** 0.5 * float(other.abs().max() if other.numel() else 0)
    return bool(((one - other).abs() <= allowed).all())
