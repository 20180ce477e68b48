"""What is kept of a run: histories, states that are checked when loaded, checkpoints."""

from .checkpoint import load, save
from .estimates import Estimate, EstimateHistory
from .history import History, Record
from .packed import Packed

__all__ = ["Estimate", "EstimateHistory", "History", "Packed", "Record", "load", "save"]
