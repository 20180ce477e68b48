"""The rules for ops, by the name of their autograd node."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from heldin.capture.contributions import Contributions, Rows
from heldin.capture.moments import upcast

from .generic import generic
from .use import OpUse

__all__ = ["OP_RULES", "OpRule", "contributions", "register_op_rule"]

OpRule = Callable[[OpUse], Contributions | Tensor | None]
OP_RULES: dict[str, OpRule] = {}


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
