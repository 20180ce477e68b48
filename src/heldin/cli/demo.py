"""`heldin demo`: one real table, many splits, four ways to train.

The breast-cancer table of scikit-learn: 569 biopsies, thirty measurements, benign or malignant. 100
rows are trained on; 469 only measure the test loss. The network and its settings are scikit-learn's
defaults, with minibatches of 32.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import heldin
from heldin.errors import HeldinError, docs
from heldin.pages.live import Live

__all__ = ["RULES", "demo", "load", "train"]

SPLITS, TRAINED_ON, HELD_OUT, FOLDS = 16, 100, 20, 5
EPOCHS, PATIENCE, BATCH, HIDDEN = 300, 10, 32, 100
RULES = {
    "heldin": "heldin.EarlyStopping",
    "split": "20 % held out",
    "folds": "five folds, then a refit",
    "none": "no stopping",
}
COLOURS = {"heldin": "tab:green", "split": "tab:red", "folds": "tab:blue", "none": "0.5"}


def demo(parser: argparse.ArgumentParser) -> None:
    """Train on 100 rows of scikit-learn's breast-cancer table in four ways, and compare."""
    add = parser.add_argument
    add("--out", default="demo.png", help="the figure: .png, .svg or .pdf (default demo.png)")
    add("--splits", type=int, default=SPLITS, help=f"random splits of the rows (default {SPLITS})")
    add("--epochs", type=int, default=EPOCHS, help=f"at most, in each run (default {EPOCHS})")
    parser.set_defaults(run=run_demo)


def run_demo(options: argparse.Namespace) -> int:
    """Run the demo."""
    try:
        import matplotlib  # noqa: F401
        import scipy  # noqa: F401
        import sklearn  # noqa: F401
    except ImportError as error:
        raise HeldinError(f"{error.name} is not installed; pip install 'heldin[demo]'") from error
    for name in ("splits", "epochs"):
        if getattr(options, name) < 1:
            raise HeldinError(f"--{name}: must be at least 1, got {getattr(options, name)}")
    out = Path(options.out)
    if out.suffix not in (".png", ".svg", ".pdf"):
        raise HeldinError(f"--out: the name must end in .png, .svg or .pdf, got {options.out!r}")
    torch.set_num_threads(1)  # tiny matrices
    print(
        f"{TRAINED_ON} rows of the breast-cancer table to train on, 469 to measure the test loss "
        f"with; {options.splits} random splits.\nA network with one hidden layer, Adam, at most "
        f"{options.epochs} epochs."
    )
    start = time.monotonic()
    jobs = [(rule, seed) for seed in range(options.splits) for rule in RULES]
    runs: dict[str, list[Run]] = {rule: [] for rule in RULES}
    with Live(len(jobs)) as live:
        for number, (rule, seed) in enumerate(jobs, 1):
            run = train(rule, seed, options.epochs)
            runs[rule].append(run)
            text = f"run {number} of {len(jobs)} | {RULES[rule]} | test loss {run.loss:.3f}"
            live.show(number, text)
    print("\n" + "\n".join(_table(runs)) + "\n\n" + _message(runs))
    out.parent.mkdir(parents=True, exist_ok=True)
    _figure(runs).savefig(out, dpi=130)
    print(f"Figure: {out} ({time.monotonic() - start:.0f} s)")
    return 0


# -- runs


class Run(NamedTuple):
    """The result of one training run."""

    rows: int  # trained on, by the final model
    loss: float  # on the test rows
    said: float  # the loss that the rule itself expected; nan: none
    low: float  # ends of the interval that it gave
    high: float
    seconds: float  # of the processor, for everything


