"""Every rule can show its run: as a page, and as a line while it trains."""

from __future__ import annotations

import base64
import csv
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("jinja2")

import heldin
from heldin.errors import docs
from heldin.rules.reporting import RunFacts, advice_on_estimates, advice_on_evidence
from heldin.state import Estimate, EstimateHistory, History, Record
from tests.support.report_runs import RULES, data, trained


def classifier(outputs: int, loss_fn: Any) -> Any:
    torch.manual_seed(0)
    x = torch.randn(60, 4, dtype=torch.float64)
    y = (x[:, 0] + 0.5 * torch.randn(60) > 0).long()
    model = nn.Linear(4, outputs).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    targets = y if outputs > 1 else y.double()[:, None]
    stopping = heldin.EarlyStopping(
        model, optimizer, loss_fn, (x, targets), "folds", metrics=["accuracy"]
    )
    return stopping.fit(20, 30)


def file_in(page: str, name: str) -> list[dict[str, str]]:
    link = re.search(rf'download="{name}" href="data:text/csv;base64,([^"]*)"', page)
    assert link is not None
    return list(csv.DictReader(io.StringIO(base64.b64decode(link[1]).decode())))


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_writes_a_page(rule: str, tmp_path: Path) -> None:
    stopping = trained(rule)
    page = stopping.report(tmp_path / "run.html")
    assert (tmp_path / "run.html").read_text(encoding="utf-8") == page
    assert "<svg" in page
    for heading in ("If this looks wrong", "Run"):
        assert f"<h2>{heading}</h2>" in page
    assert "Linear, 5 parameters, on cpu" in page
    assert "SGD, momentum 0.5" in page
    assert f"heldin {heldin.__version__}, PyTorch {torch.__version__}" in page
    assert '<th scope="row">learning rate</th><td>0.05</td>' in page
    assert '<th scope="row">duration</th>' in page
    assert re.findall(r'(?:src|href)="(?!https://heldin|data:)[^"]*"', page) == []  # one file
    assert len(file_in(page, "history.csv")) == len(stopping.history)
    shown = stopping._repr_html_()
    assert shown.startswith('<iframe srcdoc="&lt;!doctype')
    assert "save('run.html')" in repr(page)


def test_a_page_says_what_to_expect_first() -> None:
    stopping = trained("folds", 60)
    page = stopping.report()
    assert f"<h1>Test loss {stopping.estimates['loss']}</h1>" in page
    assert f"epoch {stopping.best_epoch + 1} (step {stopping.best_step})" in page
    low, high = re.findall(r"\[(.*), (.*)\]", str(stopping.estimates["loss"]))[0]
    assert f"<td>{low} to {high}</td>" in page
    assert "±" not in page


