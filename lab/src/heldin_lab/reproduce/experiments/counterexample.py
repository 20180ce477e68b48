"""Sec. 3.2: the same quadratics from a start for which no better point is passed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from heldin_lab.reproduce.experiment import NEAR, Claim, Experiment, Tables
from heldin_lab.reproduce.readings import Choice, Value
from heldin_lab.reproduce.run import Run
from heldin_lab.reproduce.tables import at, last, least

from .quadratic import EIGENVALUES, SPECTRA, Settings, draw, problem, train

__all__ = ["EXPERIMENT"]


START = Choice(
    "start",
    'What the factor 5 of the file name "initFactor5_noOver" multiplies.',
    (
        Value("beyond", "the minimiser of the training loss: the path cannot overfit", "beyond"),
        Value("random", "a draw of the law of zeta that knows nothing of it", "random"),
    ),
    replayed=False,
)


def descend(run: Run, kind: str) -> None:
    """One spectrum, from beyond the minimiser -zeta of the training loss."""
    b, zeta, _ = problem(run.seed, kind, run.settings)
    train(run, b, zeta, -run.settings.start * zeta)


def parts(settings: Settings) -> Mapping[str, Mapping[str, Any]]:
    """One run for each spectrum."""
    return {kind: {"kind": kind} for kind in SPECTRA}


def _claims(kind: str) -> list[Claim]:
    def rise(tables: Tables) -> float:
        return last(tables[kind], "test_loss") / least(tables[kind], "test_loss")

    def above(tables: Tables) -> float:
        return at(tables[kind], "test_loss") / least(tables[kind], "test_loss")

    return [
        Claim(
            f"{kind} spectrum: the test loss never rises (at the end / least on the path)",
            "flattens out, does not increase again",
            rise,
            most=1.001,
            form=".3f",
        ),
        Claim(
            f"{kind} spectrum: the rule stops above the floor (test loss at the stop / least)",
            "a sub-optimal stop",
            above,
            above=NEAR,
        ),
    ]


EXPERIMENT = Experiment(
    name="counterexample",
    title="Quadratics that cannot overfit",
    place="Sec. 3.2, Fig. SythLin_counter",
    settings={"quick": Settings(start=5.0), "full": Settings(seeds=10, start=5.0)},
    parts=parts,
    run=descend,
    figure=draw,
    caption=(
        "Columns: spectra. Top: eigenvalues. Middle: training loss (grey) and exact test loss "
        "(red). Bottom: the criterion and the stop (bar)."
    ),
    claims=lambda settings: [claim for kind in SPECTRA for claim in _claims(kind)],
    choices=(
        "Start: 5 times the minimiser of the training loss, so that in every eigen-direction the "
        "path leads towards both minimisers (the paper's file names have a factor 5, not what it "
        "multiplies). Everything else as in the experiment before.",
    ),
    readings=lambda settings: (START, EIGENVALUES),
    left_out=("Learning rate and length, as in the experiment before.",),
)
