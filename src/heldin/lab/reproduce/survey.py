"""Claims under every reading, from runs on disk, stored as small files of a repository."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from heldin.errors import HeldinError

from . import lessons as _lessons
from .collected import Collected, collect, progress
from .experiment import Claim
from .figures import Column, columns
from .fullsize import ELEMENTWISE, PLAN, TENTHS, Planned, tasks
from .multiverse import (
    CRITERION,
    Universe,
    file_name,
    replay_criterion,
    replay_greedy,
    replay_rmsprop,
    universe,
    write_universe,
)
from .readings import DIVISION, Choice
from .registry import EXPERIMENTS
from .runner import Task
from .spread import SPREADS

__all__ = ["REAL", "SIZES", "quick_tasks", "survey"]

SEEDS = 20  # of what is cheap
TENTH, QUICK = "a tenth of the width", "quick preset"
SIZES = ("full size", "a fifth of the width", TENTH, QUICK, "")
DESCENTS = {"fifth-gd": "a fifth of the width", "tenth-gd": TENTH}
REAL = "real runs"  # of sizes whose claims are not replayed
REPLAYED = ("mnist-gd", "mnist-sgd", "sector", "greedy", "rmsprop")


def survey(
    names: Sequence[str],
    runs: Path,
    store: Path,
    *,
    seeds: int = SEEDS,
    tell: Callable[[str], object] = lambda line: None,
) -> None:
    """Compute the readings of experiments and store them.

    Args:
        names: of experiments, or "all".
        runs: folder of runs: those of the plan, and of the quick preset in a folder "quick".
        store: folder for the results.
        seeds: for the experiments that are computed anew: toy, quadratics, WDBC.
        tell: gets a line for each result.
    """
    chosen = [*SPREADS, *REPLAYED] if "all" in names else list(names)
    unknown = [name for name in chosen if name not in (*SPREADS, *REPLAYED)]
    if unknown:
        raise HeldinError(
            f"reproduce: {unknown[0]!r} has no readings; those that have are "
            f"{', '.join((*SPREADS, *REPLAYED))}"
        )
    store.mkdir(parents=True, exist_ok=True)
    for name in chosen:
        if name in SPREADS:
            e = EXPERIMENTS[name]
            settings = e.settings["quick"]
            claims = _claims_of(name, settings)
            found = universe(name, "", claims, e.readings(settings), SPREADS[name](seeds))
            _keep(store, found, tell)
    if any(name in REPLAYED for name in chosen):
        _collected(runs, store, tell)


def _claims_of(name: str, settings: Any) -> list[Claim]:
    """The claims of an experiment; of the quadratics those of one start, as the starts vary."""
    claims = list(EXPERIMENTS[name].claims(settings))
    if name != "quadratic":
        return claims
    return [replace(c, text=c.text.replace(", opposite start", "")) for c in claims[:3]]


def _keep(store: Path, found: Universe, tell: Callable[[str], object]) -> None:
    if not found.rows:  # no reading that a run so short allows
        return
    write_universe(store / f"{file_name(found)}.csv", found)
    tell(f"{found.experiment}, {found.size or 'all'}: {len(found.rows)} readings")


# --- runs on disk ----------------------------------------------------------------------------


def quick_tasks(runs: Path, seeds: int = 5) -> Iterator[Task]:
    """The runs of the quick preset in a folder."""
    for name in REPLAYED:
        e = EXPERIMENTS[name]
        settings = e.settings["quick"]
        for seed in range(seeds):
            for part, arguments in e.parts(settings).items():
                yield Task(
                    name, "quick", part, seed, e.run, arguments, settings, "", "cpu", runs, 0.0
                )


def _collected(runs: Path, store: Path, tell: Callable[[str], object]) -> None:
    """What the runs on disk say; of runs that are not there, what is stored stays."""
    rows: list[dict[str, Any]] = []
    kept = store / "facts.json"
    facts: dict[str, Any] = json.loads(kept.read_text("utf-8")) if kept.exists() else {}
    _from_plan(runs, store, rows, facts, tell)
    _from_quick(runs / "quick", store, facts, tell)
    before = _stored_progress(store)
    rows = [before.get(_run_of(row), row) if not row["steps"] else row for row in rows]
    there = {_run_of(row)[:3] for row in rows}
    planned = {p.name for p in (*PLAN, *TENTHS, *ELEMENTWISE)}
    rows += [row for run, row in before.items() if run[:3] not in there and row["set"] in planned]
    if rows:
        with open(store / "progress.csv", "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    kept.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def _run_of(row: Mapping[str, Any]) -> tuple[str, ...]:
    """A run as it is planned now."""
    return str(row["set"]), str(row["run"]), str(row["seed"]), str(row["of"])


def _stored_progress(store: Path) -> dict[tuple[str, ...], dict[str, Any]]:
    path = store / "progress.csv"
    if not path.exists():
        return {}
    with open(path, newline="", encoding="utf-8") as file:
        return {_run_of(row): row for row in csv.DictReader(file)}


def _whole(found: Collected, parts: Sequence[str]) -> dict[int, dict[str, Any]]:
    """The seeds of which all these parts are finished."""
    return {
        seed: {part: each[part] for part in parts}
        for seed, each in found.items()
        if all(part in each and each[part].finished for part in parts)
    }


def _from_plan(
    runs: Path,
    store: Path,
    rows: list[dict[str, Any]],
    facts: dict[str, Any],
    tell: Callable[[str], object],
) -> None:
    full: dict[int, dict[str, Any]] = {}
    sgd = EXPERIMENTS["mnist-sgd"]
    for planned in PLAN:
        mine = [task for _, task in tasks((planned,), runs)]
        found = collect(mine)
        rows += progress(planned.name, found, mine)
        settings = mine[0].settings
        if planned.name == "full-sgd":
            _lessons.from_full(facts, found)
            for seed, each in _whole(found, planned.parts).items():
                full.setdefault(seed, {}).update(each)
        elif planned.name in DESCENTS:
            if whole := _whole(found, planned.parts):
                claims = EXPERIMENTS["mnist-gd"].claims(settings)
                _criterion(store, "mnist-gd", DESCENTS[planned.name], claims, whole, tell)
        elif found:
            facts[planned.name] = {p: one.table.iloc[-1].to_dict() for p, one in found[0].items()}
    if full:
        rates = tuple(sorted({float(part.split()[1].strip(",")) for part in full[0]}))
        settings = replace(sgd.settings["full"], rates=rates)
        _criterion(store, "mnist-sgd", "full size", sgd.claims(settings), full, tell)
        greedy = replace(EXPERIMENTS["greedy"].settings["full"], rates=rates)
        _greedy(store, "full size", greedy, _logged(full), None, tell)
        _figure(store, "mnist-sgd-full", rates, full)
    _tenths(runs, store, rows, facts, tell)


def _tenths(
    runs: Path,
    store: Path,
    rows: list[dict[str, Any]],
    facts: dict[str, Any],
    tell: Callable[[str], object],
) -> None:
    """A tenth of the width, with all images, pixels and initial weights varied."""
    sgd = EXPERIMENTS["mnist-sgd"]
    values: list[Any] = []
    done: list[Planned] = []
    pixels, initial = sgd.readings(None)[3:]
    for planned in TENTHS:
        mine = [task for _, task in tasks((planned,), runs)]
        found = collect(mine)
        rows += progress(planned.name, found, mine)
        whole = _whole(found, planned.parts)
        if not whole:
            continue
        done.append(planned)
        settings = mine[0].settings
        fixed = {
            pixels.name: next(v.name for v in pixels.values if v.setting == settings.pixels),
            initial.name: next(v.name for v in initial.values if v.setting == settings.init),
        }
        claims = sgd.claims(settings)
        if planned is TENTHS[0]:
            _criterion(store, "mnist-sgd", TENTH, claims, whole, tell)
            _elementwise(runs, store, _logged(whole), rows, tell)
            _lessons.from_tenth(facts, whole, planned.parts)
            _figure(store, "mnist-sgd-tenth", settings.rates, whole)
        values += replay_criterion(claims, {0: whole[0]}, fixed)
    if len(done) == len(TENTHS):
        choices: Sequence[Choice] = (*CRITERION, pixels, initial)
        size = f"{TENTH}, pixels and initial weights varied"
        _keep(store, universe("mnist-sgd", size, claims, choices, values), tell)


def _logged(runs: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    return {seed: {p: one for p, one in each.items() if one.log} for seed, each in runs.items()}


def _criterion(
    store: Path,
    name: str,
    size: str,
    claims: Sequence[Claim],
    runs: Collected,
    tell: Callable[[str], object],
) -> None:
    found = universe(name, size, claims, CRITERION, replay_criterion(claims, runs))
    _keep(store, found, tell)


def _from_quick(
    runs: Path, store: Path, facts: dict[str, Any], tell: Callable[[str], object]
) -> None:
    """The quick preset: the seeds of which all runs are finished."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for name in REPLAYED:
        e = EXPERIMENTS[name]
        parts = list(e.parts(e.settings["quick"]))
        mine = [task for task in quick_tasks(runs) if task.experiment == name]
        found[name] = _whole(collect(mine), parts)
    for name in ("mnist-gd", "mnist-sgd", "sector"):
        e = EXPERIMENTS[name]
        if found[name]:
            claims = e.claims(e.settings["quick"])
            _criterion(store, name, QUICK, claims, found[name], tell)
    if found["sector"]:
        _lessons.from_sector(facts, found["sector"])
    for name in ("greedy", "rmsprop"):
        if found[name]:
            _real(store, name, QUICK, EXPERIMENTS[name].settings["quick"], found[name], tell)
    if plain := _logged(found["mnist-sgd"]):
        settings = EXPERIMENTS["greedy"].settings["quick"]
        _greedy(store, QUICK, settings, plain, settings.steps, tell)
        if found["rmsprop"]:
            settings = EXPERIMENTS["rmsprop"].settings["quick"]
            _rmsprop(store, QUICK, settings, plain, found["rmsprop"], tell)


