"""A training run as one page of HTML, and as a card for notebooks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heldin.errors import HeldinError

from . import render, svg

__all__ = ["Advice", "RunPage", "card", "write_page"]

Advice = tuple[str, str]  # what to try, and where the pages say more of it
Curves = Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class RunPage:
    """What there is to show of a run.

    Attributes:
        title: what was decided, in a few words.
        verdict: why.
        facts, settings, cost: tables of names and values.
        advice: what to try.
        plot: draws the rule's own curve into axes; None if there is nothing to draw.
    """

    title: str
    verdict: str
    facts: list[tuple[str, str]]
    settings: list[tuple[str, str]]
    cost: list[tuple[str, str]]
    advice: list[Advice]
    plot: Callable[[Any], Any] | None


def _figure(page: RunPage, curves: Curves, size: tuple[float, float]) -> str:
    """The rule's curve, and above it those that the caller has brought."""
    if page.plot is None and not curves:
        return ""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise HeldinError(
            "report: figures need matplotlib: pip install 'heldin[report]'"
        ) from error
    panels = (page.plot is not None) + bool(curves)
    figure = Figure(figsize=(size[0], size[1] * panels), layout="constrained")
    axes = list(figure.subplots(panels, 1, squeeze=False)[:, 0])
    if curves:
        ax = axes.pop(0)
        for name, values in curves.items():
            ax.plot(range(1, len(values) + 1), list(values), label=name)
        ax.set_xlabel("step")
        ax.set_ylabel("loss")
        ax.legend(fontsize="small")
    if page.plot is not None:
        page.plot(axes[0])
    return svg(figure)


def checked_curves(curves: Mapping[str, Any] | None) -> Curves:
    """Losses by name, one for each step, as lists of numbers."""
    found: dict[str, list[float]] = {}
    for name, values in (curves or {}).items():
        try:
            found[str(name)] = [float(value) for value in values]
        except (TypeError, ValueError) as error:
            raise HeldinError(
                f"report: curves[{name!r}] must be a list of numbers, one for each step ({error})"
            ) from error
        if not any(map(math.isfinite, found[str(name)])):
            raise HeldinError(f"report: curves[{name!r}] has no finite number; leave it out")
    return found


def write_page(page: RunPage, path: str | Path, curves: Mapping[str, Any] | None) -> Path:
    """Write the page, which needs no other file and no network."""
    path = Path(path)
    if path.suffix not in (".html", ".htm"):
        raise HeldinError(f"report: the name must end in .html, got {str(path)!r}")
    try:
        import jinja2  # noqa: F401
    except ImportError as error:
        raise HeldinError("report needs jinja2: pip install 'heldin[report]'") from error
    figure = _figure(page, checked_curves(curves), (8, 3.6))
    text = render("run.html", page=page, title=page.title, figure=figure)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise HeldinError(f"report: {path} cannot be written ({error})") from error
    return path


def card(page: RunPage) -> str | None:
    """For notebooks, which show an object by this; None without jinja2, without a figure if
    matplotlib is missing."""
    try:
        figure = _figure(page, {}, (6, 3.0))
    except HeldinError:
        figure = ""
    try:
        return render("card.html", page=page, figure=figure)
    except ImportError:
        return None
