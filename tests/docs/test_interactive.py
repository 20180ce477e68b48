"""The interactive page, in a browser: it reacts, stays quiet and computes what heldin computes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support import inside, runs

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


def found(page: Any, what: str) -> Any:
    return page.evaluate(f"heldin.toy.{what}")


def move(page: Any, name: str, value: float) -> None:
    page.locator(f"input[name={name}]").evaluate(
        "(input, value) => { input.value = value; "
        "input.dispatchEvent(new Event('input', { bubbles: true })); }",
        value,
    )


def pictures(page: Any) -> list[str]:
    drawn: list[str] = page.locator("svg").evaluate_all("all => all.map(s => s.innerHTML)")
    return drawn


def test_sliders_change_everything(page: Any) -> None:
    for name, value in (("rows", 60), ("noise", 0.3), ("size", 10), ("rate", -1.5)):
        before, text = pictures(page)[:2], page.inner_text("output")
        move(page, name, value)
        assert all(a != b for a, b in zip(before, pictures(page)[:2], strict=True)), name
        assert page.inner_text("output") != text
    settings = found(page, "settings")
    assert (settings["rows"], settings["noise"], settings["size"]) == (60, 0.3, 10)
    before = found(page, "found.x")
    page.click("button[name=again]")
    assert found(page, "found.x") != before


def test_the_table_has_the_numbers_of_the_runs(page: Any) -> None:
    move(page, "rows", 20)
    page.wait_for_function("heldin.toy.done", timeout=60_000)
    rules, regrets = found(page, "found.rules"), found(page, "regrets")
    assert {name: rule["rows"] for name, rule in rules.items()} == {
        "folds": 20, "split": 16, "evidence": 20
    }  # fmt: skip
    assert [len(values) for values in regrets.values()] == [40, 40, 40]
    for row, rule in zip(page.locator("tbody tr").all(), rules.values(), strict=True):
        said = row.inner_text()
        assert str(rule["step"]) in said
        assert f"{rule['loss']:.2f}" in said
        assert rule["regret"] == pytest.approx(rule["loss"] / found(page, "found.best") - 1)
    assert sum(regrets["folds"]) < sum(regrets["split"])  # what the page is there to show
    label = page.get_attribute("[data-plot=regret]", "aria-label")
    under = sum(value < 0.1 for value in regrets["folds"])
    assert f"heldin, five folds, all rows: {under} of 40 draws less than 10 % above" in label


def test_keyboard_alone(page: Any) -> None:
    """Tab goes through all controls, arrows move a slider and the words beside it."""
    reached = []
    for _ in range(6):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.name || document.activeElement.id"))
    assert reached == ["theme", "rows", "noise", "size", "rate", "again"]
    page.focus("input[name=rate]")
    before = found(page, "found.rules.folds.loss")
    for _ in range(6):
        page.keyboard.press("ArrowLeft")
    assert found(page, "found.rules.folds.loss") != before
    spoken = page.get_attribute("input[name=rate]", "aria-valuetext")
    assert spoken == page.inner_text("label:has([name=rate]) b") == "0.0050"
    assert page.get_attribute("output", "aria-live") == "polite"
    for label in page.locator("svg").evaluate_all("all => all.map(s => s.ariaLabel)"):
        assert "five folds" in label
    page.focus("#theme")
    page.keyboard.press("Enter")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 24, 29)"


RIGHT_SIDES = ".map(e => e.getBoundingClientRect().right)"
HEIGHTS = ".map(e => e.getBoundingClientRect().height)"


def test_on_a_phone(page: Any) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    # all at once: the page draws its parts anew while it computes
    boxes = "[...document.querySelectorAll('%s')].filter(e => e.getClientRects().length)"
    sides = page.evaluate(boxes % "input, button, td, svg" + RIGHT_SIDES)
    assert len(sides) > 10
    assert max(sides) <= 360
    assert min(page.evaluate(boxes % "input, button" + HEIGHTS)) >= 32


def waves(x: Tensor, size: int) -> Tensor:
    angles = x[:, None] * torch.arange(1, size // 2) / 2
    each = torch.stack([angles.sin(), angles.cos()], -1).flatten(1)
    return torch.cat([torch.ones_like(x)[:, None], x[:, None], each], 1)


def test_numbers_are_heldins(page: Any) -> None:
    """Evidence and folds, on the page's rows and with its folds."""
    move(page, "noise", 0.7)
    move(page, "rows", 25)
    move(page, "size", 20)
    settings, here = found(page, "settings"), found(page, "found")
    checks = [step for step in page.evaluate("AT") if step <= 120]
    torch.set_default_dtype(torch.float64)
    try:
        x, y = torch.tensor(here["x"]), torch.tensor(here["y"])[:, None]
        phi, loss_fn = waves(x, 20), nn.MSELoss()
        model = nn.Linear(20, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=settings["rate"] / 2)  # of half as much
        evidence = runs.EvidenceStopping.paper(model, "all", smoothing=0.0)
        folds = runs.FoldStopping(
            model, optimizer, loss_fn, (phi, y), folds=torch.tensor(here["fold"]), average="best",
            patience=None,
        )  # fmt: skip
        inside.check_at(folds, checks)
        for _ in range(120):
            optimizer.zero_grad()
            loss_fn(model(phi), y).backward()
            evidence.step()
            optimizer.step()
            folds.step(indices=range(25))
        evidence.close()
        folds.close()
    finally:
        torch.set_default_dtype(torch.float32)
    assert evidence.stopped_step == here["path"]["stop"]
    assert [check.step for check in folds.history] == checks
    for i, ours in enumerate(folds.history):
        assert here["estimate"][i] == pytest.approx(ours.estimate / 2, rel=1e-9)
        assert here["error"][i] == pytest.approx(ours.standard_error / 2, rel=1e-9)
        assert here["path"]["training"][ours.step] == pytest.approx(ours.training_loss / 2)
