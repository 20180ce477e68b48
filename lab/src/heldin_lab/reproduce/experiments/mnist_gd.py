"""Sec. 3.4: the perceptron on MNIST, full-batch gradient descent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from heldin_lab.reproduce.experiment import CLOSE, Claim, Experiment, Results, Tables
from heldin_lab.reproduce.figures import Column, columns
from heldin_lab.reproduce.readings import DIVISION, SMOOTHING, START
from heldin_lab.reproduce.run import Run
from heldin_lab.reproduce.tables import at, least, step_of

from .mnist import FULL_NET, INITIAL, PIXELS, against, train
from .mnist import Settings as Net
from .mnist_flow import follow

__all__ = ["EXPERIMENT", "column"]


@dataclass(frozen=True)
class Settings(Net):
    """Those of the net, and how the path is computed."""

    flow: bool = False  # along gradient flow, the limit of small rates, in the place of each step


def descend(run: Run, rate: float, method: str) -> None:
    """Train with or without a validation set, to the end."""
    (follow if run.settings.flow else train)(run, rate, method)


def parts(settings: Settings) -> Mapping[str, Mapping[str, Any]]:
    """With and without a validation set."""
    (rate,) = settings.rates
    return {method: {"rate": rate, "method": method} for method in ("validation", "evidence")}


def column(results: Results, settings: Net) -> Column:
    """Column 1 of the paper's figure."""
    tables = next(iter(results.values()))
    title = f"gradient descent, rate {settings.rates[0]:g}"
    return Column(title, tables["validation"], tables["evidence"])


def draw(results: Results, settings: Settings) -> Any:
    """Validation loss, test losses, criterion."""
    return columns([column(results, settings)])


def claims(settings: Settings) -> list[Claim]:
    """An early stop, somewhat worse than validation's."""

    def early(tables: Tables) -> float:
        own = tables["evidence"]
        return step_of(own) / float(own.step[own.test_loss.idxmin()])

    def exact(tables: Tables) -> float:
        held = tables["validation"]
        return at(held, "test_loss") / least(held, "test_loss")

    return [
        Claim(
            "evidence stops early (step of the stop / step of the least test loss)",
            "a bit too early",
            early,
            most=0.999,
            form=".3f",
        ),
        Claim(
            "its test loss is slightly worse than validation's (at the stops, evidence / "
            "validation)",
            "1.32 (10^-0.92 / 10^-1.04)",
            against("validation", "evidence"),
            above=1.0,
        ),
        Claim(
            "validation stops almost exactly at the least test loss (at the stop / least on its "
            "path)",
            "nearly exactly positioned",
            exact,
            most=CLOSE,
        ),
    ]


EXPERIMENT = Experiment(
    name="mnist-gd",
    title="Perceptron on MNIST, gradient descent",
    place="Sec. 3.4, Fig. MLP6-BS128, column 1",
    settings={
        "quick": Settings(steps=300, every=5, rates=(0.1,), batch=None),
        "full": Settings(
            steps=20_000,
            every=50,
            widths=FULL_NET,
            training=40_000,
            validation=10_000,
            test=10_000,
            rates=(0.01,),
            batch=None,
            piece=2000,
        ),
    },
    parts=parts,
    run=descend,
    figure=draw,
    caption=(
        "Top: validation loss of the run with a validation set. Middle: test losses of that "
        "run (red) and of the run on all images (blue). Bottom: the criterion, smoothed and "
        "raw. Bars: stops."
    ),
    claims=claims,
    choices=(
        "Pixels divided by 255; He's initial weights (normal, variance 2 / inputs), biases zero; "
        "the split and the initial weights are drawn anew for each seed, the same for both runs.",
        "Smoothing 0.9, the default of rules.Evidence.paper; weights that no image reaches "
        "(constant pixels, dead units) are left out of the means.",
        "The full batch is accumulated over several backward passes.",
        "Validation's stop is the least validation loss of the whole run.",
    ),
    differs={
        "quick": "A net a tenth as wide (784-250-200-150-100-50-10, 297,510 parameters), 2,000 "
        "training, 500 validation and 2,000 test images in the place of 40,000, 10,000 and 10,000; "
        "learning rate 0.1 in the place of 0.01, as there are only 300 steps.",
        "full": "Nothing; 20,000 steps (the paper does not give their number).",
    },
    data="mnist",
    readings=lambda settings: (SMOOTHING, START, DIVISION, PIXELS, INITIAL),
    left_out=(
        "As for stochastic gradient descent; pixels and initial weights are not varied yet.",
    ),
)
