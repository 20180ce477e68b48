"""Early stopping without a validation set."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._requirements import check_torch

if TYPE_CHECKING:
    from . import criterion as criterion
    from . import diagnostics as diagnostics
    from . import errors as errors
    from . import ops as ops
    from . import rules as rules
    from . import state as state
    from ._api import *

__version__ = "0.2.0.dev0"  # the one place; pyproject.toml reads it

__all__ = [
    "EarlyStopping",
    "ElementwiseStopping",
    "HeldinError",
    "HeldinWarning",
    "Interval",
    "Moments",
    "NotObservable",
    "Observation",
    "Patience",
    "compare",
    "evidence",
    "observe",
    "verify",
]

_MODULES = ("criterion", "diagnostics", "errors", "ops", "rules", "state")

check_torch()


def __getattr__(name: str) -> Any:
    # PyTorch is imported with the first name that is used, so that `heldin --help` is quick.
    if name in _MODULES:
        return import_module(f"heldin.{name}")
    if name in __all__:
        api = import_module("heldin._api")
        globals().update({public: getattr(api, public) for public in __all__})
        return globals()[name]
    from .errors import did_you_mean

    hint = did_you_mean(name, __all__)
    raise AttributeError(f"module 'heldin' has no attribute {name!r}{hint and '; '}{hint}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
