"""The site builds without a warning, has every public name and asks nothing of a network."""

from __future__ import annotations

import ast
import doctest
import itertools
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import heldin

ROOT = Path(__file__).parents[2]


INTERNAL = {"cli", "lab", "model_hook", "pages", "pause", "verification"}  # not for users
SHOWN = {"crossval": {"Committee", "Comparison", "OutOfFold"}}  # the others are internal
PACKAGE = ROOT / "src" / "heldin"


def assigned(source: Path) -> list[str]:
    """__all__ of a module, without importing it: frameworks may be missing, or take their time."""
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return names
    return []


def documented(sources: list[Path], name: str) -> str:
    """The docstring of a class or function in one of some files."""
    for source in sources:
        for node in ast.parse(source.read_text()).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
                return ast.get_docstring(node) or ""
    return ""


def public() -> dict[str, str]:
    """Docstrings of every public name: of the package and its modules without an underscore."""
    found = {f"heldin.{name}": getattr(heldin, name).__doc__ or "" for name in heldin.__all__}
    for path in sorted(PACKAGE.iterdir()):
        source = path / "__init__.py" if path.is_dir() else path
        if path.stem.startswith("_") or path.stem in INTERNAL or source.suffix != ".py":
            continue
        if source.exists():
            parts = PACKAGE / "adapters"  # where larger callbacks of frameworks are written
            beside = sorted(parts.glob(f"*_{path.stem}.py"))
            files = sorted(path.rglob("*.py")) if path.is_dir() else [path, *beside]
            module = getattr(heldin, path.stem, None)  # or not imported: see `assigned`
            names = set(assigned(source)) - set(heldin.__all__)
            for name in sorted(names & SHOWN.get(path.stem, names)):
                text = getattr(module, name).__doc__ if module else documented(files, name)
                found[f"heldin.{path.stem}.{name}"] = text or ""
    return found


PUBLIC = public()


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_name_has_a_docstring_with_an_example(name: str) -> None:
    assert PUBLIC[name], f"{name} has no docstring of its own"
    assert doctest.DocTestParser().get_examples(PUBLIC[name]), f"{name}: no >>> in its docstring"


def test_the_package_lists_its_names() -> None:
    assert assigned(PACKAGE / "__init__.py") == heldin.__all__  # as the site reads it


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for needed in ("zensical", "mkdocstrings", "latex2mathml"):
        pytest.importorskip(needed, reason=f"{needed} is needed to build the site: make setup")
    folder = tmp_path_factory.mktemp("project")
    for file in ("CONTRIBUTING.md", "mkdocs.yml"):  # a copy, as the site is written beside it
        shutil.copy(ROOT / file, folder)
    shutil.copytree(ROOT / "docs", folder / "docs")
    for linked in ("src", "examples"):
        (folder / linked).symlink_to(ROOT / linked)
    built = subprocess.run(
        [sys.executable, "docs/build.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return folder / "site"


@contextmanager
def opened(**options: Any) -> Iterator[Any]:
    """A page of a browser."""
    playwright = pytest.importorskip("playwright.sync_api")
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
    if browser is None:
        pytest.skip("no Chromium to open the site with")
    with playwright.sync_playwright() as started:
        running = started.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        yield running.new_page(**options)
        running.close()


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


def test_every_name_is_on_an_api_page(site: Path) -> None:
    pages = [site / "api.html", *sorted((site / "api").glob("*.html"))]
    text = "".join(page.read_text() for page in pages)
    for name in PUBLIC:
        assert f'id="{name}"' in text, name


def test_formulas_and_examples_are_set(site: Path) -> None:
    text = (site / "api" / "evidence.html").read_text()
    assert "<math" in text
    assert "arithmatex" not in text
    assert "&gt;&gt;&gt; import" not in re.sub(r"<pre.*?</pre>", "", text, flags=re.S)
    contributing = (site / "contributing.html").read_text()
    assert "How a batch flows" in contributing


def test_programs_of_the_gallery_are_on_its_page(site: Path) -> None:
    text = (site / "gallery.html").read_text()
    assert text.count('class="highlight"') == 20  # a program, and what it prints
    assert "<!-- site:" not in text


def test_pages_for_programs_that_read(site: Path) -> None:
    text = (site / "llms.txt").read_text()
    answers = ast.literal_eval(re.search(r"ANSWERS = (\(.*?\))", PAGES_TEST, re.S)[1])
    for name in answers:
        assert re.search(rf"/{name}\.md>\): \S", text), f"{name} has no description"
    page = (site / "no-validation-set.md").read_text()
    assert page.startswith("# Stop without a validation set\n")
    assert "```python\nimport torch" in page
    assert "(how/shadows.md)" in page
    for name in ("index", "gallery", "cost", "faq"):
        rest = re.sub(r"```.*?```", "", (site / f"{name}.md").read_text(), flags=re.S)
        assert not re.search(r"<script|<form|<div|<!--|\{ \.|\.html#", rest), name


PAGES_TEST = (Path(__file__).parent / "test_pages.py").read_text()


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("hyperparameter", "search"),
        ("hyperparameters", "search"),
        ("imbalanced", "groups-time-imbalance"),
        ("overfitting", "no-validation-set|faq"),
        ("accuracy", "metrics"),
        ("LoRA", "lora"),
        ("optuna", "search"),
    ],
)
def test_search_leads_to_pages_for_users(site: Path, asked: str, found: str) -> None:
    with opened() as page:
        page.goto((site / "index.html").as_uri())
        page.click(".md-search__button")
        page.get_by_role("combobox").fill(asked)
        options = page.get_by_role("option")
        options.first.wait_for()
        targets = "all => all.map(e => (e.querySelector('a') || e).href || '')"
        links = options.evaluate_all(targets)[:5]
    assert any(re.search(rf"({found})\.html", link) for link in links), links


