"""The picture at the top of the README, and the same as an animation.

    python -m heldin_lab.figures.hero [--out FOLDER]

It is the first split of `heldin demo`: a network on 100 rows of scikit-learn's breast-cancer table.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch

from heldin.cli import demo_runs as demo
from heldin_lab.figures import IMAGES


def main(arguments: list[str] | None = None, epochs: int = demo.EPOCHS, frames: int = 36) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=IMAGES)
    out = parser.parse_args(arguments).out
    torch.set_num_threads(1)
    runs = {rule: demo.train(rule, seed=0, epochs=epochs) for rule in demo.RULES}
    demo.figure(runs).savefig(out / "hero.png", dpi=140)
    animation(runs, out / "hero.gif", frames)
    for rule, run in runs.items():
        said = f", said {run.estimate:.3f}" if run.estimate is not None else ""
        print(f"{rule}: {run.rows} rows, epoch {run.kept:.0f}, test loss {run.loss:.3f}{said}")


def animation(runs: dict[str, demo.Run], path: Path, frames: int = 36) -> None:
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
            demo.draw(ax, runs, upto)
            writer.grab_frame()


def _epochs(last: int, frames: int) -> Iterator[float]:
    """Yield epochs from 3 to the last, evenly spaced on a logarithmic axis."""
    for i in range(frames):
        yield 3 * (last / 3) ** (i / (frames - 1))


if __name__ == "__main__":
    main()
