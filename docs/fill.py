"""Put the results of commands into the pages that quote them.

A page says `<!-- table:cost -->` and `<!-- /table:cost -->`; what is between the two is what the
command wrote, kept in `docs/results/cost.md`. A test checks that they are the same.

    python docs/fill.py
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"
PLACE = re.compile(r"<!-- table:(?P<name>[\w-]+) -->\n(?P<text>.*?)<!-- /table:(?P=name) -->", re.S)


def pages() -> list[Path]:
    """All that may quote a result."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]


def filled(text: str) -> str:
    """The page with what the results say now."""

    def put(place: re.Match[str]) -> str:
        result = (RESULTS / f"{place['name']}.md").read_text(encoding="utf-8").strip()
        name = place["name"]
        return f"<!-- table:{name} -->\n\n{result}\n\n<!-- /table:{name} -->"

    return PLACE.sub(put, text)


def main() -> None:
    """Rewrite the pages."""
    for page in pages():
        before = page.read_text(encoding="utf-8")
        after = filled(before)
        if after != before:
            page.write_text(after, encoding="utf-8")
            print(f"filled {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
