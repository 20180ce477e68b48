"""From outcomes to tables."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["BASE", "COLUMNS", "SUMMARY", "coverage", "read", "same_run", "summarise", "write"]

BASE = "split 20 %"  # what a rule has to win against
COLUMNS = (
    "dataset",
    "n",
    "noise",
    "model",
    "optimizer",
    "seed",
    "rule",
    "stop_step",
    "steps_spent",
    "test_loss",
    "best_test_loss",
    "regret",
    "test_accuracy",
    "fired",
    "seconds",
    "clean_loss",
    "best_clean_loss",
    "estimate",
    "standard_error",
    "test_error",
    "cost",
)
RESAMPLES = 1000

Row = Mapping[str, Any]


def write(path: Path, rows: Iterable[Row], columns: Sequence[str]) -> None:
    """A CSV file with these columns."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({key: _text(row[key]) for key in columns})


def _text(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else value


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of such a file, numbers as numbers."""
    with open(path, newline="", encoding="utf-8") as file:
        return [{key: _value(text) for key, text in row.items()} for row in csv.DictReader(file)]


def _value(text: str) -> Any:
    if text in ("True", "False"):
        return text == "True"
    try:
        return int(text)
    except ValueError:
        try:
            return float(text)
        except ValueError:
            return text


def same_run(row: Row) -> tuple[Any, ...]:
    """What the rows of one training run have in common, and no others."""
    return tuple(row[key] for key in ("dataset", "n", "noise", "model", "optimizer", "seed"))


WIDTHS = (1, 2, 3)  # in standard errors
STATISTICS = ("gm", "median", "p90", "worst", "win_rate", "never_fired")
SUMMARY = (
    "rule",
    "runs",
    "datasets",
    *(f"{name}{end}" for name in STATISTICS for end in ("", "_low", "_high")),
    "steps_spent",
    "cost",  # mean number of runs
    "accuracy",
    "stop_ratio",  # median of stop step / step of the lowest test loss, both plus 1
    "log_bias",  # of the rule's estimate of the test loss: median of log(estimate / test loss)
    *(f"within_{width}" for width in WIDTHS),  # share of test losses within so many errors of it
)


def summarise(
    rows: Sequence[Row], resamples: int = RESAMPLES, seed: int = 0
) -> list[dict[str, Any]]:
    """One row per rule: statistics of its regret, with 95 % intervals from drawing datasets again.

    Runs on a single dataset are drawn themselves. Rules that are not defined on all runs are
    summarised over those on which they are.
    """
    base = {same_run(row): row["regret"] for row in rows if row["rule"] == BASE}
    lowest = {same_run(row): row["stop_step"] for row in rows if row["rule"] == "oracle"}
    result = []
    for rule in dict.fromkeys(row["rule"] for row in rows):
        own = [row for row in rows if row["rule"] == rule and same_run(row) in base]
        if not own:
            continue
        names = sorted({row["dataset"] for row in own})
        blocks = len(names) if len(names) > 1 else len(own)
        place = np.array([names.index(row["dataset"]) for row in own])
        place = place if len(names) > 1 else np.arange(len(own))
        regret = np.array([_finite(row["regret"]) for row in own])
        other = np.array([_finite(base[same_run(row)]) for row in own])
        fired = np.array([bool(row["fired"]) for row in own], dtype=float)
        wins = (regret < other) + 0.5 * (regret == other)
        generator = np.random.default_rng(seed)
        drawn = generator.integers(blocks, size=(resamples, blocks))
        times = np.stack([(drawn == i).sum(1) for i in range(blocks)], axis=1)
        weights = np.concatenate([np.ones((1, len(own))), times[:, place]])  # as it is, and drawn
        values = {
            "gm": np.exp(_mean(np.log(regret), weights)),
            "median": _quantile(regret, weights, 0.5),
            "p90": _quantile(regret, weights, 0.9),
            "worst": np.where(weights > 0, regret, 0.0).max(1),
            "win_rate": _mean(wins, weights),
            "never_fired": 1 - _mean(fired, weights),
        }
        line: dict[str, Any] = {"rule": rule, "runs": len(own), "datasets": len(names)}
        for name in STATISTICS:
            line[name] = float(values[name][0])
            low, high = np.quantile(values[name][1:], [0.025, 0.975])
            line[f"{name}_low"], line[f"{name}_high"] = float(low), float(high)
        line["steps_spent"] = float(np.median([row["steps_spent"] for row in own]))
        line["cost"] = float(np.mean([row["cost"] for row in own]))
        line["accuracy"] = float(np.mean([row["test_accuracy"] for row in own]))
        known = [(row["stop_step"], lowest.get(same_run(row))) for row in own]
        ratios = [(stop + 1) / (best + 1) for stop, best in known if best is not None]
        line["stop_ratio"] = float(np.median(ratios)) if ratios else math.nan
        result.append(line | coverage(own))
    return result


def _mean(values: Any, weights: Any) -> Any:
    """(draws,) means under (draws, runs) weights."""
    return weights @ values / weights.sum(1)


def _quantile(values: Any, weights: Any, share: float) -> Any:
    """(draws,) quantiles: the first value up to which the runs have that share of the weight."""
    order = np.argsort(values)
    reached = np.cumsum(weights[:, order], axis=1) / weights.sum(1, keepdims=True)
    return values[order][(reached >= share - 1e-12).argmax(1)]


def _finite(regret: float) -> float:
    """A rule that keeps a diverged model has no finite regret; it counts as a thousand."""
    return regret if math.isfinite(regret) else 1000.0


def coverage(rows: Sequence[Row]) -> dict[str, float]:
    """How a rule's own estimates compare with the test loss of what it keeps; nan: it has none.

    A test loss has an error of its own, the larger the fewer test rows there are: the difference is
    measured in both errors together.
    """
    own = [row for row in rows if math.isfinite(row["estimate"]) and row["estimate"] > 0]
    if not own:
        return {"log_bias": math.nan, **{f"within_{width}": math.nan for width in WIDTHS}}
    off = np.array(
        [
            (row["estimate"] - row["test_loss"])
            / math.hypot(row["standard_error"], row["test_error"])
            for row in own
        ]
    )
    bias = [math.log(row["estimate"] / row["test_loss"]) for row in own]
    shares = {f"within_{width}": float((np.abs(off) <= width).mean()) for width in WIDTHS}
    return {"log_bias": float(np.median(bias)), **shares}
