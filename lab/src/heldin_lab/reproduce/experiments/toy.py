"""Sec. 3.1: least squares with far too many features, on twenty points."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from heldin_lab.reproduce.experiment import NEAR, SLIGHT, Claim, Experiment, Results, Tables
from heldin_lab.reproduce.figures import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    RED,
    bar,
    criterion,
    logarithmic,
    new,
)
from heldin_lab.reproduce.readings import Choice, Value
from heldin_lab.reproduce.run import Run
from heldin_lab.reproduce.tables import at, last, least, step_of
from heldin_lab.rules import Evidence, EvidenceStopping, ValidationStopping

__all__ = ["EXPERIMENT"]


@dataclass(frozen=True)
class Settings:
    """Of the data, the features and the descent."""

    seeds: int = 20
    steps: int = 600
    training: int = 20
    validation: int = 10
    test: int = 10_000
    pairs: int = 24  # of sine and cosine
    frequency: float = 0.5  # a_j = j times this
    reach: float = 4.0  # x is uniform in [-reach, reach]
    slope: float = 1.0
    intercept: float = 0.5
    noise: float = 1.0
    rate: float = 0.01
    early: int = 3  # the step of the fit that is too early


CHOICES = (
    Choice(
        "inputs",
        "Where x lies.",
        (
            Value("[-4, 4]", "a few periods of the slowest waves", 4.0),
            Value("[-1, 1]", "the usual interval", 1.0),
            Value("[-10, 10]", "many periods", 10.0),
        ),
        replayed=False,
    ),
    Choice(
        "frequencies",
        'The "varying" frequencies a_j.',
        (
            Value("j / 2", "half the whole numbers", 0.5),
            Value("j", "the whole numbers", 1.0),
            Value("j / 4", "quarters", 0.25),
        ),
        replayed=False,
    ),
    Choice(
        "noise",
        "The standard deviation of the noise (the slope is 1).",
        (
            Value("1", "as large as the slope", 1.0),
            Value("0.5", "half of it", 0.5),
            Value("2", "twice as large", 2.0),
        ),
        replayed=False,
    ),
    Choice(
        "start",
        "Where the weights start.",
        (
            Value("zero", "the least that can be said", 0.0),
            Value("small", '"small", as Sec. 3.2 says of weights: normal, deviation 0.1', 0.1),
        ),
        replayed=False,
    ),
    Choice(
        "length",
        "How many steps are shown.",
        (
            Value("600", "the overfitted fit of the figure is well visible", 600),
            Value("200", "a third of it", 200),
            Value("2000", "three times as many", 2000),
        ),
    ),
)


def features(x: Tensor, settings: Settings) -> Tensor:
    """1, x, sin(a_1 x), cos(a_1 x), ...

    >>> features(torch.zeros(1), Settings(pairs=2))
    tensor([[1., 0., 0., 1., 0., 1.]])
    """
    angles = x[:, None] * settings.frequency * torch.arange(1, settings.pairs + 1)
    waves = torch.stack([angles.sin(), angles.cos()], -1).flatten(1)
    return torch.cat([torch.ones_like(x)[:, None], x[:, None], waves], 1)


def data(seed: int, settings: Settings) -> list[tuple[Tensor, Tensor]]:
    """Inputs and answers for training, validation and test."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for rows in (settings.training, settings.validation, settings.test):
        x = settings.reach * (2 * torch.rand(rows, generator=generator) - 1)
        noise = settings.noise * torch.randn(rows, generator=generator)
        found.append((x, settings.intercept + settings.slope * x + noise))
    return found


def descend(run: Run) -> None:
    """Gradient descent with both rules watching."""
    s = run.settings
    sets = [(features(x, s), y[:, None]) for x, y in data(run.seed, s)]
    model = nn.utils.skip_init(nn.Linear, 2 + 2 * s.pairs, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=s.rate)

    def errors(which: int) -> Tensor:
        x, y = sets[which]
        each: Tensor = 0.5 * (y - model(x)).square()
        return each

    validation = ValidationStopping(
        model, lambda: errors(1).mean(), patience=s.steps, restore_best=False, history=2
    )
    paper = Evidence.paper(parameter_groups="all", smoothing=0.0)
    with EvidenceStopping(model, paper) as rule:
        everything = {"model": model, "optimizer": optimizer, "rule": rule, "other": validation}
        for step in run.steps(s.steps, **everything):
            errors(0).mean().backward()
            rule.step()
            validation.step()
            with torch.no_grad():
                for which, name in enumerate(("train", "validation", "test")):
                    each = errors(which)
                    error = float(each.std()) / len(each) ** 0.5
                    run.note(step, **{f"{name}_loss": float(each.mean()), f"{name}_error": error})
            run.note(step, criterion=rule.criterion)
            if step in (s.early, rule.stopped_step, s.steps):
                run.note(step, **{f"w{k}": w for k, w in enumerate(model.weight[0].tolist())})
            optimizer.step()
            optimizer.zero_grad()
        run.mark(rule.stopped_step, "stop")
        run.mark(validation.best_step, "validation_stop")


