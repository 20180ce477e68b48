"""What the planned runs say, as far as they are: readings, figures and facts for the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from . import lessons as _lessons
from .collected import Collected, Found, collect, progress
from .experiment import Claim
from .experiments.rmsprop import RMS_CHOICES
from .figures import Column, columns
from .fullsize import ELEMENTWISE, PLAN, TENTHS, Planned, tasks
from .multiverse import universe
from .readings import DIVISION, LENGTH, Choice
from .registry import EXPERIMENTS
from .replay import (
    CRITERION,
    replay_criterion,
    replay_factors,
    replay_greedy,
    replay_rmsprop,
    shortened,
    stopped_shares,
)
from .runner import Task
from .store import FACTORS, FIFTH, FULL, REAL, TENTH, VARIED, Store

__all__ = ["criterion", "factors", "from_plan", "greedy", "logged", "real", "rmsprop", "whole"]

Runs = dict[int, dict[str, Found]]  # by seed and part


def from_plan(runs: Path, store: Store, rows: list[dict[str, Any]], facts: dict[str, Any]) -> None:
    """Look at all planned runs in a folder.

    Args:
        runs: the folder.
        store: where results go.
        rows: gets a row for each run: how far it is.
        facts: gets what `lessons` makes sentences of.
    """
    sgd: Runs = {}
    stopped: Runs = {}
    damped: Runs = {}
    for planned in PLAN:
        found, settings = _look(planned, runs, rows, store)
        if planned.name == "full-sgd":
            _lessons.from_full(facts, found)
            _add(sgd, found)
        elif planned.name == "full-greedy":
            _add(stopped, found)
        elif planned.name == "full-rmsprop":
            _add(damped, found)
        elif done := whole(found, planned.parts):
            claims = EXPERIMENTS["mnist-gd"].claims(settings)
            if logged(done):
                criterion(store, "mnist-gd", FIFTH, claims, done)
                _lessons.from_flow(facts, settings.rates[0], done[0])
            _figure(store, "mnist-gd", "fifth", settings, done)
    _full(store, facts, sgd, stopped, damped)
    _tenths(runs, store, rows, facts)


def _look(
    planned: Planned, runs: Path, rows: list[dict[str, Any]], store: Store | None = None
) -> tuple[dict[int, dict[str, Found]], Any]:
    """The runs of a set, on disk or (if there is a store) stored, and their settings."""
    mine = [task for _, task in tasks((planned,), runs)]
    found = collect(mine)
    if store is not None:
        _remember(store, planned, mine, found)
    rows += progress(planned.name, found, mine)
    return found, mine[0].settings


def _remember(store: Store, planned: Planned, mine: Sequence[Task], found: Runs) -> None:
    """Store the records of finished runs, and add those that are stored and not on disk."""
    for task in mine:
        name = f"{planned.name}-{task.name}"
        one = found.get(task.seed, {}).get(task.part)
        if one is not None and one.finished:
            store.keep_run(name, one.table, task.total)
        elif (table := store.run(name, task.total)) is not None:
            spent = float(table.cpu_seconds.iloc[0])
            kept = Found(table, {}, True, task.total, task.total, spent)
            found.setdefault(task.seed, {})[task.part] = kept


def _add(runs: Runs, found: Collected) -> None:
    """Add the runs that are finished."""
    for seed, parts in found.items():
        runs.setdefault(seed, {}).update({p: one for p, one in parts.items() if one.finished})


def whole(found: Collected, parts: Sequence[str]) -> Runs:
    """The seeds of which all these parts are finished."""
    return {
        seed: {part: each[part] for part in parts}
        for seed, each in found.items()
        if all(part in each and each[part].finished for part in parts)
    }


def logged(runs: Collected) -> Runs:
    """The runs that have a log, of seeds that have one."""
    found = {seed: {p: one for p, one in each.items() if one.log} for seed, each in runs.items()}
    return {seed: each for seed, each in found.items() if each}


# --- full size -------------------------------------------------------------------------------


def _full(store: Store, facts: dict[str, Any], sgd: Runs, stopped: Runs, damped: Runs) -> None:
    """MNIST with SGD, and with weights that stop, at the paper's size."""
    plain = logged(sgd)
    parts = [part for part in plain.get(0, {}) if part.endswith("evidence")]
    both = [p for p in parts if p.replace("evidence", "validation") in sgd[0]]
    if both:
        rates = tuple(map(_rate, both))
        e = EXPERIMENTS["mnist-sgd"]
        pairs = whole(sgd, [q for p in both for q in (p.replace("evidence", "validation"), p)])
        claims = e.claims(replace(e.settings["full"], rates=rates))
        criterion(store, "mnist-sgd", FULL, claims, pairs)
        _columns(store, "full", rates, pairs)
    if parts:
        settings = EXPERIMENTS["greedy"].settings["full"]
        greedy(store, FULL, replace(settings, rates=tuple(map(_rate, parts))), plain, None)
        settings = EXPERIMENTS["rmsprop"].settings["full"]
        if f"rate {settings.rates[0]:g}, evidence" in parts:
            rmsprop(store, FULL, settings, plain)
    if twins := _twins(sgd, stopped):
        names = [part for part in twins[0] if part.endswith("greedy")]
        settings = replace(EXPERIMENTS["greedy"].settings["full"], rates=tuple(map(_rate, names)))
        real(store, "greedy", FULL, settings, twins, every=True)
        _stopped(facts, settings, twins[0], names[0])
        _figure(store, "greedy", "full", settings, twins)
    settings = EXPERIMENTS["rmsprop"].settings["full"]
    if done := whole(damped, ("RMSprop",)):
        factors(store, FULL, settings, done)
    if done := whole(damped, ("SGD", "SGD with stopping", "RMSprop")):
        real(store, "rmsprop", FULL, settings, done, every=True)
        _figure(store, "rmsprop", "full", settings, done)


