"""One table, many splits, four ways to train: the runs and the figure of `heldin demo`.

The breast-cancer table of scikit-learn: 569 biopsies, thirty measurements, benign or malignant. 100
rows are trained on; 469 only measure the test loss. The network and its settings are scikit-learn's
defaults, with minibatches of 32.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import heldin

__all__ = ["RULES", "Problem", "Run", "figure", "interval", "load", "train"]

TRAINED_ON, HELD_OUT, FOLDS, EPOCHS, PATIENCE, BATCH, HIDDEN = 100, 20, 5, 300, 10, 32, 100
RULES = {
    "heldin": "heldin.EarlyStopping",
    "split": "20 % held out",
    "folds": "five folds, then a refit",
    "none": "no stopping",
}
COLOURS = {"heldin": "tab:green", "split": "tab:red", "folds": "tab:blue", "none": "0.5"}


@dataclass(frozen=True)
class Problem:
    """Rows to train on and rows to test with; inputs have mean 0 and standard deviation 1."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor


@dataclass(frozen=True)
class Run:
    """The result of one training run.

    Attributes:
        rows: trained on, by the final model.
        epochs: of the final model's weights.
        loss: on the test rows.
        said: the loss that the rule itself expected; nan: none.
        low, high: the interval that it gave.
        seconds: of the processor, for everything.
    """

    rows: int
    epochs: float
    loss: float
    said: float
    low: float
    high: float
    seconds: float


def load(seed: int) -> Problem:
    """Return a split of the table."""
    from sklearn.datasets import load_breast_cancer
    from sklearn.model_selection import train_test_split

    x, y = load_breast_cancer(return_X_y=True)
    x, test_x, y, test_y = train_test_split(
        x, y, train_size=TRAINED_ON, random_state=seed, stratify=y
    )
    means, spreads = x.mean(0), x.std(0)

    def tensors(x: Any, y: Any) -> tuple[Tensor, Tensor]:
        return torch.tensor((x - means) / spreads).float(), torch.tensor(y)

    return Problem(*tensors(x, y), *tensors(test_x, test_y))


def train(rule: str, seed: int, epochs: int = EPOCHS) -> Run:
    """Train in one of the ways of `RULES`. The test rows decide nothing."""
    problem, loss_fn = load(seed), nn.CrossEntropyLoss()
    x, y = problem.x, problem.y
    said, low, high = math.nan, math.nan, math.nan
    start = time.process_time()
    if rule == "heldin":
        model, optimizer = _network(seed)
        stopping = heldin.EarlyStopping(model, optimizer, loss_fn, (x, y))
        stopping.fit(BATCH, epochs, generator=torch.Generator().manual_seed(seed))
        estimate = stopping.estimates["loss"]
        said, low, high = estimate.value, estimate.low, estimate.high
        best = (stopping.best_epoch or 0) + 1.0
    elif rule == "split":
        held = torch.arange(len(x)) >= len(x) - HELD_OUT
        model, best, said = _stopped(x, y, held, seed, epochs)
        x = x[~held]
    elif rule == "folds":
        parts = torch.arange(len(x)) % FOLDS
        folds = [_stopped(x, y, parts == fold, seed, epochs) for fold in range(FOLDS)]
        best = sum(epoch for _, epoch, _ in folds) / FOLDS
        said = sum(loss for *_, loss in folds) / FOLDS
        model = _plain(x, y, seed, round(best))
    else:
        model, best = _plain(x, y, seed, epochs), float(epochs)
    seconds = time.process_time() - start
    with torch.no_grad():
        loss = float(loss_fn(model(problem.test_x), problem.test_y))
    return Run(len(x), best, loss, said, low, high, seconds)


def _network(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(30, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 2))
    return model, torch.optim.Adam(model.parameters(), lr=1e-3)


