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

from ._run import Measurement
from ._workloads import WORKLOADS

__all__ = ["table", "write_report"]

Growth = Mapping[str, tuple[list[int], dict[str, list[float]], dict[str, float]]]


def table(results: Sequence[Measurement]) -> str:
    """Ratios to a plain step, one row per workload."""
    methods = list(dict.fromkeys(m for r in results for m in (*r.seconds, *r.skipped)))
    methods.remove("plain")
    lines = [
        "| workload | plain step | " + " | ".join(methods) + " |",
        "|---" * (len(methods) + 2) + "|",
    ]
    for result in results:
        cells = [f"{r:.2f}" if (r := result.ratios.get(m)) else "-" for m in methods]
        base = result.seconds["plain"]
        unit = f"{base * 1e3:.1f} ms" if base > 1e-3 else f"{base * 1e6:.0f} us"
        lines.append(f"| {result.title} | {unit} | " + " | ".join(cells) + " |")
    if any(result.memory for result in results):
        lines += ["", "Peak memory as a multiple of the plain step's:", ""]
        kept = list(dict.fromkeys(m for r in results for m in r.memory if m != "plain"))
        lines += ["| workload | " + " | ".join(kept) + " |", "|---" * (len(kept) + 1) + "|"]
        for result in results:
            if result.memory:
                cells = [f"{v:.2f}" if (v := result.memory.get(m)) else "-" for m in kept]
                lines.append(f"| {result.title} | " + " | ".join(cells) + " |")
    notes = [
        f"- {result.workload}: {method}: {why}"
        for result in results
        for method, why in result.skipped.items()
    ]
    return "\n".join([*lines, *(["", "Left out:", "", *notes] if notes else [])])


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


def write_report(results: Sequence[Measurement], growing: Growth, out: Path) -> str:
    """Write cost.json, cost.md and the charts into a folder; return the Markdown."""
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
    }
    (out / "cost.json").write_text(json.dumps(data, indent=1))
    head = (
        f"A whole training step (forward, backward, evidence, SGD) as a multiple of the same step "
        f"without heldin; medians of interleaved repetitions. {where['date']}, "
        f"{where['processor']}, {where['threads']} threads, torch {where['torch']}."
    )
    text = f"{head}\n\n{table(results)}\n"
    if growing:
        text += "\nGrowth of the time per step (slope in log-log):\n\n"
        methods = next(iter(growing.values()))[1]
        text += "| with | " + " | ".join(methods) + " |\n" + "|---" * (len(methods) + 1) + "|\n"
        for what, (_, _, slopes) in growing.items():
            text += f"| {what} | " + " | ".join(f"{slopes[m]:.2f}" for m in methods) + " |\n"
    (out / "cost.md").write_text(text)
    _draw(results, growing, out)
    return text


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