def test_the_file_behind_the_chart_is_the_history() -> None:
    stopping = trained("folds")
    rows = file_in(stopping.report(), "history.csv")
    records = list(stopping.history)
    assert [int(row["step"]) for row in rows] == [record.step for record in records]
    assert [float(row["estimate"]) for row in rows] == [record.estimate for record in records]
    assert all(float(row["low"]) < float(row["estimate"]) < float(row["high"]) for row in rows)
    assert [int(row["epoch"]) for row in rows] == [-(-record.step // 2) for record in records]


def test_classes_are_counted_as_they_are() -> None:
    stopping = classifier(3, nn.CrossEntropyLoss())
    page, held = stopping.report(), stopping.out_of_fold
    guesses = held.outputs.argmax(1)
    for truth in range(2):
        counts = [int(((held.targets == truth) & (guesses == g)).sum()) for g in range(3)]
        row = re.search(rf'<tr><th scope="row">{truth}</th>(.*?)</tr>', page)
        assert row is not None
        cells = re.findall(r"<td[^>]*>(.*?)</td>", row[1])
        assert [int(cell) for cell in cells[:4]] == [*counts, sum(counts)]
        assert cells[4] == f"{counts[truth] / sum(counts):.0%}"
    assert "<h2>Calibration</h2>" in page
    losses = stopping.record().row_losses
    rows = file_in(page, "out-of-fold.csv")
    assert [float(row["loss"]) for row in rows] == pytest.approx(losses.tolist())
    shares = held.outputs.softmax(1)[:, 1].tolist()
    assert [float(row["p(1)"]) for row in rows] == pytest.approx(shares)
    worst = page[page.index("Worst rows") :]
    first = re.search(r'<tr><th scope="row">(\d+)</th>', worst)
    assert first is not None
    assert int(first[1]) == int(losses.argmax())


def test_one_output_for_two_classes() -> None:
    stopping = classifier(1, nn.BCEWithLogitsLoss())
    rows = file_in(stopping.report(), "out-of-fold.csv")
    shares = stopping.out_of_fold.outputs.sigmoid().flatten().tolist()
    assert [float(row["p(1)"]) for row in rows] == pytest.approx(shares)
    assert {row["true"] for row in rows} == {"0", "1"}


def test_numbers_are_drawn_against_the_truth() -> None:
    stopping = trained("folds")
    page = stopping.report()
    assert "<h2>Predicted against true</h2>" in page
    assert page.count("<circle") == 40
    rows = file_in(page, "out-of-fold.csv")
    predicted = stopping.out_of_fold.outputs.flatten().tolist()
    assert [float(row["predicted"]) for row in rows] == pytest.approx(predicted)
    assert [float(row["true"]) for row in rows] == pytest.approx(data()[1].flatten().tolist())


def test_runs_side_by_side() -> None:
    first, second = trained("folds"), trained("folds", rate=0.001)
    page = first.report(beside={"small <rate>": second})
    difference = heldin.compare(second, first)["loss"]
    row = re.search(r'<th scope="row">small &lt;rate&gt;</th>(.*?)</tr>', page)
    assert row is not None
    assert f"<td>{second.estimates['loss']}</td>" in row[1]
    assert f"<td>{difference.interval}</td>" in row[1]
    assert f"<td>{difference.probability:.0%}</td>" in row[1]
    with pytest.raises(heldin.HeldinError, match="estimates no test loss"):
        first.report(beside={"other": trained("evidence")})
    other = trained("folds", seed=1)
    assert "different folds" in first.report(beside={"other": other})


def test_what_cannot_be_a_page_is_refused(tmp_path: Path) -> None:
    stopping = trained("validation", 2)
    with pytest.raises(heldin.HeldinError, match=r"must end in \.html"):
        stopping.report(tmp_path / "run.pdf")
    with pytest.raises(heldin.HeldinError, match="cannot be written"):
        stopping.report(tmp_path / "missing" / "run.html")


def test_single_weights_have_a_page(tmp_path: Path) -> None:
    (x, y), model = data(), nn.Linear(4, 1).double()
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = heldin.ElementwiseStopping(inner, model, smoothing=0.5)
    for _ in range(5):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    page = optimizer.report()
    share = optimizer.stopped_fraction(by="tensor")["weight"]
    assert f'<th scope="row">weight</th><td>{share:.1%}' in re.sub(r"<td [^>]*>", "<td>", page)


def test_models_and_rates_in_words() -> None:
    facts, model = RunFacts(), nn.Sequential(nn.LazyLinear(2), nn.Linear(2, 1))
    optimizer = torch.optim.Adam(model[1].parameters(), lr=0.1)
    facts.describe(model, optimizer)
    assert facts.model == "Sequential, 3 parameters, on cpu"
    model[1].bias.requires_grad_(False)
    facts.describe(model, optimizer)
    assert facts.model == "Sequential, 3 parameters, 2 of them trained, on cpu"
    for rate in (0.05, 0.01):
        optimizer.param_groups[0]["lr"] = rate
        facts.note_rates(optimizer)
    assert ("learning rate", "0.1 at first, 0.01 at last") in facts.rows()


def test_a_model_card_has_estimates_and_settings() -> None:
    stopping = trained("folds", metrics=["r2"])
    card = stopping.model_card()
    for row in (
        f"| test loss | {stopping.estimates['loss']} |",
        f"| r2 | {stopping.estimates['r2']} |",
        "| model | Linear, 5 parameters, on cpu |",
        "| learning rate | 0.05 |",
    ):
        assert f"\n{row}\n" in card
    assert "trained on all 40 rows" in card
    assert "no test loss was estimated" in trained("evidence").model_card()


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