def test_records_are_not_searched(site: Path) -> None:
    items = json.loads((site / "search.json").read_text())["items"]
    places = {item["location"].partition("#")[0] for item in items}
    assert "how-good.html" in places
    assert not places & {"which-rule.html", "guarantees.html", "reproduction.html"}


def model_of(layers: str, width: int) -> nn.Module:
    """A network for inputs of 64 numbers."""
    if layers == "linear":
        return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
    if layers == "other":
        inner = nn.Sequential(nn.Linear(64, width), nn.LayerNorm(width), nn.ReLU())
        return nn.Sequential(inner, nn.Linear(width, 10))
    first = nn.Sequential(nn.Unflatten(1, (1, 64)), nn.Conv1d(1, 64, 3), nn.Flatten())
    return nn.Sequential(first, nn.Linear(62 * 64, width), nn.ReLU(), nn.Linear(width, 10))


def reason_chosen(model: nn.Module, loop: str, rows: int) -> str:
    """What heldin says about a model, rows and a loop."""
    data: Any = (torch.zeros(rows, 64), torch.zeros(rows, dtype=torch.long))
    loss_fn = nn.CrossEntropyLoss()
    loss: dict[str, Any] = {"loss_fn": loss_fn}
    if loop == "any":
        data = torch.utils.data.TensorDataset(*data)
        loss = {"batch_loss": lambda model, batch: loss_fn(model(batch[0]), batch[1])}
    optimizer = torch.optim.AdamW(model.parameters())
    stopping = heldin.EarlyStopping(model, optimizer, data=data, **loss)
    reason = stopping.reason_chosen
    stopping.close()
    return reason


