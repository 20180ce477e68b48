"""The site builds without a warning, has every public name and asks nothing of a network."""

from __future__ import annotations

import doctest
import importlib
import inspect
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import heldin

ROOT = Path(__file__).parent.parent
API = (ROOT / "docs" / "api.md").read_text()


def public() -> dict[str, Any]:
    """Every public name: of the package and of its modules without an underscore."""
    found: dict[str, Any] = {f"heldin.{name}": getattr(heldin, name) for name in heldin.__all__}
    for module in pkgutil.iter_modules(heldin.__path__):
        if module.name.startswith("_") or f"::: heldin.{module.name}" not in API:
            continue
        try:
            loaded = importlib.import_module(f"heldin.{module.name}")
        except ImportError:  # an integration whose framework is not installed
            continue
        names = getattr(loaded, "__all__", ())
        found |= {f"heldin.{module.name}.{name}": getattr(loaded, name) for name in names}
    return found


PUBLIC = public()
INTERNAL = {"bench", "reproduce", "study"}  # commands: `heldin bench` and so on


def test_modules_are_on_the_api_page() -> None:
    modules = {m.name for m in pkgutil.iter_modules(heldin.__path__) if not m.name.startswith("_")}
    listed = set(re.findall(r"^::: heldin\.(\w+)", API, re.M))
    assert modules - INTERNAL - listed == set(), "add '::: heldin.<module>' to docs/api.md"


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_name_is_on_the_api_page(name: str) -> None:
    module, _, _ = name.rpartition(".")
    lines = API.splitlines()
    assert f"::: {name}" in lines or f"::: {module}" in lines, f"add '::: {name}' to docs/api.md"


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_name_has_a_docstring_with_an_example(name: str) -> None:
    text = inspect.getdoc(PUBLIC[name]) or ""
    assert text, f"{name} has no docstring"
    if inspect.getmodule(PUBLIC[name]) is not None and (PUBLIC[name].__doc__ or "") == "":
        pytest.fail(f"{name} has only the docstring of its base class")
    assert doctest.DocTestParser().get_examples(text), f"{name}: no >>> example in its docstring"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for needed in ("mkdocs", "material", "mkdocstrings", "latex2mathml"):
        pytest.importorskip(needed, reason=f"{needed} is needed to build the site: heldin[docs]")
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    return folder


def test_no_page_fetches_anything(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 20
    fetched = re.compile(
        r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["']?(?:https?:)?//"""
        r"""|<link\b[^>]*\brel=["']?(?:stylesheet|preconnect|preload)[^>]*href=["']?(?:https?:)?//"""
        r"""|url\(["']?(?:https?:)?//""",
        re.I,
    )
    sheets = sorted(site.rglob("*.css"))
    for page in [*pages, *sheets]:
        assert fetched.search(page.read_text()) is None, page.name


def test_every_name_has_an_anchor(site: Path) -> None:
    text = (site / "api.html").read_text()
    for name in PUBLIC:
        assert f'id="{name}"' in text, name


def test_formulas_and_examples_are_set(site: Path) -> None:
    text = (site / "api.html").read_text()
    assert "<math" in text
    assert "arithmatex" not in text
    assert "&gt;&gt;&gt; import" not in re.sub(r"<pre.*?</pre>", "", text, flags=re.S)
    contributing = (site / "contributing.html").read_text()
    assert "How a batch flows" in contributing


def test_both_colour_schemes(site: Path) -> None:
    text = (site / "index.html").read_text()
    assert 'data-md-color-scheme="slate"' in text
    assert 'data-md-color-scheme="default"' in text
