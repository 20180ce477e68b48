"""Run loops one after the other, and write the table."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from .job import Loop
from .judge import Outcome, judge

__all__ = ["FAULTS", "by_kind", "run_loops", "table"]

FAULTS = ("wrong", "changed", "crashed")
VERDICTS = ("exact", "refused", "warned", *FAULTS, "skipped")


def run_loops(
    loops: Sequence[Loop], out: Path | None, tell: Callable[[str], None]
) -> list[Outcome]:
    """Judge loops and write their outcomes as JSON.

    Args:
        loops: to be run.
        out: folder for the JSON file; None: none is written.
        tell: is told the outcome of each loop.
    """
    outcomes = []
    for number, loop in enumerate(loops, 1):
        outcome = judge(loop)
        outcomes.append(outcome)
        tell(f"[{number}/{len(loops)}] {outcome.name}: {outcome.verdict}")
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        text = json.dumps([outcome.as_dict() for outcome in outcomes], indent=1)
        (out / "loops.json").write_text(text + "\n", encoding="utf-8")
    return outcomes


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the outcomes as a table in Markdown, by kind, with a line of counts."""
    lines = ["| loop | verdict | difference | cost | remark |", "|---|---|---|---|---|"]
    kind = ""
    for outcome in sorted(outcomes, key=lambda each: each.kind):
        if outcome.kind != kind:
            kind = outcome.kind
            lines.append(f"| **{kind}** | | | | |")
        off = "" if outcome.difference is None else f"{outcome.difference:.0e}"
        cost = "" if outcome.cost is None else f"{outcome.cost:.1f}"
        mark = "" if outcome.expected else " (unexpected)"
        message = "" if outcome.verdict == "exact" else outcome.message
        shown = " ".join(message.split()).replace("|", "/")
        remark = shown[:140] + (" ..." if len(shown) > 140 else "")
        lines.append(f"| {outcome.name} | {outcome.verdict}{mark} | {off} | {cost} | {remark} |")
    counts = Counter(outcome.verdict for outcome in outcomes)
    shown = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])
    unexpected = [outcome.name for outcome in outcomes if not outcome.expected]
    lines += ["", f"{len(outcomes)} loops: {shown}."]
    if unexpected:
        lines.append(f"Unexpected: {', '.join(unexpected)}.")
    return "\n".join(lines)


def by_kind(outcomes: Sequence[Outcome]) -> str:
    """Return the counts by kind, and what the loops that are not exact do."""
    counts = Counter((outcome.kind, outcome.verdict) for outcome in outcomes)
    verdicts = VERDICTS[:-1]
    lines = [f"| loops by kind | number | {' | '.join(verdicts)} |", "|---" + "|---:" * 7 + "|"]
    for kind in [*sorted({outcome.kind for outcome in outcomes}), None]:
        row = [
            sum(n for (k, v), n in counts.items() if v == w and kind in (k, None)) for w in verdicts
        ]
        name = "**all**" if kind is None else kind
        lines.append(f"| {name} | {sum(row)} | {' | '.join(map(str, row))} |")
    for verdict in verdicts[1:]:
        rest = [outcome for outcome in outcomes if outcome.verdict == verdict]
        if rest:
            lines += ["", f"| {verdict} | what the loop does |", "|---|---|"]
            lines += [f"| {outcome.name} | {outcome.what} |" for outcome in rest]
    return "\n".join(lines)
