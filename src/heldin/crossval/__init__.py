"""What cross-validation gives, from out-of-fold outputs: pure functions on tensors."""

from .committee import Committee
from .comparison import Comparison, Difference, RunRecord, compare
from .intervals import Estimates, Interval, mean_interval, statistic_interval
from .metrics import Metric, are_probabilities, described, resolve_metrics
from .out_of_fold import OutOfFold
from .temperature import (
    Calibrated,
    calibrate,
    cross_fitted,
    fit_temperature,
    numbered,
    scale_last_layer,
    temperature_losses,
)

__all__ = [
    "Calibrated",
    "Committee",
    "Comparison",
    "Difference",
    "Estimates",
    "Interval",
    "Metric",
    "OutOfFold",
    "RunRecord",
    "are_probabilities",
    "calibrate",
    "compare",
    "cross_fitted",
    "described",
    "fit_temperature",
    "mean_interval",
    "numbered",
    "resolve_metrics",
    "scale_last_layer",
    "statistic_interval",
    "temperature_losses",
]
