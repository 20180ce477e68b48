"""Where the public names come from; `heldin` reads this at the first use of one of them."""

from heldin.capture.moments import Moments as Moments
from heldin.capture.observation import Observation as Observation
from heldin.capture.observation import observe as observe
from heldin.criterion.evidence import evidence as evidence
from heldin.diagnostics.verification import verify as verify
from heldin.early_stopping import EarlyStopping as EarlyStopping
from heldin.early_stopping import Interval as Interval
from heldin.errors import HeldinError as HeldinError
from heldin.errors import HeldinWarning as HeldinWarning
from heldin.errors import NotObservable as NotObservable
from heldin.rules.elementwise import ElementwiseStopping as ElementwiseStopping
from heldin.rules.estimated.choose import stopping as stopping
from heldin.rules.estimated.curves import Patience as Patience
from heldin.rules.estimated.folds import FoldStopping as FoldStopping
from heldin.rules.estimated.folds import ShadowStopping as ShadowStopping
from heldin.rules.estimated.leave_one_out import LeaveOneOutStopping as LeaveOneOutStopping
from heldin.rules.evidence import EvidenceStopping as EvidenceStopping
from heldin.rules.validation import ValidationStopping as ValidationStopping
