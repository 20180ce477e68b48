"""Scores of out-of-fold predictions, with 95 % intervals for new rows."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import brentq
from sklearn.calibration import calibration_curve
from sklearn.metrics import roc_auc_score

__all__ = ["Interval", "calibration", "class_scores", "number_scores"]

SIDE = 1.96  # standard errors on each side of an estimate
BINS = 10  # of the calibration curve
PRIOR_ROWS = 10  # rows with normal errors that are added to the spread of squared errors


class Interval(NamedTuple):
    """An estimate for new rows and the ends of its 95 % interval."""

    value: float
    low: float
    high: float


def class_scores(
    probabilities: Any,
    codes: Any,
    weights: Any = None,
    widening: float = 1.0,
    constant: bool = False,
) -> dict[str, Interval]:
    """Return accuracy and area under the ROC curve.

    With more than two classes, the area is the mean over classes of each against the others.

    Args:
        probabilities: (n, classes).
        codes: (n,) class numbers.
        weights: (n,) of the rows, or None.
        widening: factor on standard errors.
        constant: whether the prediction for new rows is a constant, whose area is 0.5. (That of
            the folds' constants is not: each is higher where its fold has fewer of a class.)

    >>> probabilities = np.array([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4]])
    >>> scores = class_scores(probabilities, np.array([0, 1, 1]))
    >>> round(scores["accuracy"].value, 3), scores["auc"].value, scores["auc"].low < 1
    (0.667, 1.0, True)
    """
    weights = np.ones(len(codes)) if weights is None else weights
    side = SIDE * widening
    right = float(np.average(probabilities.argmax(1) == codes, weights=weights))
    scores = {"accuracy": Interval(right, *_wilson(right, _effective_rows(weights), side))}
    areas = []
    for number in range(probabilities.shape[1]) if probabilities.shape[1] > 2 else [1]:
        truth = codes == number
        if truth.any() and not truth.all():
            column = probabilities[:, number]
            area = 0.5 if constant else roc_auc_score(truth, column, sample_weight=weights)
            ones, zeros = _effective_rows(weights[truth]), _effective_rows(weights[~truth])
            areas.append((float(area), *_auc_ends(float(area), ones, zeros, side)))
    if areas:
        scores["auc"] = Interval(*np.mean(areas, axis=0).tolist())
    return scores


def _effective_rows(weights: Any) -> float:
    """Return the number of equally weighted rows whose mean is as precise (Kish)."""
    return float(weights.sum() ** 2 / np.square(weights).sum())


def _wilson(share: float, n: float, side: float) -> tuple[float, float]:
    """Return the ends of Wilson's interval, which has a width also at shares of 0 and 1.

    >>> [round(end, 3) for end in _wilson(1.0, 6, 1.96)]
    [0.61, 1.0]
    """
    extra = side**2 / n
    middle = (share + extra / 2) / (1 + extra)
    half = side / (1 + extra) * math.sqrt(share * (1 - share) / n + extra / (4 * n))
    return max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half))


def _auc_ends(area: float, ones: float, zeros: float, side: float) -> tuple[float, float]:
    """Return the areas that lie `side` standard errors (theirs) from the observed one.

    Newcombe's method 5 (Statistics in Medicine, 2006): Hanley and McNeil's standard error is
    evaluated at the ends, not at the estimate, where it is 0 for areas of 0 and 1.

    >>> [round(end, 3) for end in _auc_ends(1.0, 3, 3, 1.96)]
    [0.501, 1.0]
    """
    rows = (ones + zeros) / 2

    def excess(end: float) -> float:
        spread = 1 + (rows - 1) * ((1 - end) / (2 - end) + end / (1 + end))
        return float((area - end) ** 2 - side**2 * end * (1 - end) * spread / (ones * zeros))

    tiny = 1e-9
    low = brentq(excess, 0.0, area - tiny) if area > tiny and excess(area - tiny) < 0 else 0.0
    high = 1.0
    if area < 1 - tiny and excess(area + tiny) < 0:
        high = brentq(excess, area + tiny, 1.0)
    return low, high


def number_scores(
    predicted: Any, y: Any, weights: Any = None, widening: float = 1.0
) -> dict[str, Interval]:
    """Return the root mean squared error and R2 of (n,) or (n, outputs) numbers.

    The spread of the squared errors is that of the rows and of ten more with normal errors, so that
    few rows, which may happen to be equally wrong, have an interval with a width.

    >>> scores = number_scores(np.array([1.0, 2.0, 4.0]), np.array([1.0, 2.0, 3.0]))
    >>> round(scores["rmse"].value, 3), round(scores["r2"].value, 3)
    (0.577, 0.5)
    """
    n = len(y)
    weights = np.ones(n) if weights is None else weights
    predicted, y = predicted.reshape(n, -1), y.reshape(n, -1)
    squares = np.square(predicted - y).mean(1)
    around = np.square(y - np.average(y, axis=0, weights=weights)).mean(1)
    mean, spread = (float(np.average(part, weights=weights)) for part in (squares, around))
    rows, root = _effective_rows(weights), math.sqrt(mean)
    side = SIDE * widening / math.sqrt(rows)

    def deviation(values: Any, level: float) -> float:
        """Return the standard deviation of values with mean 0, normal errors added."""
        squared = rows * float(np.average(np.square(values), weights=weights))
        return math.sqrt((squared + PRIOR_ROWS * 2 * level**2) / (rows + PRIOR_ROWS))

    half = side * deviation(squares - mean, mean) / (2 * root) if root else 0.0
    scores = {"rmse": Interval(root, max(0.0, root - half), root + half)}
    if spread:
        r2 = 1 - mean / spread
        # first order of a ratio of two means
        half = side * deviation((squares - (1 - r2) * around) / spread, 1 - r2)
        scores["r2"] = Interval(r2, r2 - half, min(1.0, r2 + half))
    return scores


def calibration(probabilities: Any, codes: Any) -> tuple[Any, Any]:
    """Return predicted probabilities and observed shares, in up to ten bins of equal counts.

    They are of the second class, or of the predicted class if there are more than two.
    """
    if probabilities.shape[1] == 2:
        predicted, truth = probabilities[:, 1], codes == 1
    else:
        predicted, truth = probabilities.max(1), probabilities.argmax(1) == codes
    bins = max(1, min(BINS, len(codes) // 10))
    shares, means = calibration_curve(
        truth, np.clip(predicted, 0, 1), n_bins=bins, strategy="quantile"
    )
    return means, shares
