"""What `heldin fit` did, as one page of HTML that needs nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from heldin.pages import render, svg

__all__ = ["write_report"]


def _figure(model: Any) -> str:
    """Training loss by epoch, the rule's own curve, and how true probabilities are, as SVG."""
    from matplotlib.figure import Figure

    facts = model.facts
    own = model.history is not None and facts["rule"] != "validation"
    calibration = facts.get("calibration")
    rows = 1 + own + (calibration is not None)
    figure = Figure(figsize=(7, 2.75 * rows + 0.25 * (rows == 1)), layout="constrained")
    axes = figure.subplots(rows, 1, squeeze=False)[:, 0]
    losses = facts["loss_curve"]
    axes[0].plot(range(1, len(losses) + 1), losses, color="0.4", label="training loss")
    axes[0].set_xlabel("epoch")
    axes[0].set_ylabel("training loss")
    if own:
        model.history.plot(axes[1])
        axes[1].set_xlim(left=0)
        axes[1].set_title(f"rule: {facts['rule']}", fontsize="medium", loc="left")
    if calibration is not None:
        axes[-1].plot([0, 1], [0, 1], color="0.8", linewidth=1)
        axes[-1].plot(*calibration, marker="o", label="rows out of fold")
        axes[-1].set_xlabel("predicted probability")
        axes[-1].set_ylabel("share that came true")
        axes[-1].legend(fontsize="small")
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
