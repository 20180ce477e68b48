"""The interactive page, in a browser: it reacts, stays quiet and computes what heldin computes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import heldin

PAGE = Path(__file__).parents[2] / "docs" / "interactive.html"
BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
playwright = pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium to open the page with")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        running = started.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """The page; in the end, nothing was asked of a network or said on the console."""
    context = browser.new_context(viewport={"width": 1200, "height": 900}, color_scheme="light")
    opened = context.new_page()
    said: list[str] = []
    opened.on("console", lambda message: said.append(message.text))
    opened.on("pageerror", lambda error: said.append(str(error)))
    opened.on("request", lambda request: said.append(request.url))
    opened.goto(PAGE.as_uri())
    yield opened
    context.close()
    assert [line for line in said if line not in (PAGE.as_uri(), "data:,")] == []


def stop(page: Any, section: str) -> int | None:
    found: int | None = page.evaluate(f"heldin.{section}.found.path.stop")
    return found


def move(page: Any, section: str, name: str, value: float) -> None:
    slider = page.locator(f"#{section} input[name={name}]")
    slider.evaluate(
        "(input, value) => { input.value = value; "
        "input.dispatchEvent(new Event('input', { bubbles: true })); }",
        value,
    )


@pytest.mark.parametrize("section", ["sketch", "toy"])
def test_sliders_move_the_stop(page: Any, section: str) -> None:
    before = stop(page, section)
    assert before is not None
    text = page.inner_text(f"#{section} output")
    assert f"step {before}" in text
    slow = float(page.input_value(f"#{section} input[name=rate]")) - 0.3  # half the rate
    move(page, section, "rate", slow)
    after = stop(page, section)
    assert after is not None
    assert 1.6 * before < after < 2.5 * before
    assert page.inner_text(f"#{section} output") != text
    for name, value in (("noise", 0.3), ("rows", 60)):
        pictures = page.locator(f"#{section} svg").evaluate_all("all => all.map(s => s.innerHTML)")
        move(page, section, name, value)
        moved = page.locator(f"#{section} svg").evaluate_all("all => all.map(s => s.innerHTML)")
        assert all(a != b for a, b in zip(pictures, moved, strict=True))
    page.click(f"#{section} button")
    assert stop(page, section) is not None


def test_keyboard_alone(page: Any) -> None:
    """Tab goes through all controls, arrows move a slider and the words beside it."""
    reached = []
    for _ in range(9):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.name || document.activeElement.id"))
    assert reached == ["theme", *["noise", "rows", "rate", "again"] * 2]
    page.focus("#toy input[name=rate]")
    before = stop(page, "toy")
    for _ in range(6):
        page.keyboard.press("ArrowLeft")
    assert stop(page, "toy") != before
    spoken = page.get_attribute("#toy input[name=rate]", "aria-valuetext")
    assert spoken == page.inner_text("#toy label:has([name=rate]) b") == "0.0050"
    assert page.get_attribute("#toy output", "aria-live") == "polite"
    for label in page.locator("svg").evaluate_all("all => all.map(s => s.ariaLabel)"):
        assert "tops at step" in label
    page.focus("#theme")
    page.keyboard.press("Enter")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 24, 29)"


def test_on_a_phone(page: Any) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    for box in (each.bounding_box() for each in page.locator("input, button").all()):
        assert box["height"] >= 32
        assert box["x"] + box["width"] <= 360


def rows(page: Any, section: str) -> tuple[Tensor, Tensor, dict[str, float], dict[str, Any]]:
    """What the page drew, and what it made of it."""
    here = f"heldin.{section}"
    x, y = page.evaluate(f"[{here}.found.x, {here}.found.y]")
    settings, path = page.evaluate(f"[{here}.settings, {here}.found.path]")
    return torch.tensor(x).double(), torch.tensor(y).double()[:, None], settings, path


def waves(x: Tensor) -> Tensor:
    angles = x[:, None] * torch.arange(1, 25) / 2
    each = torch.stack([angles.sin(), angles.cos()], -1).flatten(1)
    return torch.cat([torch.ones_like(x)[:, None], x[:, None], each], 1)


@pytest.mark.parametrize("section", ["sketch", "toy"])
def test_numbers_are_heldins(page: Any, section: str) -> None:
    move(page, section, "noise", 0.7)
    move(page, section, "rows", 25)
    torch.set_default_dtype(torch.float64)
    try:
        x, y, settings, path = rows(page, section)
        phi = x[:, None] if section == "sketch" else waves(x)
        model = nn.Linear(phi.shape[1], 1, bias=False)
        nn.init.constant_(model.weight, -1.0 if section == "sketch" else 0.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=settings["rate"])
        criteria, losses = [], []
        with heldin.EvidenceStopping.paper(model, "all", smoothing=0.0) as stopping:
            for _ in range(100):
                loss = (model(phi) - y).square().mean() / 2
                loss.backward()
                stopping.step()
                criteria.append(stopping.criterion)
                losses.append(loss.item())
                optimizer.step()
                optimizer.zero_grad()
    finally:
        torch.set_default_dtype(torch.float32)
    assert (settings["noise"], settings["rows"]) == (0.7, 25)
    assert stopping.stopped_step == path["stop"]
    assert criteria == pytest.approx(path["criterion"][:100], rel=1e-9, abs=1e-9)
    assert losses == pytest.approx(path["training"][:100], rel=1e-9)
