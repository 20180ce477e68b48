"""Sec. 3.6: single weights stop, one after the other, and stay stopped."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch.nn import functional as F

from heldin_lab.reproduce.experiment import NEAR, SHARE, SLIGHT, Claim, Experiment, Results, Tables
from heldin_lab.reproduce.figures import BLUE, GREY, fractions, legend, logarithmic, new
from heldin_lab.reproduce.readings import (
    DIVISION,
    ELEMENTWISE_SMOOTHING,
    ELEMENTWISE_START,
    LENGTH,
    Choice,
)
from heldin_lab.reproduce.run import Run
from heldin_lab.reproduce.tables import last, least
from heldin_lab.reproduce.training import batch, mean_loss
from heldin_lab.rules import ElementwiseStopping

from .mnist import FULL_NET, digits, net
from .mnist import Settings as Net

__all__ = ["EXPERIMENT", "Reading", "shares", "train"]

Reading = Literal["zero", "out"]  # of 0/0, the ratio of a weight that no sample reaches


@dataclass(frozen=True)
class Settings(Net):
    """Those of the net, and the element-wise rule's."""

    steps: int = 1000
    every: int = 25
    smoothing: float = 0.99
    start: float = 10.0
    shown: int = 1000  # training images on which the training loss is computed

    @property
    def warmup(self) -> int:
        """Before this step no weight can have stopped."""
        return math.ceil(math.log(self.start) / -math.log(self.smoothing))


def train(
    run: Run, optimizer: Any, model: Any, size: int, note: Any, steps: int | None = None
) -> None:
    """Train on all images and note the losses, and what else is to be noted."""
    s = run.settings
    data = digits(run, held_out=False)
    for step in run.steps(steps or s.steps, model=model, optimizer=optimizer):
        x, y = data.train(batch(step, data.rows, size, run.seed))
        F.cross_entropy(model(x), y).backward()
        if step == 1 or step % s.every == 0:
            run.note(step, train_loss=mean_loss(model, data.train, s.shown, s.piece))
            run.note(step, test_loss=mean_loss(model, data.test, s.test, s.piece))
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 or step % s.every == 0:
            run.note(step, **note())


def shares(optimizer: ElementwiseStopping) -> dict[str, float]:
    """The shares of stopped weights, of the net ("off") and of each tensor ("off/...")."""
    each = optimizer.stopped_fraction(by="tensor")
    return {"off": optimizer.stopped_fraction(), **{f"off/{n}": v for n, v in each.items()}}


def descend(run: Run, rate: float, dead: Reading | None) -> None:
    """Train with weights that stop, or (`dead` is None) with none that do, to compare."""
    s = run.settings
    model = net(run)
    plain = torch.optim.SGD(model.parameters(), lr=rate)
    if dead is None:
        train(run, plain, model, s.batch, dict, s.length(rate))
        return
    optimizer = ElementwiseStopping(
        plain, model, greedy=True, smoothing=s.smoothing, start=s.start, dead=dead
    )
    train(run, optimizer, model, s.batch, lambda: shares(optimizer), s.length(rate))
    optimizer.close()


def parts(settings: Settings) -> Mapping[str, Mapping[str, Any]]:
    """Each rate with and without stopping; the middle rate also with 0/0 left out."""
    found: dict[str, dict[str, Any]] = {}
    for rate in settings.rates:
        found[f"rate {rate:g}, greedy"] = {"rate": rate, "dead": "zero"}
        found[f"rate {rate:g}, plain"] = {"rate": rate, "dead": None}
    rate = middle(settings)
    return {**found, f"rate {rate:g}, greedy, 0/0 left out": {"rate": rate, "dead": "out"}}


