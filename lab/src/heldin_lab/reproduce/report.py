"""The report: figures, claims and settings as one HTML file, as Markdown, and as tables."""

from __future__ import annotations

import base64
import csv
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from heldin_lab.pages import markdown_table, render

from .experiment import CLOSE, NEAR, SHARE, SLIGHT, Verdict
from .outcomes import Outcome, Reproduction
from .tables import versions

__all__ = ["HEAD", "cells", "claim_rows", "write_docs", "write_report"]

DPI = 150  # good enough to print
DOCS_DPI = 90  # small enough for a repository
OVERVIEW = ("experiment", "claims confirmed", "runs", "CPU time")
HEAD = ("claim", "paper", "ours: median (range)", "holds if", "verdict")
TITLE = "Early stopping without a validation set: a reproduction"
WORDS = (
    "A claim is confirmed if it holds with more than half of the seeds. The paper's words are "
    f'read the same way everywhere: "acceptable", "near" and "comparable" are at most {SLIGHT:.2f} '
    f'times as much, which the paper calls "slightly worse" elsewhere, with {NEAR:.2f} beside it; '
    f'"as good as" and "almost identical" at most {CLOSE - 1:.0%}, shares of weights within '
    f"{SHARE:.0%} of all weights. A rule that does not stop confirms nothing about its stop."
)


def write_report(folder: Path, found: Reproduction) -> None:
    """Draw the figures and write report.html, report.md and claims.csv."""
    sizes = {}
    for outcome in found.outcomes:
        figure = _figure(outcome, found.outcomes)
        name = outcome.experiment.name
        figure.savefig(folder / "figures" / f"{name}.png", dpi=DPI)
        figure.savefig(folder / "figures" / f"{name}.svg")
        sizes[name] = float(figure.get_figwidth())
    with open(folder / "claims.csv", "w", newline="", encoding="utf-8") as file:
        rows = list(claim_rows(found.outcomes))
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    (folder / "report.md").write_text(_markdown(found, "figures"), encoding="utf-8")
    sections = [
        {
            **_section(outcome, found.preset),
            "wide": sizes[outcome.experiment.name] > 5.5,
            "image": _encoded(folder / "figures" / f"{outcome.experiment.name}.png"),
        }
        for outcome in found.outcomes
    ]
    page = render("reproduction.html", **_facts(found), sections=sections)
    found.report.write_text(page, encoding="utf-8")


def write_docs(path: Path, found: Reproduction) -> None:
    """Write the report as a page of documentation, with small figures."""
    figures = path.parent / "figures" / path.stem
    figures.mkdir(parents=True, exist_ok=True)
    for outcome in found.outcomes:
        figure = _figure(outcome, found.outcomes)
        figure.savefig(
            figures / f"{outcome.experiment.name}.png",
            dpi=DOCS_DPI,
            metadata={"Software": None},  # the same figure gives the same file
        )
    path.write_text(_markdown(found, f"figures/{path.stem}"), encoding="utf-8")


def _figure(outcome: Outcome, others: Sequence[Outcome]) -> Any:
    arguments = [outcome.results, outcome.settings]
    for other in others:
        if other.experiment.name == outcome.experiment.beside:
            arguments += [other.results, other.settings]
    return outcome.experiment.figure(*arguments)


def claim_rows(outcomes: Sequence[Outcome]) -> Iterable[dict[str, Any]]:
    """The claims as rows of a table."""
    for outcome in outcomes:
        for verdict in outcome.verdicts:
            known = [v for v in verdict.values.values() if not math.isnan(v)]
            yield {
                "experiment": outcome.experiment.name,
                "claim": verdict.claim.text,
                "paper": verdict.claim.paper,
                "median": statistics.median(known) if known else math.nan,
                "least": min(known, default=math.nan),
                "most": max(known, default=math.nan),
                "holds_if": verdict.claim.condition,
                "seeds": len(verdict.values),
                "held": verdict.held,
                "confirmed": verdict.confirmed,
            }


# --- what all forms say ----------------------------------------------------------------------


def _verdict(verdict: Verdict) -> str:
    seeds = len(verdict.values)
    word = "confirmed" if verdict.confirmed else "not confirmed"
    if seeds > 1:
        word += f" ({verdict.held} of {seeds})"
    claim = verdict.claim
    if claim.beside is not None:
        word += f"; {verdict.held_beside} of {seeds} within {claim.beside:{claim.form}}"
    return word


def cells(verdict: Verdict) -> tuple[str, ...]:
    """A row of the claims table, see `HEAD`."""
    claim = verdict.claim
    return claim.text, claim.paper, verdict.ours, claim.condition, _verdict(verdict)


def _summary(found: Reproduction) -> str:
    verdicts = [verdict for outcome in found.outcomes for verdict in outcome.verdicts]
    confirmed = sum(verdict.confirmed for verdict in verdicts)
    spent = _time(sum(outcome.seconds for outcome in found.outcomes))
    finished = max(outcome.finished for outcome in found.outcomes)
    about = ", ".join(f"{name} {number}" for name, number in versions().items())
    return (
        f"Preset {found.preset}: {confirmed} of {len(verdicts)} claims confirmed. "
        f"{spent} of CPU time on {found.device}, finished on {finished} ({about})."
    )


def _time(seconds: float) -> str:
    """A duration in words.

    >>> _time(9), _time(90), _time(5400)
    ('9 seconds', '1.5 minutes', '1.5 hours')
    """
    for name, size in (("hours", 3600), ("minutes", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {name}"
    return f"{seconds:.0f} seconds"


def _overview(found: Reproduction) -> Iterable[tuple[str, ...]]:
    """A row for each experiment, see `OVERVIEW`."""
    for outcome in found.outcomes:
        verdicts = outcome.verdicts
        yield (
            outcome.experiment.name,
            f"{sum(verdict.confirmed for verdict in verdicts)} of {len(verdicts)}",
            str(sum(map(len, outcome.results.values()))),
            _time(outcome.seconds),
        )


def _settings(outcome: Outcome) -> dict[str, str]:
    return {
        name: ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
        for name, value in asdict(outcome.settings).items()
    }


def _caption(outcome: Outcome) -> str:
    seeds = len(outcome.results)
    return outcome.experiment.caption + (f" Seed 0 of {seeds}." if seeds > 1 else "")


def _facts(found: Reproduction) -> dict[str, Any]:
    """What the report says about all experiments together."""
    return {
        "title": TITLE,
        "summary": _summary(found),
        "words": WORDS,
        "command": found.command,
        "missing": found.missing,
        "overview_head": OVERVIEW,
        "overview": list(_overview(found)),
        "claims_head": HEAD,
    }


def _section(outcome: Outcome, preset: str) -> dict[str, Any]:
    """What it says about one of them."""
    e = outcome.experiment
    return {
        "name": e.name,
        "title": e.title,
        "place": e.place,
        "caption": _caption(outcome),
        "claims": [(cells(verdict), verdict.confirmed) for verdict in outcome.verdicts],
        "choices": e.choices,
        "differs": e.differs.get(preset, "Nothing: these are the paper's sizes."),
        "origin": outcome.origin,
        "settings": _settings(outcome),
    }


def _markdown(found: Reproduction, figures: str) -> str:
    sections = [_section(outcome, found.preset) for outcome in found.outcomes]
    return render(
        "reproduction.md",
        **_facts(found),
        sections=sections,
        figures=figures,
        table=markdown_table,
    )


def _encoded(image: Path) -> str:
    return base64.b64encode(image.read_bytes()).decode()
