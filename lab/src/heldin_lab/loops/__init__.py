"""Training loops of other people's kinds, with heldin and beside twins trained by hand.

`heldin-lab loops` runs each of them without heldin, with `heldin.EarlyStopping`, and beside freshly
built models that are trained on the visible rows only. Nothing may be wrong silently, and no
training may be changed.
"""

from . import batches, data, losses, models, state, steps  # noqa: F401  (they register their loops)
from .job import LOOPS, Job, Loop
from .judge import Outcome, judge
from .report import by_kind, run_loops, table

__all__ = ["LOOPS", "Job", "Loop", "Outcome", "by_kind", "judge", "run_loops", "table"]
