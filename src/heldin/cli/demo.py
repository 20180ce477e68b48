"""`heldin demo`: one real table, many splits, with and without a validation set."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from heldin.errors import HeldinError

__all__ = ["demo"]

SPLITS, EPOCHS = 10, 300
COMPARED = ("auto", "validation", "evidence")
SHORT = {"auto": "auto", "validation": "20 % split", "evidence": "evidence", "none": "no stop"}


def demo(parser: argparse.ArgumentParser) -> None:
    """Train on 100 rows of scikit-learn's breast-cancer table, stop in three ways, compare."""
    parser.add_argument("--out", default="demo.png", help="the figure (.png, .svg or .pdf)")
    parser.add_argument(
        "--splits",
        type=int,
        default=SPLITS,
        help=f"into training and test rows (default {SPLITS})",
    )
    parser.add_argument(
        "--epochs", type=int, default=EPOCHS, help=f"at most, in each run (default {EPOCHS})"
    )
    parser.set_defaults(run=run_demo)


def run_demo(options: argparse.Namespace) -> int:
    """The command."""
    try:
        import matplotlib  # noqa: F401
        import scipy  # noqa: F401
        import sklearn  # noqa: F401
        from rich.console import Console

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
    console = Console()
    console.print(
        f"{story.TRAINED_ON} rows of the breast-cancer table to train on, 469 to measure the test "
        "loss with.\nThree ways to know when to stop; a network with one hidden layer; Adam.\n",
        highlight=False,
    )
    start = time.monotonic()
    jobs = [("none", 0), *((rule, seed) for seed in range(options.splits) for rule in COMPARED)]
    runs: dict[str, list[Any]] = {rule: [] for rule in story.RULES}
    with Live(len(jobs), "run") as live:
        for number, (rule, seed) in enumerate(jobs, 1):

            def tell(epoch: int, status: str, place: int = number - 1, rule: str = rule) -> None:
                live.show(place, f"{SHORT[rule]}, epoch {epoch}: {status.partition(': ')[2]}")

            runs[rule].append(story.train(rule, seed, options.epochs, tell))
            live.show(number, f"{SHORT[rule]}: test loss {runs[rule][-1].loss:.3f}")
    console.print(_table(runs, options.splits))
    out.parent.mkdir(parents=True, exist_ok=True)
    first = {rule: of_rule[0] for rule, of_rule in runs.items()}
    story.figure(first).savefig(out, dpi=130)
    spent = time.monotonic() - start
    console.print(f"Figure of the first split: {out} ({spent:.0f} s)", highlight=False)
    return 0


def _table(runs: dict[str, list[Any]], splits: int) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from . import demo_runs as story

    plural = "" if splits == 1 else "s"
    table = Table(
        title=f"Means over {splits} split{plural} with their 95 % interval",
        title_justify="left",
        box=SIMPLE_HEAD,
        caption="said: what the rule itself expected; wins: a lower test loss than with the split",
        caption_justify="left",
    )
    table.add_column("rule", no_wrap=True)
    for name in ("rows", "epochs", "test loss", "said", "wins"):
        table.add_column(name, justify="right", no_wrap=True)
    split = runs["validation"]
    for rule in COMPARED:
        found = runs[rule]
        middle, half = story.interval([run.loss for run in found])
        said = "-"
        if rule != "evidence":
            said = f"{story.interval([run.estimate for run in found])[0]:.3f}"
        better = sum(a.loss < b.loss for a, b in zip(found, split, strict=True))
        table.add_row(
            story.RULES[rule],
            str(found[0].rows),
            f"{sum(run.epochs for run in found) / len(found):.0f}",
            f"{middle:.3f}" + (f" ± {half:.3f}" if splits > 1 else ""),
            said,
            "" if rule == "validation" else f"{better} of {splits}",
        )
    return table
