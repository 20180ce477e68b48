"""Every rule can show its run: a page, a card in notebooks, a line while it trains."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import heldin
from heldin.errors import docs
from heldin.rules.reporting import advice_on_estimates, advice_on_evidence
from heldin.state import Estimate, EstimateHistory, History, Record

RULES = ["evidence", "folds", "shadow", "leave-one-out", "validation", "elementwise"]


def trained(rule: str, steps: int = 40) -> Any:
    torch.manual_seed(0)
    x, y = torch.randn(40, 4), torch.randn(40, 1)
    y += 2 * x[:, :1]
    model, loss_fn = nn.Linear(4, 1), nn.MSELoss()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05)
    before = rule in ("evidence", "validation")
    if rule == "evidence":
        stopping: Any = heldin.EvidenceStopping(model)
    elif rule == "validation":
        stopping = heldin.ValidationStopping(model, lambda: loss_fn(model(x), y))
    elif rule == "elementwise":
        stopping = optimizer = heldin.ElementwiseStopping(optimizer, model, smoothing=0.5)
    else:
        stopping = heldin.stopping(rule, model, optimizer, loss_fn, (x, y))
    for _ in range(steps):
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        if before:
            stopping.step()
        optimizer.step()
        if not before and rule != "elementwise":
            stopping.step(indices=range(40))
    return stopping


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_writes_a_page(rule: str, tmp_path: Path) -> None:
    for needed in ("matplotlib", "jinja2"):
        pytest.importorskip(needed)
    stopping = trained(rule)
    card = stopping._repr_html_()
    stopping.close()
    losses = [1 / (1 + i) for i in range(40)]
    path = stopping.report(tmp_path / "run.html", groups=True, curves={"test <loss>": losses})
    page = path.read_text(encoding="utf-8")
    assert type(stopping).__name__ in page
    assert "<svg" in page
    assert "test &lt;loss&gt;" in page
    for heading in ("Course", "If this looks wrong", "Cost", "Settings"):
        assert f"<h2>{heading}</h2>" in page
    assert re.findall(r'(?:src|href)="(?!https://heldin|#)[^"]*"', page) == []  # one file
    assert "<svg" in card
    verdict = getattr(stopping, "reason", "after 40 steps").replace(">", "&gt;")
    assert verdict in page
    assert verdict in card


def test_groups_are_drawn_on_request(tmp_path: Path) -> None:
    for needed in ("matplotlib", "jinja2"):
        pytest.importorskip(needed)
    stopping = trained("evidence")
    stopping.close()
    pages = [
        stopping.report(tmp_path / "run.html", groups=groups).read_text()
        for groups in (False, True)
    ]
    assert "criterion of weight" not in pages[0]
    assert "criterion of weight" in pages[1]
    assert len(pages[1]) > len(pages[0])


def test_what_cannot_be_a_page_is_refused(tmp_path: Path) -> None:
    for needed in ("matplotlib", "jinja2"):
        pytest.importorskip(needed)
    stopping = trained("validation", 3)
    with pytest.raises(heldin.HeldinError, match=r"must end in \.html"):
        stopping.report(tmp_path / "run.pdf")
    with pytest.raises(heldin.HeldinError, match="list of numbers, one for each step"):
        stopping.report(tmp_path / "run.html", curves={"loss": ["much"]})
    with pytest.raises(heldin.HeldinError, match="no finite number"):
        stopping.report(tmp_path / "run.html", curves={"loss": [float("nan")]})
    with pytest.raises(heldin.HeldinError, match="cannot be written"):
        stopping.report(tmp_path / "missing" / "run.html")


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_says_what_the_rule_says(terminal: bool) -> None:
    rich = pytest.importorskip("rich.console")
    stopping = trained("validation", 3)
    file = io.StringIO()
    console = rich.Console(file=file, force_terminal=terminal, width=200)
    with stopping.progress(total=10, console=console):
        stopping.step(7.0)
    said = file.getvalue()
    assert stopping.reason.startswith("step 4: loss 7")
    assert "loss 7" in said
    if not terminal:
        assert said.splitlines()[-1] == "step 4 of 10: " + stopping.reason.removeprefix("step 4: ")


def test_progress_tells_the_check_from_the_step() -> None:
    stopping = trained("folds", 45)  # checks are on a grid
    step, text = stopping._look()
    assert step == 45
    assert re.match(r"at step 40: estimated loss .* at step \d+$", text)
    stopping.patience = heldin.Patience(factor=0.5, slack=0, checks=0)
    stopping.restore()  # the last weights are checked, too
    stopping.close()
    assert stopping.reason.startswith("step 45: estimated loss ")
    assert stopping._look() == (45, "stopped, " + stopping.reason.partition(": ")[2])


def test_a_page_says_what_to_expect_first(tmp_path: Path) -> None:
    for needed in ("matplotlib", "jinja2"):
        pytest.importorskip(needed)
    stopping = trained("folds")
    stopping.close()
    page = stopping.report(tmp_path / "run.html").read_text()
    first = re.search(r"<tr><th[^>]*>(.*?)</th><td>(.*?)</td></tr>", page)
    assert first is not None
    assert first[1] == "test loss to expect"
    assert first[2].startswith(f"{stopping.estimate:.4g} ± {2 * stopping.standard_error:.2g} ")


def estimates(*losses: float) -> EstimateHistory:
    history = EstimateHistory()
    for step, loss in enumerate(losses):
        history.append(Estimate(step, loss, 0.01, loss))
    history.best_step = min(history, key=lambda record: record.estimate).step
    return history


def test_advice_fits_the_run() -> None:
    def advice(*losses: float, stop: bool = False) -> str:
        return " ".join(text for text, _ in advice_on_estimates(estimates(*losses), stop))

    assert "before training has the lowest" in advice(1, 2, 3, 4)
    assert "before training has the lowest" not in advice(3, 2, 1)
    assert "train longer" in advice(3, 2, 1)
    assert "train longer" not in advice(3, 1, 2, 3, 4, stop=True)
    assert "waits for its patience" in advice(3, 1, 2, 3, 4)

    history = History()
    history.append(Record(1, 8, raw=-0.1, criterion=-0.1))
    never = advice_on_evidence(history, should_stop=False, armed=False)
    assert "never left zero" in never[0][0]
    assert "fits every row" in advice_on_evidence(history, should_stop=False, armed=True)[0][0]
    assert "early" in advice_on_evidence(history, should_stop=True, armed=True)[0][0]


def test_links_of_advice_lead_to_pages() -> None:
    folder = Path(__file__).parents[2] / "docs"
    runs = [advice_on_estimates(estimates(1, 2), False)]
    history = History()
    for armed, stop in ((False, False), (True, False), (True, True)):
        history.append(Record(len(history) + 1, 8, raw=0.1, criterion=0.1))
        runs.append(advice_on_evidence(history, stop, armed))
    links = {link for run in runs for _, link in run if link}
    assert links
    for link in links:
        page, _, anchor = link.removeprefix(docs("")).partition("#")
        text = (folder / page).with_suffix(".md").read_text(encoding="utf-8").lower()
        assert not anchor or re.search(rf"^#+ {anchor.replace('-', ' ')}", text, re.M), link
