"""Tables in README and docs are those that the commands wrote."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from heldin.state.estimates import COVERAGE

FILL = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "fill.py"))


@pytest.mark.parametrize("page", FILL["pages"](), ids=lambda page: page.name)
def test_tables_are_what_the_commands_wrote(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert FILL["filled"](text) == text, "run docs/fill.py"
    assert text.count("<!-- table:") == len(FILL["PLACE"].findall(text)), "a table is not closed"


def test_fill_puts_the_result_between_the_marks() -> None:
    page = "a\n<!-- table:coverage -->\nold\n<!-- /table:coverage -->\nb\n"
    result = (FILL["RESULTS"] / "coverage.md").read_text(encoding="utf-8").strip()
    assert result in FILL["filled"](page)
    assert "old" not in FILL["filled"](page)
    assert FILL["filled"](page).endswith("\nb\n")


def test_the_table_of_rules_has_the_numbers_of_the_study() -> None:
    assert (FILL["RESULTS"] / "rules.md").read_text(encoding="utf-8") == FILL["rules"]()


def test_the_promises_have_the_numbers_of_the_study() -> None:
    """The README's sentences quote the tables; a new study changes both."""
    text = (FILL["ROOT"] / "README.md").read_text(encoding="utf-8")
    quality = (FILL["RESULTS"] / "quality.md").read_text(encoding="utf-8")
    rows = {r[1].strip(): r for r in (li.split("|") for li in quality.splitlines()) if len(r) > 5}
    auto, split = rows['`heldin.stopping("auto", ...)`'], rows["20 % held out, patience"]
    assert f"ends {(float(auto[2]) - 1) * 100:.1f} % above" in text
    assert f"held out, {(float(split[2]) - 1) * 100:.1f} %" in text
    assert f"in {auto[4].strip().replace('%', ' %')} of the runs" in text
    nets = [f"{(float(row[6]) - 1) * 100:.1f} %" for row in (auto, split)]
    assert f"runs): {nets[0]} above; with 20 % held out, {nets[1]}." in text
    for width, word in ((2, "two"), (3, "three")):
        share = f"{COVERAGE['folds'][width]:.0%}".replace("%", " %")
        assert re.search(rf"{word}( standard errors of the estimate)?\s+in {share}", text), share
    observed = (FILL["RESULTS"] / "coverage.md").read_text(encoding="utf-8")
    of = re.search(r"of (\d+) models.*?heldin \| (\d+) \|", observed, re.S)
    assert of is not None
    assert f"of {of[1]} kinds of models it observes {of[2]}" in text
