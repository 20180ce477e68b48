"""Early stopping without a validation set."""

from ._auto import stopping
from ._curves import Patience
from ._errors import HeldinError, HeldinWarning, MixedSamplesWarning, NotObservable
from ._estimates import Estimate, EstimateHistory
from ._evidence import Evidence, evidence
from ._folds import FoldStopping, ShadowStopping
from ._history import History, Record
from ._leaveoneout import LeaveOneOutStopping
from ._moments import Moments
from ._observe import Observation, observe
from ._rules import Use, rule
from ._stopping import EvidenceStopping
from ._verify import Verification, verify

__all__ = [
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
    "Patience",
    "Record",
    "ShadowStopping",
    "Use",
    "Verification",
    "evidence",
    "observe",
    "rule",
    "stopping",
    "verify",
]
