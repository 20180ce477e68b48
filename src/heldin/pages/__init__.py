"""Reports in a single file: templates, a style sheet, charts, and their numbers as CSV."""

from __future__ import annotations

import base64
import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from heldin.errors import HeldinError

__all__ = ["Report", "Section", "Table", "csv_link", "render"]


@dataclass(frozen=True)
class Table:
    """A table of texts."""

    header: Sequence[str]  # names of the columns; empty: the first cell of each row is its name
    rows: Sequence[Sequence[str]]
    shades: Sequence[Sequence[float]] = ()  # numbers from 0 to 1 behind the cells; empty: none


@dataclass(frozen=True)
class Section:
    """A part of a report."""

    title: str
    text: str = ""  # a sentence below the title
    charts: Sequence[str] = ()  # SVG elements, see `heldin.pages.charts`
    tables: Sequence[Table] = ()  # below the charts
    files: Mapping[str, str] = field(default_factory=dict)  # names to links, see `csv_link`


class Report(str):
    """A report as the text of an HTML page; notebooks show it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<heldin report of {len(self):,} characters; save('run.html') writes it>"

    def _repr_html_(self) -> str:
        frame = "width: 100%; height: 40em; border: 1px solid #8888"
        return f'<iframe srcdoc="{escape(self)}" style="{frame}"></iframe>'

    def save(self, path: str | Path) -> Path:
        """Write the page to a file that needs no network."""
        path = Path(path)
        if path.suffix not in (".html", ".htm"):
            raise HeldinError(f"report: the name must end in .html, got {str(path)!r}")
        try:
            path.write_text(self, encoding="utf-8")
        except OSError as error:
            raise HeldinError(f"report: {path} cannot be written ({error})") from error
        return path


@cache
def _environment() -> Any:
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ImportError as error:  # PyTorch requires it
        raise HeldinError("a report needs jinja2: pip install jinja2") from error
    return Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def render(template: str, **values: Any) -> Report:
    """Render a page from a template; values are escaped in HTML."""
    return Report(_environment().get_template(template).render(values))


def csv_link(columns: Mapping[str, Sequence[Any]]) -> str:
    """Return columns of equal length as a CSV file inside of a link."""
    file = io.StringIO(newline="")
    writer = csv.writer(file)
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    return "data:text/csv;base64," + base64.b64encode(file.getvalue().encode()).decode()
