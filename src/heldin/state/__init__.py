"""Histories of a run, validation of loaded states, and checkpoints."""

from .checkpoint import load, save
from .estimates import Estimate, EstimateHistory
from .history import History, Record
from .packed import Packed

__all__ = ["Estimate", "EstimateHistory", "History", "Packed", "Record", "load", "save"]
