"""What the site adds to plain Markdown, so that the pages stay readable without it.

- Formulas become MathML, which browsers draw by themselves: no script, no fonts to fetch.
- Doctests, in pages and docstrings, become highlighted blocks without needing a fence.
- `heldin.name` in running text links to the API page.
- CONTRIBUTING.md of the repository is the page contributing.md.
"""

from __future__ import annotations

import html
import re
import unicodedata
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from markdown import Markdown
from markdown.extensions import Extension
from markdown.preprocessors import Preprocessor

ROOT = Path(__file__).parent.parent
FENCE = re.compile(r"\s*(```|~~~)")
MARK = re.compile(r"^(\s*```\w+) illustration.*$")  # for the tests only
FORMULA = re.compile(r'<(span|div) class="arithmatex">(.*?)</\1>', re.S)
SCRIPT = re.compile(r'<mi mathvariant="script">([A-Z])</mi>')
NAME = re.compile(r"(?<![\[`])`heldin\.(\w+)`(?![\]`])")
LINK = re.compile(r"(\]\()(?:docs/)([^)]*\))")


def public_names() -> set[str]:
    """heldin.__all__, read from the source: building the site needs no torch."""
    text = (ROOT / "src" / "heldin" / "__init__.py").read_text()
    return set(re.findall(r'^    "(\w+)",$', text, re.M))


class Doctests(Preprocessor):
    """Fences around doctests, links around names."""

    names = public_names()

    def run(self, lines: list[str]) -> list[str]:
        """A doctest begins with >>> and ends at an empty line."""
        result: list[str] = []
        fenced = example = False
        for line in lines:
            if not example and FENCE.match(line):
                fenced = not fenced
                line = MARK.sub(r"\1", line)
            elif not fenced and not example and line.startswith(">>> "):
                result += ["", "```pycon"]
                example = True
            elif example and not line.strip():
                result.append("```")
                example = False
            result.append(line if fenced or example else NAME.sub(self._link, line))
        return [*result, "```"] if example else result

    def _link(self, match: re.Match[str]) -> str:
        name = f"heldin.{match[1]}"
        return f"[`{name}`][{name}]" if match[1] in self.names else match[0]


class Examples(Extension):
    """Registers the preprocessor, before fences are looked for."""

    def extendMarkdown(self, md: Markdown) -> None:
        """Called by Python-Markdown."""
        md.preprocessors.register(Doctests(md), "heldin_doctests", 200)


def on_config(config: Any) -> Any:
    """Pages and docstrings alike are converted with these extensions."""
    config.markdown_extensions.append(Examples())
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page about contributing is the file at the top of the repository."""
    if page.file.src_uri == "contributing.md":
        return LINK.sub(r"\1\2", (ROOT / "CONTRIBUTING.md").read_text())
    return markdown


def on_post_page(output: str, **_: Any) -> str:
    """Formulas to MathML."""
    return FORMULA.sub(_mathml, output)


def _mathml(match: re.Match[str]) -> str:
    formula = html.unescape(match[2]).strip()[2:-2]  # without \( and \) or \[ and \]
    display = "block" if match[1] == "div" else "inline"
    return SCRIPT.sub(_script, convert(formula, display=display))


def _script(match: re.Match[str]) -> str:
    """Browsers know script letters by their own code points only."""
    for kind in ("SCRIPT", "MATHEMATICAL SCRIPT"):
        try:
            return f"<mi>{unicodedata.lookup(f'{kind} CAPITAL {match[1]}')}</mi>"
        except KeyError:
            continue
    return match[0]
