"""The numbers and figures of docs/how-good.md, from the runs of `heldin-lab study rivals`.

    heldin-lab study rivals --task tables --data DIR      # and images, texts, tuning
    python -m heldin_lab.figures.how_good gather out/rivals    # copies the runs to docs/study
    python -m heldin_lab.figures.how_good page                 # writes tables and figures

Blocks between `<!-- begin NAME -->` and `<!-- end NAME -->` of both pages are written by `page`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from heldin.state.estimates import COVERAGE_ROWS
from heldin_lab.figures import DOCS, IMAGES
from heldin_lab.pages import markdown_table
from heldin_lab.study.contest import UNITS, read_lines
from heldin_lab.study.tables import read

PAGES = (
    DOCS / "how-good.md",
    DOCS / "how-good-tables.md",
    DOCS / "faq.md",
    DOCS.parent / "README.md",
)
STUDY = DOCS / "study"
KINDS = {"tables": ("tables", "new-tables"), "networks": ("images", "texts", "tuning")}
BASE, BEST, FULL = "split", "best on the path", "no stopping"
RESAMPLES = 2000
FEWEST = 30  # runs from which a coverage is quoted
SHADOWS = {  # number of shadows, and whether they are light
    (5, False): "heldin, five folds",
    (4, False): "heldin, four shadows",
    (3, False): "heldin, three shadows",
    (2, False): "heldin, two shadows",
    (1, False): "heldin, one shadow",
    (3, True): "heldin, three light shadows",
}
LONG = 0.5  # share of the loss in the worst 5 % of the rows from which a tail is long
Z = 1.96

# Quality to reach (issue 32): geometric mean and 90th percentile of test loss / lowest on the path,
# and time in plain runs, by the default and with a budget of 6.
TARGETS: Sequence[tuple[str, str, int, str, tuple[float, float, float | None]]] = (
    ("tables, n <= 200", "tables", 200, "heldin", (1.025, 1.07, None)),
    ("tables, n <= 200", "tables", 200, "heldin, budget 6", (1.02, 1.06, None)),
    ("networks", "networks", 10**9, "heldin", (1.03, 1.10, 2.0)),
    ("networks", "networks", 10**9, "heldin, budget 6", (1.015, 1.05, None)),
)

# A temperature exists for classes only: in regressions a calibrated rule is the plain one.
PLAIN = {
    "split, calibrated": "split",
    "split, bagged, calibrated": "split, bagged",
    "split, calibrated, refit": "split, refit",
    "five folds, calibrated, refit": "five folds, refit",
    "eight bagged folds, calibrated": "eight bagged folds",
    "evidence, temperature": "evidence",
    "heldin, without temperature": "heldin",
}
RULES = (
    "no stopping",
    "split",
    "split, bagged",
    "split, calibrated",
    "split, bagged, calibrated",
    "split, refit",
    "split, calibrated, refit",
    "Prechelt GL",
    "Prechelt UP",
    "three splits, refit",
    "five folds, refit at the mean step",
    "five folds, refit at the mean epoch",
    "five folds, refit",
    "five folds, calibrated, refit",
    "five folds, committee",
    "eight bagged folds",
    "eight bagged folds, calibrated",
    "cosine schedule to the end",
    "cosine schedule, EMA",
    "cosine schedule, SWA",
    "weight decay by a split, to the end",
    "task-vector growth",
    "GradStop",
    "evidence",
    "evidence, smoothing 0.95",
    "evidence, temperature",
    "heldin",
    "heldin, without temperature",
    "heldin, budget 6",
    "heldin, committee",
    "heldin, five folds",
    "heldin, four shadows",
    "heldin, three shadows",
    "heldin, two shadows",
    "heldin, one shadow",
    "heldin, three light shadows",
)
MAIN = (
    "no stopping",
    "split",
    "split, refit",
    "split, bagged, calibrated",
    "split, calibrated, refit",
    "five folds, refit",
    "five folds, calibrated, refit",
    "cosine schedule, EMA",
    "evidence",
    "heldin",
    "heldin, one shadow",
)
STRONGEST = (
    "eight bagged folds, calibrated",
    "five folds, refit",
    "five folds, calibrated, refit",
    "split, calibrated, refit",
    "split, bagged, calibrated",
    "split, calibrated",
)
TASKS = {  # by the name of their dataset
    "tables": "tables",
    "mnist": "images",
    "python-help": "texts",
    "digits-after-mnist": "fine-tuning",
    "faces": "faces",
    "topics": "topics of texts",
    "halves": "halves of digits",
}
NAMES = {
    "1": "one shadow",
    "2": "two shadows",
    "3": "three",
    "4": "four",
    "5": "five folds",
    "3 light": "three light ones",
}
SAID = {
    "split": "20 % held out",
    "five folds, refit": "five folds, then refit",
    "heldin, five folds": "heldin, five shadows",
    "heldin, four shadows": "heldin, four shadows",
    "heldin, three shadows": "heldin, three shadows",
    "heldin, two shadows": "heldin, two shadows",
    "heldin, one shadow": "heldin, one shadow",
    "heldin, three light shadows": "heldin, three light shadows",
}


@dataclass(frozen=True)
class Theme:
    """Colours of a figure, on a transparent ground."""

    ink: str  # of text and axes
    ground: str  # of the page
    muted: str
    outside: str
    rules: Mapping[str, str]  # by the first word of a rule

    def of(self, rule: str) -> str:
        """Return the colour of a rule."""
        return self.rules.get(re.split("[ ,]", rule)[0], self.rules["other"])


LIGHT = Theme(
    "#24292f", "#ffffff", "#8b9199", "#c0392b",
    {"heldin": "#1b7f5c", "split": "#6b7280", "five": "#2b6cb0", "other": "#c2571a"},
)  # fmt: skip
DARK = Theme(
    "#d7dbe0", "#0e1013", "#868d96", "#ff8a80",
    {"heldin": "#4cc796", "split": "#a3abb5", "five": "#7ab3f0", "other": "#f2a071"},
)  # fmt: skip

Line = Mapping[str, Any]
Size = tuple[float, float]


# -- numbers


@cache
def runs(kind: str) -> list[Line]:
    """Return the stored runs of tables or of networks."""
    return [line for name in KINDS[kind] for line in read_lines(STUDY / f"rivals-{name}.jsonl")]


def value(run: Line, rule: str, unit: str) -> float:
    """Return what a rule reached in a run; nan if it was not followed there.

    R2 below 0 counts as 0.
    """
    rules = run["rules"]
    if rule not in rules and not run["classes"]:
        rule = PLAIN.get(rule, rule)
    if rule not in rules:
        return math.nan
    number = rules[rule][UNITS.index(unit)]
    if number is None:  # a loss that is not finite counts as a thousand times the best
        return 1000 * run["rules"][BEST][0] if unit == "loss" else math.nan
    if unit == "accuracy" and not run["classes"]:
        number = max(0.0, number)
    return float(number)


@dataclass(frozen=True)
class Mean:
    """A mean with the ends of its 95 % interval."""

    middle: float
    low: float
    high: float
    count: int

    def mapped(self, transform: Callable[[Any], Any]) -> Mean:
        """Return it on another scale."""
        middle, low, high = (float(transform(v)) for v in (self.middle, self.low, self.high))
        return Mean(middle, low, high, self.count)

    def shown(self, digits: int = 1, sign: bool = True) -> str:
        """Return it as text."""
        if not self.count:
            return "-"
        plus = "+" if sign else ""
        ends = f"{self.low:{plus}.{digits}f}, {self.high:{plus}.{digits}f}"
        return f"{self.middle:{plus}.{digits}f} [{ends}]"


def mean(pairs: Sequence[tuple[str, float]]) -> Mean:
    """Return the mean of (dataset, number), with an interval from drawing the datasets again.

    Runs on fewer than five datasets are drawn themselves.

    >>> mean([("a", 1.0), ("b", 3.0)]).middle
    2.0
    """
    pairs = [(name, number) for name, number in pairs if math.isfinite(number)]
    if not pairs:
        return Mean(math.nan, math.nan, math.nan, 0)
    names = sorted({name for name, _ in pairs})
    many = len(names) >= 5
    place = np.array([names.index(name) if many else i for i, (name, _) in enumerate(pairs)])
    numbers = np.array([number for _, number in pairs])
    blocks = int(place.max()) + 1
    sums, counts = np.bincount(place, numbers), np.bincount(place)
    drawn = np.random.default_rng(0).integers(blocks, size=(RESAMPLES, blocks))
    means = sums[drawn].sum(1) / counts[drawn].sum(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return Mean(float(numbers.mean()), float(low), float(high), len(pairs))


def compared(lines: Sequence[Line], rule: str, unit: str, base: str = BASE) -> Mean:
    """Return the mean difference to another rule, in points."""
    return mean(
        [(r["spec"]["dataset"], 100 * (value(r, rule, unit) - value(r, base, unit))) for r in lines]
    )


def ratio(lines: Sequence[Line], rule: str, base: str, unit: str = "loss") -> Mean:
    """Return the geometric mean of a ratio to another rule."""
    return mean(
        [
            (r["spec"]["dataset"], math.log(value(r, rule, unit) / value(r, base, unit)))
            for r in lines
        ]
    ).mapped(np.exp)


def excess(lines: Sequence[Line], rule: str) -> Mean:
    """Return by how many per cent the loss is above the lowest on the path."""
    return ratio(lines, rule, BEST).mapped(per_cent)


def per_cent(share: float) -> float:
    """Return by how many per cent a ratio is above 1."""
    return 100 * (share - 1)


def wins(lines: Sequence[Line], rule: str) -> float:
    """Return the share of runs with a lower loss than the split; equal ones count half."""
    pairs = [(value(r, rule, "loss"), value(r, BASE, "loss")) for r in lines]
    pairs = [pair for pair in pairs if math.isfinite(pair[0])]
    return float(np.mean([(a < b) + 0.5 * (a == b) for a, b in pairs])) if pairs else math.nan


def cost(lines: Sequence[Line], rule: str, unit: str = "steps") -> float:
    """Return the mean cost until the stop, in those of a run without stopping."""
    shares = [value(r, rule, unit) / value(r, FULL, unit) for r in lines]
    return float(np.nanmean(shares)) if np.isfinite(shares).any() else math.nan


def classified(lines: Sequence[Line], classes: bool = True) -> list[Line]:
    """Return the runs with classes, or those without."""
    return [r for r in lines if bool(r["classes"]) is classes]


def is_inside(said: Sequence[float]) -> bool:
    """Return whether the measured loss lies in the interval, allowing for its own error."""
    middle, low, high, true, error, _ = said
    end = high - middle if true > middle else middle - low
    return abs(true - middle) <= math.hypot(end, Z * error)


def statements(rule: str, lines: Sequence[Line]) -> list[list[float]]:
    """Return what a rule said in each run: value, ends, measured loss, its error, tail."""
    kept = [r["said"][rule] for r in lines if rule in r["said"]]
    return [said for said in kept if None not in said]


def coverage(rule: str, lines: Sequence[Line]) -> tuple[float, int]:
    """Return the share of intervals that hold the measured loss, and the number of runs."""
    inside = [is_inside(said) for said in statements(rule, lines)]
    return (float(np.mean(inside)) if inside else math.nan), len(inside)


def quoted_coverage() -> dict[tuple[int, bool], tuple[float, ...]]:
    """Return what `heldin.Interval.coverage` is to quote, by shadows, light or not, and rows.

    The lower one of the coverage in all runs and in those with about as many rows.
    """
    lines = runs("tables") + runs("networks")
    quoted = {}
    for key, rule in SHADOWS.items():
        every, number = coverage(rule, lines)
        if number < FEWEST:
            continue
        shares = []
        for low, high in itertools.pairwise((0, *COVERAGE_ROWS, 10**9)):
            share, count = coverage(rule, [r for r in lines if low < r["spec"]["n"] <= high])
            shares.append(round(min(every, share if count >= FEWEST else every), 2))
        quoted[key] = tuple(shares)
    return quoted


# -- tables


def full_table(kind: str) -> str:
    """Return every rule in every unit."""
    lines = runs(kind)
    classes, numbers = classified(lines), classified(lines, classes=False)
    rows = []
    for rule in RULES:
        over = excess(lines, rule)
        if not over.count:
            continue
        row = [f"**{rule}**" if rule == "heldin" else rule, over.shown(sign=False)]
        row += [compared(classes, rule, unit).shown() for unit in ("accuracy", "auc", "ece")]
        if numbers:
            row.append(compared(numbers, rule, "accuracy").shown())
        row += [f"{wins(lines, rule):.2f}", f"{cost(lines, rule):.2f}"]
        row += [f"{cost(lines, rule, 'seconds'):.2f}", str(over.count)]
        rows.append(row)
    head = ["rule", "loss above the best, %", "accuracy", "AUC", "calibration error"]
    head += ["R2"] if numbers else []
    head += ["wins", "steps", "time", "runs"]
    return markdown_table(head, rows)


def by_group(kind: str, key: str, rules: Sequence[str], unit: str = "accuracy") -> str:
    """Return accuracy against the split by size or noise, runs with classes only."""
    lines = classified(runs(kind))
    groups = sorted({r["spec"][key] for r in lines})
    rows = []
    for rule in rules:
        row = [rule]
        for group in groups:
            row.append(compared([r for r in lines if r["spec"][key] == group], rule, unit).shown())
        rows.append(row)
    counts = [sum(r["spec"][key] == group for r in lines) for group in groups]
    name = {"n": "n = {}", "noise": "noise {:g}"}[key]
    titles = [f"{name.format(g)} ({c} runs)" for g, c in zip(groups, counts, strict=True)]
    return markdown_table(["", *titles], rows)


def loss_by_size(kind: str) -> str:
    """Return the loss above the best by size."""
    lines = runs(kind)
    sizes = sorted({r["spec"]["n"] for r in lines})
    rows = [
        [
            rule,
            *(
                excess([r for r in lines if r["spec"]["n"] == n], rule).shown(1, False)
                for n in sizes
            ),
        ]
        for rule in MAIN
    ]
    return markdown_table(["", *(f"n = {n}" for n in sizes)], rows)


def evidence_stored() -> str:
    """Return evidence against a split with patience in the study of 0.1, by n and noise."""
    rows = []
    for name in ("small", "large"):
        table = read(STUDY / f"{name}-groups.csv")
        for group in dict.fromkeys(row["group"] for row in table):
            if not group.startswith(("n = ", "noise = ")):
                continue
            of_rule = {row["rule"]: row for row in table if row["group"] == group}
            ours, split = of_rule["evidence, epochs, median"], of_rule["split 20 % patience"]
            gap = 100 * (ours["accuracy"] - split["accuracy"])
            label = (
                group
                if group.startswith("n =")
                else f"{group}, n {'<= 200' if name == 'small' else '>= 500'}"
            )
            rows.append(
                [label, str(ours["runs"]), f"{ours['accuracy']:.3f}", f"{split['accuracy']:.3f}",
                 f"{gap:+.1f}", f"{ours['gm']:.3f}", f"{split['gm']:.3f}"]
            )  # fmt: skip
    head = ["", "runs", "evidence", "split", "points", "evidence, loss", "split, loss"]
    return markdown_table(head, rows)


def coverage_table() -> str:
    """Return the coverage of 95 % intervals per configuration."""
    lines = runs("tables") + runs("networks")
    parts: dict[str, Callable[[Line], bool]] = {
        "all runs": lambda r: True,
        "tables": lambda r: r in runs("tables"),
        "networks": lambda r: r in runs("networks"),
        "n <= 100": lambda r: r["spec"]["n"] <= 100,
        "n = 150 to 300": lambda r: 100 < r["spec"]["n"] <= 300,
        "n >= 500": lambda r: r["spec"]["n"] >= 500,
    }
    rows = []
    for rule, label in SAID.items():
        cells = [label]
        for part in parts.values():
            share, count = coverage(rule, [r for r in lines if part(r)])
            cells.append(f"{share:.2f} ({count})" if count else "not measured")
        for long in (False, True):
            said = [s for s in statements(rule, lines) if (s[5] > LONG) is long]
            share = float(np.mean([is_inside(s) for s in said])) if said else math.nan
            cells.append(f"{share:.2f} ({len(said)})" if said else "not measured")
        said = statements(rule, lines)
        width = np.median([(s[2] - s[1]) / s[0] for s in said]) if said else math.nan
        bias = (
            np.exp(np.median([math.log(max(s[0], 1e-9) / s[3]) for s in said]))
            if said
            else math.nan
        )
        rows.append([*cells, f"{width:.2f}", f"{bias:.2f}"])
    head = ["", *parts, "short tail", "long tail", "width / value", "said / true"]
    return markdown_table(head, rows)


def main_table() -> str:
    """Return the few rules that the page speaks of."""
    rows = []
    for rule in MAIN:
        cells = [f"**{rule}**" if rule == "heldin" else rule]
        for kind in KINDS:
            lines = runs(kind)
            accuracy = compared(classified(lines), rule, "accuracy")
            cells += [
                f"{excess(lines, rule).middle:.1f}",
                accuracy.shown(1) if rule != BASE else "0",
                f"{cost(lines, rule):.2f}",
                f"{cost(lines, rule, 'seconds'):.2f}",
            ]
        rows.append(cells)
    head = [""]
    for kind in KINDS:
        head += [f"{kind}: loss, %", "accuracy, points", "steps", "time"]
    return markdown_table(head, rows)


def counts() -> str:
    """Say how many runs there are."""
    tables, networks = runs("tables"), runs("networks")
    names = {r["spec"]["dataset"] for r in tables}
    regressions = len(classified(tables, classes=False))
    by_kind = ", ".join(
        f"{sum(r['spec']['dataset'] == name for r in networks)} of {label}"
        for name, label in (
            ("mnist", "a CNN on images"),
            ("python-help", "a transformer on texts"),
            ("digits-after-mnist", "fine-tuning"),
        )
    )
    return (
        f"{len(tables)} runs on {len(names)} tables ({regressions} of them regressions) and "
        f"{len(networks)} of networks: {by_kind}."
    )


def paired() -> str:
    """Compare heldin with its strongest rivals on the same runs."""
    rows = []
    for kind in KINDS:
        lines = runs(kind)
        for rule in STRONGEST:
            loss = ratio(lines, "heldin", rule)
            gap = compared(classified(lines), "heldin", "accuracy", rule)
            spent = [ratio(lines, "heldin", rule, unit) for unit in ("steps", "seconds")]
            rows.append([kind, rule, loss.shown(3, False), gap.shown(),
                         *(f"{each.middle:.2f}" for each in spent)])  # fmt: skip
    head = ["", "heldin against", "loss, ratio", "accuracy, points", "steps, ratio", "time, ratio"]
    return markdown_table(head, rows)


def rivals() -> str:
    """Return where heldin stands beside each strong rival."""
    names = {
        "five folds, calibrated, refit": "five folds, calibrated, then refit",
        "split, calibrated, refit": "split, calibrated, then refit",
        "split, bagged, calibrated": "split, bagged and calibrated",
    }
    rows = []
    for rule, label in names.items():
        for kind in KINDS:
            lines = runs(kind)
            gap = compared(classified(lines), "heldin", "accuracy", rule)
            spent = [ratio(lines, "heldin", rule, unit).middle for unit in ("steps", "seconds")]
            row = [label, kind, ratio(lines, "heldin", rule).shown(3, False), gap.shown()]
            rows.append([*row, *(f"{each:.2f}" for each in spent)])
    head = ["against", "", "loss, ratio", "accuracy, points", "steps, ratio", "time, ratio"]
    return markdown_table(head, rows)


def sizes() -> str:
    """Return heldin's gain over the split by number of rows, in one row each."""
    rows = []
    groups = {kind: runs(kind) for kind in KINDS}
    groups["images, 3,000 steps"] = [*read_lines(STUDY / "rivals-images-large.jsonl")]
    for kind, lines in groups.items():
        for n in sorted({r["spec"]["n"] for r in lines}):
            some = [r for r in lines if r["spec"]["n"] == n]
            loss = ratio(some, "heldin", BASE)
            gap = compared(classified(some), "heldin", "accuracy")
            rows.append([kind, str(n), loss.shown(2, False), gap.shown(), str(len(some))])
    return markdown_table(["", "rows", "loss / split", "accuracy, points", "runs"], rows)