def _plain(
    x: Tensor, y: Tensor, seed: int, epochs: int, stop: Callable[[nn.Module], bool] | None = None
) -> nn.Module:
    """Train in a plain loop."""
    model, optimizer = _network(seed)
    generator, loss_fn = torch.Generator().manual_seed(seed), nn.CrossEntropyLoss()
    for _ in range(epochs):
        for index in torch.randperm(len(x), generator=generator).split(BATCH):
            optimizer.zero_grad()
            loss_fn(model(x[index]), y[index]).backward()
            optimizer.step()
        if stop is not None and stop(model):
            break
    return model


def _stopped(
    x: Tensor, y: Tensor, held: Tensor, seed: int, epochs: int
) -> tuple[nn.Module, float, float]:
    """Train on the other rows until the held-out loss has not fallen for a while.

    Returns:
        The model with its best weights, the best epoch, and its held-out loss.
    """
    losses: list[float] = []
    weights: dict[str, Tensor] = {}

    def stop(model: nn.Module) -> bool:
        with torch.no_grad():
            losses.append(float(nn.functional.cross_entropy(model(x[held]), y[held])))
        if losses[-1] == min(losses):
            weights.update({name: value.clone() for name, value in model.state_dict().items()})
        return len(losses) - losses.index(min(losses)) > PATIENCE

    model = _plain(x[~held], y[~held], seed, epochs, stop)
    model.load_state_dict(weights)
    return model, losses.index(min(losses)) + 1.0, min(losses)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean, and half of a 95 % interval of it.

    >>> middle, half = interval([1.0, 2.0, 3.0])
    >>> round(middle, 2), round(half, 2)
    (2.0, 2.48)
    """
    from scipy.stats import t

    numbers = torch.tensor(values, dtype=torch.float64)
    if len(numbers) < 2:
        return float(numbers.mean()), math.nan
    error = float(numbers.std()) / math.sqrt(len(numbers))
    return float(numbers.mean()), float(t.ppf(0.975, len(numbers) - 1)) * error


def figure(runs: dict[str, list[Run]]) -> Any:
    """Draw the test losses of all runs, and what was expected against what came."""
    from matplotlib.figure import Figure

    page = Figure(figsize=(8, 3.8), layout="constrained")
    left, right = page.subplots(1, 2)
    for place, (rule, name) in enumerate(RULES.items()):
        losses = [run.loss for run in runs[rule]]
        spots = [place + 0.3 * (i / max(1, len(losses) - 1) - 0.5) for i in range(len(losses))]
        left.plot(spots, losses, "o", color=COLOURS[rule], alpha=0.35, markersize=4)
        mean = sum(losses) / len(losses)
        left.plot([place - 0.3, place + 0.3], [mean, mean], color=COLOURS[rule], linewidth=2.5)
        left.text(place, mean, f"{mean:.3f}", ha="center", va="bottom", fontsize=9)
        if rule in ("heldin", "split"):
            said = [run.said for run in runs[rule]]
            right.plot(said, losses, "o", color=COLOURS[rule], alpha=0.6, markersize=5, label=name)
    labels = ["heldin", *(name.replace(", ", ",\n") for name in list(RULES.values())[1:])]
    left.set_xticks(range(len(RULES)), labels, fontsize=8)
    left.set_ylim(bottom=0)
    left.set_ylabel("test loss")
    for run in runs["heldin"]:
        right.plot([run.low, run.high], [run.loss] * 2, color=COLOURS["heldin"], alpha=0.25)
    ticks = [0.002, 0.01, 0.05, 0.1, 0.2, 0.5, 1]
    right.plot(ticks, ticks, color="0.7", linewidth=1)
    right.set(xscale="log", yscale="log", xlim=(0.0015, 1.5), ylim=(0.05, None))
    right.set_xticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
    right.set_yticks(ticks[2:6], [f"{tick:g}" for tick in ticks[2:6]], minor=False)
    right.minorticks_off()
    right.set(xlabel="loss that it expected, with 95 % interval", ylabel="test loss")
    right.legend(fontsize=8, frameon=False)
    for ax in (left, right):
        ax.spines[["top", "right"]].set_visible(False)
    return page
