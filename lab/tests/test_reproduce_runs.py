"""The paper's experiments in tiny settings: their runs, and the report."""

from __future__ import annotations

import json
import re
import shutil
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

import heldin
from heldin import HeldinError
from heldin_lab.cli import reproduce as _commands
from heldin_lab.cli.main import main
from heldin_lab.reproduce import EXPERIMENTS, reproduce
from heldin_lab.reproduce import tables as _tables
from heldin_lab.reproduce import training as training
from heldin_lab.reproduce.report import write_docs
from heldin_lab.reproduce.run import Run
from small_data import TINY, data, settings_of
from tests.support import runs

for package in ("joblib", "matplotlib", "pandas", "sklearn", "rich"):
    pytest.importorskip(package)

__all__ = ["data"]
NAMES = list(EXPERIMENTS)


# --- runs ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """All experiments in tiny settings: the data folder, the report's and what came."""
    with pytest.MonkeyPatch.context() as patch:
        folder = data.__wrapped__(tmp_path_factory.mktemp("tiny"), patch)  # type: ignore[attr-defined]
        out = folder.parent / "report"
        heard: list[Any] = []
        found = reproduce(
            out=out, data=folder, changes=TINY, device="cpu", jobs=1, watch=heard.append
        )
        yield folder, out, found, heard


def test_all_experiments_run(everything: Any) -> None:
    _, out, found, heard = everything
    assert [o.experiment.name for o in found.outcomes] == NAMES
    assert not found.missing
    for outcome in found.outcomes:
        e = outcome.experiment
        for kind, start in (("png", b"\x89PNG"), ("svg", b"<?xml")):
            assert (out / "figures" / f"{e.name}.{kind}").read_bytes().startswith(start)
        assert len(outcome.verdicts) == len(e.claims(outcome.settings)) > 0
        for verdict in outcome.verdicts:
            assert set(verdict.values) == set(range(outcome.settings.seeds))
    assert not list((out / "checkpoints").iterdir())
    totals = {name: total for name, (_, total) in heard[-1].items()}
    assert totals == {name: done for name, (done, _) in heard[-1].items()}
    assert totals["wdbc"] == 2 * 2 * 60
    assert found.command == "heldin-lab reproduce all --preset quick"


def test_tables_are_tidy(everything: Any) -> None:
    import pandas

    _, out, found, _ = everything
    paths = sorted((out / "runs").glob("*.csv"))
    runs = sum(len(o.experiment.parts(o.settings)) * o.settings.seeds for o in found.outcomes)
    assert len(paths) == runs
    whole = pandas.concat(map(_tables.read, paths))
    assert (whole.groupby(["experiment", "part", "seed"]).step.apply(lambda s: s.is_unique)).all()
    for column in (
        "preset",
        "seconds",
        "cpu_seconds",
        "device",
        "heldin",
        "torch",
        "python",
        "settings",
    ):
        assert whole[column].notna().all()
    assert (whole.torch == torch.__version__).all()
    settings = json.loads(whole[whole.experiment == "sector"].settings.iloc[0])
    assert settings["features"] == 30
    assert settings["rates"] == [1.0, 0.1]


def test_rows_are_at_the_stops(everything: Any) -> None:
    """Whatever the interval of records, there is a row where a rule stops, with a test loss."""
    _, _, found, _ = everything
    stops = 0
    for outcome in found.outcomes:
        for tables in outcome.results.values():
            for part, table in tables.items():
                if "stop" not in table:
                    continue
                assert table.stop.sum() <= 1
                stops += int(table.stop.sum())
                if "criterion" in table and table.stop.any():
                    assert table.criterion[table.stop == 1].iloc[0] > 0, part
                if "validation_loss" in table and outcome.experiment.name != "toy":
                    at = table.validation_loss[table.stop == 1].iloc[0]
                    assert at == table.validation_loss.min()
    assert stops > 10


def test_evidence_trains_on_all_images(data: Path) -> None:
    from heldin_lab.reproduce.experiments import mnist as _mnist

    run = Run(0, settings_of("mnist-sgd"), data=data)
    kept, whole = (_mnist.digits(run, held_out=held) for held in (True, False))
    assert (kept.rows, whole.rows) == (64, 88)
    first, second = kept.train(torch.arange(64))[0], whole.train(torch.arange(88))[0]
    assert torch.equal(first, second[:64])
    assert torch.equal(kept.validation(torch.arange(24))[0], second[64:])
    tests = kept.test(torch.arange(40))[0]
    distances = torch.cdist(tests, second)
    assert distances.min() > 0  # no image is in both