def better() -> str:
    """List rules that beat the default in a unit, or cost less for nearly the same loss."""
    lines = []
    for kind in KINDS:
        of_kind = runs(kind)
        for rule in RULES[1:]:
            if rule.startswith("heldin"):
                continue
            loss = ratio(of_kind, rule, "heldin")
            if not loss.count or loss.middle > 1.05:
                continue
            spent = [ratio(of_kind, rule, "heldin", unit).middle for unit in ("steps", "seconds")]
            gap = compared(classified(of_kind), rule, "accuracy", "heldin")
            verdict = "lower loss" if loss.middle < 1 else "loss within 5 %"
            lines.append(
                f"- {kind}, *{rule}*: {verdict} ({loss.shown(3, False)} of heldin's), accuracy "
                f"{gap.shown()} points, {spent[0]:.2f} of its steps, {spent[1]:.2f} of its time"
            )
    return "\n".join(lines)


def said_sentence() -> str:
    """Say how often the default's interval held the measured loss."""
    lines = runs("tables") + runs("networks")
    said = statements("heldin", lines)
    inside = sum(map(is_inside, said))
    words = {5: "five", 4: "four", 3: "three", 2: "two", 1: "one"}
    shares = [
        f"with {words[number]} in {100 * coverage(rule, lines)[0]:.0f} %"
        for (number, light), rule in SHADOWS.items()
        if not light and coverage(rule, lines)[1]
    ]
    light, refit = (
        round(100 * coverage(rule, lines)[0])
        for rule in ("heldin, three light shadows", "five folds, refit")
    )
    return (
        f"The 95 % interval of the default held the measured test loss in {inside} of {len(said)} "
        f"runs. Of full shadows, {', '.join(shares)}; with three light ones, whose intervals are "
        f"wide, in {light} %. The plain interval of five folds, not widened for other training "
        f"rows, held the loss after their refit in {refit} %."
    )