def middle(settings: Settings) -> float:
    """The rate of the other reading."""
    return settings.rates[len(settings.rates) // 2]


def draw(results: Results, settings: Settings) -> Any:
    """Top row the losses, bottom row the shares of stopped weights; columns: rates."""
    tables = next(iter(results.values()))
    figure = new(4.0)
    grid = figure.subplots(2, len(settings.rates), sharex=True, squeeze=False)
    for (top, bottom), rate in zip(grid.T, settings.rates, strict=True):
        table, plain = tables[f"rate {rate:g}, greedy"], tables[f"rate {rate:g}, plain"]
        top.set_title(f"SGD, batch {settings.batch}, rate {rate:g}", fontsize=9)
        top.plot(table.step, table.train_loss, color=GREY, label="train")
        if len(plain) > 1:
            top.plot(plain.step, plain.test_loss, ":", color=BLUE, label="test, plain SGD")
        else:  # all that is left of a run
            lowest = float(plain.test_loss.min())
            top.axhline(lowest, linestyle=":", color=BLUE, label="test, plain SGD, least")
        top.plot(table.step, table.test_loss, color=BLUE, label="test")
        logarithmic(top, "")
        fractions(bottom, table, "off")
        bottom.axvline(settings.warmup, color="0.6", linestyle=":", linewidth=1)
        bottom.set_xlabel("step")
    grid[0, 0].set_ylabel("loss")
    grid[1, 0].set_ylabel("stopped weights")
    figure.align_ylabels(grid[:, 0])
    grid[0, 0].legend(fontsize=7, frameon=False)
    legend(grid[1, 0], loc="upper left")
    return figure


def claims_at(settings: Settings, rate: float, reading: str = "") -> list[Claim]:
    """Return the claims about one rate."""
    name = f"rate {rate:g}"
    own, plain = f"{name}, greedy{reading}", f"{name}, plain"
    name += reading

    def after(tables: Tables) -> float:
        table = tables[own]
        return float(table.off[table.step > settings.warmup].iloc[0])

    return [
        Claim(
            f"{name}: 10 % of the weights or more stop right after the warm-up (share at the first "
            f"record after step {settings.warmup})",
            "10 % or more",
            after,
            above=0.0999,
        ),
        Claim(
            f"{name}: about 50 % of the whole net at the end",
            "around 50 %",
            lambda tables: last(tables[own], "off"),
            above=0.5 - SHARE,
            most=0.5 + SHARE,
        ),
        Claim(
            f"{name}: a test loss comparable to plain SGD's (least on the paths, greedy / plain)",
            "comparable",
            lambda tables: least(tables[own], "test_loss") / least(tables[plain], "test_loss"),
            most=SLIGHT,
            beside=NEAR,
            replayed=False,
        ),
        Claim(
            f"{name}: towards the end, where overfitting sets in, weights stop faster (growth of "
            "the share per step after the least test loss / before it)",
            "suddenly at a higher rate",
            lambda tables: acceleration(tables[own], settings.warmup),
            above=1.0,
            missing="no overfitting",
        ),
    ]


def acceleration(table: Any, warmup: int) -> float:
    """Growth of the stopped share after the least test loss over that before; nan if at an end."""
    after = table[table.step > warmup]
    turn = float(table.step[table.test_loss.idxmin()])
    if not len(after) or not float(after.step.iloc[0]) < turn < float(table.step.iloc[-1]):
        return math.nan
    first, last_row = after.iloc[0], table.iloc[-1]
    middle_row = table[table.step == turn].iloc[0]
    before = (middle_row.off - first.off) / (turn - first.step)
    late = (last_row.off - middle_row.off) / (last_row.step - turn)
    return float(late / before) if before > 0 else math.inf


def largest(settings: Settings, reading: str = "") -> Claim:
    """About the largest of all tensors at all rates that were run."""

    def value(tables: Tables) -> float:
        shown = [
            tables[f"rate {rate:g}, greedy{reading}"]
            for rate in settings.rates
            if f"rate {rate:g}, greedy{reading}" in tables
        ]
        return max(last(t, n) for t in shown for n in t.columns if n.startswith("off/"))

    return Claim(
        f"up to 80 % in a layer at the end{reading} (largest share of all tensors and rates)",
        "up to 80 %",
        value,
        above=0.8 - SHARE,
        most=0.8 + SHARE,
        across=max,
    )


def claims(settings: Settings) -> list[Claim]:
    """For each rate, and for the other reading of 0/0."""
    found = [claim for rate in settings.rates for claim in claims_at(settings, rate)]
    found += claims_at(settings, middle(settings), ", 0/0 left out")
    return [*found, largest(settings), largest(settings, ", 0/0 left out")]


def choices(settings: Settings) -> tuple[Choice, ...]:
    """Ours first: the settings' smoothing, and 0/0 read as 0."""
    own = [v for v in ELEMENTWISE_SMOOTHING.values if v.setting == settings.smoothing]
    others = [v for v in ELEMENTWISE_SMOOTHING.values if v.setting != settings.smoothing]
    out, zero, *epsilons = DIVISION.values
    return (
        replace(ELEMENTWISE_SMOOTHING, values=(*own, *others)),
        ELEMENTWISE_START,
        replace(DIVISION, values=(zero, out, *epsilons)),
    )


EXPERIMENT = Experiment(
    name="greedy",
    title="Greedy element-wise stopping",
    place="Sec. 3.6, Fig. MLP6-numOff",
    settings={
        "quick": Settings(),
        "full": Settings(
            steps=50_000,
            every=250,
            travel=125.0,
            widths=FULL_NET,
            training=40_000,
            validation=10_000,
            test=10_000,
            rates=(0.003, 0.005, 0.01),
            smoothing=0.999,
            shown=5_000,
        ),
    },
    parts=parts,
    run=descend,
    figure=draw,
    caption=(
        "Top: training loss (grey) and test loss (blue; dotted without stopping). Bottom: "
        "share of stopped weights of each weight matrix (red), each bias (blue) and the whole "
        "net (green); the dotted line is the end of the warm-up."
    ),
    claims=claims,
    choices=(
        "Net, images, batches and initial weights as for MNIST with SGD, on all training images.",
        "The averages of f start at 10; smoothing 0.99 in the quick preset (no weight can stop in "
        "the first 230 steps), 0.999 in the full one (2,302 steps).",
        "Weights that no image of a batch reaches (constant pixels, dead units) have f = 0/0. Two "
        "readings: 0, so that they stop when the warm-up is over (all rates, and the figure); and "
        "left out, so that they keep their average and never stop (the middle rate).",
        "To be read beside it: under pure noise a smoothed f is below 1 with probability 0.45 "
        "(smoothing 0.99) or 0.30 (0.999) at any one time.",
    ),
    differs={
        "quick": "Net and images as for MNIST; learning rates ten times the paper's, 1,000 steps.",
        "full": "Nothing; rate times steps is 125 (the paper does not give the number of steps; "
        "the test loss of this net turns at about 90).",
    },
    data="mnist",
    readings=choices,
    added=(LENGTH,),
    left_out=(
        "The threshold: it is f = 1, where the criterion 1 - f is zero.",
        "The learning rate: the paper's three are given.",
        "Pixels, initial weights and batches, as for MNIST with SGD.",
    ),
)
