"""What the ranks of a distributed test do. Run by `test_distributed.py`, one process per rank.

Every case trains in several processes and compares with one process on the concatenated batch. A
case is a function of the rank and the number of ranks; it joins by its decorator.
"""

from . import checkpoints, ddp, ddp_decisions, sharded
from .common import BENCHMARK, CASES

__all__ = ["BENCHMARK", "CASES", "checkpoints", "ddp", "ddp_decisions", "sharded"]
