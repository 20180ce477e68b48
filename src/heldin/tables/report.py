"""What `heldin fit` did, as one page of HTML that needs nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from heldin.pages import render, svg

__all__ = ["write_report"]


def _figure(model: Any) -> str:
    """Training loss by epoch, and the rule's own curve, as SVG."""
    from matplotlib.figure import Figure

    facts = model.facts
    own = model.history is not None and facts["rule"] != "validation"
    figure = Figure(figsize=(7, 5.5 if own else 3), layout="constrained")
    axes = figure.subplots(2 if own else 1, 1, squeeze=False)[:, 0]
    losses = facts["loss_curve"]
    axes[0].plot(range(1, len(losses) + 1), losses, color="0.4", label="training loss")
    axes[0].set_xlabel("epoch")
    axes[0].set_ylabel("training loss")
    if own:
        model.history.plot(axes[1])
        axes[1].set_xlim(left=0)
        axes[1].set_title(f"rule: {facts['rule']}", fontsize="medium", loc="left")
    return svg(figure)


def _columns(model: Any) -> Iterator[tuple[str, str, str, str]]:
    """Name, kind, what was learnt, and whether values were missing."""
    for column in model.columns.used:
        if column.kind == "number":
            learnt = f"mean {column.mean:.4g}, standard deviation {column.spread:.4g}"
        else:
            known = ", ".join(column.categories[:12])
            learnt = known + (", ..." if len(column.categories) > 12 else "")
        yield column.name, column.kind, learnt, "yes" if column.missing else ""


def write_report(model: Any, lines: Sequence[tuple[str, str]], path: Path) -> None:
    """Write the page.

    Args:
        model: a `TabularModel` just fitted.
        lines: the summary, as (name, value).
        path: where to.
    """
    page = render(
        "fit.html",
        title=f"{model.target.name} from {model.facts['data']}",
        summary=lines,
        figure=_figure(model),
        columns=list(_columns(model)),
    )
    path.write_text(page, encoding="utf-8")
