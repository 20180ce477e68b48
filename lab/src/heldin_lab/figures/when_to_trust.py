"""The figures and numbers of docs/when-to-trust.md.

    python -m heldin_lab.figures.when_to_trust [--out FOLDER] [NAME ...]

Everything is simulated; each figure takes seconds on one core. The numbers that the text quotes are
printed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import heldin
from heldin_lab.figures import IMAGES
from heldin_lab.rules import Evidence, EvidenceStopping

BLUE, RED, GREY = "tab:blue", "tab:red", "0.6"


class Recorder:
    """Watches a run to its end, however early the rule asks to stop."""

    def __init__(
        self,
        model: nn.Module,
        make: Callable[..., Evidence] = Evidence,
        **options: Any,
    ) -> None:
        self.loss: list[float] = []
        self.stopping = EvidenceStopping(model, make(**options))

    def step(self, optimizer: torch.optim.Optimizer, loss: Tensor, true_loss: float) -> None:
        """Note the loss and make a training step."""
        self.loss.append(true_loss)
        loss.backward()
        self.stopping.step()
        optimizer.step()
        optimizer.zero_grad()

    @property
    def stop(self) -> int | None:
        """The step at which the rule asked to stop."""
        return self.stopping.stopped_step

    def at_stop(self) -> float:
        """The loss at the stop, or at the end if there was none."""
        return self.loss[(self.stop or len(self.loss)) - 1]

    def draw(self, top: Any, bottom: Any, title: str, name: str = "true loss") -> None:
        """The loss above, the criterion below, a bar at the stop."""
        top.plot(range(1, len(self.loss) + 1), self.loss, color=RED)
        top.set_title(title, fontsize=9)
        top.set_ylabel(name)
        self.stopping.history.plot(bottom)
        for ax in (top, bottom):
            if self.stop is not None:
                ax.axvline(self.stop, color=BLUE, linewidth=3, alpha=0.4)
        self.stopping.close()


def batches(n: int, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Row numbers of minibatches, epoch after epoch."""
    while True:
        yield from torch.randperm(n, generator=generator).split(size)


# --- the path must pass a better point -------------------------------------------------------


def path(figure: Any) -> None:
    """Least squares from a small start, and from one beyond the minimum of the training loss."""
    torch.manual_seed(0)
    n, d = 60, 40
    truth = torch.zeros(d, 1)
    truth[:5] = 1.0
    x = torch.randn(n, d)
    y = x @ truth + 2.0 * torch.randn(n, 1)
    fitted = torch.linalg.lstsq(x, y).solution
    axes = figure.subplots(2, 2, sharex="col")
    starts = {
        "start at zero": torch.zeros(d, 1),
        "start beyond the fit": fitted + 4.0 * (fitted - truth),
    }
    for column, (title, start) in enumerate(starts.items()):
        model = nn.Linear(d, 1, bias=False)
        model.weight.data = start.T.clone()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        run = Recorder(model)
        for _ in range(300):
            true_loss = float((model.weight.detach().T - truth).square().sum())
            run.step(optimizer, 0.5 * F.mse_loss(model(x), y), true_loss)
        run.draw(axes[0, column], axes[1, column], title)
        axes[0, column].set_yscale("log")
        print(
            f"path: {title}: stops at step {run.stop} with true loss {run.at_stop():.2f}; least on "
            f"the path {min(run.loss):.2f}, at its end {run.loss[-1]:.2f}"
        )


# --- plateaus --------------------------------------------------------------------------------


