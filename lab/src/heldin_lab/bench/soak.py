"""A long run: does memory grow, does a step get slower, is the history bounded?

    python -m heldin_lab.bench.soak --steps 200000

A small model is trained for so many steps under observation by `EvidenceStopping` (which is kept
from stopping) or `ElementwiseStopping`, with batches of changing size. Resident memory and the time
of a step are sampled on the way. Memory is flat if the slope of a straight line through its
samples, after the first tenth of the run, is within three of its own standard errors, or not worth
a page of memory in a thousand steps.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from heldin_lab.rules import ElementwiseStopping, Evidence, EvidenceStopping

SAMPLES = 200  # of memory, over a run
KINDS = ("evidence", "elementwise")


def resident() -> int:
    """Bytes of memory that this process holds."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def line(xs: list[float], ys: list[float]) -> tuple[float, float]:
    """Slope of the straight line through points, and its standard error.

    Neighbouring samples of memory are alike, so the error is taken from the differences between
    the means of ten stretches of the run.
    """
    n = max(1, len(xs) // 10)
    xs = [sum(xs[i : i + n]) / n for i in range(0, len(xs) - n + 1, n)]
    ys = [sum(ys[i : i + n]) / n for i in range(0, len(ys) - n + 1, n)]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread
    rest = [y - mean_y - slope * (x - mean_x) for x, y in zip(xs, ys, strict=True)]
    return slope, (sum(r * r for r in rest) / max(1, len(xs) - 2) / spread) ** 0.5


def soak(kind: str, steps: int) -> dict[str, Any]:
    """Train for a number of steps; what memory, time and history did."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    stopping: Any = None
    if kind == "evidence":
        stopping = EvidenceStopping(model, Evidence(warmup=steps))
    else:
        optimizer = ElementwiseStopping(optimizer, model, smoothing=0.999)
    data = torch.randn(256, 10)
    labels = (data[:, 0] + torch.randn(256) > 0).long()
    memory: list[tuple[float, float]] = []
    times: list[float] = []  # one for each stretch between two samples
    stretch = max(1, steps // SAMPLES)
    gc.collect()
    gc.freeze()  # what is there now is not gone through again with every sample
    began = time.perf_counter()
    for step in range(1, steps + 1):
        rows = torch.randint(0, 256, (8 + step % 9,))
        optimizer.zero_grad()
        F.cross_entropy(model(data[rows]), labels[rows]).backward()
        if stopping is not None:
            stopping.step()
        optimizer.step()
        if step % stretch == 0:
            now = time.perf_counter()
            times.append((now - began) / stretch)
            gc.collect()
            memory.append((step, resident()))
            _show(f"{kind}: step {step} of {steps}")
            began = time.perf_counter()
    later = memory[len(memory) // 10 :]
    slope, error = line([x for x, _ in later], [y for _, y in later])
    tenth = max(1, len(times) // 10)
    report = {
        "kind": kind,
        "steps": steps,
        "memory at the end, MiB": round(memory[-1][1] / 2**20, 2),
        "growth after the first tenth, KiB": round((later[-1][1] - later[0][1]) / 1024, 1),
        "slope, bytes per 1000 steps": round(1000 * slope, 1),
        "its standard error": round(1000 * error, 1),
        "step at the start, microseconds": round(1e6 * median(times[tenth : 2 * tenth]), 1),
        "step at the end, microseconds": round(1e6 * median(times[-tenth:]), 1),
        "fastest stretch at the start": round(1e6 * min(times[: len(times) // 2]), 1),
        "fastest stretch at the end": round(1e6 * min(times[len(times) // 2 :]), 1),
        "records in the history": None if stopping is None else len(stopping.history),
        "flat": abs(slope) <= max(3 * error, 4.096),
    }
    if stopping is not None:
        stopping.close()
    else:
        optimizer.close()
    return report


def table(reports: list[dict[str, Any]]) -> str:
    width = max(len(name) for name in reports[0])
    rows = []
    for name in reports[0]:
        cells = "".join(f"{r[name]!s:>14}" for r in reports)
        rows.append(f"{name:<{width}}{cells}")
    return "\n".join(rows)


def markdown(reports: list[dict[str, Any]]) -> str:
    """The reports as a table for the documentation."""
    head, *names = reports[0]
    lines = ["| " + " | ".join(["", *(str(r[head]) for r in reports)]) + " |"]
    lines.append("|---" * (1 + len(reports)) + "|")
    lines += ["| " + " | ".join([name, *(str(r[name]) for r in reports)]) + " |" for name in names]
    return "\n".join(lines) + "\n"


def _show(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{text:60}", end="", file=sys.stderr, flush=True)


def main(steps: int, kinds: list[str], out: str | None) -> int:
    torch.set_num_threads(1)
    reports = [soak(kind, steps) for kind in kinds]
    _show("")
    print(table(reports))
    if out:
        text = markdown(reports) if out.endswith(".md") else json.dumps(reports, indent=2) + "\n"
        Path(out).write_text(text, encoding="utf-8")
    return 0 if all(report["flat"] for report in reports) else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--out", help="a file for the reports: JSON, or a table if it ends in .md")
    given = parser.parse_args()
    sys.exit(main(given.steps, given.kinds, given.out))
