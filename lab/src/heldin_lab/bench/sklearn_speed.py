"""Time of an epoch of heldin's MLPClassifier beside scikit-learn's.

    python -m heldin_lab.bench.sklearn_speed --out out/sklearn_speed.json

10,000 rows, 50 columns, one hidden layer of 100, Adam, batches of 200, one thread. Fits of few and
of many epochs are timed and subtracted, so that what is done once does not count. The variants take
turns, so that a busy machine slows all of them; medians over the rounds are printed, wall time and
processor time.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.neural_network import MLPClassifier as Theirs
from threadpoolctl import threadpool_limits

from heldin.sklearn import MLPClassifier as Ours

ROWS, COLUMNS, NEVER = 10_000, 50, 10**6


def data() -> tuple[Any, Any]:
    """So noisy that no rule stops within the epochs that are timed."""
    generator = np.random.default_rng(0)
    X = generator.normal(size=(ROWS, COLUMNS))
    return X, (X[:, 0] + X[:, 1] * X[:, 2] + generator.normal(size=ROWS) > 0).astype(int)


VARIANTS: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "scikit-learn": (Theirs, {}),
    "scikit-learn, early_stopping=True": (Theirs, {"early_stopping": True}),
    "heldin, early_stopping=False": (Ours, {"early_stopping": False}),
    'heldin, early_stopping="evidence"': (Ours, {"early_stopping": "evidence"}),
    "heldin (default)": (Ours, {}),
}


def timed(name: str, X: Any, y: Any, epochs: int) -> tuple[float, float]:
    """Wall and processor time of a fit."""
    kind, options = VARIANTS[name]
    model = kind(max_iter=epochs, n_iter_no_change=NEVER, random_state=0, **options)
    wall, processor = time.perf_counter(), time.process_time()
    model.fit(X, y)
    found = time.perf_counter() - wall, time.process_time() - processor
    assert model.n_iter_ == epochs, f"{name} stopped after {model.n_iter_} epochs"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    X, y = data()
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in VARIANTS}
    with threadpool_limits(1):
        for name in VARIANTS:
            timed(name, X, y, 1)
        for _ in range(options.rounds):
            for name, found in seconds.items():
                few = timed(name, X, y, 1)
                many = timed(name, X, y, 1 + options.epochs)
                found.append(
                    ((many[0] - few[0]) / options.epochs, (many[1] - few[1]) / options.epochs)
                )
    results = {
        name: {
            "wall": statistics.median(wall for wall, _ in found),
            "processor": statistics.median(processor for _, processor in found),
        }
        for name, found in seconds.items()
    }
    base = results["scikit-learn"]
    print(f"{'an epoch of 50 steps':42} {'wall ms':>8} {'ratio':>6} {'cpu ms':>8} {'ratio':>6}")
    for name, times in results.items():
        cells = [
            f"{1e3 * times[kind]:8.1f} {times[kind] / base[kind]:6.2f}"
            for kind in ("wall", "processor")
        ]
        print(f"{name:42} {' '.join(cells)}")
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        about = {"machine": platform.processor() or platform.machine(), "torch": torch.__version__}
        options.out.write_text(json.dumps({"about": about, "seconds": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
