"""Which results lead the page, and what is said of each claim."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from .experiment import Claim
from .multiverse import Judged, Universe, judge
from .registry import EXPERIMENTS
from .store import REAL, VARIED

__all__ = ["DETAILS", "HEAD", "Line", "counts", "details", "leading", "row", "short"]

HEAD = (
    "experiment",
    "claim",
    "the paper's words",
    "our reading",
    "share of readings",
    "what matters most",
    "verdict",
)
DETAILS = (
    "row",
    "claim",
    "our reading",
    "share of readings",
    "what matters most, and the share with each of its values",
    "verdict",
)


@dataclass(frozen=True)
class Line:
    """A claim at one size.

    Attributes:
        found: the values under all readings.
        place: of the claim among those of `found`.
        counted: False if the same claim has been counted already, from a replay.
    """

    found: Universe
    place: int
    counted: bool = True

    @property
    def text(self) -> str:
        """The claim."""
        return self.found.claims[self.place]

    @property
    def judged(self) -> Judged:
        """What becomes of it."""
        return judge(self.found, self.place)

    @property
    def mine(self) -> bool:
        """Whether it holds under our reading."""
        return 2 * self.judged.ours[0] > self.found.seeds

    @property
    def claim(self) -> Claim | None:
        """With its words and limits."""
        experiment = EXPERIMENTS[self.found.experiment]
        for settings in experiment.settings.values():
            for claim in experiment.claims(settings):
                if _about(claim.text) == _about(self.text):
                    return claim
        return None


def _about(text: str) -> str:
    """A claim's text without its rate and without how it is measured.

    >>> _about("rate 0.01: validation stops early (step of the stop)")
    'validation stops early'
    """
    words = text.split(" (")[0].replace(", opposite start", "")
    return words.split(": ", 1)[1] if words.startswith("rate ") else words


def leading(found: Sequence[Universe]) -> list[Line]:
    """Of each claim the largest size, and real runs of that size beside what is replayed.

    Args:
        found: all results, the larger of an experiment first.
    """
    lines: list[Line] = []
    seen: dict[tuple[str, str], str] = {}  # the size at which a claim was counted
    for each in found:
        if each.size.endswith(VARIED):
            continue
        new: dict[tuple[str, str], str] = {}
        for place, text in enumerate(each.claims):
            key = each.experiment, _about(text)
            if key not in seen:
                lines.append(Line(each, place))
                new[key] = each.size
            elif each.size == f"{seen[key]}, {REAL}":
                lines.append(Line(each, place, counted=False))
        seen |= new
    return lines


def counts(lines: Iterable[Line]) -> dict[str, int]:
    """How many claims hold."""
    verdicts = [line.judged.verdict for line in lines if line.counted]
    names = ("holds", "holds under some readings", "does not hold")
    return {"all": len(verdicts), **{name: verdicts.count(name) for name in names}}


def _ours(line: Line) -> str:
    held, _, value = line.judged.ours
    form = ".2f" if line.claim is None else line.claim.form
    number = "no value" if math.isnan(value) else f"{value:{form}}"
    if not line.mine and line.claim is not None and number == f"{line.claim.most:{form}}":
        number = f"{value:.4g}"  # else it would look like the limit
    return f"{number}, {'holds' if line.mine else 'does not hold'} ({held} of {line.found.seeds})"


def _share(line: Line) -> str:
    words = f"{line.judged.share:.0%} of {len(line.found.rows)}"
    claim = line.claim
    if claim is not None and claim.beside is not None:
        words += f" (with {claim.beside:.2f}: {line.judged.beside:.0%})"
    return words


def _matters(line: Line) -> str:
    if len(line.found.rows) == 1:
        return "only this reading was run"
    low, high = line.judged.spread
    return f"{line.judged.choice} ({low:.0%} to {high:.0%})" if high > low else "nothing"


def row(line: Line) -> tuple[str, ...]:
    """Of the table of all claims, see `HEAD`."""
    size = f", {line.found.size}" if line.found.size else ""
    claim = line.claim
    words = "" if claim is None else f"{claim.paper}; holds if {claim.condition}"
    return (
        f"{line.found.experiment}{size}",
        line.text,
        words,
        _ours(line),
        _share(line),
        _matters(line),
        line.judged.verdict,
    )


def details(found: Universe) -> Iterator[tuple[str, ...]]:
    """Of the table of one set of readings, see `DETAILS`."""
    for place, text in enumerate(found.claims):
        line = Line(found, place)
        matters = _matters(line)
        if line.judged.spread[1] > line.judged.spread[0]:
            shares = found.by_choice(place)[line.judged.choice]
            words = ", ".join(f"{value}: {share:.0%}" for value, share in shares.items())
            matters = f"{line.judged.choice} ({words})"
        yield str(place + 1), text, _ours(line), _share(line), matters, line.judged.verdict


def short(text: str) -> str:
    """A claim without how it is measured.

    >>> short("rate 0.01: validation stops early (step of the stop)")
    'rate 0.01: validation stops early'
    """
    words = text.split(" (")[0]
    return words if len(words) <= 90 else words[:87] + "..."
