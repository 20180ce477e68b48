"""What the ranks of a distributed test do. Run by `test_distributed.py` and
`test_shadow_group.py`, one process per rank.

Every case trains in several processes and compares with one process on the concatenated batch. A
case is a function of the rank and the number of ranks; it joins by its decorator.
"""

from . import checkpoints, ddp, ddp_decisions, frameworks, outputs, shadows, sharded
from .common import CASES

__all__ = [
    "CASES", "FRAMEWORKS", "SHADOWS",
    "checkpoints", "ddp", "ddp_decisions", "frameworks", "outputs", "shadows", "sharded",
]  # fmt: skip

# Those of other files of tests.
SHADOWS = [name for name in CASES if name.startswith("shadows_")]
FRAMEWORKS = [name for name in CASES if name.startswith("frameworks_")]
