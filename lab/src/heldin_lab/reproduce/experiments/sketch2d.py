"""Sec. 3.2: two optimiser paths in a plane, and the region in which the rule stops them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from heldin import Moments
from heldin_lab.reproduce.experiment import Claim, Experiment, Results, Tables
from heldin_lab.reproduce.figures import BLUE, GREY, RED, new
from heldin_lab.reproduce.run import Run
from heldin_lab.reproduce.tables import at

from .quadratic import Quadratic, train

__all__ = ["EXPERIMENT"]


@dataclass(frozen=True)
class Settings:
    """Two weights; the true minimiser is zero."""

    seeds: int = 1
    steps: int = 400
    noise: float = 1.0
    rate: float = 0.02
    curvature: tuple[float, float, float] = (1.0, 0.4, 0.6)  # B's entries 11, 12, 22
    shift: tuple[float, float] = (-1.0, -0.6)  # zeta
    passing: tuple[float, float] = (-3.0, 0.5)  # start of the path that passes a better point
    stuck: tuple[float, float] = (4.5, 2.5)  # start of the one that does not


PATHS = {"passes a better point": "passing", "cannot overfit": "stuck"}


def _problem(settings: Settings) -> tuple[Tensor, Tensor]:
    one, both, two = settings.curvature
    return torch.tensor([[one, both], [both, two]]), torch.tensor(settings.shift)


def descend(run: Run, start: str) -> None:
    """One path."""
    b, zeta = _problem(run.settings)
    train(run, b, zeta, torch.tensor(getattr(run.settings, start)), weights=True)


def draw(results: Results, settings: Settings) -> Any:
    """Contours of the true loss (red) and the training loss (grey), minimisers, paths, region."""
    b, zeta = _problem(settings)
    figure = new(4.0, 6.0)
    axes = figure.subplots()
    x = torch.linspace(-4.0, 5.5, 240)
    y = torch.linspace(-2.5, 3.5, 160)
    grid = torch.stack(torch.meshgrid(x, y, indexing="xy"), -1)  # (160, 240, 2)
    for shift, colour, name in ((torch.zeros(2), RED, "$w^*$"), (zeta, GREY, r"$w^*_\mathcal{D}$")):
        away = grid + shift
        loss = 0.5 * (away @ b * away).sum(-1)
        axes.contour(
            x, y, loss, levels=[0.1, 0.4, 0.9, 1.8, 3.2, 5.0], colors=colour, linewidths=0.7
        )
        axes.plot(-shift[0], -shift[1], "x", color=colour, markersize=9, markeredgewidth=2)
        place = (float(-shift[0]), float(-shift[1]))
        axes.annotate(name, place, (6, 6), textcoords="offset points")
    gradient = (grid + zeta) @ b
    error = Quadratic(b, zeta, settings.noise, zeta).error
    # two samples one error above and below the gradient: their moments give the criterion
    moments = Moments(2 * gradient, 2 * (gradient.square() + error.square()), 2)
    inside = 1.0 - moments.snr.mean(-1)
    axes.contourf(x, y, inside, levels=[0.0, 1.0], colors=[BLUE], alpha=0.15)
    tables = next(iter(results.values()))
    for (name, table), colour in zip(tables.items(), (BLUE, RED), strict=True):
        axes.plot(table.w1, table.w2, color=colour, linewidth=2, label=f"path that {name}")
        axes.plot(at(table, "w1"), at(table, "w2"), "o", color=colour, markersize=6)
    axes.set(xlabel="$w_1$", ylabel="$w_2$", xlim=(-4, 5.5), ylim=(-2.5, 3.5))
    axes.legend(fontsize=7, loc="lower right")
    return figure


def _loss(part: str) -> Any:
    def value(tables: Tables) -> float:
        table = tables[part]
        return at(table, "test_loss") / float(table.test_loss.iloc[-1])

    return value


def claims(settings: Settings) -> list[Claim]:
    """What the picture shows."""
    ratio = "(true loss at the stop / at the end of the path)"
    good, bad = PATHS
    return [
        Claim(
            f"the path that {good} is stopped at one {ratio}",
            "better",
            _loss(good),
            most=0.999,
            form=".3f",
        ),
        Claim(f"the path that {bad} is stopped too early {ratio}", "worse", _loss(bad), above=1.0),
    ]


def parts(settings: Settings) -> Mapping[str, Mapping[str, Any]]:
    """One run for each path."""
    return {name: {"start": start} for name, start in PATHS.items()}


EXPERIMENT = Experiment(
    name="sketch2d",
    title="What early stopping assumes, in two dimensions",
    place="Sec. 3.2, Fig. SythLin_sketch",
    settings={"quick": Settings(), "full": Settings()},
    parts=parts,
    run=descend,
    figure=draw,
    caption=(
        "Contours of the true loss (red) and of the training loss (grey) with their "
        "minimisers, two paths of gradient descent, the region in which the rule stops "
        "(shaded), and the stops (dots)."
    ),
    claims=claims,
    choices=(
        "Both losses are quadratics with B = (1, 0.4; 0.4, 0.6); the minimiser of the training "
        "loss is (1, 0.6), the true one is zero; Lambda = I.",
        "It is a picture: nothing is drawn at random, so there is one seed.",
    ),
    left_out=("The functions drawn: it is a picture, and the claims are about these functions.",),
)
