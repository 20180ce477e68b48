"""Early stopping without a validation set."""

from ._errors import HeldinError, HeldinWarning, MixedSamplesWarning, NotObservable
from ._evidence import Evidence, evidence
from ._moments import Moments
from ._observe import Observation, observe
from ._rules import Use, rule
from ._stopping import EvidenceStopping
from .diagnostics.damping import fraction_below, rmsprop_factors
from .diagnostics.verification import Verification, verify
from .rules.elementwise import ElementwiseStopping
from .rules.estimated.choose import stopping
from .rules.estimated.curves import Patience
from .rules.estimated.folds import FoldStopping, ShadowStopping
from .rules.estimated.leave_one_out import LeaveOneOutStopping
from .rules.validation import ValidationStopping
from .state.checkpoint import load, save
from .state.estimates import Estimate, EstimateHistory
from .state.history import History, Record
from .state.packed import Packed

__all__ = [
    "ElementwiseStopping",
    "Estimate",
    "EstimateHistory",
    "Evidence",
    "EvidenceStopping",
    "FoldStopping",
    "HeldinError",
    "HeldinWarning",
    "History",
    "LeaveOneOutStopping",
    "MixedSamplesWarning",
    "Moments",
    "NotObservable",
    "Observation",
    "Packed",
    "Patience",
    "Record",
    "ShadowStopping",
    "Use",
    "ValidationStopping",
    "Verification",
    "evidence",
    "fraction_below",
    "load",
    "observe",
    "rmsprop_factors",
    "rule",
    "save",
    "stopping",
    "verify",
]
