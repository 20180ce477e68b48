"""The report: figures, claims and settings as one HTML file, as Markdown, and as tables."""

from __future__ import annotations

import base64
import csv
import html
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .experiment import CLOSE, NEAR, SHARE, Verdict
from .outcomes import Outcome, Reproduction
from .tables import versions

__all__ = ["HEAD", "cells", "claim_rows", "write_docs", "write_report"]

DPI = 150  # good enough to print
DOCS_DPI = 90  # small enough for a repository
OVERVIEW = ("experiment", "claims confirmed", "runs", "CPU time")
HEAD = ("claim", "paper", "ours: median (range)", "holds if", "verdict")
STYLE = """
:root { --line: #d5d5d5; --soft: #666; --yes: #00682f; --no: #a52300; }
* { box-sizing: border-box; }
body { font: 1rem/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff;
  max-width: 62rem; margin: 0 auto; padding: 1rem; overflow-wrap: break-word; }
h1 { font-size: 1.6rem; line-height: 1.2; } h2 { margin-top: 2.5rem; font-size: 1.25rem; }
p, li { max-width: 46rem; } small, .place { color: var(--soft); }
nav a { display: inline-block; margin-right: 0.8rem; padding: 0.2rem 0; }
.figure { overflow-x: auto; margin: 1rem 0; }
.figure img { display: block; width: 100%; height: auto; }
table { border-collapse: collapse; width: 100%; font-size: 0.9rem; }
th, td { text-align: left; vertical-align: top; padding: 0.35rem 0.8rem 0.35rem 0;
  border-bottom: 1px solid var(--line); }
.yes { color: var(--yes); font-weight: 600; } .no { color: var(--no); font-weight: 600; }
summary { cursor: pointer; padding: 0.3rem 0; }
code { overflow-wrap: anywhere; }
@media (max-width: 44rem) {
  .claims thead { display: none; }
  .claims tr { display: block; padding: 0.6rem 0; border-bottom: 1px solid var(--line); }
  .claims td { display: block; border: 0; padding: 0.1rem 0; }
  .claims td[data-label]::before { content: attr(data-label) ": "; color: var(--soft); }
  .figure.wide img { width: 44rem; max-width: none; }
}
"""
WORDS = (
    "A claim is confirmed if it holds with more than half of the seeds. The paper's words are "
    f'read the same way everywhere: "near" and "comparable" are at most {NEAR - 1:.0%} above, '
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
    found.report.write_text(_html(found, folder, sizes), encoding="utf-8")


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


# --- what both forms say ---------------------------------------------------------------------


def _verdict(verdict: Verdict) -> str:
    seeds = len(verdict.values)
    word = "confirmed" if verdict.confirmed else "not confirmed"
    return word if seeds == 1 else f"{word} ({verdict.held} of {seeds})"


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


def _differs(outcome: Outcome, preset: str) -> str:
    return outcome.experiment.differs.get(preset, "Nothing: these are the paper's sizes.")


def _settings(outcome: Outcome) -> dict[str, str]:
    return {
        name: ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
        for name, value in asdict(outcome.settings).items()
    }


def _caption(outcome: Outcome) -> str:
    seeds = len(outcome.results)
    return outcome.experiment.caption + (f" Seed 0 of {seeds}." if seeds > 1 else "")


# --- Markdown --------------------------------------------------------------------------------


def _markdown(found: Reproduction, figures: str) -> str:
    lines = ["# Early stopping without a validation set: a reproduction", ""]
    lines += [f"Made by `{found.command}`; not to be edited by hand.", ""]
    lines += [_summary(found), "", WORDS, ""]
    lines += [f"- {name} was not run: {reason}" for name, reason in found.missing.items()]
    lines += _grid(OVERVIEW, _overview(found))
    for outcome in found.outcomes:
        e = outcome.experiment
        settings = ", ".join(f"{n} {value}" for n, value in _settings(outcome).items())
        lines += ["", f"## {e.title}", "", f"`{e.name}`: {e.place}.", ""]
        lines += [f"![{e.title}]({figures}/{e.name}.png)", "", _caption(outcome), ""]
        lines += _grid(HEAD, map(cells, outcome.verdicts))
        lines += ["", "Chosen where the paper leaves it open:", ""]
        lines += [f"- {choice}" for choice in e.choices]
        lines += ["", f"What differs from the paper: {_differs(outcome, found.preset)}", ""]
        if outcome.origin:
            lines += [f"Data: {outcome.origin}.", ""]
        lines += [f"All settings: `{settings}`."]
    return "\n".join(lines) + "\n"


def _grid(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table in Markdown.

    >>> _grid(["a"], [["1"], ["x | y"]])
    ['| a |', '|---|', '| 1 |', '| x \\\\| y |']
    """
    table = [[cell.replace("|", r"\|") for cell in row] for row in rows]
    lines = ["| " + " | ".join(row) + " |" for row in (head, *table)]
    return [lines[0], "|" + "---|" * len(head), *lines[1:]]


# --- HTML ------------------------------------------------------------------------------------


def _html(found: Reproduction, folder: Path, widths: dict[str, float]) -> str:
    text = html.escape
    links = "".join(
        f'<a href="#{o.experiment.name}">{text(o.experiment.name)}</a>' for o in found.outcomes
    )
    lost = "".join(
        f'<p class="no">{text(name)} was not run: {text(reason)}</p>'
        for name, reason in found.missing.items()
    )
    head = "".join(f"<th>{text(word)}</th>" for word in OVERVIEW)
    overview = "".join(
        "<tr>" + "".join(f"<td>{text(cell)}</td>" for cell in row) + "</tr>"
        for row in _overview(found)
    )
    sections = "".join(
        _section(outcome, found.preset, folder, widths[outcome.experiment.name] > 5.5)
        for outcome in found.outcomes
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>Early stopping without a validation set: a reproduction</title>
<style>{STYLE}</style>
</head>
<body>
<h1>Early stopping without a validation set: a reproduction</h1>
<p>{text(_summary(found))}</p>
<p>{text(WORDS)}</p>
<p>Made by <code>{text(found.command)}</code>.</p>
{lost}<nav>{links}</nav>
<div class="figure"><table><thead><tr>{head}</tr></thead><tbody>{overview}</tbody></table></div>
{sections}</body>
</html>
"""


def _section(outcome: Outcome, preset: str, folder: Path, wide: bool) -> str:
    text = html.escape
    e = outcome.experiment
    image = base64.b64encode((folder / "figures" / f"{e.name}.png").read_bytes()).decode()
    head = "".join(f"<th>{text(word)}</th>" for word in HEAD)
    rows = "".join(_row(verdict) for verdict in outcome.verdicts)
    choices = "".join(f"<li>{text(choice)}</li>" for choice in e.choices)
    settings = "".join(
        f"<tr><td><code>{text(name)}</code></td><td><code>{text(value)}</code></td></tr>"
        for name, value in _settings(outcome).items()
    )
    origin = f"<p>Data: {text(outcome.origin)}.</p>" if outcome.origin else ""
    return f"""<section id="{e.name}">
<h2>{text(e.title)}</h2>
<p class="place">{text(e.place)}</p>
<div class="figure{" wide" if wide else ""}"><img alt="{text(e.title)}"
src="data:image/png;base64,{image}"></div>
<p><small>{text(_caption(outcome))}</small></p>
<table class="claims"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>
<p>Chosen where the paper leaves it open:</p>
<ul>{choices}</ul>
<p>What differs from the paper: {text(_differs(outcome, preset))}</p>
{origin}<details><summary>All settings</summary><table>{settings}</table></details>
</section>
"""


def _row(verdict: Verdict) -> str:
    words = cells(verdict)
    kind = "yes" if verdict.confirmed else "no"
    found = [f"<td>{html.escape(words[0])}</td>"]
    for label, cell in zip(HEAD[1:-1], words[1:-1], strict=True):
        found.append(f'<td data-label="{html.escape(label)}">{html.escape(cell)}</td>')
    found.append(f'<td class="{kind}">{html.escape(words[-1])}</td>')
    return "<tr>" + "".join(found) + "</tr>"
