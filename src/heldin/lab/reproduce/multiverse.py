"""For each claim: under which share of the admissible readings it holds.

A reading gives values for the seeds that were run; it holds if the claim does with more than half
of them. Readings of the criterion are replayed from what the runs have logged.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heldin.state.files import replacing

from .averages import key
from .collected import Collected, Found
from .experiment import Claim, Verdict
from .experiments import greedy as _greedy
from .experiments import rmsprop as _rmsprop
from .ledger import criteria, first_above, smooth
from .readings import DIVISION, SMOOTHING, START, Choice, ours, readings

__all__ = [
    "Judged",
    "Universe",
    "judge",
    "read_universe",
    "replay_criterion",
    "replay_greedy",
    "replay_rmsprop",
    "restopped",
    "universe",
    "write_universe",
]

CRITERION = (SMOOTHING, START, DIVISION)
MOST, LEAST = 0.9, 0.1  # of the readings: "holds", "does not hold"


@dataclass(frozen=True)
class Universe:
    """The values of some claims under all readings.

    Attributes:
        experiment: its name.
        size: of the runs, in words.
        seeds: how many there are.
        choices: names, by which readings differ.
        claims: texts of the claims, in order.
        rows: for each reading its values' names, and for each claim the number of seeds with which
            it holds, the same with the other limit, and the median.
    """

    experiment: str
    size: str
    seeds: int
    choices: tuple[str, ...]
    claims: tuple[str, ...]
    rows: Sequence[tuple[tuple[str, ...], Sequence[tuple[int, int, float]]]]

    def holds(self, claim: int, beside: bool = False) -> list[bool]:
        """Of each reading, whether it holds with more than half of the seeds."""
        return [2 * cells[claim][int(beside)] > self.seeds for _, cells in self.rows]

    def share(self, claim: int, beside: bool = False) -> float:
        """Of the readings in which a claim holds."""
        return statistics.fmean(self.holds(claim, beside))

    def by_choice(self, claim: int) -> dict[str, dict[str, float]]:
        """The share among the readings that have a value, for each choice and value."""
        held = self.holds(claim)
        found: dict[str, dict[str, list[bool]]] = {name: {} for name in self.choices}
        for (names, _), yes in zip(self.rows, held, strict=True):
            for choice, value in zip(self.choices, names, strict=True):
                found[choice].setdefault(value, []).append(yes)
        return {c: {v: statistics.fmean(b) for v, b in vs.items()} for c, vs in found.items()}


@dataclass(frozen=True)
class Judged:
    """What becomes of a claim under all readings."""

    share: float
    beside: float
    ours: tuple[int, int, float]
    choice: str
    spread: tuple[float, float]

    @property
    def verdict(self) -> str:
        """In one line."""
        if self.share >= MOST:
            return "holds"
        return "does not hold" if self.share <= LEAST else "holds under some readings"


def judge(found: Universe, claim: int) -> Judged:
    """The share of readings, and the choice that moves it most."""
    spans = {c: (min(v.values()), max(v.values())) for c, v in found.by_choice(claim).items()}
    choice = max(spans, key=lambda c: spans[c][1] - spans[c][0])
    mine = found.rows[0][1][claim]
    return Judged(found.share(claim), found.share(claim, True), mine, choice, spans[choice])


def universe(
    experiment: str,
    size: str,
    claims: Sequence[Claim],
    choices: Sequence[Choice],
    values: Iterable[tuple[Mapping[str, str], Sequence[Sequence[float]]]],
) -> Universe:
    """From the values of the seeds under each reading, ours first."""
    rows, seeds = [], 0
    for reading, each in values:
        cells = []
        for claim, numbers in zip(claims, each, strict=True):
            seeds = len(numbers)
            verdict = Verdict(claim, {i: float(v) for i, v in enumerate(numbers)})
            known = [v for v in verdict.values.values() if not math.isnan(v)]
            middle = statistics.median(known) if known else math.nan
            cells.append((verdict.held, verdict.held_beside, middle))
        rows.append((tuple(reading[c.name] for c in choices), cells))
    mine = tuple(ours(choices).values())
    rows.sort(key=lambda row: row[0] != mine)
    names = tuple(c.name for c in choices)
    return Universe(experiment, size, seeds, names, tuple(c.text for c in claims), rows)


# --- replaying -------------------------------------------------------------------------------


def restopped(one: Found, smoothing: float, start: float, division: str | float) -> Any:
    """A run's table with the stop of a reading; losses between records are on a line."""
    import numpy
    import pandas

    raw = criteria(one.log, division)
    stop = float(first_above(smooth(raw, smoothing, start), one.log["steps"]))
    table = one.table.loc[:, ["step", "test_loss"]].assign(stop=0.0)
    if math.isnan(stop):
        return table
    if not (table.step == stop).any():
        loss = float(numpy.interp(stop, table.step, table.test_loss))
        row = pandas.DataFrame([{"step": stop, "test_loss": loss, "stop": 0.0}])
        table = pandas.concat([table, row]).sort_values("step", ignore_index=True)
    return table.assign(stop=(table.step == stop).astype(float))


