"""The results as JSON, a Markdown table and charts."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from heldin_lab.pages import markdown_table

from .counts import Counts, counts_table
from .run import Measurement
from .workloads import WORKLOADS

__all__ = ["table", "write_report"]

Growth = Mapping[str, tuple[list[int], dict[str, list[float]], dict[str, float]]]


def table(results: Sequence[Measurement]) -> str:
    """Ratios to a plain step, one row per workload."""
    methods = list(dict.fromkeys(m for r in results for m in (*r.seconds, *r.skipped)))
    methods.remove("plain")
    rows = []
    for result in results:
        base = result.seconds["plain"]
        unit = f"{base * 1e3:.1f} ms" if base > 1e-3 else f"{base * 1e6:.0f} us"
        rows.append([result.title, unit, *(_cell(result.ratios.get(m)) for m in methods)])
    return markdown_table(["workload", "plain step", *methods], rows)


def memory_table(results: Sequence[Measurement]) -> str:
    """Peak memory as a multiple of the plain step's."""
    kept = list(dict.fromkeys(m for r in results for m in r.memory if m != "plain"))
    rows = [[r.title, *(_cell(r.memory.get(m)) for m in kept)] for r in results if r.memory]
    return markdown_table(["workload", *kept], rows) if rows else ""


def targets_table(results: Sequence[Measurement]) -> str:
    """What was asked for, and whether it was reached."""
    rows = []
    for result in results:
        workload = WORKLOADS[result.workload]
        for what, asked, found in (
            ("time", workload.targets, result.ratios),
            ("memory", workload.memory, result.memory),
        ):
            for estimator, most in asked.items():
                if (value := found.get(f"heldin {estimator}")) is not None:
                    verdict = "yes" if value <= most else "no"
                    each = result.apart.get(f"heldin {estimator}") if what == "time" else None
                    span = f" ({min(each):.2f} to {max(each):.2f})" if each else ""
                    number = f"{value:.2f}{span}"
                    rows.append([result.workload, estimator, what, f"{most:.2f}", number, verdict])
    head = ["workload", "estimator", "of", "at most", "measured", "reached"]
    return markdown_table(head, rows) if rows else ""


def left_out(results: Sequence[Measurement]) -> str:
    """Why some methods have no number."""
    return "".join(
        f"- {result.workload}: {method}: {why}\n"
        for result in results
        for method, why in result.skipped.items()
    )


def growth_table(growing: Growth) -> str:
    """Slopes in log-log of the time per step."""
    if not growing:
        return ""
    methods = list(next(iter(growing.values()))[1])
    rows = [
        [what, *(_cell(slopes[m]) for m in methods)] for what, (_, _, slopes) in growing.items()
    ]
    return markdown_table(["with", *methods], rows)


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    name = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), name)
    return {
        "date": datetime.date.today().isoformat(),
        "processor": name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def write_report(
    results: Sequence[Measurement],
    growing: Growth,
    out: Path,
    counts: Mapping[str, Sequence[Counts]] | None = None,
) -> str:
    """Write cost.json, tables and charts into a folder; return the tables."""
    out.mkdir(parents=True, exist_ok=True)
    where = machine()
    data = {
        "machine": where,
        "workloads": [
            {
                "name": r.workload,
                "title": r.title,
                "seconds": r.seconds,
                "ratios": r.ratios,
                "apart": r.apart,
                "memory": r.memory,
                "skipped": r.skipped,
                "targets": WORKLOADS[r.workload].targets,
                "memory_targets": WORKLOADS[r.workload].memory,
            }
            for r in results
        ],
        "growth": {
            what: {"sizes": sizes, "seconds": seconds, "slopes": slopes}
            for what, (sizes, seconds, slopes) in growing.items()
        },
        "counts": {
            method: [[each.operations, each.waits] for each in steps]
            for method, steps in (counts or {}).items()
        },
    }
    (out / "cost.json").write_text(json.dumps(data, indent=1))
    processes = max((len(each) for r in results for each in r.apart.values()), default=1)
    head = (
        f"A whole training step (forward, backward, evidence, SGD) as a multiple of the same step "
        f"without heldin; medians of interleaved repetitions, over {processes} processes. "
        f"{where['date']}, "
        f"{where['processor']}, threads: {where['threads']}, torch {where['torch']}.\n\n"
    )
    parts = {
        "cost": head + table(results),
        "memory": memory_table(results),
        "targets": targets_table(results),
        "left-out": left_out(results),
        "growth": growth_table(growing),
        "counts": counts_table(counts) if counts else "",
    }
    for name, text in parts.items():
        if text:
            (out / f"{name}.md").write_text(text, encoding="utf-8")
    _draw(results, growing, out)
    titles = {
        "cost": "",
        "memory": "Peak memory as a multiple of the plain step's:\n\n",
        "targets": "Asked for:\n\n",
        "left-out": "Left out:\n\n",
        "growth": "Growth of the time per step (slope in log-log):\n\n",
        "counts": "Operations and waits for the device in a step:\n\n",
    }
    return "\n".join(titles[name] + text for name, text in parts.items() if text)


def _draw(results: Sequence[Measurement], growing: Growth, out: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [r for r in results if len(r.seconds) > 1]
    figure, axes = plt.subplots(
        1, len(rows), figsize=(3.2 * len(rows), 3.2), layout="constrained", squeeze=False
    )
    for axis, result in zip(axes[0], rows, strict=True):
        ratios = {m: v for m, v in result.ratios.items() if m != "plain"}
        colours = ["tab:blue" if m.startswith("heldin") else "tab:gray" for m in ratios]
        axis.barh(list(ratios), list(ratios.values()), color=colours)
        axis.axvline(1, color="black", linewidth=0.8)
        axis.invert_yaxis()
        axis.set(title=result.workload, xlabel="times a plain step", xscale="log")
    figure.savefig(out / "cost.png", dpi=120)
    plt.close(figure)
    if growing:
        figure, axes = plt.subplots(
            1, len(growing), figsize=(3.2 * len(growing), 3), layout="constrained", squeeze=False
        )
        for axis, (what, (sizes, seconds, slopes)) in zip(axes[0], growing.items(), strict=True):
            for method, values in seconds.items():
                axis.loglog(sizes, values, marker="o", label=f"{method} ({slopes[method]:.2f})")
            axis.set(xlabel=what, ylabel="seconds per step")
            axis.legend(frameon=False, fontsize=7)
        figure.savefig(out / "growth.png", dpi=120)
        plt.close(figure)
