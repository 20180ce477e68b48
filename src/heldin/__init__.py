"""Early stopping without a validation set."""

import warnings
from importlib import import_module
from typing import Any

from heldin.capture.moments import Moments
from heldin.capture.observation import Observation, observe
from heldin.criterion.evidence import evidence
from heldin.rules.evidence import EvidenceStopping

from . import criterion as criterion
from . import diagnostics as diagnostics
from . import errors as errors
from . import ops as ops
from . import state as state
from .diagnostics.verification import verify
from .errors import HeldinError, HeldinWarning, NotObservable
from .rules.elementwise import ElementwiseStopping
from .rules.estimated.choose import stopping
from .rules.estimated.curves import Patience
from .rules.estimated.folds import FoldStopping, ShadowStopping
from .rules.estimated.leave_one_out import LeaveOneOutStopping
from .rules.validation import ValidationStopping

__all__ = [
    "ElementwiseStopping",
    "EvidenceStopping",
    "FoldStopping",
    "HeldinError",
    "HeldinWarning",
    "LeaveOneOutStopping",
    "Moments",
    "NotObservable",
    "Observation",
    "Patience",
    "ShadowStopping",
    "ValidationStopping",
    "evidence",
    "observe",
    "stopping",
    "verify",
]

# Names that were here in 0.1, and where they are now. They go with the next release.
_MOVED = {
    "Estimate": "state.Estimate",
    "EstimateHistory": "state.EstimateHistory",
    "Evidence": "criterion.Evidence",
    "History": "state.History",
    "MixedSamplesWarning": "errors.MixedSamplesWarning",
    "Packed": "state.Packed",
    "Record": "state.Record",
    "Use": "ops.OpUse",
    "Verification": "diagnostics.Verification",
    "fraction_below": "diagnostics.fraction_below",
    "load": "state.load",
    "rmsprop_factors": "diagnostics.rmsprop_factors",
    "rule": "ops.register_op_rule",
    "save": "state.save",
}


def __getattr__(name: str) -> Any:
    if name not in _MOVED:
        raise AttributeError(f"module 'heldin' has no attribute {name!r}")
    place = _MOVED[name]
    warnings.warn(
        f"heldin.{name} is now heldin.{place}; the old name goes with the next release",
        DeprecationWarning,
        stacklevel=2,
    )
    module, _, own = place.partition(".")
    return getattr(import_module(f"heldin.{module}"), own)
