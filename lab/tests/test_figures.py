"""The scripts behind the figures, tables and tutorials of the documentation run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from heldin.state.estimates import COVERAGE, INTERVAL_COVERAGE
from heldin_lab.figures import (
    DOCS,
    IMAGES,
    ROOT,
    batch_flow,
    how,
    how_good,
    tutorials,
    when_to_trust,
    which_rule,
)
from heldin_lab.study.data import Problem
from heldin_lab.study.tables import coverage, read

WHICH = DOCS / "which-rule.md"
# Settings with which the tutorials take seconds; `heldin_lab.figures.tutorials` runs them in full.
SMALL = {
    "small-data": {"SPLITS, STEPS = 5, 3000": "SPLITS, STEPS = 1, 60"},
    "text": {"STEPS, SEEDS = 400, 3": "STEPS, SEEDS = 6, 1", "texts(2000": "texts(100"},
    "label-noise": {"STEPS = 3000": "STEPS = 25"},
    "single-weights": {"EPOCHS = 100": "EPOCHS = 3"},
}


@pytest.mark.parametrize("name", ["path", "tiny"])
def test_when_to_trust(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    when_to_trust.main([name, "--out", str(tmp_path)])
    assert (tmp_path / f"when-to-trust-{name}.png").stat().st_size > 5000
    printed = capsys.readouterr().out
    text = (DOCS / "when-to-trust.md").read_text()
    quoted = {"path": ["2.03", "2.01", "7.67"], "tiny": ["-0.012", "-0.152", "-0.681"]}[name]
    assert all(number in printed and number in text for number in quoted)


def test_every_figure_is_in_the_text() -> None:
    text = (DOCS / "when-to-trust.md").read_text()
    for image in IMAGES.glob("when-to-trust-*.png"):
        assert f"figures/{image.name}" in text


def test_the_page_on_rules_has_the_numbers_of_the_study() -> None:
    text = WHICH.read_text(encoding="utf-8")
    assert which_rule.filled(text) == text
    assert all(f"<!-- begin {name} -->\n" in text for name in which_rule.BLOCKS)
    result = WHICH.parent / "results" / "quality.md"
    assert result.read_text(encoding="utf-8") == which_rule.quality()
    for image in IMAGES.glob("which-rule-*.png"):
        assert f"figures/{image.name}" in text


def test_the_band_states_the_coverage_that_the_study_found() -> None:
    study = WHICH.parent / "study"
    rows = read(study / "errors.csv")
    found = {rule: coverage([r for r in rows if r["rule"] == rule]) for rule in ("folds", "shadow")}
    before = {row["rule"]: row for row in read(study / "small-coverage.csv")}
    found["leave-one-out"] = before["leave-one-out bagged patience"]  # with a plain standard error
    for rule, shares in COVERAGE.items():
        for width, share in shares.items():
            assert share == round(found[rule][f"within_{width}"], 2)


def test_the_page_how_good_has_the_numbers_of_its_runs() -> None:
    named = ""
    for page in how_good.PAGES:
        text = page.read_text(encoding="utf-8")
        assert how_good.filled(text) == text
        named += text
    assert all(f"<!-- begin {name} -->\n" in named for name in how_good.BLOCKS)
    for name in how_good.FIGURES:
        assert f"figures/how-good-{name}.png" in named
        for variant in ("", "-dark", "-narrow", "-narrow-dark"):
            assert (IMAGES / f"how-good-{name}{variant}.png").stat().st_size > 5000
    words = how_good.PAGES[0].read_text(encoding="utf-8").split()
    assert sum(any(c.isalnum() for c in word) for word in words) <= 1000  # tables included


def test_the_picture_of_the_readme_has_the_numbers_of_its_runs() -> None:
    for page in (DOCS / "index.md", DOCS.parent / "README.md"):
        assert how_good.overview_words() in " ".join(page.read_text(encoding="utf-8").split())


def test_the_interval_states_the_coverage_of_the_study() -> None:
    assert how_good.quoted_coverage() == INTERVAL_COVERAGE


def test_renewed_runs_replace_the_old_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [{"spec": {"n": n}, "rules": {}} for n in (1, 2)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "texts-renewed.jsonl").write_text(json.dumps({"spec": {"n": 2}, "rules": 7}) + "\n")
    study = tmp_path / "study"
    study.mkdir()
    monkeypatch.setattr(how_good, "STUDY", study)
    how_good.gather(tmp_path)
    assert [path.name for path in study.iterdir()] == ["rivals-texts.jsonl"]
    found = [line["rules"] for line in how_good.read_lines(study / "rivals-texts.jsonl")]
    assert found == [{}, 7]


def test_what_was_missed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(n: int, ours: float) -> dict[str, object]:
        rules = {
            "best on the path": [1.0, 1, 1, 1, 50, 5.0],
            "no stopping": [1.0, 1, 1, 1, 100, 10.0],
            "heldin": [ours, 1, 1, 1, 100, 15.0],
            "heldin, without temperature": [1.2, 1, 1, 1, 100, 15.0],
        }
        return {"spec": {"dataset": "mnist", "n": n}, "classes": 2, "rules": rules}

    monkeypatch.setattr(how_good, "runs", lambda _: [run(50, 1.02), run(500, 1.04)])
    few, none, networks, _ = how_good.quality_table().splitlines()[2:]
    assert "| 1.200 / 1.200, 1.50 runs: **missed** (mean, p90) |" in few
    assert few.endswith("| 1.020 / 1.020, 1.50 runs: reached |")
    assert none.endswith("| 0 | 1.02 / 1.06 | not run | not run |")
    assert "| 2 | 1.03 / 1.1, 2 runs |" in networks
    assert networks.endswith("| 1.030 / 1.038, 1.50 runs: reached |")


def test_differences_are_paired_and_datasets_are_drawn() -> None:
    def run(dataset: str, ours: float, split: float) -> dict[str, object]:
        def values(loss: float) -> list[float]:
            return [loss, 1 - loss, 0.5, 0.1, 10, 1.0]

        rules = {"best on the path": values(0.1), "heldin": values(ours), "split": values(split)}
        return {"spec": {"dataset": dataset}, "classes": 2, "rules": rules}

    lines = [run(name, 0.2, 0.4) for name in "abcdef"] + [run("a", 0.3, 0.3)]
    gap = how_good.compared(lines, "heldin", "accuracy")
    assert gap.middle == pytest.approx(100 * 0.2 * 6 / 7)
    assert gap.low < gap.middle <= gap.high <= 20 + 1e-9
    assert how_good.wins(lines, "heldin") == pytest.approx(6.5 / 7)
    assert how_good.ratio(lines[:6], "heldin", "split").middle == pytest.approx(0.5)
    assert how_good.excess(lines[:6], "split").middle == pytest.approx(300)


def test_an_interval_allows_for_the_error_of_the_measurement() -> None:
    assert how_good.is_inside([0.5, 0.4, 0.7, 0.69, 0.0, 0.1])
    assert not how_good.is_inside([0.5, 0.4, 0.7, 0.39, 0.0, 0.1])
    assert how_good.is_inside([0.5, 0.4, 0.7, 0.39, 0.1, 0.1])


def test_the_outlier_is_a_row_that_is_trained_on(tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((150, 3))
    np.savez(tmp_path / "t.npz", X=x, y=x[:, 0], task="reg")
    table = which_rule.WithOutlier("t", 150, tmp_path / "t.npz", seed=7)
    problem = Problem.cut(table, 40, 0.0, 1, 7)
    assert float(problem.y.max()) > 5  # of standard deviations that it is part of
    assert float(problem.y_test.abs().max()) < 3


# So few steps may teach a model nothing, and the library says so.
@pytest.mark.filterwarnings("ignore:.*never fell below:heldin.HeldinWarning")
@pytest.mark.filterwarnings("ignore:.*validation loss was never computed:heldin.HeldinWarning")
@pytest.mark.parametrize("name", sorted(SMALL))
def test_tutorials_run(name: str, tmp_path: Path) -> None:
    if name == "text":
        pytest.importorskip("transformers")
    printed = tutorials.play(name, tmp_path, SMALL[name])
    figure = tmp_path / f"tutorial-{name}.png"
    assert figure.stat().st_size > 5000
    said = tutorials.said(name)
    assert len(printed) == len(said)
    for now, then in zip(printed, said, strict=True):  # the same words, with other numbers
        assert re.sub(r"[\d.]+", "", now).split()[:2] == re.sub(r"[\d.]+", "", then).split()[:2]
    assert (IMAGES / figure.name).exists()


def test_every_tutorial_is_tested() -> None:
    pages = {page.stem for page in (DOCS / "tutorials").glob("*.md")} - {"index"}
    assert pages == set(SMALL)


@pytest.mark.parametrize(
    ("name", "page", "numbers"),
    [
        ("sketch", "how/evidence.md", ["1.13", "1.00"]),
        ("toy", "how/evidence.md", ["step 21"]),
        ("smoothing", "guides/smoothing.md", ["step 9", "step 42", "step 93"]),
        ("leave-one-out", "how/leave-one-out.md", ["60", "6.37", "5.65", "24", "5.0 %"]),
    ],
)
def test_figures_and_their_numbers(
    name: str, page: str, numbers: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    how.main([name, "--out", str(tmp_path)])
    assert (tmp_path / f"how-{name}.png").stat().st_size > 5000
    printed, text = capsys.readouterr().out, (DOCS / page).read_text()
    for number in numbers:
        assert number in printed, number
        assert number in text, number


def test_pictures_of_code_name_files_that_exist() -> None:
    """The picture in CONTRIBUTING and the list below it speak of modules; so must the source."""
    sources = [*(ROOT / "src").rglob("*.py"), *(ROOT / "lab").rglob("*.py")]
    files = "".join(f"{path.relative_to(ROOT)}\n" for path in sources)
    picture = (IMAGES / "batch-flow.svg").read_text()
    assert picture == batch_flow.picture()
    for text in (picture, (ROOT / "CONTRIBUTING.md").read_text()):
        named = set(re.findall(r"(?<![\w/])([\w/]+\.py)\b", text))
        assert len(named) > 10
        for name in named:
            assert (ROOT / name).exists() or f"/{name}\n" in files, name
