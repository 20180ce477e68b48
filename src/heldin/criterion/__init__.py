"""From moments of gradients to values that say whether to go on."""

from heldin._evidence import Evidence

__all__ = ["Evidence"]
