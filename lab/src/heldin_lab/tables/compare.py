"""Run methods on many small problems, and say how they compare."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from heldin_lab.study.data import Table

from .problems import SmallProblem
from .rivals import Method, fitted

__all__ = [
    "Row",
    "by_problem",
    "compare",
    "compared",
    "covered",
    "floored",
    "interval",
    "read",
    "write_comparison",
]

Progress = Callable[[str], None]
Row = dict[str, Any]
RESULTS = "results.jsonl"
LEAST = 1e-6  # of the constant's loss: smaller ones are taken for it, or ratios say nothing
WORSE = 1.02  # times the constant's loss


def read(folder: str | Path) -> list[Row]:
    """The results that are there."""
    path = Path(folder) / RESULTS
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def compare(
    cases: Iterable[tuple[Table, int, int]],
    methods: Mapping[str, Method],
    out: str | Path,
    progress: Progress = lambda _: None,
) -> list[Row]:
    """Fit every method on every problem; what is there already is not done again.

    Returns:
        One row for each fit: table, n, seed, method, loss, score, the constant's loss, seconds of
        CPU, and for heldin's estimators the estimate. A method that failed has an error in place.
    """
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    rows = read(folder)
    done = {(r["table"], r["n"], r["seed"], r["method"]) for r in rows}
    for table, n, seed in cases:
        missing = [name for name in methods if (table.name, n, seed, name) not in done]
        if not missing:
            continue
        problem = SmallProblem.cut(table, n, seed)
        for name in missing:
            progress(f"{table.name}, n = {n}, seed {seed}: {name}")
            row = {"table": table.name, "n": n, "seed": seed, "method": name}
            row |= _one(problem, methods[name])
            rows.append(row)
            with (folder / RESULTS).open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    return rows


def _one(problem: SmallProblem, method: Method) -> Row:
    start = time.process_time()
    try:
        model, predicted = fitted(method, problem)
    except Exception as error:  # whatever a rival raises is its result
        return {"error": f"{type(error).__name__}: {str(error)[:200]}"}
    seconds = time.process_time() - start
    losses = problem.losses(predicted)
    row = {
        "loss": float(losses.mean()),
        "test_error": float(losses.std(ddof=1) / len(losses) ** 0.5),
        "score": problem.score(predicted),
        "constant": float(problem.losses(problem.constant()).mean()),
        "seconds": seconds,
        "classes": problem.classes,
    }
    if getattr(model, "estimate_", None) is not None:
        row |= {"estimate": float(model.estimate_), "estimate_error": float(model.estimate_error_)}
    return row


# -- tables


def by_problem(
    rows: Iterable[Row], methods: Sequence[str]
) -> dict[tuple[Any, ...], dict[str, Row]]:
    """The problems on which all of the methods have a result or an error, and one a result."""
    found: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        if row["method"] in methods:
            found.setdefault((row["table"], row["n"], row["seed"]), {})[row["method"]] = row
    return {
        key: each
        for key, each in found.items()
        if len(each) == len(methods) and any("constant" in row for row in each.values())
    }


def floored(row: Row, constant: float) -> float:
    """The loss of a result; a failed fit counts as the constant."""
    return float(max(row.get("loss", constant), LEAST * constant))


def compared(
    rows: Sequence[Row],
    methods: Sequence[str],
    best_of: Sequence[str] | None = None,
    sizes: Sequence[int] | None = None,
) -> list[dict[str, Any]]:
    """Per method: mean rank, geometric-mean and median ratio to the best, wins, and so on.

    Args:
        rows: what `compare` gave.
        methods: those to compare.
        best_of: among which the best of a problem is looked for (default: all).
        sizes: numbers of rows to look at (default: all).
    """
    chosen = by_problem((r for r in rows if sizes is None or r["n"] in sizes), methods)
    best_of = methods if best_of is None else best_of
    ratios: dict[str, list[float]] = {name: [] for name in methods}
    ranks: dict[str, list[float]] = {name: [] for name in methods}
    per_table: dict[str, dict[str, list[float]]] = {name: {} for name in methods}
    wins, worse, failed = (dict.fromkeys(methods, 0) for _ in range(3))
    over: dict[str, float] = dict.fromkeys(methods, 0.0)
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for (table, _, _), each in chosen.items():
        constant = next(r["constant"] for r in each.values() if "constant" in r)
        losses = {name: floored(row, constant) for name, row in each.items()}
        best = min(losses[name] for name in best_of)
        order = sorted(losses.values())
        for name, loss in losses.items():
            ratios[name].append(loss / best)
            per_table[name].setdefault(table, []).append(loss / best)
            ties = [i for i, value in enumerate(order) if value == loss]
            ranks[name].append(1 + statistics.fmean(ties))
            wins[name] += loss == order[0]
            failed[name] += "error" in each[name]
            worse[name] += loss > WORSE * constant
            over[name] = max(over[name], loss / constant)
            if "seconds" in each[name]:
                seconds[name].append(each[name]["seconds"])
    return [
        {
            "method": name,
            "problems": len(chosen),
            "rank": statistics.fmean(ranks[name]),
            "ratio": math.exp(statistics.fmean(map(math.log, ratios[name]))),
            "interval": interval(per_table[name]),
            "median": statistics.median(ratios[name]),
            "p90": float(np.quantile(ratios[name], 0.9)),
            "wins": wins[name],
            "worse_than_constant": worse[name],
            "worst_of_constant": over[name],
            "failed": failed[name],
            "seconds": statistics.median(seconds[name] or [math.nan]),
        }
        for name in methods
        if chosen
    ]


def interval(ratios: Mapping[str, Sequence[float]]) -> tuple[float, float]:
    """95 % of the geometric mean when tables are drawn again, with all of their problems."""
    logs = [np.log(values) for values in ratios.values()]
    sums, counts = np.array([v.sum() for v in logs]), np.array([len(v) for v in logs])
    drawn = np.random.default_rng(0).integers(len(logs), size=(2000, len(logs)))
    means = sums[drawn].sum(1) / counts[drawn].sum(1)
    low, high = np.exp(np.quantile(means, [0.025, 0.975]))
    return float(low), float(high)


def covered(rows: Sequence[Row], method: str) -> dict[str, float]:
    """How often the loss on new rows lay within so many standard errors of the estimate."""
    found = [r for r in rows if r["method"] == method and "estimate" in r]
    if not found:
        return {}
    distance = np.array(
        [
            abs(r["estimate"] - r["loss"]) / math.hypot(r["estimate_error"], r["test_error"])
            for r in found
        ]
    )
    log_bias = np.array([math.log(r["estimate"] / max(r["loss"], 1e-12)) for r in found])
    return {
        "fits": len(found),
        "within_1": float((distance <= 1).mean()),
        "within_2": float((distance <= 2).mean()),
        "bias": float(np.exp(np.median(log_bias))),
    }


def _markdown(lines: Sequence[Mapping[str, Any]]) -> str:
    """A table, best rank first."""
    head = (
        "| method | mean rank | ratio to the best [95 %] | median ratio | wins | worse than the "
        "constant | worst, of the constant | failed | CPU seconds |\n"
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n"
    )
    body = ""
    for line in sorted(lines, key=lambda each: each["rank"]):
        low, high = line["interval"]
        body += (
            f"| {line['method']} | {line['rank']:.2f} | {line['ratio']:.3f} [{low:.2f}, "
            f"{high:.2f}] | {line['median']:.3f} | {line['wins']} | {line['worse_than_constant']} "
            f"| {line['worst_of_constant']:.2f} | {line['failed']} | {line['seconds']:.2g} |\n"
        )
    return head + body


def _beside(
    rows: Sequence[Row], methods: Sequence[str], rivals: Sequence[str], sizes: Sequence[int]
) -> str:
    """heldin's methods, each with the best of the rivals, problem by problem."""
    text = ""
    for name in methods if rivals else ():
        if not name.startswith("heldin"):
            continue
        line, *_ = compared(rows, [name, *rivals], rivals)
        parts = [(n, compared(rows, [name, *rivals], rivals, [n])) for n in sizes]
        low, high = line["interval"]
        text += (
            f"{name}: {line['ratio']:.3f} [{low:.3f}, {high:.3f}] of the loss of the best of "
            f"scikit-learn's rivals, median {line['median']:.3f} ("
            + ", ".join(f"{found[0]['ratio']:.3f} at n = {n}" for n, found in parts if found)
            + f"); better than all of them in {line['wins']} of {line['problems']} problems.\n\n"
        )
    return text


