"""Do the sampled and the exact criterion say the same, over whole training runs?

Several stopping rules watch one run, so that every difference between them is the estimator's. The
yardstick is what the exact criterion does by itself: its scatter from batch to batch, and how far
its stop moves when only the order of the batches is another.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heldin_lab.rules import Evidence, EvidenceStopping

__all__ = ["BUDGETS", "MODELS", "Agreement", "agreement"]

BUDGETS = (256, 1024, 4096, 16384)
ROWS, BATCH, RATE = 200, 32, 0.2


class _Rows(nn.Module):
    """A transformer that reads an image row by row."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.encoder(self.embed(x[:, 0])).mean(1))
        return scores


def _mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 400), nn.ReLU(), nn.Linear(400, 300), nn.ReLU(),
        nn.Linear(300, 10),
    )  # fmt: skip


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64 * 16, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": _mlp,
    "cnn": _cnn,
    "transformer": _Rows,
    "deep transformer": lambda: _Rows(4),  # 52 parameters, looked at in turns
}


@dataclass(frozen=True)
class Agreement:
    """One run watched with one budget, beside the exact criterion.

    Attributes:
        difference: root mean square of sampled minus exact, before smoothing.
        noise: scatter of the exact value from step to step, before smoothing; from the median,
            since a batch that lacks a class gives a single huge value.
        exact_stop, sampled_stop: where each stopped; `steps` if it did not.
        order_spread: how far the exact stop is from that with another order of the batches.
    """

    model: str
    seed: int
    budget: int
    difference: float
    noise: float
    exact_stop: int
    sampled_stop: int
    order_spread: int


def _train(
    model: str, seed: int, order: int, steps: int, budgets: Sequence[int]
) -> tuple[EvidenceStopping, list[EvidenceStopping]]:
    """One run on digits; nothing stops it, so that all criteria see all of it."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    torch.manual_seed(seed)
    chosen = torch.randperm(len(labels))[:ROWS]
    x = torch.tensor(images, dtype=torch.float32)[chosen].reshape(-1, 1, 8, 8) / 8 - 1
    y = torch.tensor(labels)[chosen]
    network = MODELS[model]()
    optimizer = torch.optim.SGD(network.parameters(), lr=RATE)
    exact = EvidenceStopping(network, Evidence(estimator="exact"), history=steps + 1)
    sampled = [
        EvidenceStopping(network, Evidence(coordinates=budget), seed=seed, history=steps + 1)
        for budget in budgets
    ]
    batches = torch.Generator().manual_seed(order)
    for _ in range(steps):
        rows = torch.randperm(ROWS, generator=batches)[:BATCH]
        F.cross_entropy(network(x[rows]), y[rows]).backward()
        for rule in (exact, *sampled):
            rule.step()
        optimizer.step()
        optimizer.zero_grad()
    for rule in (exact, *sampled):
        rule.close()
    return exact, sampled


def agreement(
    out: str | Path,
    *,
    models: Sequence[str] = tuple(MODELS),
    seeds: int = 5,
    steps: int = 1000,
    budgets: Sequence[int] = BUDGETS,
    progress: Callable[[str], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """Train, compare, and write `agreement.csv`, `agreement.md` and a figure into a folder.

    Returns:
        one line per model and budget.
    """
    rows: list[Agreement] = []
    drawn: dict[str, tuple[EvidenceStopping, list[EvidenceStopping]]] = {}
    for model in models:
        for seed in range(seeds):
            progress(f"{model}: seed {seed + 1} of {seeds}")
            exact, sampled = _train(model, seed, 0, steps, budgets)
            other, _ = _train(model, seed, 1, steps, ())
            drawn.setdefault(model, (exact, sampled))
            raw = [record.raw for record in exact.history]
            jumps = [abs(b - a) for a, b in pairwise(raw)]
            stop = exact.stopped_step or steps
            for budget, rule in zip(budgets, sampled, strict=True):
                gaps = [(r.raw - value) ** 2 for r, value in zip(rule.history, raw, strict=True)]
                rows.append(
                    Agreement(
                        model,
                        seed,
                        budget,
                        difference=math.sqrt(statistics.fmean(gaps)),
                        noise=1.05 * statistics.median(jumps),  # of one value, if they are normal
                        exact_stop=stop,
                        sampled_stop=rule.stopped_step or steps,
                        order_spread=abs((other.stopped_step or steps) - stop),
                    )
                )
    lines = [
        _summary([r for r in rows if r.model == model and r.budget == budget])
        for model in models
        for budget in budgets
    ]
    _write(Path(out), rows, lines)
    _draw(Path(out), drawn, budgets)
    return lines


def _summary(rows: Sequence[Agreement]) -> dict[str, Any]:
    return {
        "model": rows[0].model,
        "budget": rows[0].budget,
        "difference": statistics.median(r.difference for r in rows),
        "noise": statistics.median(r.noise for r in rows),
        "stop": statistics.median(r.exact_stop for r in rows),
        "moved": statistics.median(abs(r.sampled_stop - r.exact_stop) for r in rows),
        "moved_most": max(abs(r.sampled_stop - r.exact_stop) for r in rows),
        "order_moves": statistics.median(r.order_spread for r in rows),
        "order_moves_most": max(r.order_spread for r in rows),
    }


def _write(out: Path, rows: Sequence[Agreement], lines: Sequence[dict[str, Any]]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    with open(out / "agreement.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(asdict(rows[0])), lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
    (out / "agreement.md").write_text(table(lines), encoding="utf-8")


def table(lines: Sequence[dict[str, Any]]) -> str:
    """The summary in Markdown."""
    text = (
        "| model | budget | sampled - exact, rms | batch noise | exact stop | stop moved by "
        "sampling (most) | by another order of batches (most) |\n" + "|---" * 7 + "|\n"
    )
    for line in lines:
        text += (
            f"| {line['model']} | {line['budget']} | {line['difference']:.3f} | "
            f"{line['noise']:.3f} | {line['stop']:.0f} | {line['moved']:.0f} "
            f"({line['moved_most']}) | {line['order_moves']:.0f} ({line['order_moves_most']}) |\n"
        )
    return text


def _draw(
    out: Path,
    drawn: dict[str, tuple[EvidenceStopping, list[EvidenceStopping]]],
    budgets: Sequence[int],
) -> None:
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1, len(drawn), figsize=(3.6 * len(drawn), 3), layout="constrained", squeeze=False
    )
    for axis, (name, (exact, sampled)) in zip(axes[0], drawn.items(), strict=True):
        for budget, rule in zip(budgets, sampled, strict=True):
            values = [record.criterion for record in rule.history]
            axis.plot(values, linewidth=0.8, label=f"sampled, {budget}")
        values = [record.criterion for record in exact.history]
        axis.plot(values, color="black", linewidth=1.2, label="exact")
        axis.axhline(0, color="gray", linewidth=0.8)
        axis.set(title=name, xlabel="step", ylabel="criterion, smoothed", ylim=(-3, 1))
    axes[0][0].legend(frameon=False, fontsize=7)
    figure.savefig(out / "agreement.png", dpi=110)
    plt.close(figure)
