"""What shadows of any model cost in a loop of one's own, as multiples of training the model alone.

    python -m heldin_lab.bench.shadows --out shadows.json

Whole runs are timed, checks and restored weights included, in rounds that alternate between the
variants; the processor's time with one thread. Given are the median over rounds of the ratio to the
plain run of the same round, and the share of the time that went into checks.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from heldin_lab.rules import FoldStopping


class Text(nn.Module):
    """A small transformer on word numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(500, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.last = nn.Linear(64, 4)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.last(self.encoder(self.words(ids)).mean(1))
        return logits


def network(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def images() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(512, 10),
    )


@dataclass(frozen=True)
class Setting:
    model: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor]
    classes: int
    rows: int
    batch: int
    epochs: int


SETTINGS = {
    "20-64-64-3, 200 rows": Setting(
        lambda: network(20, 64, 64, 3), lambda n: torch.randn(n, 20), 3, 200, 32, 100
    ),
    "784-256-256-10, 2,000 rows": Setting(
        lambda: network(784, 256, 256, 10), lambda n: torch.randn(n, 784), 10, 2000, 128, 10
    ),
    "CNN, 500 rows": Setting(images, lambda n: torch.randn(n, 1, 16, 16), 10, 500, 32, 8),
    "transformer, 500 rows": Setting(Text, lambda n: torch.randint(500, (n, 24)), 4, 500, 32, 8),
    "20-64-3, 100,000 rows": Setting(
        lambda: network(20, 64, 3), lambda n: torch.randn(n, 20), 3, 100_000, 256, 2
    ),
}


def batch_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def general(shadows: int) -> Callable[..., Any]:
    return lambda model, optimizer, loader: FoldStopping(
        model, optimizer, data=loader, batch_loss=batch_loss, shadows=shadows, patience=None
    )


def stacked(shadows: int) -> Callable[..., Any]:
    return lambda model, optimizer, loader: FoldStopping(
        model, optimizer, F.cross_entropy, loader, shadows=shadows, patience=None
    )


WAYS: dict[str, Callable[..., Any] | None] = {
    "alone": None,
    "one shadow, batch_loss": general(1),
    "two shadows, batch_loss": general(2),
    "one shadow, loss_fn": stacked(1),
    "five folds, loss_fn": stacked(5),
}


def run(setting: Setting, way: Callable[..., Any] | None) -> tuple[float, float, int]:
    """Seconds of a whole run, seconds of them in checks, number of checks."""
    torch.manual_seed(0)
    x = setting.inputs(setting.rows)
    y = torch.randint(setting.classes, (setting.rows,))
    loader = DataLoader(TensorDataset(x, y), batch_size=setting.batch, shuffle=True)
    model = setting.model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    start, checks = time.process_time(), 0.0
    stopping = way(model, optimizer, loader) if way else None
    if stopping is not None:
        plain = stopping._check

        def timed() -> None:
            nonlocal checks
            before = time.process_time()
            plain()
            checks += time.process_time() - before

        stopping._check = timed
    for _ in range(setting.epochs):
        for batch in loader:
            batch_loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            if stopping is not None:
                stopping.step()
    seconds = time.process_time() - start
    if stopping is None:
        return seconds, 0.0, 0
    del stopping._check
    stopping.close()
    return seconds, checks, len(stopping.history)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="settings whose name contains this")
    parser.add_argument("--out", help="write the numbers as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    for name, setting in SETTINGS.items():
        if options.only not in name:
            continue
        for make in WAYS.values():
            run(replace(setting, epochs=1, rows=min(setting.rows, 500)), make)  # imports, caches
        found: dict[str, list[tuple[float, float, int]]] = {way: [] for way in WAYS}
        for _ in range(options.rounds):
            for way, make in WAYS.items():
                found[way].append(run(setting, make))
        for way, values in found.items():
            pairs = zip(values, found["alone"], strict=True)
            ratio = statistics.median(own[0] / alone[0] for own, alone in pairs)
            share = statistics.median(own[1] / own[0] for own in values)
            results.append(
                {"network": name, "way": way, "times": round(ratio, 2), "checks": round(share, 3)}
            )
            print(
                f"{name:28} {way:24} {ratio:5.2f} x   checks {share:6.1%} ({values[0][2]})",
                flush=True,
            )
    if options.out:
        machine = {"torch": torch.__version__, "machine": platform.machine(), "threads": 1}
        with open(options.out, "w", encoding="utf-8") as file:
            json.dump({"machine": machine, "results": results}, file, indent=1)


if __name__ == "__main__":
    main()
