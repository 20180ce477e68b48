"""What cross-validation gives, from out-of-fold outputs: pure functions on tensors."""

from .committee import Committee as Committee
from .comparison import Comparison as Comparison
from .comparison import Difference as Difference
from .comparison import RunRecord as RunRecord
from .comparison import compare as compare
from .intervals import Estimates as Estimates
from .intervals import Interval as Interval
from .intervals import mean_interval as mean_interval
from .intervals import statistic_interval as statistic_interval
from .metrics import Metric as Metric
from .metrics import are_probabilities as are_probabilities
from .metrics import described as described
from .metrics import resolve_metrics as resolve_metrics
from .out_of_fold import OutOfFold as OutOfFold
from .temperature import Calibrated as Calibrated
from .temperature import Calibrator as Calibrator
from .temperature import fit_temperature as fit_temperature
from .temperature import numbered as numbered
from .temperature import temperature_losses as temperature_losses
