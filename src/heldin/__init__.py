"""Early stopping without a validation set."""

from ._curves import Patience
from ._errors import HeldinError, HeldinWarning, MixedSamplesWarning, NotObservable
from ._estimates import Estimate, EstimateHistory
from ._evidence import Evidence, evidence
from ._folds import FoldStopping, ShadowStopping
from ._leaveoneout import LeaveOneOutStopping
from ._moments import Moments
from ._observe import Observation, observe
from ._rules import Use, rule

__all__ = [
    "Estimate",
    "EstimateHistory",
    "Evidence",
    "FoldStopping",
    "HeldinError",
    "HeldinWarning",
    "LeaveOneOutStopping",
    "MixedSamplesWarning",
    "Moments",
    "NotObservable",
    "Observation",
    "Patience",
    "ShadowStopping",
    "Use",
    "evidence",
    "observe",
    "rule",
]
