"""Early stopping without a validation set."""

from typing import TYPE_CHECKING, Any

from ._requirements import check_torch

if TYPE_CHECKING:
    from ._api import *

__version__ = "0.2.0.dev0"  # the one place; pyproject.toml reads it

__all__ = [
    "ElementwiseStopping",
    "Estimate",
    "EstimateHistory",
    "Evidence",
    "EvidenceStopping",
    "FoldStopping",
    "HeldinError",
    "HeldinWarning",
    "History",
    "LeaveOneOutStopping",
    "MixedSamplesWarning",
    "Moments",
    "NotObservable",
    "Observation",
    "Packed",
    "Patience",
    "Record",
    "ShadowStopping",
    "Use",
    "ValidationStopping",
    "Verification",
    "evidence",
    "fraction_below",
    "load",
    "observe",
    "rmsprop_factors",
    "rule",
    "save",
    "stopping",
    "verify",
]

check_torch()


def __getattr__(name: str) -> Any:
    # PyTorch is imported with the first name that is used, so that `heldin --help` is quick.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import _api

    globals().update({public: getattr(_api, public) for public in __all__})
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