def replay_criterion(
    claims: Sequence[Claim], runs: Collected, fixed: Mapping[str, str] | None = None
) -> Iterator[tuple[dict[str, str], list[list[float]]]]:
    """The values of claims about stops under each reading of the criterion.

    Args:
        claims: of the experiment.
        runs: finished ones; those that have a log are stopped anew.
        fixed: values of choices that are those of the runs.
    """
    for reading in readings(CRITERION):
        how = [choice.setting(reading) for choice in CRITERION]
        tables = {
            seed: {
                part: restopped(one, *how) if one.log else one.table for part, one in parts.items()
            }
            for seed, parts in runs.items()
        }
        values = [[float(claim.value(each)) for each in tables.values()] for claim in claims]
        yield {**reading, **(fixed or {})}, values


def _shares(one: Found, place: int, ever: bool, steps: int | None) -> Any:
    """The table of a plain run with the shares that the element-wise rule would have stopped."""
    import numpy
    import pandas

    at = one.log["averages_steps"]
    shares = one.log["averages"][:, place, :, int(ever)]
    sizes = one.log["sizes"].astype("float64")
    table = pandas.DataFrame({"step": at, "off": shares @ sizes / sizes.sum()})
    for name, column in zip(one.log["names"], shares.T, strict=True):
        table[f"off/{name}"] = column
    table["test_loss"] = numpy.interp(at, one.table.step, one.table.test_loss)
    return table if steps is None else table[table.step <= steps]


def replay_greedy(
    settings: Any, runs: Collected, steps: int | None = None
) -> tuple[list[Claim], list[tuple[dict[str, str], list[list[float]]]]]:
    """Claims about the shares of stopped weights, along the path of plain training.

    Readings whose warm-up is longer than half of the run are left out.

    Args:
        settings: of the greedy experiment, with the rates that were run.
        runs: of MNIST with SGD on all images.
        steps: how many of them count.
    """
    from dataclasses import replace

    choices = _greedy.choices(settings)
    kept, found = [], []
    for reading in readings(choices):
        smoothing, start, division = (choice.setting(reading) for choice in choices)
        own = replace(settings, smoothing=smoothing, start=start)
        length = steps or min(int(p.table.step.iloc[-1]) for s in runs.values() for p in s.values())
        if own.warmup > length / 2:
            continue
        kept = [c for c in _greedy.claims(own) if "left out" not in c.text and c.replayed]
        place = key(smoothing, start, division)
        tables = {
            seed: {
                part.replace("evidence", "greedy"): _shares(one, place, True, steps)
                for part, one in parts.items()
                if one.log
            }
            for seed, parts in runs.items()
        }
        found.append((reading, [[float(c.value(t)) for t in tables.values()] for c in kept]))
    return kept, found


def replay_rmsprop(
    settings: Any, plain: Collected, part: str, damped: Collected, steps: int | None = None
) -> tuple[list[Claim], list[tuple[dict[str, str], list[list[float]]]]]:
    """Claims about Eq. 15 along the path of plain training, and about RMSprop's factors."""
    choices = _rmsprop.EXPERIMENT.readings(settings)
    kept = [c for c in _rmsprop.claims(settings) if "left out" not in c.text and c.replayed]
    found = []
    seeds = sorted(set(plain) & set(damped))
    for reading in readings(choices):
        division, start, *others = choices
        place = key(settings.smoothing, start.setting(reading), division.setting(reading))
        column = "low/" + "/".join(reading[choice.name] for choice in others)
        lowest = f"below {min(settings.thresholds):g}"
        values: list[list[float]] = [[] for _ in kept]
        for seed in seeds:
            table = damped[seed]["RMSprop"].table
            tables = {
                "SGD with stopping": _shares(plain[seed][part], place, False, steps),
                "RMSprop": table.assign(**{lowest: table[column]}),
            }
            for claim, numbers in zip(kept, values, strict=True):
                numbers.append(float(claim.value(tables)))
        found.append((reading, values))
    return kept, found


# --- files -----------------------------------------------------------------------------------


def write_universe(path: Path, found: Universe) -> None:
    """As a small CSV file: a column for each choice, and three for each claim."""
    with replacing(path) as part, open(part, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([found.experiment, found.size, found.seeds, len(found.choices)])
        writer.writerow(found.claims)
        writer.writerow(found.choices)
        for names, cells in found.rows:
            numbers = [f"{held} {beside} {value:.4g}" for held, beside, value in cells]
            writer.writerow([*names, *numbers])


def read_universe(path: Path) -> Universe:
    """What `write_universe` has written."""
    with open(path, newline="", encoding="utf-8") as file:
        (experiment, size, seeds, width), claims, choices, *rows = csv.reader(file)
    count = int(width)

    def cell(text: str) -> tuple[int, int, float]:
        held, beside, value = text.split()
        return int(held), int(beside), float(value)

    table = [(tuple(row[:count]), [cell(text) for text in row[count:]]) for row in rows]
    return Universe(experiment, size, int(seeds), tuple(choices), tuple(claims), table)
