"""Put the results of commands into the pages that quote them.

A page says `<!-- table:cost -->` and `<!-- /table:cost -->`; what is between the two is what the
command wrote, kept in `docs/results/cost.md`. A test checks that they are the same. The table of
rules, `rules.md`, is made here: words beside the numbers of `quality.md`.

The calculator of cost.md gets the constants that `rule="auto"` chooses by.

    python docs/fill.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"
PLACE = re.compile(r"<!-- table:(?P<name>[\w-]+) -->\n(?P<text>.*?)<!-- /table:(?P=name) -->", re.S)

# What to take, what it is in quality.md, rows that are trained on, time in plain runs, and whether
# it says what test loss to expect.
CHOICES = [
    ("the default", '`rule="auto"`', "all", "2 to 6, by `budget`", "yes"),
    ("more rows, a larger model", '`rule="shadow"`', "all", "2", "yes"),
    ("no room for a second model", '`rule="leave-one-out"`', "all", "1.5 to 2", "yes"),
    ("no time to spare", '`rules.Evidence(window="epoch")`', "all", "1.05 to 1.2", "no"),
    ("today: a split and patience ¹", "20 % held out, patience", "80 %", "1.1", "of few rows"),
    ("today: a split, then a refit", "20 % held out, then again on all rows", "all", "2", "no"),
    ("today: five folds, then a refit", "", "all", "5 to 6", "yes"),
    ("today: no early stopping", "no early stopping", "all", "1", "no"),
]
NOTE = """Time is in plain runs. The numbers are the test loss at the stop, divided by the lowest on
the path of a model that saw all rows (1: could not be better): means over the runs of our study, of
tables with at most 200 and at least 500 rows, and of networks on 50 to 1,000 images or texts, from
scratch and fine-tuned. -: not in the study.

¹ `EarlyStopping` of Lightning, Keras and skorch; `early_stopping=True` of scikit-learn."""


def rules() -> str:
    """Which rule when, with cost and quality beside what people do today."""
    quality = (RESULTS / "quality.md").read_text(encoding="utf-8")
    rows = [[c.strip() for c in line.strip("| ").split("|")] for line in quality.splitlines()]
    found = {row[0]: (row[1], row[4], row[5]) for row in rows if len(row) == 6}
    head = ["", "rule", "rows trained on", "time", "n <= 200", "n >= 500", "networks"]
    lines = []
    for when, rule, trained, time, says in CHOICES:
        numbers = found[rule] if rule else ("-",) * 3
        lines.append([when, rule if rule.startswith("`") else "", trained, time, *numbers, says])
    table = [[*head, "says the test loss"], ["---"] * 4 + ["---:"] * 3 + ["---"], *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in table) + f"\n\n{NOTE}\n"


CONSTANTS = re.compile(r"(?<=\n  const costs = )\{.*\}(?=;\n)")


def constants() -> str:
    """What `rule="auto"` chooses, by engine, size, rows and room for shadows."""
    from heldin.rules import auto
    from heldin.rules.options import Auto

    edges = sorted({auto.REGRET_ROWS + 1, auto.FEW, auto.MANY})
    names = {key: name.partition(",")[0] for key, name in auto.NAMES.items()}

    def chosen(engine: str, size: int, rows: int, room: int) -> list[object]:
        case = auto._Case(rows=rows, parameters=1, bytes=4, engine=engine, size=size)
        memory = room * auto.TENSORS * case.bytes
        found = auto._choose(case, None, memory, light=engine == "replay")
        key = found.shadows, found.share
        return [names[key], found.shadows, case.cost(*key)]

    table = {
        engine: [
            [[chosen(engine, size, rows, room) for room in range(1, 6)] for rows in [1, *edges]]
            for size in range(len(auto.SIZES) + 1)
        ]
        for engine in auto.COSTS
    }
    five = {
        engine: [
            auto._Case(rows=1, parameters=1, bytes=4, engine=engine, size=size).cost(5)
            for size in range(len(auto.SIZES) + 1)
        ]
        for engine in auto.COSTS
    }
    return json.dumps(
        {"chosen": table, "five": five, "rows": edges, "sizes": auto.SIZES,
         "tensors": auto.TENSORS, "memory": Auto().memory}
    )  # fmt: skip


def pages() -> list[Path]:
    """All that may quote a result."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]


def filled(text: str) -> str:
    """The page with what the results say now."""

    def put(place: re.Match[str]) -> str:
        result = (RESULTS / f"{place['name']}.md").read_text(encoding="utf-8").strip()
        name = place["name"]
        return f"<!-- table:{name} -->\n\n{result}\n\n<!-- /table:{name} -->"

    return CONSTANTS.sub(lambda _: constants(), PLACE.sub(put, text))


def main() -> None:
    """Rewrite the pages."""
    (RESULTS / "rules.md").write_text(rules(), encoding="utf-8")
    for page in pages():
        before = page.read_text(encoding="utf-8")
        after = filled(before)
        if after != before:
            page.write_text(after, encoding="utf-8")
            print(f"filled {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
