"""What the site adds to plain Markdown, so that the pages stay readable without it.

An extension of Python-Markdown, which every program that builds the site can use: no hook of one.

- Formulas become MathML, which browsers draw by themselves: no script, no fonts to fetch.
- Doctests, in pages and docstrings, become highlighted blocks without needing a fence.
- `heldin.name` in running text links to the API page.
- A picture that has twins, `name-dark.png` and `name-narrow.png`, becomes one that suits the page:
  its colours and its width.
- `<!-- site: every other name -->` becomes the entries of public names that no API page lists.
- `<!-- site: CONTRIBUTING.md -->` becomes that file of the repository, and so does any other file:
  programs and what they print as blocks of code.
"""

from __future__ import annotations

import ast
import html
import re
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from xml.etree.ElementTree import Element, SubElement

from latex2mathml.converter import convert
from markdown import Markdown
from markdown.extensions import Extension
from markdown.postprocessors import Postprocessor
from markdown.preprocessors import Preprocessor
from markdown.treeprocessors import Treeprocessor

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "heldin"
FIGURES = ROOT / "docs" / "figures"
INTERNAL = {"cli", "lab", "model_hook", "pages", "pause", "verification"}  # not for users
SHOWN = {  # the others are internal
    "crossval": {"Committee", "Comparison", "Difference", "Estimates", "OutOfFold", "RunRecord"}
}
PHONE = "(max-width: 600px)"
FENCE = re.compile(r"\s*(```|~~~)")
MARK = re.compile(r"^(\s*```\w+) illustration.*$")  # for the tests only
FORMULA = re.compile(r'<(span|div) class="arithmatex">(.*?)</\1>', re.S)
SCRIPT = re.compile(r'<mi mathvariant="script">([A-Z])</mi>')
NAME = re.compile(r"(?<![\[`])`heldin\.([\w.]+)`(?![\]`])")
FILE = re.compile(r"<!-- site: (\S+\.(?:py|txt)) -->$")
LINK = re.compile(r"(\]\()(?:docs/)([^)]*\))")


def names_in(module: Path) -> list[str]:
    """__all__ of a module, read from its source: building the site needs no torch."""
    for node in ast.parse(module.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return [str(name) for name in ast.literal_eval(node.value)]
    return []


def public() -> dict[str, list[str]]:
    """Public names by module: of the package, and of its modules what is not also there."""
    found = {"heldin": names_in(PACKAGE / "__init__.py")}
    for path in sorted(PACKAGE.iterdir()):
        source = path / "__init__.py" if path.is_dir() else path
        if re.match(r"[a-z]", path.stem) and source.suffix == ".py" and source.exists():
            if path.stem not in INTERNAL:
                own = [name for name in names_in(source) if name not in found["heldin"]]
                shown = SHOWN.get(path.stem, set(own))
                found[f"heldin.{path.stem}"] = [name for name in own if name in shown]
    return found


class Doctests(Preprocessor):
    """Fences around doctests, links around names."""

    names = frozenset(f"{module}.{n}" for module, own in public().items() for n in own)

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
        return f"[`{name}`][{name}]" if name in self.names else match[0]


def expanded(lines: list[str]) -> list[str]:
    """Lines with a comment that asks for a part, replaced by the part."""
    result: list[str] = []
    for line in lines:
        named = FILE.match(line)
        if line in PARTS:
            result += PARTS[line]().splitlines()
        else:
            result += _block(ROOT / named[1]) if named else [line]
    return result


class Parts(Preprocessor):
    """What other files give to a page."""

    def run(self, lines: list[str]) -> list[str]:
        """Called by Python-Markdown."""
        return expanded(lines)


class Pictures(Treeprocessor):
    """Pictures for dark pages and for phones, where a file has twins."""

    def run(self, root: Element) -> None:
        """Each `img` with twins becomes two `picture`s, of which the style sheet shows one."""
        for parent in list(root.iter()):
            for place, child in enumerate(list(parent)):
                source = child.get("src", "")
                if child.tag == "img" and (FIGURES / f"{Path(source).stem}-dark.png").exists():
                    parent.remove(child)
                    parent.insert(place, _twins(child, source.removesuffix(".png")))


class Formulas(Postprocessor):
    """Formulas to MathML."""

    def run(self, text: str) -> str:
        """The page, after everything else."""
        return FORMULA.sub(_mathml, text)


class Site(Extension):
    """Pages and docstrings alike are converted with it."""

    def extendMarkdown(self, md: Markdown) -> None:
        """Called by Python-Markdown: parts before doctests, both before fences are looked for."""
        md.preprocessors.register(Parts(md), "heldin_parts", 210)
        md.preprocessors.register(Doctests(md), "heldin_doctests", 200)
        md.treeprocessors.register(Pictures(md), "heldin_pictures", 5)
        md.postprocessors.register(Formulas(md), "heldin_formulas", 0)


def makeExtension(**options: object) -> Site:
    """Called by Python-Markdown."""
    return Site(**options)


def _twins(image: Element, stem: str) -> Element:
    both = Element("span", {"class": "twins"})
    both.tail = image.tail
    for scheme, shade in (("light", ""), ("dark", "-dark")):
        picture = SubElement(both, "picture", {"class": f"for-{scheme}"})
        if (FIGURES / f"{Path(stem).name}-narrow{shade}.png").exists():
            narrow = {"media": PHONE, "srcset": f"{stem}-narrow{shade}.png"}
            SubElement(picture, "source", narrow)
        attributes = {**image.attrib, "src": f"{stem}{shade}.png", "loading": "lazy"}
        SubElement(picture, "img", attributes)
    return both


def _contributing() -> str:
    return LINK.sub(r"\1\2", (ROOT / "CONTRIBUTING.md").read_text())


def _block(path: Path) -> list[str]:
    """A program or a text as a block of code; the marks of cells are comments."""
    kind = "py" if path.suffix == ".py" else "text"
    return [f"```{kind}", *path.read_text().replace("# %% ", "# ").strip().splitlines(), "```"]


def _other_names() -> str:
    pages = [ROOT / "docs" / "api.md", *(ROOT / "docs" / "api").glob("*.md")]
    return "\n".join(_unlisted("\n".join(page.read_text() for page in pages)))


PARTS: dict[str, Callable[[], str]] = {
    "<!-- site: CONTRIBUTING.md -->": _contributing,
    "<!-- site: every other name -->": _other_names,
}


def _unlisted(markdown: str) -> Iterator[str]:
    """Entries for public names that have no place yet, a section for each module."""
    for module, names in public().items():
        missing = [f"{module}.{n}" for n in names if f"::: {module}.{n}\n" not in markdown + "\n"]
        if missing:
            yield "\n## More\n" if module == "heldin" else f"\n## {module}\n"
            yield from (f"::: {name}\n" for name in missing)


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
