"""Diagnostics that help to decide whether the criterion can be trusted."""

from .verification import Verification

__all__ = ["Verification"]
