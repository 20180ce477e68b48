"""From moments of gradients to values that say whether to go on."""

from heldin.criterion.evidence import Evidence

__all__ = ["Evidence"]