def parity(seed: int, steps: int, make: Callable[..., Evidence]) -> Recorder:
    """The sign of a product of two inputs among forty: at first no weight shows a signal."""
    torch.manual_seed(seed)
    n, d = 10_000, 40
    x = torch.randn(n, d)
    y = (x[:, 0] * x[:, 1] > 0).float()[:, None]
    model = nn.Sequential(nn.Linear(d, 64), nn.ReLU(), nn.Linear(64, 1))
    for p in model.parameters():
        p.data.mul_(0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    run = Recorder(model, make)
    rows = batches(n, 250, torch.Generator().manual_seed(seed))
    for _ in range(steps):
        i = next(rows)
        loss = F.binary_cross_entropy_with_logits(model(x[i]), y[i])
        run.step(optimizer, loss, float(loss.detach()))
    return run


def plateau(figure: Any) -> None:
    """A plateau at the start, under the paper's rule and under the default one."""
    axes = figure.subplots(2, 2, sharex=True, sharey="row")
    rules: dict[str, Callable[..., Evidence]] = {
        "the paper's rule": Evidence.paper,
        "the default": Evidence,
    }
    for column, (title, make) in enumerate(rules.items()):
        run = parity(1, 600, make)
        run.draw(axes[0, column], axes[1, column], title, "training loss")
        early = 0
        for seed in range(10):
            other = parity(seed, 100, make)
            other.stopping.close()
            early += other.stop is not None and other.at_stop() > 0.6
        print(
            f"plateau: {title}: stop at step {run.stop}, training loss there {run.at_stop():.3f}, "
            f"at the end {run.loss[-1]:.3f}; stops on the plateau with {early} of 10 seeds"
        )


# --- learning rates --------------------------------------------------------------------------


def rate_drop(figure: Any) -> None:
    """Noisy least squares on ever new data; the learning rate is divided by ten twice."""
    axes = figure.subplots(2, 2, sharex=True, sharey="row")
    for column, drops in enumerate(([], [300, 600])):
        torch.manual_seed(0)
        d = 50
        model = nn.Linear(d, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.4)
        run = Recorder(model, correction="gaussian")
        for step in range(900):
            if step in drops:
                optimizer.param_groups[0]["lr"] /= 10
            x = torch.randn(128, d)
            y = x.sum(1, keepdim=True) + 3.0 * torch.randn(128, 1)
            true_loss = float((model.weight.detach() - 1).square().sum())
            run.step(optimizer, 0.5 * F.mse_loss(model(x), y), true_loss)
        title = "divided by ten at steps 300 and 600" if drops else "constant learning rate"
        run.draw(axes[0, column], axes[1, column], title)
        axes[0, column].set_yscale("log")
        print(
            f"rate_drop: {title}: stop at step {run.stop}, true loss there {run.at_stop():.3f}, "
            f"mean of the last 100 steps {sum(run.loss[-100:]) / 100:.3f}"
        )


def stationary(rate: float, momentum: float, steps: int = 250) -> float:
    """The mean criterion of SGD that has converged, on a quadratic of curvature 1."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(500))
    model.forward = lambda x: 0.5 * (model.w - x) ** 2
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum)
    total = 0.0
    rule = Evidence(smoothing=0, correction="gaussian")
    with EvidenceStopping(model, rule) as stopping:
        for step in range(2 * steps):
            model(torch.randn(32, 500, generator=generator)).sum(1).mean().backward()
            stopping.step()
            optimizer.step()
            optimizer.zero_grad()
            total += stopping.criterion if step >= steps else 0.0
    return total / steps


def momentum(figure: Any) -> None:
    """What a converged run shows: the larger the step, the further below zero."""
    ax = figure.subplots()
    rates = [0.01, 0.03, 0.1, 0.3]
    for beta, colour in ((0.0, BLUE), (0.9, RED)):
        found = [stationary(rate, beta) for rate in rates]
        theory = [-a / (2 - a) if beta == 0 else -a / (2 * (1 - beta)) for a in rates]
        ax.plot(rates, found, "o", color=colour, label=f"momentum {beta}")
        ax.plot(rates, theory, color=colour, linewidth=0.8)
        line = ", ".join(f"{a}: {v:.3f}" for a, v in zip(rates, found, strict=True))
        print(f"momentum: {beta}: criterion at convergence by learning rate: {line}")
    ax.axhline(0.0, color="0.4", linewidth=0.8)
    ax.set_xscale("log")
    ax.set_xlabel("learning rate x curvature")
    ax.set_ylabel("mean criterion")
    ax.legend()


# --- tiny batches ----------------------------------------------------------------------------


def tiny(figure: Any) -> None:
    """No signal at all, by batch size; and fifty classes, of which a batch shows only a few."""
    left, right = figure.subplots(1, 2)
    generator = torch.Generator().manual_seed(0)
    sizes = [4, 5, 6, 8, 12, 16, 32, 64, 128]
    means: dict[str | None, list[float]] = {None: [], "gaussian": [], "symmetric": []}
    for m in sizes:
        c = torch.randn(m, 200_000, generator=generator)
        seen = {"w": heldin.Moments(c.sum(0), c.square().sum(0), m)}
        for correction, values in means.items():
            found = heldin.evidence(seen, correction=correction)  # type: ignore[arg-type]
            values.append(found.criterion)
    for (correction, values), style in zip(means.items(), ("o-", "s--", "^:"), strict=True):
        left.plot(sizes, values, style, markersize=4, label=f"correction={correction!r}")
        line = ", ".join(f"{m}: {v:.3f}" for m, v in zip(sizes, values, strict=True))
        print(f"tiny: mean criterion without signal, correction={correction}: {line}")
    left.axhline(0.0, color="0.4", linewidth=0.8)
    left.set_xscale("log", base=2)
    left.set_xlabel("batch size")
    left.set_ylabel("mean criterion, no signal")
    left.legend(fontsize=7)

    classes, n, size = 50, 3200, 32
    for window, colour in ((1, GREY), (n // size, BLUE)):
        torch.manual_seed(0)
        y = torch.arange(n) % classes
        x = torch.randn(n, 10)  # nothing to learn
        model = nn.Linear(10, classes)
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        rows = batches(n, size, torch.Generator().manual_seed(1))
        rule = Evidence(parameter_groups="all", smoothing=0, window=window, checks=10**9)
        with EvidenceStopping(model, rule) as stopping:
            for _ in range(10 * n // size):
                i = next(rows)
                F.cross_entropy(model(x[i]), y[i]).backward()
                stopping.step()
                optimizer.step()
                optimizer.zero_grad()
        table = stopping.history.columns()
        right.plot(table["step"], table["raw"], color=colour, label=f"window={window}")
        print(
            f"tiny: {classes} classes, batches of {size}, window={window}: criterion from "
            f"{min(table['raw']):.4g} to {max(table['raw']):.4g}"
        )
    right.axhline(0.0, color="0.4", linewidth=0.8)
    right.set_yscale("symlog", linthresh=1.0)
    right.set_xlabel("step")
    right.legend(fontsize=7)


FIGURES: dict[str, tuple[Callable[[Any], None], tuple[float, float]]] = {
    "path": (path, (7, 3.2)),
    "plateau": (plateau, (7, 3.2)),
    "rate_drop": (rate_drop, (7, 3.2)),
    "momentum": (momentum, (4, 2.6)),
    "tiny": (tiny, (7, 2.6)),
}


def main(arguments: list[str] | None = None) -> None:
    """Draw all figures, or those named."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(FIGURES))
    parser.add_argument("--out", type=Path, default=IMAGES)
    chosen = parser.parse_args(arguments)
    unknown = set(chosen.names) - set(FIGURES)
    if unknown:
        parser.error(f"no figure named {', '.join(sorted(unknown))}")
    torch.set_num_threads(1)
    pyplot.rcParams.update({"font.size": 8, "axes.spines.top": False, "axes.spines.right": False})
    for name in chosen.names or FIGURES:
        draw, size = FIGURES[name]
        figure = pyplot.figure(figsize=size, layout="constrained")
        draw(figure)
        figure.savefig(chosen.out / f"when-to-trust-{name.replace('_', '-')}.png", dpi=90)
        pyplot.close(figure)


if __name__ == "__main__":
    main()
