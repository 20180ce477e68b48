"""All that the laboratory takes from heldin's stopping rules.

Other modules of the laboratory import rules, and the parts of rules that studies replay, from here,
so that a change of the library's interface changes this module alone.
"""

from heldin import (
    ElementwiseStopping,
    EvidenceStopping,
    FoldStopping,
    LeaveOneOutStopping,
    Patience,
    ShadowStopping,
    ValidationStopping,
    stopping,
)
from heldin.rules.estimated import leave_one_out, shadows
from heldin.rules.estimated.base import PathStopping
from heldin.rules.estimated.curves import best_check, mean_and_error, next_check, votes
from heldin.rules.estimated.jacobians import mapped
from heldin.rules.estimated.losses import LossFunction, RowLoss
from heldin.rules.estimated.stack import Stack, hyperparameters
from heldin.rules.ranks import COLUMNS, HEAD

__all__ = [
    "COLUMNS",
    "HEAD",
    "ElementwiseStopping",
    "EvidenceStopping",
    "FoldStopping",
    "LeaveOneOutStopping",
    "LossFunction",
    "PathStopping",
    "Patience",
    "RowLoss",
    "ShadowStopping",
    "Stack",
    "ValidationStopping",
    "best_check",
    "hyperparameters",
    "leave_one_out",
    "mapped",
    "mean_and_error",
    "next_check",
    "shadows",
    "stopping",
    "votes",
]
