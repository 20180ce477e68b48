"""What `heldin fit` did, as one page of HTML that needs nothing else."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["write_report"]

STYLE = """
body { font-family: system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; font-size: 0.9rem; }
td, th { padding: 0.2rem 0.8rem 0.2rem 0; text-align: left; border-bottom: 1px solid #ddd; }
th { font-weight: 600; white-space: nowrap; vertical-align: top; }
svg { max-width: 100%; height: auto; }
"""


def _figure(model: Any) -> str:
    """Training loss by epoch, and the rule's own curve, as SVG."""
    import matplotlib
    from matplotlib.figure import Figure

    facts = model.facts
    own = model.history is not None and facts["rule"] != "validation"
    with matplotlib.rc_context({"svg.hashsalt": "heldin", "svg.fonttype": "none"}):
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
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    return text[text.index("<svg") :]


def _columns(model: Any) -> str:
    rows = []
    for column in model.columns.used:
        if column.kind == "number":
            what = f"mean {column.mean:.4g}, standard deviation {column.spread:.4g}"
        else:
            known = ", ".join(column.categories[:12])
            what = known + (", ..." if len(column.categories) > 12 else "")
        gaps = "yes" if column.missing else ""
        cells = (column.name, column.kind, what, gaps)
        rows.append("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in cells) + "</tr>")
    head = "<tr><th>column</th><th>kind</th><th>learnt</th><th>missing values</th></tr>"
    return f"<table>{head}{''.join(rows)}</table>"


def write_report(model: Any, lines: Sequence[tuple[str, str]], path: Path) -> None:
    """Write the page.

    Args:
        model: a `TabularModel` just fitted.
        lines: the summary, as (name, value).
        path: where to.
    """
    table = "".join(
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>"
        for name, value in lines
    )
    title = html.escape(f"{model.target.name} from {model.facts['data']}")
    page = f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style></head>
<body><h1>{title}</h1>
<table>{table}</table>
<h2>Training</h2>
{_figure(model)}
<h2>Columns</h2>
{_columns(model)}
</body></html>
"""
    path.write_text(page, encoding="utf-8")
