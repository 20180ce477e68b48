"""Where the public names come from; `heldin` reads this at the first use of one of them."""

from heldin.capture.moments import Moments as Moments
from heldin.capture.observation import Observation as Observation
from heldin.capture.observation import observe as observe
from heldin.criterion.evidence import evidence as evidence
from heldin.crossval import Interval as Interval
from heldin.crossval import compare as compare
from heldin.early_stopping import EarlyStopping as EarlyStopping
from heldin.errors import HeldinError as HeldinError
from heldin.errors import HeldinWarning as HeldinWarning
from heldin.errors import NotObservable as NotObservable
from heldin.rules.elementwise import ElementwiseStopping as ElementwiseStopping
from heldin.rules.policy import Patience as Patience
from heldin.verification import verify as verify
