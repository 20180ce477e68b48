"""Reports that are one file: templates, a style sheet and figures inside the page."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["markdown_table", "render", "svg"]


@cache
def _environment() -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

    return Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=select_autoescape(["html"]),  # other pages are Markdown
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def render(template: str, **values: Any) -> str:
    """Return a page made from one of the templates; values are escaped in HTML.

    >>> "<h1>a &lt; b</h1>" in render("page.html", title="a < b")
    True
    """
    text: str = _environment().get_template(template).render(values)
    return text


def svg(figure: Any) -> str:
    """Return a matplotlib figure as an element of a page; equal figures give equal text."""
    import matplotlib

    file = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "heldin", "svg.fonttype": "none"}):
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    return text[text.index("<svg") :]


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown.

    >>> print(markdown_table(["a"], [["1"], ["x | y"]]), end="")
    | a |
    |---|
    | 1 |
    | x \\| y |
    """
    table = [[cell.replace("|", r"\|") for cell in row] for row in rows]
    lines = ["| " + " | ".join(row) + " |" for row in (head, *table)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]]) + "\n"