def _elementwise(
    runs: Path,
    store: Path,
    plain: Mapping[int, Mapping[str, Any]],
    rows: list[dict[str, Any]],
    tell: Callable[[str], object],
) -> None:
    """Single weights that stop, at a tenth of the width: real ones, and along plain runs."""
    for planned in ELEMENTWISE:
        mine = [task for _, task in tasks((planned,), runs)]
        found, settings = collect(mine), mine[0].settings
        rows += progress(planned.name, found, mine)
        whole = _whole(found, planned.parts)
        if planned.experiment == "greedy":
            _greedy(store, TENTH, settings, plain, None, tell)
        elif whole:
            _rmsprop(store, TENTH, settings, plain, whole, tell)
        if whole:
            _real(store, planned.experiment, TENTH, settings, whole, tell)
            e = EXPERIMENTS[planned.experiment]
            tables = {seed: {p: o.table for p, o in each.items()} for seed, each in whole.items()}
            _save(store, f"{e.name}-tenth", e.figure(tables, settings))


def _greedy(
    store: Path,
    size: str,
    settings: Any,
    plain: Mapping[int, Mapping[str, Any]],
    steps: int | None,
    tell: Callable[[str], object],
) -> None:
    claims, values = replay_greedy(settings, plain, steps)
    choices = EXPERIMENTS["greedy"].readings(settings)
    _keep(store, universe("greedy", size, claims, choices, values), tell)