def load(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x and y of a split of the table to train on, and x and y to test with.

    Inputs have mean 0 and standard deviation 1 in the training rows.
    """
    from sklearn.datasets import load_breast_cancer
    from sklearn.model_selection import train_test_split

    x, y = load_breast_cancer(return_X_y=True)
    parts = train_test_split(x, y, train_size=TRAINED_ON, random_state=seed, stratify=y)
    means, spreads = parts[0].mean(0), parts[0].std(0)
    x, test_x = (torch.tensor((part - means) / spreads).float() for part in parts[:2])
    return x, torch.tensor(parts[2]), test_x, torch.tensor(parts[3])


def train(rule: str, seed: int, epochs: int = EPOCHS) -> Run:
    """Train in one of the ways of `RULES`. The test rows decide nothing."""
    x, y, test_x, test_y = load(seed)
    said = low = high = math.nan
    start = time.process_time()
    if rule == "heldin":
        model, optimizer = _network(seed)
        stopping = heldin.EarlyStopping(model, optimizer, nn.CrossEntropyLoss(), (x, y))
        stopping.fit(BATCH, epochs, generator=torch.Generator().manual_seed(seed))
        said, low, high = stopping.estimates["loss"]
    elif rule == "split":
        held = torch.arange(len(x)) >= len(x) - HELD_OUT
        model, _, said = _stopped(x, y, held, seed, epochs)
        x = x[~held]
    elif rule == "folds":
        parts = torch.arange(len(x)) % FOLDS
        folds = [_stopped(x, y, parts == fold, seed, epochs) for fold in range(FOLDS)]
        said = sum(loss for *_, loss in folds) / FOLDS
        model = _plain(x, y, seed, round(sum(epoch for _, epoch, _ in folds) / FOLDS))
    else:
        model = _plain(x, y, seed, epochs)
    seconds = time.process_time() - start
    with torch.no_grad():
        loss = float(nn.functional.cross_entropy(model(test_x), test_y))
    return Run(len(x), loss, said, low, high, seconds)


def _network(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(30, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 2))
    return model, torch.optim.Adam(model.parameters(), lr=1e-3)


def _plain(
    x: Tensor, y: Tensor, seed: int, epochs: int, stop: Callable[[nn.Module], bool] | None = None
) -> nn.Module:
    """Train in a plain loop."""
    model, optimizer = _network(seed)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for index in torch.randperm(len(x), generator=generator).split(BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[index]), y[index]).backward()
            optimizer.step()
        if stop is not None and stop(model):
            break
    return model


def _stopped(
    x: Tensor, y: Tensor, held: Tensor, seed: int, epochs: int
) -> tuple[nn.Module, float, float]:
    """Train on the other rows until the held-out loss has not fallen for a while.

    Return the model with its best weights, the best epoch, and its held-out loss.
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


# -- what they show


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean, and half of a 95 % interval of it."""
    from scipy.stats import t

    numbers = torch.tensor(values, dtype=torch.float64)
    if len(numbers) < 2:
        return float(numbers.mean()), math.nan
    error = float(numbers.std()) / math.sqrt(len(numbers))
    return float(numbers.mean()), float(t.ppf(0.975, len(numbers) - 1)) * error


def _table(runs: dict[str, list[Run]]) -> list[str]:
    lines = [f"{'means':<26}{'rows':>5}{'test loss':>11}{'expected':>10}{'CPU time':>10}"]
    for rule, name in RULES.items():
        means = [interval(values)[0] for values in zip(*runs[rule], strict=True)]
        rows, loss, said, *_, seconds = means
        expected = "-" if math.isnan(said) else f"{said:.3f}"
        lines.append(f"{name:<26}{rows:>5.0f}{loss:>11.3f}{expected:>10}{seconds:>8.2f} s")
    return lines


def _message(runs: dict[str, list[Run]]) -> str:
    """Return what the runs show, in words; differences are paired over the splits."""
    ours, count = runs["heldin"], len(runs["heldin"])
    sentences = []
    for rule in ("split", "folds"):
        pairs = [*zip(ours, runs[rule], strict=True)]
        change, half = interval([100 * (a.loss / b.loss - 1) for a, b in pairs])
        better = sum(a.loss < b.loss for a, b in pairs)
        ends = f"{change - half:+.0f} to {change + half:+.0f} %"
        band = "" if math.isnan(half) else f" (95 % interval {ends})"
        sentences.append(
            f"Test loss of heldin against {RULES[rule]!r}: {change:+.0f} %{band}, lower in "
            f"{better} of {count} splits."
        )
    held = sum(run.low <= run.loss <= run.high for run in ours)
    cost, split, folds = (sum(run.seconds for run in runs[r]) for r in ("heldin", "split", "folds"))
    sentences += [
        f"Its interval held the test loss in {held} of {count} splits.",
        f"It cost {cost / split:.1f} times the split's time, and {cost / folds:.1f} times that "
        "of five folds and a refit.",
        f"One table is an example; a study of many: {docs('how-good.html')}",
    ]
    return "\n".join(sentences)


def _figure(runs: dict[str, list[Run]]) -> Any:
    """Draw the test losses of all runs, and what was expected against what came."""
    from matplotlib.figure import Figure

    page = Figure(figsize=(8, 3.8), layout="constrained")
    left, right = page.subplots(1, 2)
    for place, (rule, name) in enumerate(RULES.items()):
        losses, colour = [run.loss for run in runs[rule]], COLOURS[rule]
        spots = [place + 0.3 * (i / max(1, len(losses) - 1) - 0.5) for i in range(len(losses))]
        left.plot(spots, losses, "o", color=colour, alpha=0.35, markersize=4)
        mean = sum(losses) / len(losses)
        left.plot([place - 0.3, place + 0.3], [mean, mean], color=colour, linewidth=2.5)
        left.text(place, mean, f"{mean:.3f}", ha="center", va="bottom", fontsize=9)
        if rule in ("heldin", "split"):
            said = [run.said for run in runs[rule]]
            right.plot(said, losses, "o", color=colour, alpha=0.6, markersize=5, label=name)
    labels = ["heldin", *(name.replace(", ", ",\n") for name in list(RULES.values())[1:])]
    left.set_xticks(range(len(RULES)), labels, fontsize=8)
    left.set(ylabel="test loss", ylim=(0, None))
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
