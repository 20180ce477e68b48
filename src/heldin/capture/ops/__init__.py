"""Per-sample contributions of each op.

`generic` is correct for every op. The rules in the other modules compute the same for common ops at
a fraction of the cost. A rule is a function of an `OpUse` that returns contributions, or None where
it does not apply; a decorator registers it for the name of an autograd node. A new module of rules
must be added to the import below.
"""

from . import conv, elementwise, embedding, linear, norm  # noqa: F401  (they register their rules)
from .generic import batched_or_single, contributions, generic
from .narrow import narrowed
from .use import OP_RULES, OpUse, UseCache, register_op_rule

__all__ = [
    "OP_RULES", "OpUse", "UseCache", "batched_or_single", "contributions", "generic", "narrowed",
    "register_op_rule",
]  # fmt: skip