def _stopped(facts: dict[str, Any], settings: Any, runs: Mapping[str, Found], part: str) -> None:
    """How much a real stop of weights differs from the replay, under our reading."""
    twin = runs[part.replace("greedy", "plain")]
    if twin.log:
        replayed = stopped_shares(settings, twin)
        size = f"{FULL}, {part.removesuffix(', greedy')}"
        _lessons.from_stopped(facts, size, runs[part].table, replayed)


def _rate(part: str) -> float:
    return float(part.split()[1].strip(","))


def _twins(sgd: Runs, stopped: Runs) -> Runs:
    """Runs with weights that stop, and the run of MNIST with SGD that differs in nothing else."""
    found: Runs = {}
    for seed, parts in stopped.items():
        for part, one in parts.items():
            twin = sgd.get(seed, {}).get(part.replace("greedy", "evidence"))
            if twin is not None:
                both = {part: one, part.replace("greedy", "plain"): twin}
                found.setdefault(seed, {}).update(both)
    return found


# --- a tenth of the width --------------------------------------------------------------------


def _tenths(runs: Path, store: Store, rows: list[dict[str, Any]], facts: dict[str, Any]) -> None:
    """All images, pixels and initial weights varied."""
    sgd = EXPERIMENTS["mnist-sgd"]
    values: list[Any] = []
    done: list[Planned] = []
    pixels, initial = sgd.readings(None)[3:]
    for planned in TENTHS:
        found, settings = _look(planned, runs, rows)
        finished = whole(found, planned.parts)
        if not finished:
            continue
        done.append(planned)
        fixed = {
            pixels.name: next(v.name for v in pixels.values if v.setting == settings.pixels),
            initial.name: next(v.name for v in initial.values if v.setting == settings.init),
        }
        claims = sgd.claims(settings)
        if planned is TENTHS[0]:
            criterion(store, "mnist-sgd", TENTH, claims, finished)
            _elementwise(runs, store, logged(finished), rows)
            _lessons.from_tenth(facts, finished, planned.parts)
            _columns(store, "tenth", settings.rates, finished)
        values += replay_criterion(claims, {0: finished[0]}, fixed)
    if done and len(done) == len(TENTHS):
        choices: Sequence[Choice] = (*CRITERION, pixels, initial)
        size = f"{TENTH}, pixels and initial weights {VARIED}"
        store.keep(universe("mnist-sgd", size, claims, choices, values), claims)


def _elementwise(runs: Path, store: Store, plain: Runs, rows: list[dict[str, Any]]) -> None:
    """Single weights that stop: real ones, and along plain runs."""
    for planned in ELEMENTWISE:
        found, settings = _look(planned, runs, rows)
        finished = whole(found, planned.parts)
        if planned.experiment == "greedy":
            greedy(store, TENTH, settings, plain, None)
        else:
            rmsprop(store, TENTH, settings, plain)
            if finished:
                factors(store, TENTH, settings, finished)
        if finished:
            real(store, planned.experiment, TENTH, settings, finished)
            _figure(store, planned.experiment, "tenth", settings, finished)


# --- readings of a set of runs ---------------------------------------------------------------


