"""All that the laboratory takes from heldin's stopping rules.

Other modules of the laboratory import rules, and the parts of rules that studies replay, from here,
so that a change of the library's interface changes this module alone.
"""

from typing import Any

from heldin import EarlyStopping, ElementwiseStopping, Patience
from heldin.distributed.ranks import COLUMNS, HEAD
from heldin.rules import leave_one_out
from heldin.rules.auto import follow as _follow
from heldin.rules.evidence import EvidenceStopping
from heldin.rules.folds import FoldStopping
from heldin.rules.inputs import RunInputs
from heldin.rules.jacobians import jacobians_by_vmap
from heldin.rules.leave_one_out import LeaveOneOutStopping
from heldin.rules.options import Auto, Evidence, Folds, LeaveOneOut, Validation
from heldin.rules.path import PathStopping
from heldin.rules.policy import PATIENCE, best_check, bootstrap_shares, mean_and_error, next_check
from heldin.rules.validation import ValidationStopping
from heldin.shadows.exchange import group_settings
from heldin.shadows.losses import LossFunction, PerRowLoss
from heldin.shadows.stack import Stack

__all__ = [
    "COLUMNS",
    "HEAD",
    "PATIENCE",
    "Auto",
    "EarlyStopping",
    "ElementwiseStopping",
    "Evidence",
    "EvidenceStopping",
    "FoldStopping",
    "Folds",
    "LeaveOneOut",
    "LeaveOneOutStopping",
    "LossFunction",
    "PathStopping",
    "Patience",
    "PerRowLoss",
    "Stack",
    "Validation",
    "ValidationStopping",
    "best_check",
    "bootstrap_shares",
    "follow",
    "group_settings",
    "jacobians_by_vmap",
    "leave_one_out",
    "mean_and_error",
    "next_check",
]


def follow(rule: Auto | Folds | LeaveOneOut, *parts: Any, **options: Any) -> Any:
    """Follow a run of a model, an optimiser, a loss and rows; options as `RunInputs` names them."""
    return _follow(RunInputs(*parts, **options), rule)
