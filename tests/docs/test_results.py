"""Tables in README and docs are those that the commands wrote."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest

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


def test_the_readme_has_the_numbers_of_the_study() -> None:
    """Its figure, table and sentences quote docs/how-good.md; a new study changes both."""
    study = (FILL["ROOT"] / "docs" / "how-good.md").read_text(encoding="utf-8")
    rows = [[cell.strip(" *") for cell in line.split("|")] for line in study.splitlines()]
    loss, accuracy, steps, time, network_loss, network_time = (
        {row[1]: row[column].split(" ")[0] for row in rows if len(row) == 11}
        for column in (2, 3, 4, 5, 6, 9)
    )
    names = ("split", "five folds, refit", "heldin")
    first, folds, ours = ([each[n] for each in (loss, accuracy, time, network_time)] for n in names)
    text = (FILL["ROOT"] / "README.md").read_text(encoding="utf-8")
    assert f"| {first[0]} % | {folds[0]} % | **{ours[0]} %** |" in text
    assert f"| {first[1]} | {folds[1]} | **{ours[1]}** |" in text
    assert f"| {first[2]} | {folds[2]} | {ours[2]} (`fit`) |" in text
    assert f"| {first[3]} | {folds[3]} | {ours[3]}: you set" in text
    larger = [network_loss[name] for name in names]
    words = " ".join(text.split())
    assert (
        f"test loss above the lowest: split {larger[0]} %, five folds and refit {larger[1]} %, "
        f"heldin {larger[2]} %."
    ) in words
    share = float(steps["heldin"]) / 5  # of a run: a model and five shadows on 0.8 of the rows
    assert f"| {first[2]} | {folds[2]} | {2 * share:.1f} to {4 * share:.1f} |" in text
    assert f"{loss['evidence']} % above the lowest loss and {accuracy['evidence']} points" in text


def test_the_page_on_groups_quotes_the_gallery() -> None:
    printed = (FILL["RESULTS"] / "gallery" / "patients.txt").read_text(encoding="utf-8")
    rows, patients = (
        re.findall(r"estimate ([\d.]+) .* new patients ([\d.]+)", line)[0]
        for line in printed.splitlines()
    )
    page = (FILL["ROOT"] / "docs" / "groups-time-imbalance.md").read_text(encoding="utf-8")
    assert (
        f"folds of rows promise a loss of {rows[0]}, and new patients have {rows[1]}; folds of "
        f"patients promise {patients[0]}, and new patients have {patients[1]}."
    ) in " ".join(page.split())


def test_the_page_on_cost_agrees_with_what_auto_reckons_with() -> None:
    page = (FILL["ROOT"] / "docs" / "cost.md").read_text(encoding="utf-8")
    found = re.search(r"  const costs = (\{.*\});\n", page)
    assert found is not None
    costs = json.loads(found[1])
    small, large = (costs["chosen"]["replay"][size][0][-1] for size in (0, -1))
    assert small[0] == "one shadow"
    assert f"| any model, one shadow | 1.6 to {small[2]} |" in page
    assert large[0] == "three light shadows"
    assert f"| large model, three light shadows | 1.8 to {large[2]:.1f} |" in page
    assert f"| any model, five shadows | 5 to {costs['five']['replay'][0]} |" in page