def criterion(store: Store, name: str, size: str, claims: Sequence[Claim], runs: Collected) -> None:
    """Claims about stops; of runs long enough also as if they had ended earlier."""
    store.keep(universe(name, size, claims, CRITERION, replay_criterion(claims, runs)), claims)
    if size in (FULL, TENTH):
        values = [
            each
            for value in LENGTH.values
            for each in replay_criterion(
                claims, shortened(runs, value.setting), {LENGTH.name: value.name}
            )
        ]
        beside = f"{size}, length {VARIED}"
        store.keep(universe(name, beside, claims, (*CRITERION, LENGTH), values), claims)


def greedy(store: Store, size: str, settings: Any, plain: Collected, steps: int | None) -> None:
    """Shares of weights that stop for good, along plain runs."""
    choices = tuple(EXPERIMENTS["greedy"].readings(settings))
    claims, values = replay_greedy(settings, plain, steps)
    store.keep(universe("greedy", size, claims, choices, values), claims)
    if size in (FULL, TENTH):
        values = [
            ({**reading, LENGTH.name: value.name}, numbers)
            for value in LENGTH.values
            for reading, numbers in replay_greedy(settings, shortened(plain, value.setting))[1]
        ]
        beside = f"{size}, length {VARIED}"
        store.keep(universe("greedy", beside, claims, (*choices, LENGTH), values), claims)


def rmsprop(store: Store, size: str, settings: Any, plain: Collected) -> None:
    """Shares of weights that stop for a while, along a plain run."""
    part = f"rate {settings.rates[0]:g}, evidence"
    own = {seed: each for seed, each in plain.items() if part in each}
    claims, choices, values = replay_rmsprop(settings, own, part, settings.steps)
    store.keep(universe("rmsprop", size, claims, choices, values), claims)
    if size in (FULL, TENTH):
        values = [
            ({**reading, LENGTH.name: value.name}, numbers)
            for value in LENGTH.values
            for reading, numbers in replay_rmsprop(
                settings,
                shortened(own, value.setting),
                part,
                round(value.setting * settings.steps),
            )[2]
        ]
        beside = f"{size}, length {VARIED}"
        store.keep(universe("rmsprop", beside, claims, (*choices, LENGTH), values), claims)


def factors(store: Store, size: str, settings: Any, runs: Collected) -> None:
    """The factors of RMSprop's learning rates."""
    claims, values = replay_factors(settings, runs)
    store.keep(universe("rmsprop", f"{size}, {FACTORS}", claims, RMS_CHOICES, values), claims)


def real(
    store: Store, name: str, size: str, settings: Any, runs: Collected, every: bool = False
) -> None:
    """Claims from runs in which weights were really stopped, under the readings of 0/0 that ran.

    Args:
        store: where they go.
        name: of the experiment.
        size: of the runs.
        settings: of the runs.
        runs: finished ones.
        every: all claims; else those that cannot be replayed.
    """
    claims = [c for c in EXPERIMENTS[name].claims(settings) if every or not c.replayed]
    tables = [{p: one.table for p, one in each.items()} for each in runs.values()]
    zero = [c for c in claims if "left out" not in c.text]
    asked = [zero]
    if any(part.endswith("left out") for part in tables[0]):
        out = {
            c.text.replace(", 0/0 left out", "").replace("0/0 left out: ", ""): c
            for c in claims
            if "left out" in c.text
        }
        zero = [c for c in zero if c.text in out]
        asked = [zero, [out[c.text] for c in zero]]
    values = DIVISION.values[1], DIVISION.values[0]
    choice = replace(DIVISION, values=values[: len(asked)])
    numbers = [
        ({choice.name: value.name}, [[float(c.value(t)) for t in tables] for c in each])
        for value, each in zip(choice.values, asked, strict=True)
    ]
    store.keep(universe(name, f"{size}, {REAL}", zero, (choice,), numbers), zero)


# --- figures ---------------------------------------------------------------------------------


def _columns(store: Store, kind: str, rates: Sequence[float], runs: Collected) -> None:
    """The paper's panels of MNIST with SGD from the first seed, a figure for each rate."""
    first = next(iter(runs.values()))
    for rate in rates:
        held, own = (first[f"rate {rate:g}, {how}"].table for how in ("validation", "evidence"))
        drawn = Column(f"SGD, batch 128, rate {rate:g}", held, own)
        store.draw(f"mnist-sgd-{kind}-rate-{rate:g}", columns([drawn]))


def _figure(store: Store, name: str, kind: str, settings: Any, runs: Collected) -> None:
    """The experiment's own figure."""
    tables: Mapping[int, Mapping[str, Any]] = {
        seed: {p: one.table for p, one in each.items()} for seed, each in runs.items()
    }
    store.draw(f"{name}-{kind}", EXPERIMENTS[name].figure(tables, settings))
