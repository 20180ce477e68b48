"""Claims under every reading, replayed from what runs have logged."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from .averages import key
from .collected import Collected, Found
from .experiment import Claim
from .experiments import greedy as _greedy
from .experiments import rmsprop as _rmsprop
from .ledger import criteria, first_above, smooth
from .readings import DIVISION, SMOOTHING, START, Choice, readings

__all__ = [
    "CRITERION",
    "Values",
    "replay_criterion",
    "replay_factors",
    "replay_greedy",
    "replay_rmsprop",
    "restopped",
    "shortened",
    "stopped_shares",
]

CRITERION = (SMOOTHING, START, DIVISION)
Values = list[tuple[dict[str, str], list[list[float]]]]  # readings, and each claim's seeds


# --- one run ---------------------------------------------------------------------------------


def restopped(one: Found, smoothing: float, start: float, division: str | float) -> Any:
    """A run's table with the stop of a reading; losses between records are on a line."""
    import numpy
    import pandas

    steps = one.log["steps"]
    raw = criteria(one.log, division)
    stop = float(first_above(smooth(raw, smoothing, start, steps), steps))
    table = one.table.loc[:, ["step", "test_loss"]].assign(stop=0.0)
    if math.isnan(stop):
        return table
    if not (table.step == stop).any():
        loss = float(numpy.interp(stop, table.step, table.test_loss))
        row = pandas.DataFrame([{"step": stop, "test_loss": loss, "stop": 0.0}])
        table = pandas.concat([table, row]).sort_values("step", ignore_index=True)
    return table.assign(stop=(table.step == stop).astype(float))


def shortened(runs: Collected, share: float) -> dict[int, dict[str, Found]]:
    """The same runs, as if they had ended earlier.

    Args:
        runs: finished ones.
        share: of their steps that is left.
    """
    return {
        seed: {part: _cut(one, round(share * one.total)) for part, one in parts.items()}
        for seed, parts in runs.items()
    }


def _cut(one: Found, steps: int) -> Found:
    table = one.table[one.table.step <= steps]
    if "validation_loss" in table and table.validation_loss.notna().any():
        best = table.validation_loss.idxmin()  # validation stops at the least that is left
        table = table.assign(stop=(table.index == best).astype(float))
    log = dict(one.log)
    for places, names in (("steps", ("table", "counts")), ("averages_steps", ("averages",))):
        if places in log:
            kept = log[places] <= steps
            log |= {name: log[name][kept] for name in (places, *names)}
    return replace(one, table=table, log=log, steps=steps, total=steps)


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


def stopped_shares(settings: Any, one: Found) -> Any:
    """What greedy stopping would have stopped along a plain run, under our reading."""
    choices = _greedy.choices(settings)
    smoothing, start, division = (choice.values[0].setting for choice in choices)
    return _shares(one, key(smoothing, start, division), True, None)


# --- all readings ----------------------------------------------------------------------------


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


def replay_greedy(
    settings: Any, runs: Collected, steps: int | None = None
) -> tuple[list[Claim], Values]:
    """Claims about the shares of stopped weights, along the path of plain training.

    Readings whose warm-up is longer than half of the run are left out.

    Args:
        settings: of the greedy experiment, with the rates that were run.
        runs: of MNIST with SGD on all images.
        steps: how many of them count.
    """
    choices = _greedy.choices(settings)
    first: list[Claim] = []
    found: Values = []
    for reading in readings(choices):
        smoothing, start, division = (choice.setting(reading) for choice in choices)
        own = replace(settings, smoothing=smoothing, start=start)
        length = steps or min(int(p.table.step.iloc[-1]) for s in runs.values() for p in s.values())
        if own.warmup > length / 2:
            continue
        kept = [c for c in _greedy.claims(own) if "left out" not in c.text and c.replayed]
        first = first or kept
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
    return first, found


def replay_rmsprop(
    settings: Any, plain: Collected, part: str, steps: int | None = None
) -> tuple[list[Claim], tuple[Choice, ...], Values]:
    """Claims about Eq. 15 along the path of plain training.

    Returns:
        The claims, the choices, and the values under each reading.
    """
    choices = division, start = _rmsprop.ZERO_FIRST, _rmsprop.C_START
    kept = [c for c in _rmsprop.shares_claims(settings) if c.replayed]
    found: Values = []
    for reading in readings(choices):
        place = key(settings.smoothing, start.setting(reading), division.setting(reading))
        tables = [
            {"SGD with stopping": _shares(each[part], place, False, steps)}
            for each in plain.values()
        ]
        found.append((reading, [[float(c.value(t)) for t in tables] for c in kept]))
    return kept, choices, found


def replay_factors(settings: Any, runs: Collected) -> tuple[list[Claim], Values]:
    """The claim about RMSprop's factors, which a run of RMSprop notes under each reading."""
    claim = _rmsprop.factors_claim(settings)
    tables = [each["RMSprop"].table for each in runs.values()]
    found: Values = []
    for reading in readings(_rmsprop.RMS_CHOICES):
        column = f"low/{'/'.join(reading.values())}"
        own = [{"RMSprop": t.assign(**{_rmsprop.lowest(settings): t[column]})} for t in tables]
        found.append((reading, [[float(claim.value(each)) for each in own]]))
    return [claim], found
