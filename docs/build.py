"""Build the site: zensical, then what it does not do itself.

    python docs/build.py

- Pages as Markdown, for programs that read (llms.txt): the source with the parts that other files
  give. Blocks of code keep their language, and links lead to Markdown. API pages stay as zensical
  made them.
- Records (tables of studies) are not searched: their numbers hide the pages for users.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORDS = (
    "benchmarks", "distributed-evidence", "guarantees", "how-good-tables", "reproduction",
    "reproduction-quick", "tables-benchmark", "which-rule",
)  # fmt: skip
OFFLINE = "var __index = "  # before the index in search.js, read where there is no server
DROPPED = re.compile(
    r"\A---\n.*?\n---\n+"  # front matter
    r"|<(form|script)\b.*?</\1>\n?|</?div[^>]*>\n?"
    r"|<!-- (begin|end|/?table)\b.*?-->\n?"  # marks of generated parts
    r"|\{ \.[^}]*\}"  # classes of buttons
    r"|(?<=```python) illustration",
    re.S,
)


def plain(page: Path) -> str:
    """Return a page as Markdown that needs no program to be read."""
    sys.path.insert(0, str(ROOT))
    from docs.site_markdown import expanded

    text = "\n".join(expanded(page.read_text(encoding="utf-8").splitlines()))
    return DROPPED.sub("", text).strip() + "\n"


def finish(docs: Path, site: Path) -> None:
    """Rewrite the Markdown and the search index of a site."""
    for page in docs.rglob("*.md"):
        target = site / page.relative_to(docs)
        if target.exists() and "\n::: " not in page.read_text(encoding="utf-8"):
            target.write_text(plain(page), encoding="utf-8")
    index = json.loads((site / "search.json").read_text(encoding="utf-8"))
    pages = {f"{name}.html" for name in RECORDS}
    index["items"] = [
        item for item in index["items"] if item["location"].partition("#")[0] not in pages
    ]
    text = json.dumps(index, ensure_ascii=False)
    (site / "search.json").write_text(text, encoding="utf-8")
    offline = site / "search.js"
    if offline.exists():
        before = offline.read_text(encoding="utf-8")
        assert before.startswith(OFFLINE)
        offline.write_text(OFFLINE + text, encoding="utf-8")


def main() -> int:
    """Build in the working directory."""
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    status = subprocess.run(command, check=False).returncode
    if not status:
        finish(Path("docs"), Path("site"))
    return status


if __name__ == "__main__":
    sys.exit(main())
