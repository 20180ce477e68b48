"""Early stopping without a validation set."""

from ._damping import fraction_below, rmsprop_factors
from ._elementwise import ElementwiseStopping
from ._errors import HeldinError, HeldinWarning, MixedSamplesWarning, NotObservable
from ._evidence import Evidence, evidence
from ._history import History, Record
from ._moments import Moments
from ._observe import Observation, observe
from ._rules import Use, rule
from ._stopping import EvidenceStopping
from ._validation import ValidationStopping
from ._verify import Verification, verify

__all__ = [
    "ElementwiseStopping",
    "Evidence",
    "EvidenceStopping",
    "HeldinError",
    "HeldinWarning",
    "History",
    "MixedSamplesWarning",
    "Moments",
    "NotObservable",
    "Observation",
    "Record",
    "Use",
    "ValidationStopping",
    "Verification",
    "evidence",
    "fraction_below",
    "observe",
    "rmsprop_factors",
    "rule",
    "verify",
]
