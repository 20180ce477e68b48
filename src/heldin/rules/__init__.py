"""Stopping rules: `Auto`, `Folds`, `LeaveOneOut`, `Evidence` and `Validation` are data."""

from .options import Auto as Auto
from .options import Evidence as Evidence
from .options import Folds as Folds
from .options import LeaveOneOut as LeaveOneOut
from .options import Rule as Rule
from .options import Validation as Validation
