"""How good networks on small tables are, beside what else can be installed."""

from .compare import compare, compared, covered, write_comparison
from .problems import SmallProblem, problems
from .rivals import METHODS, installed
from .settings import SETTINGS, against, write_settings

__all__ = [
    "METHODS",
    "SETTINGS",
    "SmallProblem",
    "against",
    "compare",
    "compared",
    "covered",
    "installed",
    "problems",
    "write_comparison",
    "write_settings",
]