def test_the_calculator_says_what_heldin_chooses(site: Path) -> None:
    """On a grid: `reason_chosen` has the same shadows and the same time."""
    grid = itertools.product(
        ("linear", "other", "large"), ("tensors", "any"), (100, 201, 1500, 12_000), (32, 400, 2000)
    )
    with opened() as page:
        page.goto((site / "cost.html").as_uri())
        answer = page.locator("form.cost output")
        for layers, loop, rows, width in grid:
            model = model_of(layers, width)
            reason = reason_chosen(model, loop, rows)
            said = re.search(r"parameters: ([a-z ]+).*?for about ([\d.]+) times", reason)
            assert said is not None, reason
            page.fill("[name=rows]", str(rows))
            page.fill("[name=parameters]", str(sum(p.numel() for p in model.parameters())))
            page.select_option("[name=layers]", layers)
            page.select_option("[name=loop]", loop)
            told = answer.inner_text()
            case = (layers, loop, rows, width, reason, told)
            assert f"By default {said[1].strip()}:" in told, case
            assert f"about {float(said[2]):.1f} times" in told, case


PHONE = {"viewport": {"width": 390, "height": 844}}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_narrow_pictures_and_no_page_overflows(site: Path, scheme: Any) -> None:
    with opened(color_scheme=scheme, **PHONE) as page:
        for name in ("index", "how-good", "cost", "gallery", "how/shadows", "faq"):
            page.goto((site / f"{name}.html").as_uri())
            assert page.evaluate("document.documentElement.scrollWidth") <= 390, name
        page.goto((site / "index.html").as_uri())
        picture = page.locator(f".twins .for-{scheme} img")
        picture.scroll_into_view_if_needed()
        shade = "-dark" if scheme == "dark" else ""
        source = picture.evaluate("e => e.currentSrc")
        assert source.endswith(f"how-good-overview-narrow{shade}.png")
        other = "light" if scheme == "dark" else "dark"
        assert not page.locator(f".twins .for-{other}").is_visible()


def test_repository_version_and_edit_links(site: Path) -> None:
    text = (site / "faq.html").read_text()
    assert f"heldin {heldin.__version__} ·" in text
    assert "https://github.com/heldin/heldin/edit/main/docs/faq.md" in text


def test_both_colour_schemes(site: Path) -> None:
    text = (site / "index.html").read_text()
    assert 'data-md-color-scheme="slate"' in text
    assert 'data-md-color-scheme="default"' in text


def test_no_code_is_cut_off(site: Path) -> None:
    """At desktop width every block of code shows whole, but for what programs printed."""
    playwright = pytest.importorskip("playwright.sync_api")
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
    if browser is None:
        pytest.skip("no Chromium to open the site with")
    cut: dict[str, list[str]] = {}
    with playwright.sync_playwright() as started:
        running = started.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        page = running.new_page(viewport={"width": 1280, "height": 900})
        for name in ("index", "gallery", "coming-from", "command-line", "frameworks", "tabular"):
            page.goto((site / f"{name}.html").as_uri())
            found = page.locator(".language-python code, .language-sh code").evaluate_all(
                "all => all.filter(e => e.offsetParent && e.scrollWidth > e.clientWidth + 1)"
                ".map(e => e.innerText.slice(0, 60))"
            )
            if found:
                cut[name] = found
        running.close()
    assert cut == {}


def test_a_reader_without_a_network(site: Path) -> None:
    """From a folder, in a browser: nothing is fetched, nothing fails, search finds things."""
    playwright = pytest.importorskip("playwright.sync_api")
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
    if browser is None:
        pytest.skip("no Chromium to open the site with")
    said: list[str] = []
    with playwright.sync_playwright() as started:
        running = started.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        page = running.new_page(viewport={"width": 1400, "height": 900}, color_scheme="light")
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: said.append(request.url))
        page.goto((site / "index.html").as_uri())
        tabs = page.locator(".md-tabs__link").all_inner_texts()
        page.click(".md-search__button")
        page.get_by_role("combobox").fill("leave-one-out")
        page.get_by_role("option", name="Leave-one-out along the path").first.wait_for()
        page.keyboard.press("Escape")
        page.locator("label[for=__palette_1]").click()
        assert page.get_attribute("body", "data-md-color-scheme") == "slate"
        running.close()
    assert [line for line in said if not line.startswith(("file:", "data:", "blob:"))] == []
    assert [tab.strip() for tab in tabs] == [
        "Start", "Answers", "Gallery", "How it works", "API", "Records", "Project",
    ]  # fmt: skip
