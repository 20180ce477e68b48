"""The evidence-based criterion, computed from moments of gradients."""

from heldin.criterion.evidence import Evidence

__all__ = ["Evidence"]
