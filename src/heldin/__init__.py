"""Early stopping without a validation set."""

from ._elementwise import ElementwiseStopping
from ._errors import HeldinError, HeldinWarning, MixedSamplesWarning, NotObservable
from ._evidence import Evidence, evidence
from ._history import History, Record
from ._moments import Moments
from ._observe import Observation, observe
from ._rules import Use, rule
from ._stopping import EvidenceStopping
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
    "Verification",
    "evidence",
    "observe",
    "rule",
    "verify",
]