def draw(results: Results, settings: Settings) -> Any:
    """Left: losses with their errors, and the criterion. Right: three fits."""
    seed, tables = next(iter(results.items()))
    table = tables["descent"]
    figure = new(4.4)
    left, right = figure.subfigures(1, 2, width_ratios=[1.5, 1.0])
    top, bottom = left.subplots(2, 1, sharex=True, height_ratios=[1.5, 1.0])
    for name, colour in (("train", GREY), ("validation", BLUE), ("test", RED)):
        mean, width = table[f"{name}_loss"], 2 * table[f"{name}_error"]
        low = (mean - width).clip(lower=1e-2 * float(mean.min()))
        top.fill_between(table.step, low, mean + width, color=colour, alpha=0.15, linewidth=0)
        top.plot(table.step, mean, color=colour, label=name)
    lowest = min(float(table[f"{n}_loss"].min()) for n in ("train", "validation", "test"))
    top.set_ylim(0.6 * lowest, 1.5 * float(table.validation_loss.max()))
    logarithmic(top, "loss")
    bar(top, step_of(table, "validation_stop"), BLUE)
    top.legend(fontsize=7, frameon=False)
    criterion(bottom, table.assign(stop=0.0))
    bottom.set(xlabel="step", ylabel="criterion")
    stop = step_of(table)
    marks = [(float(settings.early), ORANGE), (stop, GREEN), (float(settings.steps), RED)]
    x, y = data(seed, settings)[0]
    line = torch.linspace(-settings.reach, settings.reach, 400)
    for axes, (step, colour) in zip(right.subplots(3, 1, sharex=True), marks, strict=True):
        for panel in (top, bottom):
            bar(panel, step, colour)
        axes.plot(line, settings.intercept + settings.slope * line, color="0.7", linewidth=1)
        axes.plot(x, y, "x", color="0.4", markersize=5)
        found = table.loc[table.step == step]
        if len(found):
            names = [f"w{k}" for k in range(2 + 2 * settings.pairs)]
            w = torch.tensor(found[names].to_numpy(dtype="float32")[0])
            axes.plot(line, features(line, settings) @ w, color=BLUE)
        title = f"step {step:.0f}" if len(found) else "no stop"
        axes.set_title(title, fontsize=8, color=colour, loc="left")
        axes.set_ylim(float(y.min()) - 1.5, float(y.max()) + 1.5)
    axes.set_xlabel("x")
    return figure


def claims(settings: Settings) -> list[Claim]:
    """Overfitting happens; both rules stop before."""

    def rise(tables: Tables) -> float:
        return last(tables["descent"], "test_loss") / least(tables["descent"], "test_loss")

    def near(mark: str) -> Any:
        def value(tables: Tables) -> float:
            table = tables["descent"]
            return at(table, "test_loss", mark) / least(table, "test_loss")

        return value

    ratio = "(true test loss there / least on the path)"
    return [
        Claim(
            "the true test loss turns up after a while (at the end / least on the path)",
            "saturates and increases",
            rise,
            above=NEAR,
        ),
        Claim(
            f"validation stops in the flat region around its minimum {ratio}",
            "an acceptable point",
            near("validation_stop"),
            most=SLIGHT,
            beside=NEAR,
        ),
        Claim(
            f"evidence stops in the flat region around its minimum {ratio}",
            "an acceptable point",
            near("stop"),
            most=SLIGHT,
            beside=NEAR,
        ),
    ]


def parts(settings: Settings) -> Mapping[str, Mapping[str, Any]]:
    """One descent."""
    return {"descent": {}}


EXPERIMENT = Experiment(
    name="toy",
    title="Linear least squares as a toy problem",
    place="Sec. 3.1, Fig. linReg-toy-prob",
    settings={"quick": Settings(), "full": Settings(seeds=100)},
    parts=parts,
    run=descend,
    figure=draw,
    caption=(
        "Left: losses with two standard deviations of their estimates, and the criterion. "
        "Blue bar: the least validation loss. Orange, green and red bars: the steps of the "
        "three fits on the right, too early, where evidence stops, and overfitted."
    ),
    claims=claims,
    choices=(
        "x uniform in [-4, 4], y = 0.5 + x + noise of variance 1; frequencies a_j = j / 2.",
        "Start at zero, learning rate 0.01, 600 steps, no smoothing: Eq. 10 as it stands.",
        "The validation stop is the least validation loss of the whole run, as in the paper.",
    ),
    readings=lambda settings: CHOICES,
    left_out=(
        "The learning rate: as long as the descent is stable, twice the rate is half the length, "
        "and the length is varied tenfold.",
        "Slope and intercept: scaled together with the noise they change nothing, and the noise is "
        "varied; their ratio is not.",
        'Whether x is drawn or equally spaced, and how many "about 10" validation points are: not '
        "varied; each seed draws other points.",
    ),
)