def inside_sentence() -> str:
    """Say in short how often intervals held the measured loss."""
    lines = runs("tables") + runs("networks")
    said = statements("heldin", lines)
    one = round(100 * coverage("heldin, one shadow", lines)[0])
    return (
        f"{sum(map(is_inside, said))} of {len(said)} test losses lay inside the default's 95 % "
        f"interval; with one shadow, {one} % did."
    )


def evidence_against_split() -> str:
    """Return the accuracy of evidence against the split, in parts of the runs."""
    tables, nets = (classified(runs(kind)) for kind in KINDS)
    parts = {
        "tables": tables,
        "50 or 100 rows": [r for r in tables if r["spec"]["n"] <= 100],
        "200 or 500 rows": [r for r in tables if r["spec"]["n"] > 100],
        "clean labels": [r for r in tables if r["spec"]["noise"] == 0.0],
        "20 % wrong labels": [r for r in tables if r["spec"]["noise"] == 0.2],
        "40 % wrong labels": [r for r in tables if r["spec"]["noise"] == 0.4],
        "networks": nets,
    }
    rows = [
        [name, compared(lines, "evidence", "accuracy").shown()] for name, lines in parts.items()
    ]
    return markdown_table(["", "accuracy against the split, points"], rows)


def evidence_sentence() -> str:
    """Say what evidence costs, and its loss."""
    calibration = compared(classified(runs("tables")), "evidence", "ece")
    losses = [f"{excess(runs(kind), 'evidence').middle:.0f} %" for kind in KINDS]
    splits = [f"{excess(runs(kind), BASE).middle:.0f}" for kind in KINDS]
    time = cost(runs("tables"), "evidence", "seconds")
    return (
        f"On tables it takes {cost(runs('tables'), 'evidence'):.2f} of the steps of a run (the "
        f"split {cost(runs('tables'), BASE):.2f}), but {time:.2f} of its time: so small a network "
        "costs less than its observation. Its log loss is "
        f"{losses[0]} above the best on tables and {losses[1]} on networks (split: {splits[0]} and "
        f"{splits[1]} %). It stops late and is overconfident: its calibration error is "
        f"{calibration.shown()} points above the split's."
    )


