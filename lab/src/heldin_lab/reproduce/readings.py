"""What the paper leaves open, as data: choices, their admissible values, and which is ours.

A reading takes one value for each choice of an experiment. Choices that act on the criterion alone
are replayed from what a run has logged (`ledger`, `averages`); the others need runs of their own.
The values were written down before the runs that are reported were made; they are not changed
after a result is known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

__all__ = [
    "DIVISION",
    "ELEMENTWISE_SMOOTHING",
    "ELEMENTWISE_START",
    "LENGTH",
    "SMOOTHING",
    "START",
    "Choice",
    "Reading",
    "Value",
    "ours",
    "readings",
]

Reading = Mapping[str, str]  # from the names of choices to the names of values


@dataclass(frozen=True)
class Value:
    """An admissible value of a choice.

    Attributes:
        name: in tables.
        why: why a careful reader of the paper may take it.
        setting: what it is for the program.
    """

    name: str
    why: str
    setting: Any


@dataclass(frozen=True)
class Choice:
    """Something the paper does not say.

    Attributes:
        name: in tables.
        question: what is left open.
        values: the admissible ones; the first is ours.
        replayed: whether one run answers for all values; if not, each needs runs of its own.
        added: whether it was written down after first results were known. Readings with such a
            choice stand beside the others and are not among those that decide a verdict.
    """

    name: str
    question: str
    values: tuple[Value, ...]
    replayed: bool = True
    added: bool = False

    def setting(self, reading: Reading) -> Any:
        """What a reading means for the program."""
        return next(v.setting for v in self.values if v.name == reading[self.name])


def readings(choices: Sequence[Choice]) -> Iterator[dict[str, str]]:
    """All readings, ours first.

    >>> choice = Choice("start", "?", (Value("zero", "", 0.0), Value("high", "", 9.0)))
    >>> list(readings([choice]))
    [{'start': 'zero'}, {'start': 'high'}]
    """
    for values in product(*(choice.values for choice in choices)):
        yield {c.name: v.name for c, v in zip(choices, values, strict=True)}


def ours(choices: Sequence[Choice]) -> dict[str, str]:
    """Our reading: the first value of each choice."""
    return {choice.name: choice.values[0].name for choice in choices}


# --- choices that several experiments share --------------------------------------------------

SMOOTHING = Choice(
    "smoothing",
    'The decay of "an exponential running average" of the criterion.',
    (
        Value("0.9", "the common default of running averages, and of rules.Evidence.paper", 0.9),
        Value("0.95", "the decay that the supplement names for RMSprop", 0.95),
        Value("0.99", '"usually 0.999, or 0.99" (supplement, element-wise rule)', 0.99),
        Value("0.999", '"usually 0.999, or 0.99" (supplement, element-wise rule)', 0.999),
    ),
)
START = Choice(
    "start of the average",
    "Where the running average of the criterion starts.",
    (
        Value("zero", "the plain recursion; a bias-corrected one stops at the same step", 0.0),
        Value("high", 'f = 10: "high values" (Sec. 3.6)', -9.0),
    ),
)
DIVISION = Choice(
    "division",
    "What a ratio is whose variance is zero, or nearly so.",
    (
        Value("0/0 left out", "a ratio that does not exist is no part of a mean", "out"),
        Value("0/0 is 0", "the gradient is zero, so f is", "zero"),
        Value("+1e-10", "added to the variance; RMSprop's in TensorFlow 1", 1e-10),
        Value("+1e-8", "added to the variance; the usual one of Adam", 1e-8),
        Value("+1e-5", "added to the variance; the usual one of normalisations", 1e-5),
    ),
)
ELEMENTWISE_SMOOTHING = Choice(
    "smoothing",
    "The decay of the averages of single weights.",
    (
        Value("0.99", '"usually 0.999, or 0.99" (supplement)', 0.99),
        Value("0.999", '"usually 0.999, or 0.99" (supplement)', 0.999),
    ),
)
ELEMENTWISE_START = Choice(
    "start of the averages",
    '"High values" at which the averages of single weights start.',
    (
        Value("10", "ten times the threshold", 10.0),
        Value("100", "a hundred times the threshold", 100.0),
    ),
)
LENGTH = Choice(
    "length",
    "How many steps are made; the paper gives their number for SECTOR only.",
    (
        Value("all", "until rate x steps is well beyond the turn of the test loss", 1.0),
        Value("four fifths", "just beyond that turn", 0.8),
    ),
    added=True,
)