def test_full_batch_is_accumulated(data: Path) -> None:
    """Pieces of any size give the same run."""
    from heldin_lab.reproduce.experiments import mnist as _mnist

    found = []
    for piece in (7, 1000):
        run = Run(0, replace(settings_of("mnist-gd"), piece=piece, steps=8), data=data)
        _mnist.train(run, rate=0.1, method="evidence")
        found.append([row["raw"] for row in run.rows])
    assert found[0] == pytest.approx(found[1], rel=1e-3)


def test_sector_scaling(data: Path) -> None:
    from heldin_lab.reproduce.experiments import sector

    run = Run(0, settings_of("sector"), data=data)
    for held_out, rows in ((True, 48), (False, 60)):
        found = sector.split(run, held_out=held_out)
        x, y = found.train(torch.arange(found.rows))
        assert x.shape == (rows, 30)
        assert x[x != 0].square().mean() == pytest.approx(1.0)
        assert y.shape == (rows,)
    run.settings = replace(run.settings, training=61)
    with pytest.raises(HeldinError, match="61 training and 30 test rows are asked for"):
        sector.split(run, held_out=True)


# --- the report ------------------------------------------------------------------------------


class Page(HTMLParser):
    """Open tags, links and words of a page."""

    VOID = ("meta", "link", "img", "br", "!doctype")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.words: list[str] = []
        self.images = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        self.images += tag == "img"
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, text: str) -> None:
        self.words.append(text)


def test_report_is_one_file(everything: Any) -> None:
    _, out, found, _ = everything
    text = (out / "report.html").read_text()
    page = Page(text)
    assert page.open == []
    assert page.images == len(NAMES)
    assert all(link.startswith(("data:", "#")) for link in page.links)
    assert "url(" not in text
    assert "<script" not in text
    words = " ".join(page.words)
    for outcome in found.outcomes:
        for verdict in outcome.verdicts:
            assert verdict.claim.text in words
            assert verdict.ours in words
        for choice in outcome.experiment.choices:
            assert choice in words
    confirmed = sum(v.confirmed for o in found.outcomes for v in o.verdicts)
    claims = sum(len(o.verdicts) for o in found.outcomes)
    assert f"{confirmed} of {claims} claims confirmed" in words
    assert "a part of SECTOR" in words


@pytest.fixture(scope="module")
def browser() -> Any:
    """Debian's Chromium, or another one that is on the path."""
    api = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: make setup"
    )
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(names)} is on the path")
    with api.sync_playwright() as play:
        yield (opened := play.chromium.launch(executable_path=found))
        opened.close()


@pytest.mark.parametrize("width", [360, 1280], ids=["phone", "desk"])
def test_report_in_a_browser(everything: Any, browser: Any, width: int) -> None:
    _, out, found, _ = everything
    page = browser.new_page(viewport={"width": width, "height": 800})
    asked: list[str] = []
    said: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto((out / "report.html").as_uri())
    assert all(url.startswith(("file:", "data:")) for url in asked)
    assert said == []
    loaded = page.eval_on_selector_all("img", "all => all.map(i => i.complete && i.naturalWidth)")
    assert len(loaded) == len(NAMES)
    assert min(loaded) > 400
    # nothing makes the page wider than the screen; what is wide scrolls in its own box
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    small = page.eval_on_selector_all(
        "p, td, li", "all => Math.min(...all.map(e => parseFloat(getComputedStyle(e).fontSize)))"
    )
    assert small >= 12
    verdicts = page.locator(".claims td:last-child")
    words = [verdict.confirmed for outcome in found.outcomes for verdict in outcome.verdicts]
    assert verdicts.count() == len(words)
    for place, confirmed in enumerate(words):
        told = verdicts.nth(place).inner_text()
        assert told.startswith("confirmed" if confirmed else "not confirmed")
    boxes = page.eval_on_selector_all(
        ".claims td", "all => all.map(e => e.getBoundingClientRect().right)"
    )
    assert max(boxes) <= width
    head = page.locator(".claims thead").first
    assert head.is_visible() == (width > 700)  # on a phone each cell has its label instead
    page.click(f"nav a[href='#{NAMES[-1]}']")
    assert page.locator(f"#{NAMES[-1]} h2").is_visible()
    page.locator("summary").last.click()
    assert page.locator("details code", has_text="rms_rate").is_visible()
    page.close()


