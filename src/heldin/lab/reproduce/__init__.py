"""The paper's experiments, figures and claims, in one command: `heldin reproduce`.

Each experiment is a module of its own: settings, run, figure, claims. What they share: the record
of a run and its checkpoints (`_run`), datasets (`_data`), running in parallel (`_runner`) and the
report (`_report`).
"""

from .data import fetch
from .registry import EXPERIMENTS
from .runner import Reproduction, reproduce

__all__ = ["EXPERIMENTS", "Reproduction", "fetch", "reproduce"]
