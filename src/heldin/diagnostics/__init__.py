"""Read-outs that help to decide whether the criterion can be trusted."""

from .damping import fraction_below, rmsprop_factors
from .verification import Verification

__all__ = ["Verification", "fraction_below", "rmsprop_factors"]
