"""The paper's experiments, figures and claims, in one command: `heldin-lab reproduce`.

Each experiment is a module of its own: settings, run, figure, claims. What they share: the record
of a run and its checkpoints (`run`), datasets (`data`), running in parallel (`runner`) and the
report (`report`).
"""

from .data import fetch
from .outcomes import Reproduction
from .registry import EXPERIMENTS
from .runner import reproduce

__all__ = ["EXPERIMENTS", "Reproduction", "fetch", "reproduce"]
