"""What out-of-fold predictions say about new rows: scores with their intervals."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from sklearn.calibration import calibration_curve
from sklearn.metrics import roc_auc_score

__all__ = ["Interval", "calibration", "class_scores", "number_scores"]

SIDE = 1.96  # standard errors to each side
BINS = 10


class Interval(NamedTuple):
    """An estimate for new rows, and where it lies in about 95 of 100 cases."""

    value: float
    low: float
    high: float


def _interval(value: float, error: float, low: float = -math.inf, high: float = math.inf) -> Any:
    return Interval(value, max(low, value - SIDE * error), min(high, value + SIDE * error))


def class_scores(shares: Any, codes: Any, wider: float = 1.0) -> dict[str, Interval]:
    """Accuracy and area under the ROC curve, of (n, classes) probabilities and (n,) class numbers.

    The area is that of each class against all others, in the mean over classes.

    >>> scores = class_scores(np.array([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4]]), np.array([0, 1, 1]))
    >>> round(scores["accuracy"].value, 3), scores["auc"].value
    (0.667, 1.0)
    """
    n = len(codes)
    right = float((shares.argmax(1) == codes).mean())
    # two rows more of either kind (Agresti and Coull), so that 0 and 1 have a width
    share = (right * n + 2) / (n + 4)
    error = wider * math.sqrt(share * (1 - share) / (n + 4))
    found = {
        "accuracy": Interval(
            right,
            max(0.0, min(right, share - SIDE * error)),
            min(1.0, max(right, share + SIDE * error)),
        )
    }
    areas, errors = [], []
    for number in range(shares.shape[1]) if shares.shape[1] > 2 else [1]:
        truth = codes == number
        if truth.any() and not truth.all():
            area = float(roc_auc_score(truth, shares[:, number]))
            areas.append(area)
            errors.append(_auc_error(area, int(truth.sum()), int((~truth).sum())))
    if areas:
        found["auc"] = _interval(float(np.mean(areas)), wider * float(np.mean(errors)), 0.0, 1.0)
    return found


def _auc_error(area: float, ones: int, zeros: int) -> float:
    """Hanley and McNeil's standard error."""
    first, second = area / (2 - area), 2 * area**2 / (1 + area)
    spread = (
        area * (1 - area) + (ones - 1) * (first - area**2) + (zeros - 1) * (second - area**2)
    ) / (ones * zeros)
    return math.sqrt(max(0.0, spread))


def number_scores(predicted: Any, y: Any, wider: float = 1.0) -> dict[str, Interval]:
    """Root of the mean squared error, and R2, of (n,) or (n, outputs) numbers.

    >>> scores = number_scores(np.array([1.0, 2.0, 4.0]), np.array([1.0, 2.0, 3.0]))
    >>> round(scores["rmse"].value, 3), round(scores["r2"].value, 3)
    (0.577, 0.5)
    """
    n = len(y)
    predicted, y = predicted.reshape(n, -1), y.reshape(n, -1)
    squares = ((predicted - y) ** 2).mean(1)
    around = ((y - y.mean(0)) ** 2).mean(1)
    mean, spread = float(squares.mean()), float(around.mean())
    root = math.sqrt(mean)
    found = {}
    error = wider * float(squares.std()) / math.sqrt(n)
    found["rmse"] = _interval(root, error / (2 * root) if root else 0.0, 0.0)
    if spread:
        r2 = 1 - mean / spread
        # the first order of a ratio of two means
        error = wider * float(((squares - (1 - r2) * around) / spread).std()) / math.sqrt(n)
        found["r2"] = _interval(r2, error, high=1.0)
    return found


def calibration(shares: Any, codes: Any) -> tuple[Any, Any]:
    """Predicted probabilities and how often they came true, in up to ten bins of equal counts.

    Of the second class, or with more than two classes of the one that is predicted.
    """
    if shares.shape[1] == 2:
        claimed, truth = shares[:, 1], codes == 1
    else:
        claimed, truth = shares.max(1), shares.argmax(1) == codes
    bins = max(1, min(BINS, len(codes) // 10))
    happened, said = calibration_curve(
        truth, np.clip(claimed, 0, 1), n_bins=bins, strategy="quantile"
    )
    return said, happened
