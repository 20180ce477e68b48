"""Fast rules for operations: how to get per-sample contributions without the generic path."""

from ._rules import Use as OpUse
from ._rules import rule as register_op_rule

__all__ = ["OpUse", "register_op_rule"]
