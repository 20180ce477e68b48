"""`heldin demo`: one real table, many splits, with and without a validation set."""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Any

from heldin.errors import HeldinError, docs

__all__ = ["demo"]

SPLITS, EPOCHS = 16, 300


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

        from . import demo_runs as story
    except ImportError as error:
        raise HeldinError(f"{error.name} is not installed; pip install 'heldin[demo]'") from error
    import torch

    from heldin.pages.live import Live

    if options.splits < 1:
        raise HeldinError(f"--splits: must be at least 1, got {options.splits}")
    if options.epochs < 1:
        raise HeldinError(f"--epochs: must be at least 1, got {options.epochs}")
    out = Path(options.out)
    if out.suffix not in (".png", ".svg", ".pdf"):
        raise HeldinError(f"--out: the name must end in .png, .svg or .pdf, got {options.out!r}")
    torch.set_num_threads(1)  # tiny matrices
    print(
        f"{story.TRAINED_ON} rows of the breast-cancer table to train on, 469 to measure the test "
        f"loss with; {options.splits} random splits.\nA network with one hidden layer, Adam, at "
        f"most {options.epochs} epochs."
    )
    start = time.monotonic()
    jobs = [(rule, seed) for seed in range(options.splits) for rule in story.RULES]
    runs: dict[str, list[Any]] = {rule: [] for rule in story.RULES}
    with Live(len(jobs)) as live:
        for number, (rule, seed) in enumerate(jobs, 1):
            runs[rule].append(story.train(rule, seed, options.epochs))
            loss = runs[rule][-1].loss
            text = f"run {number} of {len(jobs)} | {story.RULES[rule]} | test loss {loss:.3f}"
            live.show(number, text)
    print("\n" + "\n".join(_table(runs)) + "\n\n" + _message(runs))
    out.parent.mkdir(parents=True, exist_ok=True)
    story.figure(runs).savefig(out, dpi=130)
    print(f"Figure: {out} ({time.monotonic() - start:.0f} s)")
    return 0


def _table(runs: dict[str, list[Any]]) -> list[str]:
    from . import demo_runs as story

    lines = [f"{'means':<26}{'rows':>5}{'test loss':>11}{'expected':>10}{'CPU time':>10}"]
    for rule, name in story.RULES.items():
        loss, said, seconds = (
            story.interval([getattr(run, field) for run in runs[rule]])[0]
            for field in ("loss", "said", "seconds")
        )
        expected = "-" if math.isnan(said) else f"{said:.3f}"
        rows = runs[rule][0].rows
        lines.append(f"{name:<26}{rows:>5}{loss:>11.3f}{expected:>10}{seconds:>8.2f} s")
    return lines


def _message(runs: dict[str, list[Any]]) -> str:
    """Return what the runs show, in words; differences are paired over the splits."""
    from . import demo_runs as story

    ours, count = runs["heldin"], len(runs["heldin"])
    sentences = []
    for rule in ("split", "folds"):
        pairs = [*zip(ours, runs[rule], strict=True)]
        change, half = story.interval([100 * (a.loss / b.loss - 1) for a, b in pairs])
        better = sum(a.loss < b.loss for a, b in pairs)
        ends = f"{change - half:+.0f} to {change + half:+.0f} %"
        band = "" if math.isnan(half) else f" (95 % interval {ends})"
        sentences.append(
            f"Test loss of heldin against {story.RULES[rule]!r}: {change:+.0f} %{band}, lower in "
            f"{better} of {count} splits."
        )
    held = sum(run.low <= run.loss <= run.high for run in ours)
    cost, split, folds = (sum(run.seconds for run in runs[r]) for r in ("heldin", "split", "folds"))
    sentences.append(f"Its interval held the test loss in {held} of {count} splits.")
    sentences.append(
        f"It cost {cost / split:.1f} times the split's time, and {cost / folds:.1f} times that of "
        "five folds and a refit."
    )
    sentences.append(f"One table is an example; a study of many: {docs('how-good.html')}")
    return "\n".join(sentences)
