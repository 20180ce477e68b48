"""Early stopping without a validation set."""

from ._errors import HeldinError, HeldinWarning, MixedSamplesWarning, NotObservable
from ._evidence import Evidence, evidence
from ._moments import Moments
from ._observe import Observation, observe
from ._rules import Use, rule
from ._verify import Verification, verify

__all__ = [
    "Evidence",
    "HeldinError",
    "HeldinWarning",
    "MixedSamplesWarning",
    "Moments",
    "NotObservable",
    "Observation",
    "Use",
    "Verification",
    "evidence",
    "observe",
    "rule",
    "verify",
]
