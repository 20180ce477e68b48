"""Sec. 3.4: the perceptron on MNIST, minibatches of 128 and three learning rates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from heldin_lab.reproduce.experiment import CLOSE, NEAR, SLIGHT, Claim, Experiment, Results
from heldin_lab.reproduce.figures import Column, columns
from heldin_lab.reproduce.readings import DIVISION, LENGTH, SMOOTHING, START
from heldin_lab.reproduce.tables import at, least

from .mnist import FULL_NET, INITIAL, PIXELS, Settings, against, train
from .mnist_gd import column as descent

__all__ = ["EXPERIMENT"]


def parts(settings: Settings) -> Mapping[str, Mapping[str, Any]]:
    """Each rate with and without a validation set."""
    return {
        f"rate {rate:g}, {method}": {"rate": rate, "method": method}
        for rate in settings.rates
        for method in ("validation", "evidence")
    }


def draw(
    results: Results,
    settings: Settings,
    beside: Results | None = None,
    beside_settings: Settings | None = None,
) -> Any:
    """Validation loss, test losses, criterion; columns: gradient descent if run, then the rates."""
    tables = next(iter(results.values()))
    drawn = [] if beside is None or beside_settings is None else [descent(beside, beside_settings)]
    for rate in settings.rates:
        name = f"rate {rate:g}"
        drawn.append(
            Column(
                f"SGD, batch {settings.batch}, {name}",
                tables[f"{name}, validation"],
                tables[f"{name}, evidence"],
            )
        )
    return columns(drawn)


def claims(settings: Settings) -> list[Claim]:
    """At each rate: as good as validation, which stops well and loses little."""

    def exact(held: str) -> Any:
        return lambda tables: at(tables[held], "test_loss") / least(tables[held], "test_loss")

    def reduced(held: str, own: str) -> Any:
        return lambda tables: least(tables[held], "test_loss") / least(tables[own], "test_loss")

    return [claim for rate in settings.rates for claim in _claims(rate, exact, reduced)]


def _claims(rate: float, exact: Any, reduced: Any) -> list[Claim]:
    held, own = f"rate {rate:g}, validation", f"rate {rate:g}, evidence"
    return [
        Claim(
            f"rate {rate:g}: evidence is as good as or better than validation "
            "(test losses at the stops, evidence / validation)",
            "as good or better",
            against(held, own),
            most=CLOSE,
            beside=NEAR,
        ),
        Claim(
            f"rate {rate:g}: validation stops where the test loss is least (test loss at the stop "
            "/ least on its path)",
            "more or less coincide",
            exact(held),
            most=CLOSE,
        ),
        Claim(
            f"rate {rate:g}: the reduced training set gives slightly higher test losses (least on "
            "the paths, reduced / all images)",
            "only slightly higher",
            reduced(held, own),
            above=1.0,
            most=SLIGHT,
            beside=NEAR,
        ),
    ]


EXPERIMENT = Experiment(
    name="mnist-sgd",
    title="Perceptron on MNIST, stochastic gradient descent",
    place="Sec. 3.4, Fig. MLP6-BS128",
    settings={
        "quick": Settings(),
        "full": Settings(
            steps=41_667,
            every=250,
            travel=125.0,
            budget=16_384,
            widths=FULL_NET,
            training=40_000,
            validation=10_000,
            test=10_000,
            rates=(0.003, 0.005, 0.01),
        ),
    },
    parts=parts,
    run=train,
    figure=draw,
    caption=("Rows as for gradient descent, which is the first column here if it was run too."),
    claims=claims,
    choices=(
        "As for gradient descent; batches are drawn without replacement, epoch by epoch, and the "
        "incomplete last one is left out.",
    ),
    differs={
        "quick": "Net and images as for gradient descent; learning rates ten times the paper's "
        "(0.03, 0.05, 0.1), as there are only 1,500 steps.",
        "full": "Nothing; rate times steps is 125 (the paper does not give the number of steps; "
        "the test loss of this net turns at about 90). "
        "The criterion of a step is that of a random block of 16,384 weights of each matrix, and "
        "of all weights in 20 of every 1,000 steps, to compare.",
    },
    data="mnist",
    beside="mnist-gd",
    readings=lambda settings: (SMOOTHING, START, DIVISION, PIXELS, INITIAL),
    added=(LENGTH,),
    left_out=(
        "Groups of parameters and the variance's divisor m - 1: the paper gives them.",
        "Biases that start at zero or slightly above, and batches with or without replacement: "
        "each would need runs of its own, which were not made.",
        "How often the validation loss is computed (every 250 steps at full size): more often "
        "would move validation's stop by less than 250 steps.",
    ),
)