def default_words() -> str:
    """Say what the default was, by kind of task."""
    parts = []
    for name, label in TASKS.items():
        lines = [r for kind in KINDS for r in runs(kind) if task(r) == name]
        if not lines:
            continue
        chosen = Counter(r["auto"] for r in lines)
        shares = [f"{NAMES[auto]} in {count}" for auto, count in chosen.most_common()]
        parts.append(f"{label}: {', '.join(shares)} of {len(lines)} runs")
    return f'*heldin* is `rule="auto"`. On {"; on ".join(parts)}.'


def task(run: Line) -> str:
    """Return which of `TASKS` a run belongs to."""
    dataset = str(run["spec"]["dataset"])
    return dataset if dataset in TASKS else "tables"


def regrets(lines: Sequence[Line], rule: str) -> tuple[float, float, int]:
    """Return geometric mean and 90th percentile of the loss over the lowest, and how many runs."""
    ratios = np.array([value(r, rule, "loss") / value(r, BEST, "loss") for r in lines])
    ratios = ratios[np.isfinite(ratios)]
    if not len(ratios):
        return math.nan, math.nan, 0
    return float(np.exp(np.log(ratios).mean())), float(np.quantile(ratios, 0.9)), len(ratios)


def quality_table() -> str:
    """Return what was to be reached, what was, and what was missed."""
    rows = []
    for label, kind, most, rule, wanted in TARGETS:
        lines = [r for r in runs(kind) if r["spec"]["n"] <= most]
        plain = "heldin, without temperature"
        if any(value(r, rule, "loss") != value(r, "heldin", "loss") for r in lines):
            plain = ""  # was not run with this budget
        name = "default" if rule == "heldin" else rule.partition(", ")[2]
        limit = f"{wanted[0]:g} / {wanted[1]:g}" + (f", {wanted[2]:g} runs" if wanted[2] else "")
        cells = [measured(lines, each, wanted) for each in (plain, rule)]
        rows.append([label, name, str(regrets(lines, rule)[2]), limit, *cells])
    head = ["", "rule", "runs", "wanted", "measured without temperature", "with temperature"]
    return markdown_table(head, rows)


