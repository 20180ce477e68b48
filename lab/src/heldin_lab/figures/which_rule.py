"""The tables and figures of docs/which-rule.md, and the small studies behind two of them.

    heldin-lab study quality --data DIR --n 50,100,200 --runs 150 --seed 0 --out out/small
    heldin-lab study quality --data DIR --n 500,1000 --runs 34 --seed 1 --out out/large
    python -m heldin_lab.bench.folds --out out/folds.json
    heldin-lab study quality --data DIR --n 50,100,200 --runs 17 --seed 20 --out out/fresh
    heldin-lab study quality --task images --data DIR --runs 21 --seed 50 --out out/images
    heldin-lab study quality --task texts --data DIR --runs 21 --seed 50 --out out/texts
    heldin-lab study quality --task tuning --data DIR --runs 21 --seed 50 --out out/tuning
    python -m heldin_lab.figures.errors --data DIR --seed 78 --out out/errors.csv
    python -m heldin_lab.figures.which_rule outlier --data DIR --out out/outlier.csv
    python -m heldin_lab.figures.which_rule gather out        # copies the tables to docs/study
    python -m heldin_lab.figures.which_rule page              # writes them into the page

The page is text with blocks between `<!-- begin NAME -->` and `<!-- end NAME -->`; `page` writes
what lies between. No number inside a block is typed by hand.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from heldin_lab.figures import DOCS, IMAGES
from heldin_lab.study.data import Table, role, tables
from heldin_lab.study.logged import LoggedRun
from heldin_lab.study.networks import KINDS
from heldin_lab.study.quality import constants
from heldin_lab.study.rules import RULES, replay
from heldin_lab.study.run import log
from heldin_lab.study.spec import Spec
from heldin_lab.study.tables import COLUMNS, SUMMARY, read, summarise, write
from heldin_lab.study.tables import coverage as covered

PAGE, STUDY = DOCS / "which-rule.md", DOCS / "study"
TABLES = ("summary", "groups")

AUTO = "folds bagged patience"  # what "auto" is below 1,000 rows
SPLIT = "split 20 %"
SHOWN = (
    "folds committee",
    AUTO,
    "folds bagged",
    "folds patience",
    "folds",
    "leave-one-out bagged patience",
    "leave-one-out bagged",
    "leave-one-out patience",
    "leave-one-out",
    "shadow patience",
    "shadow bagged",
    "shadow",
    "evidence (paper)",
    "evidence",
    "evidence, median",
    "evidence, epochs",
    "evidence, epochs, median",
    *(f"split {share} %{way}" for share in (10, 20, 30) for way in (" refit", "", " patience")),
    "Prechelt GL",
    "Prechelt PQ",
    "pooled evidence",
    "gradient disparity t1",
    "gradient disparity t2",
    "label wave",
    "gradient-weight alignment",
    "last iterate",
)
FEW = (
    AUTO,
    "folds patience",
    "folds committee",
    "leave-one-out bagged patience",
    "shadow patience",
    "split 20 % refit",
    SPLIT,
    "evidence, epochs, median",
    "last iterate",
)

LEAST = 8  # runs of a group that is spoken of

Row = Mapping[str, Any]


# --- one outlier that dominates the loss ------------------------------------------------------


@dataclass(frozen=True, eq=False)
class WithOutlier(Table):
    """A table in which one row that a run trains on has a target far outside."""

    seed: int = 0
    size: float = 20.0  # standard deviations

    def load(self) -> tuple[Any, Any, bool]:
        """The table, with the outlier."""
        x, y, classes = super().load()
        generator = np.random.default_rng([self.seed, zlib.crc32(self.name.encode())])
        first = generator.permutation(len(x))[0]  # as in Problem.cut: a training row
        y = y.astype(float)
        y[first] = y.mean() + self.size * y.std()
        return x, y, classes


def outlier(data: str, out: Path, runs: int) -> None:
    """Train on tables with an outlier, replay every rule, write the summary."""
    available = [t for t in tables(data) if role(t.name) == "confirmation" and t.rows >= 200]
    numbers = [t for t in available if not t.load()[2]]
    generator = np.random.default_rng(0)
    rows = []
    for i in range(runs):
        table = numbers[i % len(numbers)]
        kind, how = (str(generator.choice(c)) for c in (("linear", "hidden1"), ("gd", "adam")))
        spec = Spec(table.name, 100, 0.0, kind, how, 5000 + i)
        spoilt = WithOutlier(table.name, table.rows, table.path, spec.seed)
        run = LoggedRun(spec, spoilt, log(spec, spoilt))
        found = [replay(run, name) for name in RULES]
        rows += [{**asdict(spec), **asdict(one)} for one in found if one is not None]
        print(f"run {i + 1} of {runs}", flush=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    write(out.with_name("outlier-results.csv"), rows, COLUMNS)
    lines = summarise(rows)
    write(out, lines, list(lines[0]))


# --- from the study's folders to docs/study ---------------------------------------------------


def gather(source: Path) -> None:
    """Copy the tables that the page is made from, those of them that were made again."""
    STUDY.mkdir(exist_ok=True)
    for name in ("small", "large", "fresh", *KINDS):
        for table in TABLES:
            _copy(source / name / f"{table}.csv", STUDY / f"{name}-{table}.csv")
    for name in ("small", "large"):
        if (source / name / "results.csv").exists():
            datasets = sorted({row["dataset"] for row in read(source / name / "results.csv")})
            (STUDY / f"{name}-datasets.txt").write_text("\n".join(datasets) + "\n")
    for name in ("folds.json", "outlier.csv", "errors.csv"):
        _copy(source / name, STUDY / name)
    _pool(source)


def _pool(source: Path) -> None:
    """Runs of all kinds of networks together; each counts for itself when they are drawn again."""
    files = [source / kind / "results.csv" for kind in KINDS]
    if all(file.exists() for file in files):
        rows = [row for file in files for row in read(file)]
        rows = [{**row, "dataset": f"{row['dataset']} {row['seed']}"} for row in rows]
        write(STUDY / "networks-summary.csv", summarise(rows), SUMMARY)


def _copy(source: Path, target: Path) -> None:
    if source.exists():
        shutil.copyfile(source, target)


# --- the blocks of the page -------------------------------------------------------------------


def _study(name: str, table: str) -> list[dict[str, Any]]:
    return read(STUDY / f"{name}-{table}.csv")


def _by_rule(rows: Sequence[Row]) -> dict[str, Row]:
    return {row["rule"]: row for row in rows}


def _group(name: str, start: str) -> list[Row]:
    return [row for row in _study(name, "groups") if row["group"].startswith(start)]


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *lines))


def _mark(name: str) -> str:
    return f"**{name}**" if name == AUTO else name


def _range(row: Row, key: str, digits: int = 3) -> str:
    return (
        f"{row[key]:.{digits}f} [{row[f'{key}_low']:.{digits}f}, {row[f'{key}_high']:.{digits}f}]"
    )


def _full(name: str) -> str:
    found = _by_rule(_study(name, "summary"))
    lines = [
        [
            _mark(rule),
            _range(found[rule], "gm"),
            f"{found[rule]['median']:.3f}",
            _range(found[rule], "p90", 2),
            f"{found[rule]['worst']:.2f}",
            _range(found[rule], "win_rate", 2),
            f"{found[rule]['never_fired']:.2f}",
            f"{found[rule]['steps_spent']:,.0f}",
        ]
        for rule in sorted((r for r in SHOWN if r in found), key=lambda r: found[r]["gm"])
    ]
    head = ["rule", "gm", "median", "p90", "worst", "wins against the 20 % split"]
    return _table([*head, "never fired", "steps (median)"], lines)


def _short(rows: Sequence[Row]) -> str:
    found = _by_rule(rows)
    lines = [
        [
            _mark(rule),
            f"{found[rule]['gm']:.3f}",
            f"{found[rule]['p90']:.2f}",
            f"{found[rule]['worst']:.2f}",
            f"{found[rule]['win_rate']:.2f}",
        ]
        for rule in FEW
        if rule in found
    ]
    runs = found[SPLIT]["runs"]
    text = _table(["rule", "gm", "p90", "worst", "wins against the 20 % split"], lines)
    return f"{runs} {'run' if runs == 1 else 'runs'}.\n\n{text}"


def runs() -> str:
    """How many runs on how many datasets."""
    small, large = (_by_rule(_study(name, "summary"))[SPLIT] for name in ("small", "large"))
    return (
        f"{small['runs']} runs on {small['datasets']} datasets with n = 50, 100 and 200 training "
        f"rows, and {large['runs']} runs on {large['datasets']} datasets with n = 500 and 1,000."
    )


def targets() -> str:
    """What was to be reached, and was it?"""
    small, large = (_by_rule(_study(name, "summary")) for name in ("small", "large"))
    asked = [
        ("folds, argmin, n <= 200", small["folds"], "gm", 1.05, "at most"),
        ("folds, argmin, n <= 200", small["folds"], "p90", 1.13, "at most"),
        ("folds, bagged, n <= 200", small["folds bagged"], "gm", 1.042, "at most"),
        ("folds, bagged, n <= 200", small["folds bagged"], "p90", 1.09, "at most"),
        ("folds, bagged, n <= 200", small["folds bagged"], "win_rate", 0.75, "at least"),
        ("leave-one-out, n <= 200", small["leave-one-out"], "gm", 1.08, "at most"),
        ("one shadow, n >= 500", large["shadow"], "gm", 1.02, "at most"),
        ("folds, bagged, with patience", small[AUTO], "gm", 1.042, "at most"),
        ("folds, bagged, with patience", small[AUTO], "p90", 1.09, "at most"),
        ("folds, bagged, with patience", small[AUTO], "win_rate", 0.75, "at least"),
        (
            "leave-one-out, bagged, with patience",
            small["leave-one-out bagged patience"],
            "gm",
            1.08,
            "at most",
        ),
        ("one shadow, with patience, n >= 500", large["shadow patience"], "gm", 1.02, "at most"),
        ("auto, asked for later", small["auto"], "gm", 1.035, "at most"),
        ("auto, asked for later", small["auto"], "p90", 1.08, "at most"),
    ]
    names = {"gm": "gm", "p90": "p90", "win_rate": "wins against the 20 % split"}
    lines = []
    for what, row, key, limit, way in asked:
        good = row[key] <= limit if way == "at most" else row[key] >= limit
        verdict = "reached" if good else "**not reached**"
        lines.append([f"{what}: {names[key]}", f"{way} {limit:g}", _range(row, key), verdict])
    for width, (low, high) in ((1, (0.63, 0.73)), (2, (0.92, 0.98))):
        share = small["auto"][f"within_{width}"]
        verdict = "reached" if low <= share <= high else "**not reached**"
        what = f"auto, asked for later: test loss within {width} standard error{'s'[: width - 1]}"
        lines.append([what, f"{low} to {high}", f"{share:.2f}", verdict])
    times = [
        ("20-64-64-3, batch 32", "5 folds, dense", 1.6),
        ("20-64-64-3, batch 32", "5 folds, vmap", 2.7),
        ("784-256-256-10, batch 128", "one shadow, dense", 2.0),
    ]
    results = json.loads((STUDY / "folds.json").read_text())["results"]
    for network, rule, limit in times:
        for way in (f"{rule}, train()", rule):
            both = [r["times"] for r in results if (r["network"], r["way"]) == (network, way)]
            verdict = "reached" if max(both) <= limit else "**not reached**"
            found = " and ".join(f"{value:.2f}" for value in both)
            title = f"{network}: time with {way} (SGD and Adam)"
            lines.append([title, f"at most {limit:g}", found, verdict])
    return _table(["", "wanted", "found", ""], lines)


def coverage() -> str:
    """Of the bands around the estimates, on fresh runs (`errors.py`)."""
    rows = read(STUDY / "errors.csv")
    lines = []
    groups = {
        "n <= 200": [row for row in rows if row["n"] <= 200],
        "n >= 500": [row for row in rows if row["n"] > 200],
        "all": rows,
    }
    for title, part in groups.items():
        for rule in dict.fromkeys(row["rule"] for row in part):
            own = [row for row in part if row["rule"] == rule]
            if len(own) < LEAST:
                continue
            found = covered(own)
            widths = [f"{found[f'within_{width}']:.2f}" for width in (1, 2, 3)]
            lines.append([f"{rule}, {title}", str(len(own)), f"{found['log_bias']:+.3f}", *widths])
    return _table(["rule", "runs", "median log bias", "within 1", "within 2", "within 3"], lines)


def networks() -> str:
    """Images, texts and fine-tuning: every rule over all three, and by the kind of task."""
    missing = [kind for kind in KINDS if not (STUDY / f"{kind}-summary.csv").exists()]
    if missing:
        return f"**Not run yet**: {', '.join(missing)}."
    found = {kind: _by_rule(_study(kind, "summary")) for kind in ("networks", *KINDS)}
    every = found["networks"]
    rules = sorted((rule for rule in every if rule != "oracle"), key=lambda r: every[r]["gm"])
    lines = []
    for rule in rules:
        row = every[rule]
        known = math.isfinite(row["log_bias"])
        within = [f"{row[f'within_{w}']:.2f}" if known else "" for w in (1, 2)]
        shown = [_range(row, "gm"), _range(row, "p90", 2), _range(row, "win_rate", 2)]
        lines.append([_named(rule), *shown, *within, f"{row['cost']:.1f}"])
    head = ["rule", "gm", "p90", "wins against the 20 % split", "within 1", "within 2", "cost"]
    titles = {"images": "images", "texts": "texts", "tuning": "fine-tuning"}
    parts = [
        [
            _named(rule),
            *(
                f"{row['gm']:.3f} / {row['p90']:.2f} / {row['win_rate']:.2f}"
                for row in (found[kind][rule] for kind in titles)
            ),
        ]
        for rule in rules
    ]
    counts = [f"{found[kind][SPLIT]['runs']} of {title}" for kind, title in titles.items()]
    return (
        f"{every[SPLIT]['runs']} runs: {', '.join(counts)}.\n\n{_reached(every['auto'])}\n\n"
        f"Every rule, over all three:\n\n{_table(head, lines)}\n\n"
        f"By the kind of task (gm / p90 / wins):\n\n{_table(['rule', *titles.values()], parts)}"
    )


def _named(rule: str) -> str:
    return f"**{rule}**" if rule == "auto" else rule


def _reached(auto: Row) -> str:
    """What `auto` was to reach over all networks."""
    asked = [("gm", "at most", 1.03), ("p90", "at most", 1.08), ("win_rate", "at least", 0.75)]
    names = {"gm": "gm", "p90": "p90", "win_rate": "wins against the 20 % split"}
    lines = []
    for key, way, limit in asked:
        good = auto[key] <= limit if way == "at most" else auto[key] >= limit
        verdict = "reached" if good else "**not reached**"
        lines.append([f"auto: {names[key]}", f"{way} {limit:g}", _range(auto, key), verdict])
    for width, (low, high) in ((1, (0.63, 0.73)), (2, (0.92, 0.98))):
        share = auto[f"within_{width}"]
        verdict = "reached" if low <= round(share, 2) <= high else "**not reached**"
        title = f"auto: test loss within {width} standard error{'s' if width > 1 else ''}"
        lines.append([title, f"{low:g} to {high:g}", f"{share:.2f}", verdict])
    return _table(["", "wanted", "found", ""], lines)


def fresh() -> str:
    """Leave-one-out with 64 probes and variants of evidence, on runs made for them."""
    every = _by_rule(_study("fresh", "summary"))
    parts = {n: _by_rule(_group("fresh", f"n = {n}")) for n in (50, 100, 200)}
    rules = (
        "auto", "leave-one-out bagged patience", "64 probes bagged patience", "leave-one-out",
        "64 probes", "split 20 % patience", SPLIT, "evidence, epochs, median", "evidence, epochs",
        "evidence, median", "evidence", "evidence (paper)",
    )  # fmt: skip
    lines = [
        [
            _named(rule),
            _range(every[rule], "gm"),
            _range(every[rule], "p90", 2),
            f"{every[rule]['win_rate']:.2f}",
            *(f"{part[rule]['gm']:.3f}" for part in parts.values()),
        ]
        for rule in rules
    ]
    head = ["rule", "gm", "p90", "wins against the 20 % split", *(f"gm, n = {n}" for n in parts)]
    counts = ", ".join(f"{part[SPLIT]['runs']} with n = {n}" for n, part in parts.items())
    row = every[SPLIT]
    text = f"{row['runs']} runs on {row['datasets']} tables ({counts})."
    return f"{text}\n\n{_table(head, lines)}"


def better() -> str:
    """The groups of runs in which the split has the lower geometric mean, or wins more often."""
    lines = []
    for name in ("small", "large"):
        groups: dict[str, list[Row]] = {}
        for row in _study(name, "groups"):
            groups.setdefault(row["group"], []).append(row)
        for group, rows in groups.items():
            found = _by_rule(rows)
            ours = (AUTO, "leave-one-out bagged patience", "shadow patience")
            for rule in ours[:2] if name == "small" else ours:
                mine, other = found[rule], found[SPLIT]
                worse = mine["gm"] > other["gm"] or mine["win_rate"] < 0.5
                if worse and mine["runs"] >= LEAST:
                    sizes = "n <= 200" if name == "small" else "n >= 500"
                    lines.append(
                        [
                            f"{rule}; {sizes}; {group}",
                            str(mine["runs"]),
                            f"{mine['gm']:.3f}",
                            f"{other['gm']:.3f}",
                            f"{mine['win_rate']:.2f}",
                        ]
                    )
    if not lines:
        return f"None of those with at least {LEAST} runs."
    return _table(["rule and runs", "runs", "gm", "gm of the split", "wins"], lines)


def evidence() -> str:
    """How early the rules stop."""
    lines = []
    rules = ("evidence (paper)", "evidence, median", "evidence, epochs, median", AUTO, SPLIT)
    for name, title in (("small", "n <= 200"), ("large", "n >= 500")):
        found = _by_rule(_study(name, "summary"))
        for rule in rules:
            row = found[rule]
            lines.append([f"{rule}, {title}", f"{row['stop_ratio']:.2f}", f"{row['gm']:.3f}"])
    return _table(["rule", "stop / best step (median)", "gm"], lines)


def outliers() -> str:
    """One outlier that dominates the loss."""
    return _short(read(STUDY / "outlier.csv"))


def two_layers() -> str:
    """Two hidden layers on the fewest rows."""
    return _short(_group("small", "two hidden layers"))


def never() -> str:
    """Runs whose lowest test loss is at their end."""
    parts = []
    for name, title in (("small", "n <= 200"), ("large", "n >= 500")):
        rows = _group(name, "training should not stop")
        if rows:
            parts.append(f"{title}: {_short(rows)}")
    return "\n\n".join(parts)


def cost() -> str:
    """Times of a training run, in runs of the model alone."""
    content = json.loads((STUDY / "folds.json").read_text())
    ways = {(r["network"], r["way"], r["optimizer"]): r["times"] for r in content["results"]}
    order = dict.fromkeys((network, way) for network, way, _ in ways)
    lines = [
        [f"{network}: {way}", *(f"{ways[network, way, kind]:.2f}" for kind in ("sgd", "adam"))]
        for network, way in order
        if way != "alone"
    ]
    return _table(["network and way", "SGD", "Adam"], lines)


def fixed() -> str:
    """The constants of all rules."""
    return "\n".join(f"- {name}: {_plain(value)}" for name, value in constants().items())


def _plain(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(_plain, value))
    return f"{value:,}" if isinstance(value, int) else str(value)


def datasets() -> str:
    """Their names."""
    both = [(STUDY / f"{name}-datasets.txt").read_text().split() for name in ("small", "large")]
    return f"n <= 200: {', '.join(both[0])}.\n\nn >= 500: {', '.join(both[1])}."


BLOCKS: dict[str, Callable[[], str]] = {
    "runs": runs,
    "targets": targets,
    "small": lambda: _full("small"),
    "large": lambda: _full("large"),
    "coverage": coverage,
    "networks": networks,
    "fresh": fresh,
    "better": better,
    "two-layers": two_layers,
    "outlier": outliers,
    "never": never,
    "evidence": evidence,
    "cost": cost,
    "constants": fixed,
    "datasets": datasets,
}


def filled(text: str) -> str:
    """The page with all blocks written."""

    def write_block(match: re.Match[str]) -> str:
        name = match["name"]
        return f"<!-- begin {name} -->\n{BLOCKS[name]()}\n<!-- end {name} -->"

    pattern = r"<!-- begin (?P<name>[\w-]+) -->\n.*?<!-- end (?P=name) -->"
    return re.sub(pattern, write_block, text, flags=re.S)


# --- figures ----------------------------------------------------------------------------------


def draw_rules(figure: Any) -> None:
    """Geometric means with their intervals."""
    for place, (name, title) in enumerate((("small", "n ≤ 200"), ("large", "n ≥ 500"))):
        found = _by_rule(_study(name, "summary"))
        rules = sorted((r for r in SHOWN if r in found), key=lambda r: -found[r]["gm"])
        ax = figure.add_subplot(1, 2, place + 1)
        for y, rule in enumerate(rules):
            row = found[rule]
            colour = {"f": "tab:green", "s": "tab:green", "l": "tab:green", "e": "tab:blue"}
            own = rule.startswith(("folds", "shadow", "leave-one-out", "evidence"))
            shade = colour[rule[0]] if own else "tab:red" if rule.startswith("split") else "0.5"
            ax.plot([row["gm_low"], row["gm_high"]], [y, y], color=shade)
            ax.plot(row["gm"], y, "o", color=shade, markersize=4)
        ax.set_yticks(range(len(rules)), rules, fontsize=7)
        ax.set_xscale("log")
        ticks = [t for t in (1, 1.1, 1.2, 1.5, 2, 3) if t <= ax.get_xlim()[1]]
        ax.set_xticks(ticks, [f"{t:g}" for t in ticks])
        ax.minorticks_off()
        ax.axvline(1, color="0.8", linewidth=0.8, zorder=0)
        ax.set_title(title, fontsize=9)
        ax.set_xlabel("geometric mean of the regret", fontsize=8)


def draw_sizes(figure: Any) -> None:
    """How the regret falls with the number of rows."""
    ax = figure.add_subplot()
    shades = {
        AUTO: "tab:green",
        "leave-one-out bagged patience": "tab:olive",
        "shadow patience": "tab:cyan",
        "evidence, epochs, median": "tab:blue",
        "split 20 % refit": "tab:orange",
        SPLIT: "tab:red",
    }
    points: dict[str, list[tuple[int, float]]] = {rule: [] for rule in shades}
    for name in ("small", "large"):
        for row in _group(name, "n = "):
            if row["rule"] in points:
                points[row["rule"]].append((int(row["group"][4:]), row["gm"]))
    for rule, found in points.items():
        ax.plot(*zip(*sorted(found), strict=True), "o-", color=shades[rule], label=rule)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ticks = sorted({n for found in points.values() for n, _ in found})
    ax.set_xticks(ticks, [f"{t:,}" for t in ticks])
    most = max(gm for found in points.values() for _, gm in found)
    marks = [t for t in (1, 1.02, 1.05, 1.1, 1.2, 1.5, 2) if t <= most * 1.05]
    ax.set_yticks(marks, [f"{t:g}" for t in marks])
    ax.minorticks_off()
    ax.set_xlabel("training rows")
    ax.set_ylabel("geometric mean of the regret")
    ax.legend(fontsize=8, frameon=False)


def quality() -> str:
    """For the README: our rules, the paper's and the usual ones; on networks, as they are now."""
    names = {
        '`rule="auto"`': (AUTO, "auto"),
        '`rule="leave-one-out"`': ("leave-one-out bagged patience", None),
        '`rule="shadow"`': ("shadow patience", "shadow bagged patience"),
        '`rules.Evidence(window="epoch")`': ("evidence, epochs, median",) * 2,
        '`rule="evidence"`': ("evidence, median",) * 2,
        "`rules.Evidence.paper()`": ("evidence (paper)",) * 2,
        "20 % held out, patience": ("split 20 % patience",) * 2,
        "20 % held out, all of the run": (SPLIT,) * 2,
        "20 % held out, then again on all rows": ("split 20 % refit",) * 2,
        "no early stopping": ("last iterate",) * 2,
    }
    small, large, nets = (
        _by_rule(_study(name, "summary")) for name in ("small", "large", "networks")
    )
    lines = [
        [
            label,
            *(f"{small[rule][key]:.3f}" for key in ("gm", "p90")),
            f"{small[rule]['win_rate']:.0%}",
            f"{large[rule]['gm']:.3f}",
            f"{nets[other]['gm']:.3f}" if other else "-",
        ]
        for label, (rule, other) in names.items()
    ]
    head = ["", "n <= 200: mean", "90th percentile", "wins against 20 %", "n >= 500: mean"]
    text = (
        "Test loss at the stop over the lowest on the path of the model that saw all rows (1: "
        "could not be better): geometric mean and 90th percentile over "
        f"{small[AUTO]['runs']} runs on {small[AUTO]['datasets']} tables, "
        f"{large[AUTO]['runs']} runs with more rows, and {nets['auto']['runs']} runs of networks "
        "on images and texts, from scratch and fine-tuned. None of these runs was used "
        "to choose a constant of the rules by an estimated test loss.\n\n"
    )
    return text + _table([*head, "networks: mean"], lines) + "\n"


def page() -> None:
    """Write the blocks and draw the figures."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    (DOCS / "results" / "quality.md").write_text(quality(), encoding="utf-8")
    for name, draw, size in (("rules", draw_rules, (10, 6)), ("sizes", draw_sizes, (6, 4))):
        figure = pyplot.figure(figsize=size, layout="constrained")
        draw(figure)
        figure.savefig(IMAGES / f"which-rule-{name}.png", dpi=110)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one of the commands."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    spoil = commands.add_parser("outlier", help="train on tables with one outlier")
    spoil.add_argument("--data", required=True, help="folder of .npz files")
    spoil.add_argument("--out", type=Path, default=Path("out/outlier.csv"))
    spoil.add_argument("--runs", type=int, default=12)
    collect = commands.add_parser("gather", help="copy the study's tables to docs/study")
    collect.add_argument("source", type=Path)
    commands.add_parser("page", help="write the tables into docs/which-rule.md")
    options = parser.parse_args(arguments)
    if options.command == "outlier":
        outlier(options.data, options.out, options.runs)
    elif options.command == "gather":
        gather(options.source)
    else:
        page()


if __name__ == "__main__":
    main()
