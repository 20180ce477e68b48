"""The situations in which observing must be exact. A bug becomes a new entry here.

Each case is a model, a way to draw a batch, and per-sample losses (m,). The truth is one backward
pass per sample through the same forward pass, so dropout and the like need no special treatment.
"""

from . import layers, uses, modules, branches, trouble, attacks, flat, complex  # isort: skip  # in this order
from .common import CASES, Case, Fn, rows

__all__ = [
    "CASES", "Case", "Fn", "attacks", "branches", "complex", "flat", "layers", "modules", "rows",
    "trouble", "uses",
]  # fmt: skip
