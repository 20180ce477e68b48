"""Compare folds with and without a temperature, and a validation split, on test rows.

    python -m heldin_lab.study.calibrated --out docs/results/calibrated.json

Every run trains one small network on n rows of a table of scikit-learn, three times: with five
folds, with five folds and a temperature (both by `heldin.EarlyStopping.fit`), and with a fifth of
the rows as a validation set, patience and a temperature fitted on that fifth. Constants are those
of the library; nothing is chosen here. Runs that are in the output already are not repeated.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from sklearn import datasets
from torch import Tensor, nn
from torch.nn import functional as F

import heldin
from heldin.crossval.temperature import fit_temperature

__all__ = ["main"]

TABLES = ("breast_cancer", "digits", "iris", "wine")
NOISE = (0.0, 0.2)  # share of labels that are drawn anew
RATE, HIDDEN, BATCH, MAX_EPOCHS, PATIENCE = 0.01, 32, 16, 400, 30
FEWEST = 40  # test rows


def table(name: str) -> tuple[Tensor, Tensor]:
    """Return standardised inputs and classes."""
    x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
    x = torch.tensor(x, dtype=torch.float32)
    return (x - x.mean(0)) / x.std(0).clamp(min=1e-6), torch.tensor(y)


def runs() -> Iterator[dict[str, Any]]:
    """Yield the settings of all runs."""
    for seed in range(5):
        for name in TABLES:
            for n in (50, 100, 200):
                for noise in NOISE:
                    yield {"table": name, "n": n, "noise": noise, "seed": seed}


def values(model: nn.Module, x: Tensor, y: Tensor, temperature: float = 1.0) -> dict[str, float]:
    """Return log loss and accuracy on test rows."""
    model.eval()
    with torch.no_grad():
        logits = model(x) / temperature
    return {
        "loss": float(F.cross_entropy(logits, y)),
        "accuracy": float((logits.argmax(1) == y).float().mean()),
    }


def one_run(table_name: str, n: int, noise: float, seed: int) -> dict[str, Any] | None:
    """Train the three models; None if the table has too few rows."""
    x, y = table(table_name)
    generator = torch.Generator().manual_seed(1000 + seed)
    order = torch.randperm(len(x), generator=generator)
    if len(x) < n + FEWEST:
        return None
    x, y = x[order], y[order]
    clean, classes = y.clone(), int(y.max()) + 1
    wrong = torch.rand(len(y), generator=generator) < noise
    y = torch.where(wrong, torch.randint(classes, (len(y),), generator=generator), y)
    train, test = slice(0, n), slice(n, None)

    def network() -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(x.shape[1], HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, classes))

    results: dict[str, Any] = {}
    for name, temperature in (("folds", False), ("folds, temperature", "auto")):
        model = network()
        stopping = heldin.EarlyStopping(
            model,
            torch.optim.Adam(model.parameters(), lr=RATE),
            F.cross_entropy,
            (x[train], y[train]),
            rule="folds",
            temperature=temperature,
            seed=seed,
        )
        shuffle = torch.Generator().manual_seed(seed)
        stopping.fit(batch_size=BATCH, max_epochs=MAX_EPOCHS, generator=shuffle)
        interval = stopping.estimates["loss"]
        results[name] = values(model, x[test], y[test]) | {
            "estimate": interval.value,
            "low": interval.low,
            "high": interval.high,
            "temperature": stopping.temperature,
        }
    results["split, temperature"] = split(network(), x[train], y[train], x[test], y[test], seed)
    results["labels"] = float((clean[test] == y[test]).float().mean())
    return results


def split(
    model: nn.Module, x: Tensor, y: Tensor, x_test: Tensor, y_test: Tensor, seed: int
) -> dict[str, Any]:
    """Train on four fifths with patience on the last fifth; then fit a temperature there."""
    held = len(x) // 5
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    best, kept, since = math.inf, copy.deepcopy(model.state_dict()), 0
    for _ in range(MAX_EPOCHS):
        model.train()
        for index in (held + torch.randperm(len(x) - held, generator=generator)).split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(model(x[index]), y[index]).backward()
            optimizer.step()
        loss = values(model, x[:held], y[:held])["loss"]
        since += 1
        if loss < best:
            best, kept, since = loss, copy.deepcopy(model.state_dict()), 0
        if since >= PATIENCE:
            break
    model.load_state_dict(kept)
    with torch.no_grad():
        temperature = fit_temperature(model(x[:held]), y[:held])
    plain = values(model, x_test, y_test)
    return values(model, x_test, y_test, temperature) | {
        "plain loss": plain["loss"],
        "temperature": temperature,
    }


def summary(results: dict[str, Any]) -> str:
    """Return a table of geometric means of loss ratios to the plain split, and of accuracies."""
    rows = [each for each in results.values() if each is not None]
    names = ("folds", "folds, temperature", "split, temperature")
    lines = [f"{len(rows)} runs", f"{'':22} loss / plain split   accuracy   interval holds loss"]
    for name in names:
        ratio = [math.log(r[name]["loss"] / r["split, temperature"]["plain loss"]) for r in rows]
        accuracy = sum(r[name]["accuracy"] for r in rows) / len(rows)
        held = [
            r[name]["low"] <= r[name]["loss"] <= r[name]["high"] for r in rows if "low" in r[name]
        ]
        shown = f"{sum(held) / len(held):.2f}" if held else ""
        mean = math.exp(sum(ratio) / len(ratio))
        middle = math.exp(median(ratio))
        lines.append(f"{name:22} {mean:.3f} (median {middle:.3f})   {accuracy:.3f}   {shown}")
    better = [
        r["folds, temperature"]["loss"] < r["folds"]["loss"]
        for r in rows
        if r["folds, temperature"]["loss"] != r["folds"]["loss"]
    ]
    lines.append(
        f"temperature lowers the loss in {sum(better)} of {len(better)} runs that it moves"
    )
    return "\n".join(lines)


def main() -> None:
    """Run what is missing, write the results, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--most", type=int, default=10**6, help="runs to add")
    options = parser.parse_args()
    results = json.loads(options.out.read_text()) if options.out.exists() else {}
    added = 0
    for setting in runs():
        key = "{table} n={n} noise={noise} seed={seed}".format(**setting)
        if key in results or added >= options.most:
            continue
        results[key] = one_run(setting["table"], setting["n"], setting["noise"], setting["seed"])
        added += 1
        options.out.write_text(json.dumps(results, indent=1))
        print(key, flush=True)
    print(summary(results))


if __name__ == "__main__":
    main()
