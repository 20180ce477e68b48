"""Early stopping without a validation set."""

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._requirements import check_torch

if TYPE_CHECKING:
    from . import criterion as criterion
    from . import diagnostics as diagnostics
    from . import errors as errors
    from . import ops as ops
    from . import state as state
    from ._api import *

__version__ = "0.2.0.dev0"  # the one place; pyproject.toml reads it

__all__ = [
    "ElementwiseStopping",
    "EvidenceStopping",
    "FoldStopping",
    "HeldinError",
    "HeldinWarning",
    "LeaveOneOutStopping",
    "Moments",
    "NotObservable",
    "Observation",
    "Patience",
    "ShadowStopping",
    "ValidationStopping",
    "evidence",
    "observe",
    "stopping",
    "verify",
]

_MODULES = ("criterion", "diagnostics", "errors", "ops", "state")

# Names that were here in 0.1, and where they are now. They go with the next release.
_MOVED = {
    "Estimate": "state.Estimate",
    "EstimateHistory": "state.EstimateHistory",
    "Evidence": "criterion.Evidence",
    "History": "state.History",
    "MixedSamplesWarning": "errors.MixedSamplesWarning",
    "Packed": "state.Packed",
    "Record": "state.Record",
    "Use": "ops.OpUse",
    "Verification": "diagnostics.Verification",
    "fraction_below": "diagnostics.fraction_below",
    "load": "state.load",
    "rmsprop_factors": "diagnostics.rmsprop_factors",
    "rule": "ops.register_op_rule",
    "save": "state.save",
}


check_torch()


def __getattr__(name: str) -> Any:
    # PyTorch is imported with the first name that is used, so that `heldin --help` is quick.
    if name in _MODULES:
        return import_module(f"heldin.{name}")
    if name in __all__:
        api = import_module("heldin._api")
        globals().update({public: getattr(api, public) for public in __all__})
        return globals()[name]
    if name not in _MOVED:
        raise AttributeError(f"module 'heldin' has no attribute {name!r}")
    place = _MOVED[name]
    warnings.warn(
        f"heldin.{name} is now heldin.{place}; the old name goes with the next release",
        DeprecationWarning,
        stacklevel=2,
    )
    module, _, own = place.partition(".")
    return getattr(import_module(f"heldin.{module}"), own)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
