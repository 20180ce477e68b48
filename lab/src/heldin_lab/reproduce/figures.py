"""Panels and colours that several of the paper's figures share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["BLUE", "GREEN", "GREY", "ORANGE", "RED", "Column", "bar", "columns", "fractions", "new"]

# The paper's: red for validation and true losses, blue for evidence, grey for training.
RED, BLUE, GREEN, ORANGE, GREY = "#c80000", "#000082", "#008200", "#ff9933", "#828282"
LIGHT_RED, LIGHT_BLUE = "#e9a0a0", "#9a9ad0"
WIDTH = 8.0  # inches, the width of a page


def new(height: float, width: float = WIDTH) -> Any:
    """An empty figure in the style of all of them."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def bar(axes: Any, step: float, colour: str) -> None:
    """A vertical bar at a stop, if there was one."""
    if not math.isnan(step):
        axes.axvline(step, color=colour, linewidth=3, alpha=0.45, zorder=0)


def logarithmic(axes: Any, label: str) -> None:
    """A logarithmic loss axis with plain, readable ticks."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    narrow = high / low < 30
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 3.0, 5.0) if narrow else (1.0,)))
    if narrow:
        axes.yaxis.set_major_formatter(lambda value, place: f"{value:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel(label)


@dataclass(frozen=True)
class Column:
    """One configuration, trained twice.

    Attributes:
        title: of the column.
        validation: table of the run with a validation set: step, validation_loss, test_loss, stop.
        evidence: table of the run on all data: step, criterion, raw, test_loss, stop.
    """

    title: str
    validation: Any
    evidence: Any


def columns(drawn: Sequence[Column]) -> Any:
    """The layout of figures MLP6-BS128, logreg and sector.

    Top row validation loss (red), middle row test losses of both runs, bottom row the criterion
    (blue); bars at the stops.
    """
    width = max(4.5, 2.1 * len(drawn) + 0.6)
    figure = new(5.2, width)
    grid = figure.subplots(3, len(drawn), sharex="col", squeeze=False)
    for (top, middle, bottom), each in zip(grid.T, drawn, strict=True):
        held, own = each.validation, each.evidence
        stops = [_stop(held), _stop(own)]
        top.set_title(each.title, fontsize=9)
        top.plot(held.step, held.validation_loss, color=RED)
        bar(top, stops[0], RED)
        middle.plot(held.step, held.test_loss, color=RED, label="validation split")
        middle.plot(own.step, own.test_loss, color=BLUE, label="evidence, all data")
        for step, colour in zip(stops, (RED, BLUE), strict=True):
            bar(middle, step, colour)
        criterion(bottom, own)
        bottom.set_xlabel("step")
        later = max(float(table.test_loss[1:].max()) for table in (held, own))
        if later > 0:
            middle.set_yscale("log")
            middle.set_ylim(top=1.1 * later)  # the loss before training would hide the rest
        for axes in (top, middle):
            logarithmic(axes, "")
    for axes, label in zip(grid[:, 0], ("validation loss", "test loss", "criterion"), strict=True):
        axes.set_ylabel(label)
    grid[1, 0].legend(fontsize=7, frameon=False)
    figure.align_ylabels(grid[:, 0])
    return figure


def _stop(table: Any) -> float:
    found = table.loc[table.stop == 1, "step"]
    return float(found.iloc[0]) if len(found) else math.nan


def criterion(axes: Any, table: Any) -> None:
    """The criterion over the steps: raw values behind, the zero line, a bar at the stop.

    Linear between -1 and 1, logarithmic beyond.
    """
    from matplotlib.ticker import SymmetricalLogLocator

    if "raw" in table:
        axes.plot(table.step, table.raw, color=LIGHT_BLUE, linewidth=0.6)
    axes.plot(table.step, table.criterion, color=BLUE)
    axes.axhline(0.0, color="0.3", linewidth=0.8)
    axes.set_yscale("symlog", linthresh=1.0)
    axes.yaxis.set_major_locator(locator := SymmetricalLogLocator(base=10.0, linthresh=1.0))
    locator.set_params(numticks=6)
    axes.yaxis.set_major_formatter(lambda value, place: _plain(value))
    axes.set_ylim(top=1.5)  # it never exceeds 1
    bar(axes, _stop(table), BLUE)


def _plain(value: float) -> str:
    """A tick of a scale that is logarithmic on both sides.

    >>> [_plain(value) for value in (-100000.0, -100.0, 0.0, 1.0)]
    ['$-10^{5}$', '-100', '0', '1']
    """
    if abs(value) < 10_000:
        return f"{value:g}"
    return f"${'-' if value < 0 else ''}10^{{{round(math.log10(abs(value)))}}}$"


def fractions(axes: Any, table: Any, prefix: str) -> None:
    """Shares of weights over the steps: matrices red, biases blue, the whole net green."""
    for name in table.columns:
        if name.startswith(f"{prefix}/"):
            bias = name.endswith("bias")
            axes.plot(
                table.step,
                table[name],
                color=BLUE if bias else RED,
                linewidth=0.8,
                alpha=0.7,
                label="biases" if bias else "weight matrices",
            )
    axes.plot(table.step, table[prefix], color=GREEN, linewidth=2, label="whole net")
    axes.set_ylim(-0.03, 1.03)
    axes.set_yticks([0, 0.5, 1])


def legend(axes: Any, **options: Any) -> None:
    """A legend in which each label occurs once."""
    handles, labels = axes.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    axes.legend(list(once.values()), list(once), fontsize=7, frameon=False, **options)
