"""The experiments, in the order of the paper."""

from __future__ import annotations

from .experiment import Experiment
from .experiments import (
    counterexample,
    greedy,
    mnist_gd,
    mnist_sgd,
    quadratic,
    rmsprop,
    sector,
    sketch,
    sketch2d,
    toy,
    wdbc,
)

__all__ = ["EXPERIMENTS"]

EXPERIMENTS: dict[str, Experiment] = {
    module.EXPERIMENT.name: module.EXPERIMENT
    for module in (
        sketch,
        toy,
        quadratic,
        counterexample,
        sketch2d,
        wdbc,
        mnist_gd,
        mnist_sgd,
        sector,
        greedy,
        rmsprop,
    )
}
