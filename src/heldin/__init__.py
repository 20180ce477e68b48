"""Early stopping without a validation set."""

from heldin.capture.moments import Moments
from heldin.capture.observation import Observation, observe
from heldin.capture.ops import OpUse as Use
from heldin.capture.ops import register_op_rule as rule
from heldin.criterion.evidence import Evidence, evidence
from heldin.rules.evidence import EvidenceStopping

from . import ops
from ._auto import stopping
from ._checkpoint import load, save
from ._curves import Patience
from ._damping import fraction_below, rmsprop_factors
from ._elementwise import ElementwiseStopping
from ._errors import HeldinError, HeldinWarning, MixedSamplesWarning, NotObservable
from ._estimates import Estimate, EstimateHistory
from ._folds import FoldStopping, ShadowStopping
from ._history import History, Record
from ._leaveoneout import LeaveOneOutStopping
from ._packed import Packed
from ._validation import ValidationStopping
from ._verify import Verification, verify

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
    "ops",
    "rmsprop_factors",
    "rule",
    "save",
    "stopping",
    "verify",
]
