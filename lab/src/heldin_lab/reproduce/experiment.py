"""What an experiment is, and what it takes for a claim to be confirmed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .readings import Choice

__all__ = [
    "CLOSE",
    "NEAR",
    "SHARE",
    "SLIGHT",
    "Claim",
    "Experiment",
    "Results",
    "Tables",
    "Verdict",
]

Tables = Mapping[str, Any]  # the DataFrames of one seed, by part
Results = Mapping[int, Tables]  # by seed

# The paper's words as numbers, the same for all experiments.
SLIGHT = 1.32  # "slightly worse" is the paper's word for this ratio: its "acceptable" and "near"
NEAR = 1.10  # a stricter "near", shown beside it
CLOSE = 1.05  # "as good as", "almost identical": at most 5 % above
SHARE = 0.15  # "about 50 %": within 15 percentage points


@dataclass(frozen=True)
class Claim:
    """A statement of the paper as a number that every seed gives, and the range it must lie in.

    Attributes:
        text: the statement.
        paper: the paper's value, in its words.
        value: the number, from the tables of one seed; nan if there is none.
        above, most: the statement holds if above < value <= most.
        beside: another upper limit, for which the same is told beside it.
        form: how to write the number.
        missing: what nan means.
        replayed: whether other readings of the criterion can be replayed; if not, the value needs
            runs of its own for each.
        across: how values of several rates become one, for a claim about all rates together.

    >>> claim = Claim("stops near the minimum", "near", lambda tables: tables["x"], most=1.1)
    >>> verdict = claim.judge({0: {"x": 1.05}, 1: {"x": 1.0}, 2: {"x": 1.3}})
    >>> verdict.ours, verdict.confirmed
    ('1.05 (1.00 to 1.30)', True)
    """

    text: str
    paper: str
    value: Callable[[Tables], float]
    above: float = -math.inf
    most: float = math.inf
    beside: float | None = None
    form: str = ".2f"
    missing: str = "no stop"
    replayed: bool = True
    across: Callable[[float, float], float] | None = None

    def judge(self, results: Results) -> Verdict:
        """Evaluate the claim on all seeds."""
        values = {seed: float(self.value(tables)) for seed, tables in results.items()}
        return Verdict(self, values)

    @property
    def condition(self) -> str:
        """The range, in words."""
        parts = []
        if self.above > -math.inf:
            parts.append(f"above {self.above:{self.form}}")
        if self.most < math.inf:
            words = f"at most {self.most:{self.form}}"
            if self.beside is not None:
                words += f" (beside it: {self.beside:{self.form}})"
            parts.append(words)
        return ", ".join(parts) or "any number"


@dataclass(frozen=True)
class Verdict:
    """What became of a claim: confirmed if it holds with more than half of the seeds."""

    claim: Claim
    values: Mapping[int, float]

    @property
    def held(self) -> int:
        """The number of seeds with which the statement holds (nan never does)."""
        return sum(self.claim.above < v <= self.claim.most for v in self.values.values())

    @property
    def held_beside(self) -> int:
        """The same with the other limit."""
        most = self.claim.most if self.claim.beside is None else self.claim.beside
        return sum(self.claim.above < v <= most for v in self.values.values())

    @property
    def confirmed(self) -> bool:
        """Whether the statement holds with more than half of the seeds."""
        return 2 * self.held > len(self.values)

    @property
    def ours(self) -> str:
        """Median and range, and how often there was no value."""
        known = [v for v in self.values.values() if not math.isnan(v)]
        lost = len(self.values) - len(known)
        form = self.claim.form
        words = ""
        if known:
            words = f"{statistics.median(known):{form}}"
            if len(self.values) > 1:
                words += f" ({min(known):{form}} to {max(known):{form}})"
        if lost:
            note = f"{self.claim.missing} with {lost} of {len(self.values)} seeds"
            words = f"{words}; {note}" if words else note
        return words


@dataclass(frozen=True)
class Experiment:
    """One experiment of the paper.

    Attributes:
        name: on the command line.
        title: in the report.
        place: the paper's section and figure.
        settings: by preset, "quick" and "full"; dataclasses with `seeds` and `steps`.
        parts: the runs of a seed, by name, from the settings; each a mapping of arguments.
        run: makes one of them: run(run, **arguments).
        figure: draws the results of the first seed: figure(results, settings).
        caption: what it shows.
        claims: the statements to check, from the settings.
        choices: what the paper leaves open, and what was chosen.
        readings: the same as data, from the settings, see `readings`; the first value is ours.
        added: choices that were written down after first results, see `Choice.added`.
        left_out: what else the paper leaves open, and why there are no readings of it.
        differs: by preset, what is not as in the paper.
        data: the dataset that has to be there ("mnist", "sector").
        beside: another experiment whose results, if there are any, are drawn in the same figure.
    """

    name: str
    title: str
    place: str
    settings: Mapping[str, Any]
    parts: Callable[[Any], Mapping[str, Mapping[str, Any]]]
    run: Callable[..., None]
    figure: Callable[..., Any]
    caption: str
    claims: Callable[[Any], Sequence[Claim]]
    choices: Sequence[str]
    differs: Mapping[str, str] = field(default_factory=dict)
    data: str | None = None
    beside: str | None = None
    readings: Callable[[Any], Sequence[Choice]] = lambda settings: ()
    added: Sequence[Choice] = ()
    left_out: Sequence[str] = ()
