"""Tables in README and docs are those that the commands wrote."""

from __future__ import annotations

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
