"""The picture at the top of the README, and the same as an animation.

    python docs/figures/hero.py [--out FOLDER]

It is the first split of `heldin demo`: a network on 100 rows of scikit-learn's breast-cancer table.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from heldin.lab import demo


def main(arguments: list[str] | None = None, epochs: int = demo.EPOCHS, frames: int = 36) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    out = parser.parse_args(arguments).out
    torch.set_num_threads(1)
    runs = {rule: demo.train(rule, seed=0, epochs=epochs) for rule in demo.RULES}
    demo.figure(runs).savefig(out / "hero.png", dpi=140)
    demo.animation(runs, out / "hero.gif", frames)
    for rule, run in runs.items():
        said = f", said {run.estimate:.3f}" if run.estimate is not None else ""
        print(f"{rule}: {run.rows} rows, epoch {run.kept:.0f}, test loss {run.loss:.3f}{said}")


if __name__ == "__main__":
    main()
