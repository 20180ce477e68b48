"""Shadows as a rule sees them: both kinds answer to the same calls, and with the same numbers."""

from .replayed import ReplayedShadows
from .stacked import StackedShadows

__all__ = ["ShadowBackend"]

ShadowBackend = ReplayedShadows | StackedShadows