def test_docs(everything: Any, tmp_path: Path) -> None:
    """A page of documentation, with all figures, small enough for a repository."""
    _, _, found, _ = everything
    write_docs(tmp_path / "page.md", found)
    text = (tmp_path / "page.md").read_text()
    assert f"Made by `{found.command}`" in text
    shown = re.findall(r"!\[.*?\]\((.*?)\)", text)
    assert shown == [f"figures/page/{name}.png" for name in NAMES]
    assert all(1000 < (tmp_path / name).stat().st_size < 150_000 for name in shown)
    for line in text.splitlines():
        if line.startswith("|"):
            assert len(re.findall(r"(?<!\\)\|", line)) in (5, 6)  # four or five columns
    assert ">>>" not in text


def test_claims_table(everything: Any) -> None:
    import csv

    _, out, found, _ = everything
    with open(out / "claims.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    verdicts = [v for o in found.outcomes for v in o.verdicts]
    assert [row["claim"] for row in rows] == [v.claim.text for v in verdicts]
    assert [row["confirmed"] for row in rows] == [str(v.confirmed) for v in verdicts]
    markdown = (out / "report.md").read_text()
    assert all(v.claim.text in markdown for v in verdicts)


def test_figures_have_the_papers_layout(everything: Any) -> None:
    _, _, found, _ = everything
    outcomes = {o.experiment.name: o for o in found.outcomes}

    def axes(name: str, *others: Any) -> list[Any]:
        outcome = outcomes[name]
        figure = outcome.experiment.figure(outcome.results, outcome.settings, *others)
        return list(figure.get_axes())

    def grid(name: str, *others: Any) -> tuple[int, int]:
        spec = axes(name, *others)[0].get_subplotspec().get_gridspec()
        return spec.nrows, spec.ncols

    beside = outcomes["mnist-gd"].results, outcomes["mnist-gd"].settings
    assert grid("sketch") == (1, 3)
    assert grid("quadratic") == grid("counterexample") == (3, 3)
    assert grid("sketch2d") == (1, 1)
    assert grid("wdbc") == grid("mnist-gd") == (3, 1)
    assert grid("mnist-sgd") == (3, 2)  # two rates here
    assert grid("mnist-sgd", *beside) == (3, 3)
    assert grid("sector") == (3, 4)
    assert grid("greedy") == (2, 2)
    assert grid("rmsprop") == (7, 1)
    assert len(axes("toy")) == 5
    top = axes("toy")[0]
    assert len(top.collections) == 3  # the bands
    assert top.get_yscale() == "log"
    bottom = axes("greedy")[2]
    tensors = 2 * 2  # weights and biases of two layers
    assert len(bottom.get_lines()) == tensors + 2  # and the whole net, and the end of the warm-up


@pytest.mark.parametrize("name", NAMES)
def test_experiments_use_the_public_api(name: str) -> None:
    source = Path(sys.modules[EXPERIMENTS[name].run.__module__].__file__ or "").read_text()
    imported = re.findall(r"^\s*(?:from|import) heldin([\w.]*)", source, re.M)
    assert not [module for module in imported if module.startswith("._")]
    names = re.findall(r"^from heldin import (.*)$", source, re.M)
    assert all(hasattr(heldin, word.strip()) for line in names for word in line.split(","))


def test_an_interruption_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(_commands, "run", interrupted)
    assert main(["reproduce", "toy", "--out", str(tmp_path)]) == 130
    assert "with --resume goes on" in capsys.readouterr().err


def test_stops_are_public_rules_stops(data: Path) -> None:
    """A run's stop is the one that heldin's rule gives when training really ends there."""
    from heldin_lab.reproduce.experiments import mnist as _mnist

    s = replace(settings_of("mnist-sgd"), steps=24, smoothing=0.5)
    run = Run(1, s, data=data)
    _mnist.train(run, rate=0.1, method="evidence")
    marked = [row["step"] for row in run.rows if row["stop"]]
    digits, model = _mnist.digits(run, held_out=False), _mnist.net(run)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    with runs.EvidenceStopping.paper(model, smoothing=0.5) as rule:
        for step in range(1, 25):
            x, y = digits.train(training.batch(step, digits.rows, s.batch, 1))
            torch.nn.functional.cross_entropy(model(x), y).backward()
            if rule.step():
                found = [step]
                break
            optimizer.step()
            optimizer.zero_grad()
    assert marked == found
