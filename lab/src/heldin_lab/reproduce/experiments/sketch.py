"""Sec. 2.2: the criterion in one dimension, with the errors of loss and gradient."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import heldin
from heldin_lab.reproduce.experiment import Claim, Experiment, Results, Tables
from heldin_lab.reproduce.figures import BLUE, ORANGE, RED, new
from heldin_lab.reproduce.run import Run

__all__ = ["EXPERIMENT"]


@dataclass(frozen=True)
class Settings:
    """Regression through the origin, with one weight."""

    seeds: int = 10
    steps: int = 201  # weights on the grid
    samples: int = 20
    population: int = 200_000
    truth: float = 1.0
    noise: float = 1.0
    slope_mean: float = 1.0  # of the input
    slope_std: float = 0.5
    span: float = 1.5  # the grid reaches that far to both sides of the truth


def scan(run: Run) -> None:
    """Losses and gradients over a grid of weights: of the data set, and of the population."""
    s = run.settings
    generator = torch.Generator().manual_seed(run.seed)

    def draw(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = s.slope_mean + s.slope_std * torch.randn(rows, 1, generator=generator)
        return x, s.truth * x + s.noise * torch.randn(rows, 1, generator=generator)

    x, y = draw(s.samples)
    everyone, answers = draw(s.population)
    model = nn.utils.skip_init(nn.Linear, 1, 1, bias=False)
    grid = torch.linspace(s.truth - s.span, s.truth + s.span, s.steps)
    for step in run.steps(s.steps):
        w = grid[step - 1]
        model.weight.data.fill_(w)
        model.zero_grad()
        with heldin.observe(model) as seen:
            loss = 0.5 * (model(x) - y).square().mean()
            loss.backward()
        away = everyone * w - answers
        losses, gradients = 0.5 * away.square(), everyone * away
        run.note(
            step,
            w=float(w),
            train_loss=float(loss.detach()),
            train_gradient=float(seen["weight"].total),
            criterion=heldin.evidence(seen).criterion,
            loss=float(losses.mean()),
            loss_error=float(losses.std()) / s.samples**0.5,
            gradient=float(gradients.mean()),
            gradient_error=float(gradients.std()) / s.samples**0.5,
        )


def _regions(table: Any) -> tuple[Any, Any, float]:
    """Where the true gradient +- its error encloses zero; where L_D's is within the error at w*."""
    best = table.gradient.abs().idxmin()
    error = float(table.gradient_error[best])
    return table.gradient.abs() < table.gradient_error, table.train_gradient.abs() < error, error


def draw(results: Results, settings: Settings) -> Any:
    """Loss, gradient, and the regions in which to stop."""
    table = next(iter(results.values()))["grid"]
    figure = new(2.6)
    left, middle, right = figure.subplots(1, 3)
    for axes, mean, error, own, name in (
        (left, "loss", "loss_error", "train_loss", "loss"),
        (middle, "gradient", "gradient_error", "train_gradient", "gradient"),
        (right, "gradient", "gradient_error", "train_gradient", "gradient"),
    ):
        shades = 14 if axes is not right else 0
        for k in range(1, shades + 1):  # the density, as nested bands
            reach = 2.5 * k / shades * table[error]
            axes.fill_between(
                table.w,
                table[mean] - reach,
                table[mean] + reach,
                color=ORANGE,
                alpha=0.055,
                linewidth=0,
            )
        for sign in (-1, 1):
            axes.plot(table.w, table[mean] + sign * table[error], color=ORANGE, linewidth=0.7)
        axes.plot(table.w, table[mean], color=ORANGE, linewidth=2.2, label="population")
        axes.plot(table.w, table[own], "--", color=BLUE, label="data set")
        axes.set(xlabel="w", ylabel=name, xlim=(table.w.iloc[0], table.w.iloc[-1]))
        axes.margins(y=0.02)
    vertical, _, width = _regions(table)
    inside = table.w[vertical]
    right.axvspan(float(inside.min()), float(inside.max()), color=RED, alpha=0.25, linewidth=0)
    right.axhspan(-width, width, color=RED, alpha=0.25, linewidth=0)
    for axes in (middle, right):
        axes.axhline(0.0, color="0.3", linewidth=0.8)
    left.legend(fontsize=7, frameon=False)
    return figure


def _overlap(tables: Tables) -> float:
    vertical, horizontal, _ = _regions(tables["grid"])
    return float((vertical & horizontal).sum() / (vertical | horizontal).sum())


def _agreement(tables: Tables) -> float:
    table = tables["grid"]
    _, horizontal, _ = _regions(table)
    return float(((table.criterion > 0) == horizontal).mean())


def claims(settings: Settings) -> list[Claim]:
    """What the picture shows."""
    return [
        Claim(
            "the two stopping regions overlap (weights in both / weights in either)",
            "roughly coincide",
            _overlap,
            above=0.0,
        ),
        Claim(
            "Eq. 10, with the error estimated at w, stops where the error at the true minimum does "
            "(share of the grid)",
            "a sensible choice near a minimum",
            _agreement,
            above=0.9,
        ),
    ]


def parts(settings: Settings) -> Mapping[str, Mapping[str, Any]]:
    """One grid."""
    return {"grid": {}}


EXPERIMENT = Experiment(
    name="sketch",
    title="Sketch of the criterion",
    place="Sec. 2.2, Fig. sketch-plain",
    settings={"quick": Settings(), "full": Settings()},
    parts=parts,
    run=scan,
    figure=draw,
    caption=(
        "Left the loss, in the middle and right the gradient: of the population (orange, with "
        "one standard deviation of what data sets of this size give, and their density), and "
        "of one data set (dashed blue). Right, shaded: where the true gradient is within one "
        "standard deviation of zero (vertical), and where the data set's is (horizontal)."
    ),
    claims=claims,
    choices=(
        "The functions: regression through the origin, y = w x + noise with x ~ N(1, 0.5^2), noise "
        "of variance 1 and 20 samples; population means and errors from 200,000 samples.",
    ),
    left_out=("The functions drawn: it is a picture, and the claims are about these functions.",),
)
