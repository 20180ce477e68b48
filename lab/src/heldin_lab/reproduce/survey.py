"""Claims under every reading, from runs on disk, stored as small files of a repository."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from heldin.errors import HeldinError

from . import confirm as _confirm
from . import fullsize as _fullsize
from . import lessons as _lessons
from . import planned as _planned
from .collected import collect
from .experiment import Claim
from .experiments import quadratic as _quadratic
from .multiverse import universe
from .registry import EXPERIMENTS
from .runner import Task
from .spread import SPREADS, quadratic
from .store import QUICK, VARIED, Store

__all__ = ["REPLAYED", "confirmed", "quick_tasks", "survey"]

SEEDS = 20  # of what is cheap
REPLAYED = ("mnist-gd", "mnist-sgd", "sector", "greedy", "rmsprop")


def survey(
    names: Sequence[str],
    runs: Path,
    folder: Path,
    *,
    seeds: int = SEEDS,
    tell: Callable[[str], object] = lambda line: None,
) -> None:
    """Compute the readings of experiments and store them.

    Args:
        names: of experiments, or "all".
        runs: folder of runs: those of the plan, and of the quick preset in a folder "quick".
        folder: for the results.
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
    folder.mkdir(parents=True, exist_ok=True)
    store = Store(folder, tell)
    for name in chosen:
        if name in SPREADS:
            e = EXPERIMENTS[name]
            settings = e.settings["quick"]
            claims = _claims_of(name, settings)
            found = universe(name, "", claims, e.readings(settings), SPREADS[name](seeds))
            store.keep(found, claims)
            if name == "quadratic":
                _noise_levels(store, claims, seeds)
    if any(name in REPLAYED for name in chosen):
        _collected(runs, store)


def _noise_levels(store: Store, claims: Sequence[Claim], seeds: int) -> None:
    """The quadratics with other noise levels than that of the figure."""
    choices = (_quadratic.START, _quadratic.EIGENVALUES, _quadratic.NOISE)
    values = quadratic(seeds, _quadratic.NOISE)
    size = f"noise level {VARIED}"
    store.keep(universe("quadratic", size, claims, choices, values), claims)


def confirmed(
    folder: Path,
    data: str | Path | None = None,
    tell: Callable[[str], object] = lambda line: None,
) -> None:
    """Compare simulated stops with real ones and gradient flow with steps, and store both.

    Args:
        folder: for the results.
        data: folder of datasets.
        tell: gets a line for each training.
    """
    folder.mkdir(parents=True, exist_ok=True)
    store = Store(folder)
    rows: list[dict[str, Any]] = []
    for training in _confirm.TRAININGS:  # each takes minutes: what is known is stored
        rows += [asdict(one) for one in _confirm.confirm([training], data, tell)]
        store.keep_rows("confirmed.csv", rows)
    facts = store.facts()
    facts["flow beside steps"] = _confirm.beside_steps(data=data, tell=tell)
    store.keep_facts(facts)


def _claims_of(name: str, settings: Any) -> list[Claim]:
    """The claims of an experiment; of the quadratics those of one start, as the starts vary."""
    claims = list(EXPERIMENTS[name].claims(settings))
    if name != "quadratic":
        return claims
    return [replace(c, text=c.text.replace(", opposite start", "")) for c in claims[:3]]


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


def _collected(runs: Path, store: Store) -> None:
    """What the runs on disk say; of runs that are not there, what is stored stays."""
    rows: list[dict[str, Any]] = []
    facts = store.facts()
    _planned.from_plan(runs, store, rows, facts)
    _from_quick(runs / "quick", store, facts)
    before = {_run_of(row): row for row in store.progress()}
    rows = [before.get(_run_of(row), row) if not row["steps"] else row for row in rows]
    there = {_run_of(row)[:3] for row in rows}
    planned = {p.name for p in _fullsize.ALL}
    rows += [row for run, row in before.items() if run[:3] not in there and row["set"] in planned]
    if rows:
        store.keep_rows("progress.csv", rows)
    store.keep_facts(facts)


def _run_of(row: Mapping[str, Any]) -> tuple[str, ...]:
    """A run as it is planned now."""
    return str(row["set"]), str(row["run"]), str(row["seed"]), str(row["of"])


def _from_quick(runs: Path, store: Store, facts: dict[str, Any]) -> None:
    """The quick preset: the seeds of which all runs are finished."""
    found: dict[str, _planned.Runs] = {}
    for name in REPLAYED:
        e = EXPERIMENTS[name]
        parts = list(e.parts(e.settings["quick"]))
        mine = [task for task in quick_tasks(runs) if task.experiment == name]
        found[name] = _planned.whole(collect(mine), parts)
    for name in ("mnist-gd", "mnist-sgd", "sector"):
        e = EXPERIMENTS[name]
        if found[name]:
            claims = e.claims(e.settings["quick"])
            _planned.criterion(store, name, QUICK, claims, found[name])
    if found["sector"]:
        _lessons.from_sector(facts, found["sector"])
    for name in ("greedy", "rmsprop"):
        if found[name]:
            settings = EXPERIMENTS[name].settings["quick"]
            _planned.real(store, name, QUICK, settings, found[name])
    damped = EXPERIMENTS["rmsprop"].settings["quick"]
    if plain := _planned.logged(found["mnist-sgd"]):
        settings = EXPERIMENTS["greedy"].settings["quick"]
        _planned.greedy(store, QUICK, settings, plain, settings.steps)
        _planned.rmsprop(store, QUICK, damped, plain)
    if found["rmsprop"]:
        _planned.factors(store, QUICK, damped, found["rmsprop"])
