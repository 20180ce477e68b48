"""The study as one page of HTML."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from heldin_lab.pages import render, svg

from .logged import LoggedRun
from .tables import BASE, same_run

__all__ = ["critical_difference", "write_report"]

Row = Mapping[str, Any]


def critical_difference(ranks: Any, alpha: float = 0.05) -> tuple[Any, float, float]:
    """Mean ranks of rules over datasets, Friedman's p-value and Nemenyi's critical difference.

    Demsar (2006). Two rules differ if their mean ranks are further apart than that.

    Args:
        ranks: (datasets, rules), the ranks of the rules on each dataset.
        alpha: level.
    """
    from scipy import stats

    blocks, rules = ranks.shape
    means = ranks.mean(0)
    chi = (
        12
        * blocks
        / (rules * (rules + 1))
        * (np.square(means).sum() - rules * (rules + 1) ** 2 / 4)
    )
    q = stats.studentized_range.ppf(1 - alpha, rules, np.inf) / math.sqrt(2)
    return (
        means,
        float(stats.chi2.sf(chi, rules - 1)),
        float(q * math.sqrt(rules * (rules + 1) / (6 * blocks))),
    )


def _matrix(rows: Sequence[Row]) -> tuple[list[str], Any]:
    """Rules that are defined everywhere, and (datasets, rules) mean log regrets."""
    runs = {same_run(row) for row in rows}
    table: dict[str, dict[Any, float]] = {}
    for row in rows:
        table.setdefault(row["rule"], {})[same_run(row)] = math.log(min(row["regret"], 1000.0))
    rules = [rule for rule, own in table.items() if set(own) == runs and rule != "oracle"]
    datasets = sorted({run[0] for run in runs})
    values = [
        [np.mean([table[rule][run] for run in runs if run[0] == name]) for rule in rules]
        for name in datasets
    ]
    return rules, np.array(values)


def _shown(figure: Any) -> str:
    from matplotlib import pyplot

    text = svg(figure)
    pyplot.close(figure)
    return text


def _draw_ranks(rows: Sequence[Row]) -> str:
    from matplotlib import pyplot
    from scipy import stats

    rules, values = _matrix(rows)
    if len(rules) < 2 or len(values) < 2:
        return "<p>Too few datasets for ranks.</p>"
    means, p, distance = critical_difference(stats.rankdata(values, axis=1))
    order = np.argsort(means)
    figure = pyplot.figure(figsize=(9, 0.26 * len(rules) + 1))
    ax = figure.add_subplot()
    for line, i in enumerate(order):
        ax.plot([means[i]], [line], "o", color="tab:blue", markersize=4)
        ax.text(means[i] + 0.15, line, f"{rules[i]}  {means[i]:.1f}", va="center", fontsize=8)
    last_end = -1
    for i in range(len(order)):  # bars over rules that cannot be told apart
        end = max(j for j in range(len(order)) if means[order[j]] - means[order[i]] <= distance)
        if end > last_end and end > i:
            ax.plot([means[order[i]], means[order[i]]], [i, end], color="0.6", linewidth=1.5)
            last_end = end
    ax.invert_yaxis()
    ax.set_yticks([])
    ax.set_xlim(0.5, len(rules) + 4)
    ax.set_xlabel(
        f"mean rank over {len(values)} datasets; critical difference {distance:.2f} (grey bars), "
        f"Friedman p = {p:.1g}"
    )
    return _shown(figure)


def _draw_regrets(rows: Sequence[Row]) -> str:
    from matplotlib import pyplot

    rules = [r for r in dict.fromkeys(row["rule"] for row in rows) if r != "oracle"]
    regrets = [
        [max(min(row["regret"], 1000.0), 1e-3) for row in rows if row["rule"] == r] for r in rules
    ]
    figure = pyplot.figure(figsize=(9, 0.26 * len(rules) + 1))
    ax = figure.add_subplot()
    ax.boxplot(
        regrets,
        orientation="horizontal",
        whis=(5, 95),
        showfliers=True,
        widths=0.6,
        flierprops={"markersize": 2, "markeredgecolor": "0.5"},
    )
    ax.set_yticks(range(1, len(rules) + 1), rules, fontsize=8)
    ax.invert_yaxis()
    ax.set_xscale("log")
    ax.set_xlim(0.8, 10)
    ax.axvline(1.0, color="0.5", linewidth=0.8)
    ax.set_xlabel(
        "regret: test loss / best test loss on the path of the full data (whiskers 5-95 %)"
    )
    return _shown(figure)


def _draw_worst(runs: Sequence[tuple[LoggedRun, Row]]) -> str:
    from matplotlib import pyplot

    figure = pyplot.figure(figsize=(9, 2.6 * math.ceil(len(runs) / 2)), layout="constrained")
    for place, (run, row) in enumerate(runs):
        ax = figure.add_subplot(math.ceil(len(runs) / 2), 2, place + 1)
        ax.plot(run["steps"], run["tested"][:, 0], color="black", label="test")
        ax.plot(run["fold_steps"], run["fold_curves"].mean(0), color="tab:orange", label="folds")
        if "loo_curves" in run.log:
            curve = run["loo_curves"].mean(0)
            ax.plot(run["loo_steps"], curve, color="tab:green", label="leave-one-out")
        ax.plot(run["fold_steps"], run["training_loss"], color="0.6", label="training")
        ax.axvline(row["stop_step"], color="tab:blue", linewidth=1)
        ax.set_xscale("symlog", linthresh=1)
        top = 2.5 * float(run["tested"][:, 0].min())
        ax.set_ylim(0, max(top, 1.2 * float(row["test_loss"])))
        ax.set_title(f"{run.spec.key}: {row['rule']}, regret {row['regret']:.2f}", fontsize=7)
        ax.tick_params(labelsize=7)
        if place == 0:
            ax.legend(fontsize=7)
    return _shown(figure)


def write_report(
    path: Path,
    rows: Sequence[Row],
    summary: Sequence[Row],
    groups: Mapping[str, Sequence[Row]],
    worst: Sequence[tuple[LoggedRun, Row]],
    constants: Mapping[str, Any],
) -> None:
    """Write the page; figures are inside it."""
    import matplotlib

    columns = {
        "rule": "rule",
        "runs": "runs",
        "gm": "geometric mean",
        "median": "median",
        "p90": "p90",
        "worst": "worst",
        "win_rate": f"wins against {BASE}",
        "never_fired": "never fired",
        "steps_spent": "steps (median)",
        "cost": "cost in runs",
        "stop_ratio": "stop / best step",
        "accuracy": "accuracy or R²",
    }
    few = {key: columns[key] for key in ("rule", "runs", "gm", "p90", "win_rate")}
    matplotlib.use("Agg", force=False)
    page = render(
        "study.html",
        title="Which stopping rule ends with the better model?",
        runs=len({same_run(r) for r in rows}),
        datasets=len({r["dataset"] for r in rows}),
        summary=summary,
        columns=columns,
        ranks=_draw_ranks(rows),
        regrets=_draw_regrets(rows),
        groups=groups,
        few=few,
        covered=[line for line in summary if math.isfinite(line["log_bias"])],
        coverage={
            "rule": "rule",
            "runs": "runs",
            "log_bias": "median log bias",
            "within_1": "within 1",
            "within_2": "within 2",
            "within_3": "within 3",
        },
        worst=_draw_worst(worst) if worst else "",
        constants=constants,
    )
    path.write_text(page, encoding="utf-8")