def write_comparison(
    rows: Sequence[Row],
    methods: Sequence[str],
    out: str | Path,
    best_of: Sequence[str] | None = None,
    rivals: Sequence[str] = (),
) -> str:
    """The tables as Markdown: of all problems, by size, and how well estimates cover; kept, too.

    Args:
        rows: what `compare` gave.
        methods: those to compare.
        out: folder for table.md.
        best_of: what the ratios are to (default: the best of all methods).
        rivals: of scikit-learn; heldin's methods are also compared with the best of these.
    """
    lines = compared(rows, methods, best_of)
    if not lines:
        return "no problem has a result of every method yet"
    text = f"{lines[0]['problems']} problems.\n\n" + _markdown(lines)
    sizes = sorted({row["n"] for row in rows})
    text += "\n| ratio to the best at n = | " + " | ".join(map(str, sizes)) + " |\n"
    text += "| --- |" + " ---: |" * len(sizes) + "\n"
    by_size = [
        {line["method"]: line["ratio"] for line in compared(rows, methods, best_of, [n])}
        for n in sizes
    ]
    for line in sorted(lines, key=lambda each: float(each["rank"])):
        values = [f"{ratios[line['method']]:.3f}" if ratios else "" for ratios in by_size]
        text += f"| {line['method']} | " + " | ".join(values) + " |\n"
    text += "\n" + _beside(rows, methods, rivals, sizes)
    for name in methods:
        if found := covered(rows, name):
            text += (
                f"{name}: in {found['fits']} fits the loss on new rows lay within one standard "
                f"error of the estimate in {found['within_1']:.0%}, within two in "
                f"{found['within_2']:.0%}; estimate over loss, median: {found['bias']:.3f}.\n\n"
            )
    (Path(out) / "table.md").write_text(text, encoding="utf-8")
    return text
