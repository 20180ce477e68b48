"""Early stopping without a validation set."""

from ._auto import stopping
from ._curves import Patience
from ._damping import fraction_below, rmsprop_factors
from ._elementwise import ElementwiseStopping
from ._errors import HeldinError, HeldinWarning, MixedSamplesWarning, NotObservable
from ._evidence import Evidence, evidence
from ._folds import FoldStopping, ShadowStopping
from ._leaveoneout import LeaveOneOutStopping
from ._moments import Moments
from ._observe import Observation, observe
from ._rules import Use, rule
from ._stopping import EvidenceStopping
from ._validation import ValidationStopping
from ._verify import Verification, verify
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