def _rmsprop(
    store: Path,
    size: str,
    settings: Any,
    plain: Mapping[int, Mapping[str, Any]],
    damped: Collected,
    tell: Callable[[str], object],
) -> None:
    part = f"rate {settings.rates[0]:g}, evidence"
    claims, values = replay_rmsprop(settings, plain, part, damped, settings.steps)
    choices = EXPERIMENTS["rmsprop"].readings(settings)
    _keep(store, universe("rmsprop", size, claims, choices, values), tell)


def _real(
    store: Path,
    name: str,
    size: str,
    settings: Any,
    runs: Collected,
    tell: Callable[[str], object],
) -> None:
    """Claims that cannot be replayed, under the two readings of 0/0 that were run."""
    claims = [c for c in EXPERIMENTS[name].claims(settings) if not c.replayed]
    out = [c for c in claims if "0/0 left out" in c.text]
    plain = [c.text.replace(", 0/0 left out", "").replace("0/0 left out: ", "") for c in out]
    zero = [c for c in claims if c.text in plain]
    choice = replace(DIVISION, values=(DIVISION.values[1], DIVISION.values[0]))
    tables = [{p: one.table for p, one in each.items()} for each in runs.values()]
    values = [
        ({choice.name: value.name}, [[float(c.value(t)) for t in tables] for c in asked])
        for value, asked in zip(choice.values, (zero, out), strict=True)
    ]
    _keep(store, universe(name, f"{size}, {REAL}", zero, (choice,), values), tell)


def _figure(store: Path, name: str, rates: Sequence[float], runs: Collected) -> None:
    """The paper's panels of MNIST with SGD, from the first seed."""
    first = next(iter(runs.values()))
    drawn = [
        Column(
            f"SGD, batch 128, rate {rate:g}",
            first[f"rate {rate:g}, validation"].table,
            first[f"rate {rate:g}, evidence"].table,
        )
        for rate in rates
    ]
    _save(store, name, columns(drawn))


def _save(store: Path, name: str, figure: Any) -> None:
    figure.savefig(store / f"{name}.png", dpi=90, metadata={"Software": None})
