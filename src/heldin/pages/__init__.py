"""Reports that are one file: templates, a style sheet and figures inside the page."""

from __future__ import annotations

import io
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["render", "svg"]


@cache
def _environment() -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def render(template: str, **values: Any) -> str:
    """A page from one of the templates; values are escaped in HTML.

    >>> page = render("fit.html", title="a < b", summary=[("rows", "80")], figure="", columns=[])
    >>> "<h1>a &lt; b</h1>" in page, "<th>rows</th><td>80</td>" in page
    (True, True)
    """
    text: str = _environment().get_template(template).render(values)
    return text


def svg(figure: Any) -> str:
    """A matplotlib figure as an element of a page; the same figure gives the same text."""
    import matplotlib

    file = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "heldin", "svg.fonttype": "none"}):
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    return text[text.index("<svg") :]
