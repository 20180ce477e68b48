"""Logistic regression on breast-cancer data, with and without a validation set.

The setting of the paper's Sec. 3.3: 569 rows, 369 of them for testing only; second-order features;
gradient descent. One run holds 20 % of the 200 training rows out to know when to stop; the others
train on all of them and stop by evidence (the paper's rule) and by what `heldin.stopping("auto")`
chooses.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import PolynomialFeatures, StandardScaler
from torch import Tensor, nn

import heldin

SEEDS, STEPS, RATE = 5, 3000, 0.01
RULES = {
    "validation": "160 rows + 40 held out",
    "paper": "all 200 rows, evidence",
    "auto": "all 200 rows, auto",
}
COLOURS = {"validation": "tab:red", "paper": "tab:blue", "auto": "tab:green"}
Run = dict[str, float]


def load(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """200 rows for training, 369 for testing; 496 features with the constant, scaled."""
    x, y = load_breast_cancer(return_X_y=True)
    x, test_x, y, test_y = train_test_split(x, y, train_size=200, random_state=seed, stratify=y)
    first, second = StandardScaler(), StandardScaler()
    expand = PolynomialFeatures(2, include_bias=False)
    x = second.fit_transform(expand.fit_transform(first.fit_transform(x)))
    test_x = second.transform(expand.transform(first.transform(test_x)))
    tensors = (
        torch.tensor(a, dtype=torch.float32) for a in (x, y[:, None], test_x, test_y[:, None])
    )
    return tuple(tensors)  # type: ignore[return-value]


def train(seed: int, rule: str, watch: bool) -> tuple[Run, list[float], list[float]]:
    """Train until the rule asks to stop; the test loss is only watched, for the figure."""
    x, y, test_x, test_y = load(seed)
    held_x, held_y = x[160:], y[160:]
    if rule == "validation":
        x, y = x[:160], y[:160]
    model = nn.Linear(x.shape[1], 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    loss_fn = nn.BCEWithLogitsLoss()

    def loss_on(x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = loss_fn(model(x), y)
        return loss

    stopping: Any
    if rule == "validation":
        stopping = heldin.ValidationStopping(model, lambda: loss_on(held_x, held_y), patience=100)
    elif rule == "paper":
        stopping = heldin.EvidenceStopping.paper(model)
    else:
        stopping = heldin.stopping("auto", model, optimizer, loss_fn, (x, y))
    steps, test_losses, criteria = 0, [], []
    with stopping:
        for _ in range(STEPS):
            steps += 1
            loss_on(x, y).backward()
            if watch:
                with torch.no_grad():
                    test_losses.append(float(loss_on(test_x, test_y)))
            if rule != "auto" and stopping.step():
                break
            optimizer.step()
            optimizer.zero_grad()
            if rule == "auto" and stopping.step():
                break
            if rule == "paper":
                criteria.append(stopping.criterion)
    with torch.no_grad():
        scores = model(test_x)
        run = {
            "rows": len(x),
            "steps": steps,
            "loss": float(loss_fn(scores, test_y)),
            "accuracy": float(((scores > 0) == (test_y > 0.5)).float().mean()),
        }
    return run, test_losses, criteria


def draw(curves: dict[str, list[float]], criteria: list[float], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(6, 5), layout="constrained")
    for rule, losses in curves.items():
        colour = COLOURS[rule]
        above.plot(range(1, len(losses) + 1), losses, color=colour, label=RULES[rule])
        above.axvline(len(losses), color=colour, linewidth=3, alpha=0.3)
    above.set(ylabel="test loss", xscale="log", title="Logistic regression on breast-cancer data")
    above.legend(frameon=False)
    below.plot(range(1, len(criteria) + 1), criteria, color="tab:blue")
    below.axhline(0, color="black", linewidth=0.8)
    below.set(ylabel="criterion (stop above 0)", xlabel="step", yscale="symlog")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def main(out: str = "out/demo.png", seeds: int = SEEDS) -> None:
    torch.set_num_threads(1)  # tiny matrices
    start = time.monotonic()
    runs: dict[str, list[Run]] = {rule: [] for rule in RULES}
    curves, criteria = {}, []
    for seed in range(seeds):
        for rule in RULES:
            run, losses, values = train(seed, rule, watch=seed == 0)
            runs[rule].append(run)
            if seed == 0:
                curves[rule] = losses
                criteria = values or criteria
        print(f"\rseed {seed + 1} of {seeds}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    print(f"{'':<24}{'rows':>6}{'steps':>8}{'test loss':>12}{'accuracy':>11}{'wins':>6}")
    for rule, label in RULES.items():
        row = {key: mean(run[key] for run in runs[rule]) for key in runs[rule][0]}
        pairs = zip(runs[rule], runs["validation"], strict=True)
        wins = sum(a["loss"] < b["loss"] for a, b in pairs)
        print(
            f"{label:<24}{row['rows']:>6.0f}{row['steps']:>8.0f}{row['loss']:>12.4f}"
            f"{row['accuracy']:>11.4f}{'' if rule == 'validation' else wins:>6}"
        )
    print(f"means over {seeds} splits; wins: a lower test loss than with rows held out")
    draw(curves, criteria, Path(out))
    print(f"figure of the first split: {out} ({time.monotonic() - start:.0f} s)")


if __name__ == "__main__":
    main(*sys.argv[1:2])