def measured(lines: Sequence[Line], rule: str, wanted: tuple[float, float, float | None]) -> str:
    """Return mean and 90th percentile of the regret, time, and whether they are as wanted."""
    middle, tail, count = regrets(lines, rule)
    if not count:
        return "not run"
    time = cost([r for r in lines if math.isfinite(value(r, rule, "loss"))], rule, "seconds")
    pairs = (("mean", middle, wanted[0]), ("p90", tail, wanted[1]), ("time", time, wanted[2]))
    missed = [name for name, number, most in pairs if most and not round(number, 3) <= most]
    verdict = f"**missed** ({', '.join(missed)})" if missed else "reached"
    return f"{middle:.3f} / {tail:.3f}, {time:.2f} runs: {verdict}"


def epoch_steps(run: Line) -> int:
    """Return the number of steps of an epoch."""
    rows = int(run["spec"]["n"])
    return math.ceil(rows / min(32, rows // 4))


def never_stops() -> str:
    """Return how often evidence reached the end of the run."""
    groups = {
        label: [r for kind in KINDS for r in runs(kind) if task(r) == name]
        for name, label in TASKS.items()
    }
    shares = [(r, r.get("majority")) for r in classified(groups["tables"])]
    groups["tables, more than 60 % in a class"] = [r for r, share in shares if (share or 0) > 0.6]
    rows = []
    for label, lines in groups.items():
        if not lines:
            continue
        cells = [label]
        for rule, most in (("evidence", math.inf), ("evidence, smoothing 0.95", 100)):
            steps = [
                (value(r, rule, "steps"), min(r["total"], most * epoch_steps(r))) for r in lines
            ]
            ended = [spent >= total for spent, total in steps if math.isfinite(spent)]
            cells.append(f"{np.mean(ended):.2f} ({len(ended)})" if ended else "not run")
        for rule in ("evidence", "evidence, smoothing 0.95", "evidence, temperature"):
            over = excess(lines, rule)
            cells.append(f"{over.middle:.1f}" if over.count == len(lines) else "not run")
        rows.append(cells)
    head = ["", "evidence", "smoothing 0.95, at most 100 epochs", "loss, %: evidence"]
    return markdown_table([*head, "smoothing 0.95", "with a temperature"], rows)


def bagged_words() -> str:
    """Say what bagged weights gain on a split."""
    lines = runs("tables") + runs("networks")
    many = [r for r in lines if r["spec"]["n"] > 200]
    every, large = (ratio(some, "split, bagged", BASE) for some in (lines, many))
    return (
        f"Bagged weights change the loss of a split by a factor of {every.shown(3, False)}, with "
        f"more than 200 rows of {large.shown(3, False)}. An earlier look had said 0.96; it did not "
        "confirm, and `rules.Validation` keeps its best weights."
    )


def choice_words() -> str:
    """List where a rival is the better choice."""
    tables, networks = runs("tables"), runs("networks")

    def beside(rule: str, lines: Sequence[Line]) -> str:
        loss = ratio(lines, rule, "heldin")
        gap = compared(classified(lines), rule, "accuracy", "heldin")
        return (
            f"{loss.shown(3, False)} of heldin's loss, {gap.shown()} points of accuracy, "
            f"{ratio(lines, rule, 'heldin', 'steps').middle:.2f} of its steps"
        )

    clean = [r for r in tables + networks if r["spec"]["noise"] == 0]
    calibration = [compared(classified(some), "heldin", "ece") for some in (tables, networks)]
    longer = ratio(tables, "five folds, calibrated, refit", "heldin", "seconds").middle
    worse = ratio(clean, "no stopping", "heldin").middle
    full = compared(classified(clean), "no stopping", "accuracy", "heldin")
    return "\n".join(
        (
            "- **Networks, about one run to spare.** A calibrated split, then a refit: "
            f"{beside('split, calibrated, refit', networks)}.",
            "- **Networks, four runs to spare.** Five folds, calibrated, then a refit: "
            f"{beside('five folds, calibrated, refit', networks)}.",
            "- **Tables, if steps count.** The same five folds: "
            f"{beside('five folds, calibrated, refit', tables)}; in time, heldin's folds train in "
            f"one stack, and theirs take {longer:.1f} times as long.",
            f"- **Clean labels.** A run without stopping is at {full.shown()} points of accuracy "
            f"against heldin, for {worse:.2f} times its loss.",
            f"- **Calibration error.** heldin is at {calibration[0].shown()} points against the "
            f"split on tables and at {calibration[1].shown()} on networks (below 0 is better).",
        )
    )


def size_words() -> str:
    """Say up to which number of rows heldin is clearly ahead of the split."""
    parts = []
    groups = {kind: runs(kind) for kind in KINDS}
    groups["images"] = [*read_lines(STUDY / "rivals-images-large.jsonl")]
    for kind, lines in groups.items():
        if not lines:
            continue
        clear = {"loss": 0, "accuracy": 0}
        for n in sorted({r["spec"]["n"] for r in lines}):
            some = [r for r in lines if r["spec"]["n"] == n]
            if ratio(some, "heldin", BASE).high < 1:
                clear["loss"] = n
            if compared(classified(some), "heldin", "accuracy").low > 0:
                clear["accuracy"] = n
        most = max(r["spec"]["n"] for r in lines)
        ends = [f"{n:,}" if n else "none" for n in clear.values()]
        parts.append(f"{kind} {' and '.join(ends)} ({most:,} tried)")
    return (
        "heldin is clearly ahead of the split up to these numbers of rows, by log loss and by "
        f"accuracy: {'; '.join(parts)}."
    )


def readme_table() -> str:
    """Return what a split, five folds with a refit, and heldin give."""
    rules = (BASE, "five folds, refit", "heldin")
    tables, networks = runs("tables"), runs("networks")
    gaps = [compared(classified(tables), rule, "accuracy").middle for rule in rules[1:]]
    losses = [f"{excess(tables, rule).middle:.1f} %" for rule in rules]
    times = {kind: [f"{cost(runs(kind), rule, 'seconds'):.2f}" for rule in rules] for kind in KINDS}
    longest = cost(tables, "heldin") / 5  # steps of the model; five shadows take 0.8 of each
    own = f"{2 * longest:.1f} to {4 * longest:.1f}"
    above = [f"{excess(networks, rule).middle:.1f} %" for rule in rules]
    rows = [
        ["rows that the model learns from", "80 %", "all", "**all**"],
        ["knows when to stop the final run", "yes", "no: the number of epochs is carried over",
         "**yes**"],
        ["tells test loss and accuracy", "from the held-out rows", "yes",
         "**yes, with intervals**"],
        ["tables: test loss above the lowest possible", *losses[:2], f"**{losses[2]}**"],
        ["tables: accuracy, in points", "0", f"{gaps[0]:+.1f}", f"**{gaps[1]:+.1f}**"],
        ["time, small networks", *times["tables"][:2], f"{times['tables'][2]} (`fit`)"],
        ["time, small networks, your own loop", *times["tables"][:2], own],
        ["time, larger networks", *times["networks"][:2],
         f"{times['networks'][2]}: you set `budget=`"],
    ]  # fmt: skip
    head = ["", "today: hold out 20 %", "today: five folds, then refit", "heldin"]
    return markdown_table(head, rows) + (
        "\n*Time until the stop, as a share of a run without stopping: a split with a patience of "
        "20 epochs, heldin with its default; in your own loop, computed from the steps of `fit` at "
        "2 to 4 times the time of a plain one ([What does it cost me?](docs/cost.md)). On larger "
        f"networks, test loss above the lowest: split {above[0]}, five folds and refit {above[1]}, "
        f"heldin {above[2]}. (A temperature goes lower.)*"
    )


def new_tables() -> str:
    """Return where heldin stands on tables that no earlier run has used."""
    lines = read_lines(STUDY / "rivals-new-tables.jsonl")
    rows = []
    for rule in ("split", "five folds, refit", *STRONGEST[:1], *STRONGEST[2:4], "evidence"):
        gap = compared(classified(lines), "heldin", "accuracy", rule)
        spent = [ratio(lines, "heldin", rule, unit).middle for unit in ("steps", "seconds")]
        row = [
            rule,
            excess(lines, rule).shown(1, False),
            ratio(lines, "heldin", rule).shown(3, False),
        ]
        rows.append([*row, gap.shown(), *(f"{each:.2f}" for each in spent)])
    names = {r["spec"]["dataset"] for r in lines}
    ours = excess(lines, "heldin").shown(1, False)
    head = ["against", "its loss above the best, %", "loss, ratio", "accuracy, points"]
    return (
        f"{len(lines)} runs on {len(names)} tables; heldin ends {ours} % above the lowest loss.\n\n"
        + markdown_table([*head, "steps, ratio", "time, ratio"], rows)
    )


PRETRAINED = ("faces", "topics", "halves")
TUNED = {"split": "20 % held out", "five folds, refit": "five folds, then refit"}
TUNED |= {"evidence": "evidence", "heldin": "heldin", "heldin, one shadow": "heldin, one shadow"}
TUNED["heldin, five folds"] = "heldin, five folds"


def tuned_table() -> str:
    """Return a table of the networks that were trained on other data first."""
    groups = {name: read_lines(STUDY / f"rivals-{name}.jsonl") for name in PRETRAINED}
    heads = [f"{name}, {len(lines)} runs: loss | accuracy" for name, lines in groups.items()]
    rows = [f"| | {' | '.join(heads)} |", f"|---|{'---|' * 2 * len(groups)}"]
    for rule, words in TUNED.items():
        cells = []
        for lines in groups.values():
            loss = ratio(lines, rule, BEST).shown(2, sign=False)
            cells += [loss, compared(lines, rule, "accuracy").shown(1)]
        rows.append(f"| {words} | {' | '.join(cells)} |")
    return "\n".join(rows)


BLOCKS: dict[str, Callable[[], str]] = {
    "tuned": tuned_table,
    "new-tables": new_tables,
    "rivals": rivals,
    "sizes": sizes,
    "better": better,
    "said": said_sentence,
    "inside": inside_sentence,
    "evidence": evidence_sentence,
    "evidence-split": evidence_against_split,
    "counts": counts,
    "main": main_table,
    "paired": paired,
    "tables": lambda: full_table("tables"),
    "networks": lambda: full_table("networks"),
    "tables-size": lambda: loss_by_size("tables"),
    "networks-size": lambda: loss_by_size("networks"),
    "accuracy-size": lambda: by_group("tables", "n", MAIN),
    "accuracy-noise": lambda: by_group("tables", "noise", MAIN),
    "networks-accuracy-size": lambda: by_group("networks", "n", MAIN),
    "networks-accuracy-noise": lambda: by_group("networks", "noise", MAIN),
    "evidence-stored": evidence_stored,
    "coverage": coverage_table,
    "default": default_words,
    "quality": quality_table,
    "never-stops": never_stops,
    "bagged": bagged_words,
    "choice": choice_words,
    "size-words": size_words,
    "readme": readme_table,
}


def filled(text: str) -> str:
    """Return a page with all blocks written."""

    def write_block(match: re.Match[str]) -> str:
        name = match["name"]
        return f"<!-- begin {name} -->\n{BLOCKS[name]().rstrip()}\n<!-- end {name} -->"

    pattern = r"<!-- begin (?P<name>[\w-]+) -->\n.*?<!-- end (?P=name) -->"
    return re.sub(pattern, write_block, text, flags=re.S)


# -- figures


def draw_cost(figure: Any, theme: Theme, narrow: bool) -> None:
    """Draw loss and accuracy against the cost until the stop."""
    panels = figure.subplots(4, 1) if narrow else figure.subplots(2, 2, sharex="row")
    ours = theme.rules["heldin"]
    for row, kind in zip(panels.reshape(2, 2), KINDS, strict=True):
        lines = runs(kind)
        for number, rule in enumerate(MAIN, 1):
            spent, colour = cost(lines, rule), theme.of(rule)
            heights = (excess(lines, rule), compared(classified(lines), rule, "accuracy"))
            for ax, height in zip(row, heights, strict=True):
                label = f"{number} {rule}" if kind == "tables" and ax is row[0] else None
                ax.plot(spent, height.middle, "o", markersize=13, color=colour, label=label)
                ax.text(spent, height.middle, str(number), color=theme.ground, fontsize=8,
                        ha="center", va="center", weight="bold")  # fmt: skip
                if colour == ours:  # stacked shadows take less time than steps
                    time = cost(lines, rule, "seconds")
                    ax.plot([time, spent], [height.middle] * 2, ":", color=colour, linewidth=1)
                    ax.plot(time, height.middle, "o", markersize=8, color=colour, mfc=theme.ground)
        for ax, title in zip(
            row, ("loss above the best, %", "accuracy over the split, points"), strict=True
        ):
            ax.set(xscale="log", xlabel="cost until the stop, plain runs")
            ax.set_title(f"{kind}: {title}", fontsize=10)
            ax.set_xticks([0.25, 0.5, 1, 2, 4], ["¼", "½", "1", "2", "4"])
            ax.minorticks_off()
        row[0].set_yscale("symlog", linthresh=1, linscale=0.5)
        row[0].set_ylim(-0.5, 80)
        row[0].set_yticks([0, 1, 2, 5, 10, 20, 50], ["0", "1", "2", "5", "10", "20", "50"])
        row[0].minorticks_off()
    columns = 1 if narrow else 3
    figure.legend(loc="outside lower center", ncols=columns, fontsize=8, frameon=False,
                  markerscale=0.6)  # fmt: skip


def draw_said(figure: Any, theme: Theme, narrow: bool) -> None:
    """Draw the loss that heldin expects beside the measured one, alone."""
    _said_panel(figure.subplots(), theme)


def _said_panel(ax: Any, theme: Theme) -> None:
    lines = runs("tables") + runs("networks")
    said = statements("heldin", lines)
    ends = [0.5 * min(s[3] for s in said), 1.6 * max(s[3] for s in said)]
    ax.plot(ends, ends, color=theme.muted, linewidth=1)
    for inside, colour in ((True, theme.rules["heldin"]), (False, theme.outside)):
        some = [s for s in said if is_inside(s) is inside]
        below = [max(0.0, s[0] - s[1]) for s in some], [max(0.0, s[2] - s[0]) for s in some]
        where = "inside the interval" if inside else "outside"
        label = f"{len(some)} of {len(said)} runs: {where}"
        ax.errorbar([s[3] for s in some], [s[0] for s in some], below, fmt="o", markersize=3,
                    linewidth=0.5, alpha=0.75, color=colour, label=label)  # fmt: skip
    ax.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    ax.set_xticks([0.01, 0.1, 1], ["0.01", "0.1", "1"])
    ax.set_yticks([0.01, 0.1, 1], ["0.01", "0.1", "1"])
    ax.set(xlabel="test loss, measured", ylabel="test loss that heldin expects")
    ax.legend(frameon=False, fontsize=8, loc="lower right", borderpad=0, handletextpad=0.2)


def draw_size(figure: Any, theme: Theme, narrow: bool) -> None:
    """Draw the gain over the split against the number of rows."""
    panels = figure.subplots(2, 1) if narrow else figure.subplots(1, 2)
    lines = runs("tables") + runs("networks")
    groups = {
        "50": (50,),
        "100": (100,),
        "150-200": (150, 200),
        "300-500": (300, 500),
        "1,000": (1000,),
    }
    rules = ("split, bagged, calibrated", "split, refit", "five folds, calibrated, refit", "heldin")
    styles = ("s:", "v:", "^--", "o-")
    for number, (rule, style) in enumerate(zip(rules, styles, strict=True)):
        loss, accuracy = [], []
        for sizes in groups.values():
            some = [r for r in lines if r["spec"]["n"] in sizes]
            loss.append(ratio(some, rule, BASE).mapped(per_cent))
            accuracy.append(compared(classified(some), rule, "accuracy"))
        colour = theme.rules["other"] if rule == "split, refit" else theme.of(rule)
        for ax, points in zip(panels, (loss, accuracy), strict=True):
            place = np.arange(len(points)) + 0.09 * (number - 1.5)
            middle = [p.middle for p in points]
            bars = [[p.middle - p.low for p in points], [p.high - p.middle for p in points]]
            ax.errorbar(place, middle, bars, fmt=style, color=colour, label=rule,
                        markersize=5, linewidth=1.2, capsize=2)  # fmt: skip
    for ax, title in zip(panels, ("loss, % against the split", "accuracy, points"), strict=True):
        ax.axhline(0, color=theme.muted, linewidth=1)
        ax.set_xticks(range(len(groups)), list(groups))
        ax.set(xlabel="training rows", title=title)
    panels[0].legend(frameon=False, fontsize=8)


BARS = {
    "no early stopping": "no stopping",
    "20 % held out, then refit": "split, refit",
    "five folds, then refit": "five folds, refit",
    "heldin": "heldin",
}
REACH = (-12.0, 14.0)  # per cent and points that are shown


def gains() -> dict[str, tuple[Mean, Mean]]:
    """Return by how much each rule is better than the split: loss in %, accuracy in points."""
    lines = runs("tables")

    def lower(r: Any) -> Any:
        return -per_cent(r)

    found = {}
    for label, rule in BARS.items():
        loss = ratio(lines, rule, BASE).mapped(lower)
        loss = Mean(loss.middle, loss.high, loss.low, loss.count)  # the sign was changed
        found[label] = loss, compared(classified(lines), rule, "accuracy")
    return found


def overview_words() -> str:
    """Return the text in place of the picture of the README."""
    parts = [
        f"{label} {loss.middle:+.1f} and {accuracy.middle:+.1f}"
        for label, (loss, accuracy) in gains().items()
    ]
    lines = runs("tables") + runs("networks")
    said = statements("heldin", lines)
    return (
        "Left: gain over holding out 20 % of the rows, test loss in per cent and accuracy in "
        f"points: {'; '.join(parts)}. Right: the test loss that heldin expects against the "
        f"measured one; {sum(map(is_inside, said))} of {len(said)} intervals hold it"
    )


def draw_overview(figure: Any, theme: Theme, narrow: bool) -> None:
    """Draw the picture of the README: gain over the split, and what was said."""
    if narrow:
        gain, said = figure.subplots(2, 1, height_ratios=(1, 1.15))
    else:
        gain, said = figure.subplots(1, 2, width_ratios=(1.35, 1))
    gain.axvline(0, color=theme.muted, linewidth=1)
    for place, (label, pair) in enumerate(gains().items()):
        for value, shift, marker, name in zip(
            pair, (-0.15, 0.15), "oD", ("test loss, % lower", "accuracy, points higher"),
            strict=True,
        ):  # fmt: skip
            ours = label == "heldin"
            colour = theme.rules["heldin"] if ours else theme.rules["split"]
            fill = colour if marker == "o" else theme.ground
            if value.middle < REACH[0]:
                gain.annotate("", (REACH[0], place + shift), (REACH[0] + 1.6, place + shift),
                              arrowprops={"arrowstyle": "->", "color": colour})  # fmt: skip
                gain.text(REACH[0] + 1.9, place + shift, f"{value.middle:+.1f}", va="center",
                          fontsize=9, color=colour)  # fmt: skip
                continue
            bars = [[value.middle - value.low], [value.high - value.middle]]
            gain.errorbar(value.middle, place + shift, xerr=bars, fmt=marker, color=colour,
                          mfc=fill, markersize=6, linewidth=1.4,
                          label=name if ours else None)  # fmt: skip
            gain.text(value.high + 0.35, place + shift, f"{value.middle:+.1f}", va="center",
                      fontsize=9, color=colour, weight="bold" if ours else "normal")  # fmt: skip
    labels = [label.replace(", then", ",\nthen") for label in BARS]
    if narrow:
        labels = [label.replace("no early ", "no early\n") for label in labels]
    gain.set_yticks(range(len(BARS)), labels, fontsize=9 if narrow else 10)
    gain.set(ylim=(len(BARS) - 0.4, -0.6), xlim=REACH)
    gain.set_xlabel("better than holding out 20 %" + (" →" if narrow else " of the rows →"))
    gain.legend(frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1),
                ncols=1 if narrow else 2, borderpad=0, handletextpad=0.3)  # fmt: skip
    _said_panel(said, theme)


FIGURES: dict[str, tuple[Callable[[Any, Theme, bool], None], Size, Size]] = {
    "cost": (draw_cost, (9, 7.6), (3.7, 13)),
    "said": (draw_said, (5.2, 4.6), (3.7, 3.5)),
    "size": (draw_size, (9, 3.6), (3.7, 6)),
    "overview": (draw_overview, (9.4, 3.5), (3.7, 6.4)),
}


def draw(folder: Path) -> None:
    """Draw all figures: for light and dark pages, wide and narrow."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names: Sequence[Any] = (
        "text.color",
        "axes.edgecolor",
        "axes.labelcolor",
        "xtick.color",
        "ytick.color",
    )
    for name, (draws, wide, slim) in FIGURES.items():
        for theme, shade in ((LIGHT, ""), (DARK, "-dark")):
            for narrow in (False, True):
                with matplotlib.rc_context(dict.fromkeys(names, theme.ink)):
                    figure = Figure(figsize=slim if narrow else wide, layout="constrained")
                    FigureCanvasAgg(figure)
                    draws(figure, theme, narrow)
                    for ax in figure.axes:
                        ax.spines[["top", "right"]].set_visible(False)
                    width = "-narrow" if narrow else ""
                    figure.savefig(
                        folder / f"how-good-{name}{width}{shade}.png",
                        dpi=160 if narrow else 120,
                        transparent=True,
                    )


def gather(source: Path) -> None:
    """Copy the runs to docs/study, those that were renewed in place of the old ones."""
    for file in sorted(source.glob("*.jsonl")):
        if file.stem.endswith("-renewed"):
            continue
        renewed = read_lines(source / f"{file.stem}-renewed.jsonl")
        by_spec = {json.dumps(line["spec"]): line for line in renewed}
        lines = [by_spec.get(json.dumps(line["spec"]), line) for line in read_lines(file)]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (STUDY / f"rivals-{file.name}").write_text(text, encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one of the commands."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    collect = commands.add_parser("gather", help="copy the runs to docs/study")
    collect.add_argument("source", type=Path)
    page = commands.add_parser("page", help="write the tables into the pages, draw the figures")
    page.add_argument("--figures", type=Path, default=IMAGES)
    options = parser.parse_args(arguments)
    if options.command == "gather":
        gather(options.source)
        return
    for key, shares in quoted_coverage().items():
        print(f"INTERVAL_COVERAGE[{key}] = {shares}")
    for path in PAGES:
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")
    draw(options.figures)


if __name__ == "__main__":
    main()
