"""Which values the estimators' parameters may have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any

import numpy as np

from heldin.errors import HeldinError
from heldin.tables.mlp import ACTIVATIONS
from heldin.tables.trainer import RULE_NAMES

__all__ = ["InvalidParameter", "check_parameters"]


class InvalidParameter(HeldinError, ValueError):
    """Arguments or data that an estimator cannot be fitted with."""


def _number(value: Any, low: float = 0.0, high: float = np.inf) -> bool:
    return isinstance(value, Real) and not _flag(value) and bool(low <= float(value) < high)


def _count(value: Any) -> bool:
    return isinstance(value, Integral) and _number(value, 1)


def _flag(value: Any) -> bool:
    return isinstance(value, (bool, np.bool_))


def _one_of(*known: Any) -> tuple[Callable[[Any], bool], str]:
    return lambda value: value in known, "one of " + ", ".join(map(repr, known))


POSITIVE = (lambda v: _number(v) and v > 0, "a number above 0")
NOT_NEGATIVE = (_number, "a number >= 0")
SHARE = (lambda v: _number(v, 0, 1), "a number in [0, 1)")
COUNT = (_count, "a whole number above 0")
FLAG = (_flag, "True or False")

KNOWN: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "hidden_layer_sizes": (
        lambda v: all(map(_count, np.atleast_1d(np.asarray(v, object)))),
        "whole numbers above 0",
    ),
    "activation": _one_of("auto", *ACTIVATIONS),
    "solver": _one_of("adam", "sgd"),
    "alpha": NOT_NEGATIVE,
    "weight_decay": (lambda v: v is None or _number(v), "None or a number >= 0"),
    "committee": (
        lambda v: v == "auto" or (_count(v) and v != 2),
        "'auto', 1, or a whole number above 2",
    ),
    "standardize": FLAG,
    "cv": (
        lambda v: (
            v is None
            or hasattr(v, "split")
            or isinstance(v, (list, tuple))
            or (_count(v) and v > 1)
        ),
        "None, a number of folds above 1, a splitter of scikit-learn or a list of splits",
    ),
    "batch_size": (lambda v: v == "auto" or _count(v), "'auto' or a whole number above 0"),
    "learning_rate": _one_of("constant", "invscaling", "adaptive"),
    "learning_rate_init": POSITIVE,
    "power_t": NOT_NEGATIVE,
    "max_iter": COUNT,
    "shuffle": FLAG,
    "tol": NOT_NEGATIVE,
    "warm_start": FLAG,
    "momentum": SHARE,
    "nesterovs_momentum": FLAG,
    "early_stopping": _one_of(*RULE_NAMES, True, False),
    "validation_fraction": (lambda v: _number(v, 0, 1) and v > 0, "a number between 0 and 1"),
    "beta_1": SHARE,
    "beta_2": SHARE,
    "epsilon": POSITIVE,
    "n_iter_no_change": COUNT,
    "fit_intercept": FLAG,
}


def check_parameters(owner: str, given: Mapping[str, Any]) -> None:
    """Refuse values that are not understood."""
    for name, value in given.items():
        good, wanted = KNOWN.get(name, (lambda _: True, ""))
        if not good(value):
            why = "; lbfgs has no steps to stop at" if name == "solver" and value == "lbfgs" else ""
            raise InvalidParameter(f"{owner}: {name} must be {wanted}, got {value!r}{why}")
