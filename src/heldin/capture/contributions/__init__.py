"""Per-sample contributions to one tensor, in the form in which an op leaves them."""

from .base import CHUNK, Contributions
from .combine import moments
from .filters import Filters, overlap
from .outer import Outer
from .rows import Lazy, Moved, Owned, Real, Rows
from .scattered import Scattered

__all__ = [
    "CHUNK",
    "Contributions",
    "Filters",
    "Lazy",
    "Moved",
    "Outer",
    "Owned",
    "Real",
    "Rows",
    "Scattered",
    "moments",
    "overlap",
]
