"""How the per-sample contributions of each op are computed.

`generic` is right for every op. The rules in the other modules say the same for common ops, at a
fraction of the cost: a rule is a function of an `OpUse` that returns contributions, or None where
it does not fit, and the decorator line registers it for the name of an autograd node. Nothing else
has to change, except that a new module joins the import below.
"""

from . import conv, elementwise, embedding, linear, norm  # noqa: F401  (they register their rules)
from .generic import generic
from .narrow import narrowed
from .registry import OP_RULES, contributions, register_op_rule
from .use import OpUse, UseCache

__all__ = [
    "OP_RULES",
    "OpUse",
    "UseCache",
    "contributions",
    "generic",
    "narrowed",
    "register_op_rule",
]
