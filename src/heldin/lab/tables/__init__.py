"""How good networks on small tables are, beside what else can be installed."""

from .compare import compare, compared, medians
from .problems import SmallProblem, problems
from .rivals import METHODS, installed

__all__ = [
    "METHODS",
    "SmallProblem",
    "compare",
    "compared",
    "installed",
    "medians",
    "problems",
]
