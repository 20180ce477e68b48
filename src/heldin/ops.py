"""Rules for ops, which compute the contributions of an autograd node fast."""

from heldin.capture.ops import OpUse, register_op_rule

__all__ = ["OpUse", "register_op_rule"]
