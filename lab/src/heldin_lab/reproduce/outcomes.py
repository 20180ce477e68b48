"""What became of experiments: the runner makes it, the report shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .experiment import Experiment, Results, Verdict

__all__ = ["Outcome", "Reproduction"]


@dataclass(frozen=True)
class Outcome:
    """What became of an experiment."""

    experiment: Experiment
    settings: Any
    results: Results
    verdicts: Sequence[Verdict]
    origin: str  # of the data
    seconds: float  # CPU time of all runs together
    finished: str  # the date of the last one


@dataclass(frozen=True)
class Reproduction:
    """What became of all of them.

    Attributes:
        preset: "quick" or "full".
        outcomes: of the experiments that ran.
        missing: experiments that did not, and why.
        device: where they ran.
        report: the HTML file.
        command: that does the same.
    """

    preset: str
    outcomes: Sequence[Outcome]
    missing: Mapping[str, str]
    device: str
    report: Path
    command: str
