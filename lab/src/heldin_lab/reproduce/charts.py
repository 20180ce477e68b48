"""The charts of the page: all claims together, and what each choice does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .experiment import NEAR
from .figures import BLUE, GREY, LIGHT_BLUE, RED, new
from .leading import Line, short
from .multiverse import Universe

__all__ = ["chart", "overview"]


def overview(lines: Sequence[Line]) -> Any:
    """A bar for each claim: the share of readings in which it holds; our reading as a dot."""
    figure = new(0.9 + 0.19 * len(lines))
    axes = figure.subplots()
    places = range(len(lines))
    shares = [line.judged.share for line in lines]
    axes.barh(places, shares, color=LIGHT_BLUE, label="share of the readings")
    both = [k for k, line in enumerate(lines) if line.claim and line.claim.beside is not None]
    beside = [lines[k].judged.beside for k in both]
    axes.barh(both, beside, height=0.35, color=GREY, label=f"with limit {NEAR:.2f}")
    for yes, colour, words in ((True, BLUE, "holds"), (False, RED, "does not")):
        own = [place for place, line in enumerate(lines) if line.mine == yes]
        axes.plot(
            [1.02] * len(own), own, "o", color=colour, markersize=4, clip_on=False,
            label=f"our reading {words}",
        )  # fmt: skip
    labels = [f"{line.found.experiment}{_beside(line)}: {short(line.text)}" for line in lines]
    axes.set_yticks(places, labels, fontsize=6.5)
    axes.set_xlim(0, 1)
    axes.set_ylim(len(lines) - 0.5, -0.5)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "100 %"], fontsize=7)
    axes.set_xlabel("share of the readings in which the claim holds", fontsize=8)
    figure.legend(fontsize=6.5, loc="outside upper right", ncols=4, frameon=False)
    return figure


def _beside(line: Line) -> str:
    return "" if line.counted else " (real run)"


def chart(found: Universe) -> Any:
    """Rows: claims. Columns: choices. Bars: the share among the readings with each value."""
    count, width = len(found.claims), len(found.choices)
    values = {choice: list(shares) for choice, shares in found.by_choice(0).items()}
    sizes = [max(2, len(each)) for each in values.values()]
    figure = new(0.9 + 0.62 * count, max(4.0, 0.36 * sum(sizes) + 0.25 * width + 0.6))
    grid = figure.subplots(count, width, squeeze=False, sharey=True, width_ratios=sizes)
    for place, row in enumerate(grid):
        shares = found.by_choice(place)
        for axes, choice in zip(row, found.choices, strict=True):
            heights = [shares[choice].get(value, 0.0) for value in values[choice]]
            colours = [BLUE if k == 0 else GREY for k in range(len(heights))]
            axes.bar(range(len(heights)), heights, color=colours)
            axes.set_xlim(-0.6, len(heights) - 0.4)
            axes.set_ylim(0, 1)
            axes.set_yticks([0, 1], ["0", "100 %"])
            axes.tick_params(labelsize=6.5)
            last = place == count - 1
            axes.set_xticks(range(len(heights)), values[choice] if last else [""] * len(heights))
            if last:
                axes.tick_params(axis="x", labelrotation=60)
            if place == 0:
                axes.set_title(choice.replace(" ", "\n", 1), fontsize=7.5)
        row[0].set_ylabel(f"{place + 1}", rotation=0, fontsize=8, labelpad=8)
    return figure
