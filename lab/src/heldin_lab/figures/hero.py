"""Curves of the training, test and estimated loss, as a picture and as an animation.

    python -m heldin_lab.figures.hero [--out FOLDER]

A network on 100 rows of scikit-learn's breast-cancer table: the first split of `heldin demo`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import heldin
from heldin.cli.demo_runs import BATCH, EPOCHS, HELD_OUT, HIDDEN, load
from heldin_lab.figures import IMAGES

RULES = ("auto", "validation", "evidence", "none")
COLOURS = {"auto": "tab:green", "validation": "tab:red", "evidence": "tab:purple"}


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
    history: Any = None


def main(arguments: list[str] | None = None, epochs: int = EPOCHS, frames: int = 36) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=IMAGES)
    out = parser.parse_args(arguments).out
    torch.set_num_threads(1)
    runs = {rule: train(rule, seed=0, epochs=epochs) for rule in RULES}
    figure(runs).savefig(out / "hero.png", dpi=140)
    animation(runs, out / "hero.gif", frames)
    for rule, run in runs.items():
        said = f", said {run.estimate:.3f}" if run.estimate is not None else ""
        print(f"{rule}: {run.rows} rows, epoch {run.kept:.0f}, test loss {run.loss:.3f}{said}")


def animation(runs: dict[str, Run], path: Path, frames: int = 36) -> None:
    """Write the picture as it comes about, as a GIF that shows the end for a while."""
    from matplotlib.animation import PillowWriter
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    page = Figure(figsize=(7.2, 3.8), layout="constrained")
    FigureCanvasAgg(page)
    ax = page.add_subplot()
    writer = PillowWriter(fps=8)
    last = len(runs["none"].test) - 1
    with writer.saving(page, str(path), dpi=80):
        # The first frame is the whole picture, for viewers that do not animate.
        for upto in [last, *_epochs(last, frames), *[last] * 16]:
            ax.clear()
            draw(ax, runs, upto)
            writer.grab_frame()


def _epochs(last: int, frames: int) -> Iterator[float]:
    """Yield epochs from 3 to the last, evenly spaced on a logarithmic axis."""
    for i in range(frames):
        yield 3 * (last / 3) ** (i / (frames - 1))


def train(rule: str, seed: int, epochs: int = EPOCHS) -> Run:
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
        stopping = heldin.EarlyStopping(model, optimizer, loss_fn, (x, y))
    elif rule == "evidence":
        window = heldin.rules.Evidence(window=run.steps_of_epoch)
        stopping = heldin.EarlyStopping(model, optimizer, rule=window)
    elif rule == "validation":
        rows = (problem.x[held], problem.y[held])
        stopping = heldin.EarlyStopping(
            model, optimizer, loss_fn, rule=heldin.rules.Validation(data=rows), patience=10
        )
    generator = torch.Generator().manual_seed(seed)
    note()
    for _ in range(epochs) if stopping is None else stopping.epochs(epochs):
        for index in torch.randperm(len(x), generator=generator).split(BATCH):
            if rule == "auto":
                stopping.note_batch((x[index], y[index]), index)
            optimizer.zero_grad()
            loss_fn(model(x[index]), y[index]).backward()
            optimizer.step()
            if rule in ("auto", "evidence") and stopping.should_stop:
                break
        run.epochs += 1
        note()
    run.kept = float(run.epochs)
    if rule in ("auto", "validation"):
        run.kept = stopping.best_step / (run.steps_of_epoch if rule == "auto" else 1)
        run.estimate = stopping.estimates["loss"].value
    if stopping is not None:
        run.history = stopping.history
    run.loss = loss_on(problem.test_x, problem.test_y)
    return run


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
    """Return the picture as a matplotlib figure."""
    from matplotlib.figure import Figure

    page = Figure(figsize=(8, 4.2), layout="constrained")
    draw(page.add_subplot(), runs)
    return page


if __name__ == "__main__":
    main()
