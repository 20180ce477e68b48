"""The values of the claims under every reading, from descents of many seeds at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from .descents import Path, toy_paths, wdbc_paths
from .experiments import counterexample as _counter
from .experiments import quadratic as _quadratic
from .experiments import toy as _toy
from .experiments import wdbc as _wdbc
from .ledger import first_above, smooth
from .readings import Choice, Reading, readings

__all__ = ["SPREADS", "Values", "counterexample", "quadratic", "toy", "wdbc"]

Values = tuple[dict[str, str], Sequence[Any]]  # a reading, and for each claim the seeds' values


def _shown(choices: Sequence[Choice], replayed: bool) -> list[Choice]:
    return [choice for choice in choices if choice.replayed == replayed]


def _settings(choices: Sequence[Choice], reading: Reading) -> dict[str, Any]:
    return {choice.name: choice.setting(reading) for choice in choices}


def _at(steps: Any, values: Any, where: Any) -> Any:
    """The values (records, seeds) at a step of each seed, between records on a line."""
    import numpy

    return numpy.array(
        [
            numpy.nan if numpy.isnan(step) else numpy.interp(step, steps, column)
            for step, column in zip(where, values.T, strict=True)
        ]
    )


def toy(seeds: int) -> Iterator[Values]:
    """Of the toy problem."""
    choices = _toy.CHOICES
    runs, replays = _shown(choices, False), _shown(choices, True)
    longest = max(v.setting for v in replays[0].values)
    for chosen in readings(runs):
        s = _settings(runs, chosen)
        path = toy_paths(
            reach=s["inputs"],
            frequency=s["frequencies"],
            noise=s["noise"],
            initial=s["start"],
            steps=longest,
            seeds=seeds,
        )
        for replayed in readings(replays):
            yield {**chosen, **replayed}, toy_values(path, replays[0].setting(replayed))


def toy_values(path: Path, length: int) -> list[Any]:
    """Values of the claims of the toy problem, in their order, for all seeds."""
    test = path.losses["test_loss"][:length]
    validation = path.losses["validation_loss"][:length]
    steps = path.steps[:length]
    least = test.min(0)
    stop = first_above(path.criteria["out"][:length], steps)
    held = steps[validation.argmin(0)]
    return [test[-1] / least, _at(steps, test, held) / least, _at(steps, test, stop) / least]


def wdbc(seeds: int) -> Iterator[Values]:
    """Of logistic regression on WDBC; all starts and rates of one scaling are made together."""
    runs, replays = _shown(_wdbc.CHOICES, False), _shown(_wdbc.CHOICES, True)
    longest = max(v.setting for v in replays[0].values)
    together = list(readings(runs[2:]))
    beside = [tuple(choice.setting(each) for choice in runs[2:]) for each in together]
    for chosen in readings(runs[:2]):
        scaling, by = (choice.setting(chosen) for choice in runs[:2])
        held, own = (
            wdbc_paths(method, scaling=scaling, by=by, settings=beside, steps=longest, seeds=seeds)
            for method in ("validation", "evidence")
        )
        for each, red, blue in zip(together, held, own, strict=True):
            stops: dict[tuple[Any, ...], Any] = {}
            for replayed in readings(replays):
                length, *how = (choice.setting(replayed) for choice in replays)
                if tuple(how) not in stops:
                    stops[tuple(how)] = _every_step(blue, *how)
                values = wdbc_values(red, blue, stops[tuple(how)], length)
                yield {**chosen, **each, **replayed}, values


def _every_step(path: Path, smoothing: float, start: float, division: str | float) -> Any:
    """The first step above zero of each seed; the criterion between records is on a line."""
    import numpy

    steps = numpy.arange(1, path.steps[-1] + 1)
    columns = path.criteria[division].T
    whole = numpy.stack([numpy.interp(steps, path.steps, column) for column in columns], 1)
    return first_above(smooth(whole, smoothing, start), steps)


def wdbc_values(held: Path, own: Path, stops: Any, length: int) -> list[Any]:
    """Values of the claims of WDBC, in their order, for all seeds."""
    import numpy

    shown = own.steps <= length
    steps, test, other = own.steps[shown], own.losses["test_loss"][shown], held.losses
    red, validation = other["test_loss"][shown], other["validation_loss"][shown]
    stop = numpy.where(stops <= length, stops, numpy.nan)
    at = _at(steps, test, stop)
    best = steps[test.argmin(0)]
    return [
        at / test.min(0),
        at / red.min(0),
        validation[-1] / validation.min(0),
        (test / red).max(0),
        stop / best,
    ]


# --- quadratics, in closed form --------------------------------------------------------------


def _quadratics(
    seeds: int,
    starts: Choice,
    start_of: Callable[..., Any],
    rise: bool,
    levels: Choice | None = None,
) -> Iterator[Values]:
    """For each start and kind of eigenvalues: the values of the claims, spectrum by spectrum."""
    import numpy
    import torch

    settings = _quadratic.Settings()
    problems = []
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(seed)
        d = settings.dimension
        q, r = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64))
        drawn = torch.randn(2, d, generator=generator, dtype=torch.float64)
        problems.append((q * r.diagonal().sign(), *drawn))
    for chosen in readings([starts, _quadratic.EIGENVALUES, *([levels] if levels else [])]):
        noise = levels.setting(chosen) if levels else settings.noise
        values: list[list[float]] = []
        for kind in _quadratic.SPECTRA:
            eigenvalues = _quadratic.spectrum(kind, settings.dimension)
            eigenvalues = eigenvalues.pow(_quadratic.EIGENVALUES.setting(chosen))
            powers = (1 - settings.rate * eigenvalues)[:, None] ** torch.arange(settings.steps)
            found = []
            for rotation, first, second in problems:
                zeta = noise**0.5 * first
                w0 = start_of(starts.setting(chosen), zeta, second, noise**0.5)
                shift = (rotation.T @ (w0 + zeta))[:, None] * powers  # w + zeta, eigen-directions
                gradient = rotation @ (eigenvalues[:, None] * shift)
                variance = noise * (rotation * eigenvalues).square().sum(1)
                criterion = 1 - (gradient.square() / variance[:, None]).mean(0)
                w = shift - (rotation.T @ zeta)[:, None]
                test = (0.5 * eigenvalues[:, None] * w.square()).sum(0).numpy()
                above = (criterion > 0).numpy()
                at = test[above.argmax()] / test.min() if above.any() else numpy.nan
                found.append([test[-1] / test.min(), at] if rise else [at])
            values += numpy.array(found).T.tolist()
        yield chosen, [numpy.array(each) for each in values]


def quadratic(seeds: int, levels: Choice | None = None) -> Iterator[Values]:
    """Of the quadratics: one claim for each spectrum; with other noise levels if asked for."""

    def start(kind: str, zeta: Any, drawn: Any, scale: float) -> Any:
        return 0.5 * {"opposite": zeta, "random": scale * drawn, "unit": drawn}[kind]

    yield from _quadratics(seeds, _quadratic.START, start, False, levels)


def counterexample(seeds: int) -> Iterator[Values]:
    """Of the quadratics that cannot overfit: two claims for each spectrum."""

    def start(kind: str, zeta: Any, drawn: Any, scale: float) -> Any:
        return -5.0 * zeta if kind == "beyond" else 5.0 * scale * drawn

    yield from _quadratics(seeds, _counter.START, start, True)


SPREADS: Mapping[str, Callable[[int], Iterator[Values]]] = {
    "toy": toy,
    "quadratic": quadratic,
    "counterexample": counterexample,
    "wdbc": wdbc,
}
