"""One table, many splits, four ways to stop: the runs and the figure of `heldin demo`.

The breast-cancer table of scikit-learn: 569 biopsies, thirty measurements, benign or malignant. 100
rows are trained on; 469 only measure the test loss. The network and its settings are scikit-learn's
defaults, with minibatches of 32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import heldin

__all__ = ["RULES", "Problem", "Run", "draw", "figure", "interval", "load", "train"]

TRAINED_ON, HELD_OUT, EPOCHS, BATCH, HIDDEN = 100, 20, 300, 32, 100
RULES = {
    "auto": 'heldin.stopping("auto")',
    "validation": "20 % held out, patience 10",
    "evidence": "heldin.EvidenceStopping",
    "none": f"no stop, {EPOCHS} epochs",
}
COLOURS = {"auto": "tab:green", "validation": "tab:red", "evidence": "tab:purple"}

Tell = Callable[[int, str], None]  # epoch, what the rule says


@dataclass(frozen=True)
class Problem:
    """Rows to train on and rows to test with; inputs have mean 0 and spread 1."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor


@dataclass
class Run:
    """How one training run went; lists have a value before the first epoch and after each."""

    rows: int
    steps_of_epoch: int
    training: list[float] = field(default_factory=list)
    test: list[float] = field(default_factory=list)
    epochs: int = 0  # until the rule asked to stop
    kept: float = math.nan  # the epoch whose weights were kept
    loss: float = math.nan  # test loss of the weights that were kept
    estimate: float | None = None
    standard_error: float | None = None
    history: Any = None


def load(seed: int) -> Problem:
    """A split of the table."""
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


def train(rule: str, seed: int, epochs: int = EPOCHS, tell: Tell | None = None) -> Run:
    """Train until the rule asks to stop. The test loss is watched, but decides nothing."""
    problem, loss_fn = load(seed), nn.CrossEntropyLoss()
    x, y = problem.x, problem.y
    held = slice(len(x) - HELD_OUT, len(x))
    if rule == "validation":
        x, y = x[: held.start], y[: held.start]
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(x.shape[1], HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    run = Run(len(x), -(-len(x) // BATCH))

    def loss_on(x: Tensor, y: Tensor) -> float:
        with torch.no_grad():
            return float(loss_fn(model(x), y))

    def note() -> None:
        run.training.append(loss_on(x, y))
        run.test.append(loss_on(problem.test_x, problem.test_y))

    stopping: Any = None
    if rule == "auto":
        stopping = heldin.stopping("auto", model, optimizer, loss_fn, (x, y))
    elif rule == "evidence":
        stopping = heldin.EvidenceStopping(model, window=run.steps_of_epoch)
    elif rule == "validation":
        stopping = heldin.ValidationStopping(
            model, lambda: loss_on(problem.x[held], problem.y[held]), patience=10
        )
    generator = torch.Generator().manual_seed(seed)
    note()
    stop = False
    while run.epochs < epochs and not stop:
        for index in torch.randperm(len(x), generator=generator).split(BATCH):
            optimizer.zero_grad()
            loss_fn(model(x[index]), y[index]).backward()
            if rule == "evidence" and stopping.step():
                stop = True
                break
            optimizer.step()
            if rule == "auto" and stopping.step(indices=index):
                stop = True
                break
        run.epochs += 1
        note()
        stop = stop or (rule == "validation" and stopping.step())
        if tell is not None:
            now = f"test loss {run.test[-1]:.3f}"
            tell(run.epochs, f"no rule: {now}" if stopping is None else stopping.reason)
    run.kept = run.epochs
    if rule in ("auto", "validation"):
        stopping.restore()
        run.kept = stopping.best_step / (run.steps_of_epoch if rule == "auto" else 1)
    if rule == "auto":
        run.estimate, run.standard_error = stopping.estimate, stopping.standard_error
    elif rule == "validation":
        run.estimate = stopping.best_loss
    if stopping is not None:
        run.history = stopping.history
        stopping.close()
    run.loss = loss_on(problem.test_x, problem.test_y)
    return run


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half of a 95 % interval of it.

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


# -- the picture


def draw(ax: Any, runs: dict[str, Run], upto: float = math.inf, words: bool = True) -> None:
    """All curves of one split, up to an epoch.

    Args:
        ax: matplotlib axes.
        runs: by the names in `RULES`, "none" included: its curves are drawn.
        upto: the last epoch to draw.
        words: also label what there is.
    """
    full, auto = runs["none"], runs["auto"]
    epochs = [e for e in range(len(full.test)) if e <= upto]
    ax.plot(epochs, full.training[: len(epochs)], color="0.55", linestyle="--", linewidth=1.2)
    ax.plot(epochs, full.test[: len(epochs)], color="black", linewidth=1.8)
    checks = [r for r in auto.history if r.step / auto.steps_of_epoch <= upto]
    at = [r.step / auto.steps_of_epoch for r in checks]
    low = [max(0.0, r.estimate - 2 * r.standard_error) for r in checks]
    high = [r.estimate + 2 * r.standard_error for r in checks]
    ax.fill_between(at, low, high, color="tab:green", alpha=0.18, linewidth=0)
    ax.plot(at, [r.estimate for r in checks], color="tab:green", linewidth=1.8)
    for rule, colour in COLOURS.items():
        run = runs[rule]
        if run.kept <= upto:
            ax.plot(
                [run.kept], [run.loss], "o", color=colour, markersize=8, markeredgecolor="white"
            )
            ax.axvline(run.kept, color=colour, linewidth=1, alpha=0.5, ymax=0.72)
    ax.set_xscale("log")
    ax.set_xlim(3, len(full.test) - 1)
    ax.set_xticks([3, 5, 10, 20, 50, 100, 200, 300])
    ax.set_xticklabels(["3", "5", "10", "20", "50", "100", "200", "300"])
    ax.minorticks_off()
    ax.set_ylim(0, 0.36)
    ax.set_xlabel("epoch")
    ax.set_ylabel("log loss")
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    if words:
        _label(ax, runs)


def _label(ax: Any, runs: dict[str, Run]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    auto, split, evidence = (runs[name] for name in ("auto", "validation", "evidence"))
    handles: list[Any] = [
        Line2D([], [], color="0.55", linestyle="--", label="training loss"),
        Line2D([], [], color="black", label="test loss (469 rows nobody trained on)"),
        Line2D([], [], color="tab:green", label="heldin's estimate of it"),
        Patch(color="tab:green", alpha=0.18, label="± 2 standard errors"),
    ]
    for rule, text in (
        ("auto", f"auto, all {auto.rows} rows: test loss {auto.loss:.3f}"),
        ("validation", f"20 % split, {split.rows} rows: {split.loss:.3f}"),
        ("evidence", f"evidence, all {evidence.rows} rows: {evidence.loss:.3f}"),
    ):
        handles.append(Line2D([], [], color=COLOURS[rule], marker="o", linewidth=1, label=text))
    ax.legend(handles=handles, fontsize=8, frameon=False, loc="upper right", ncols=2)


def figure(runs: dict[str, Run]) -> Any:
    """The picture as a matplotlib figure."""
    from matplotlib.figure import Figure

    page = Figure(figsize=(8, 4.2), layout="constrained")
    draw(page.add_subplot(), runs)
    return page
