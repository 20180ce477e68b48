"""The figures and numbers of docs/how, docs/guides and docs/index.md.

    python -m heldin_lab.figures.how [--out FOLDER] [NAME ...]

Everything is simulated; each figure takes seconds on one core. The numbers that the text quotes are
printed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import heldin
from heldin_lab.figures import IMAGES
from heldin_lab.rules import Evidence, EvidenceStopping, LeaveOneOut, follow

TRUE, TRAIN, STOP, LATE = "tab:orange", "tab:blue", "tab:green", "tab:red"


# --- the sketch: one weight ------------------------------------------------------------------


def sketch(figure: Any) -> None:
    """y = w x + noise: loss and gradient of the population and of 20 rows."""
    torch.manual_seed(2)
    n, noise = 20, 1.0
    x = torch.randn(n)
    y = x + noise * torch.randn(n)
    w = torch.linspace(-1.3, 3.3, 200)
    left, right = figure.subplots(1, 2)
    loss, error = ((w - 1) ** 2 + noise**2) / 2, ((w - 1) ** 2 + noise**2) / (2 * n) ** 0.5
    own = (w[:, None] * x - y).square().mean(1) / 2
    left.fill_between(w, loss - error, loss + error, color=TRUE, alpha=0.2, linewidth=0)
    left.plot(w, loss, color=TRUE, label="of all data, ±1 error")
    left.plot(w, own, color=TRAIN, linestyle="--", label=f"of {n} rows")
    left.set(xlabel="weight", title="loss", ylim=(0, 3.5))
    left.legend(fontsize=8, frameon=False)
    slope, error = w - 1, ((2 * (w - 1) ** 2 + noise**2) / n) ** 0.5
    own = ((w[:, None] * x - y) * x).mean(1)
    inside = w[slope.abs() <= error]
    level = noise / n**0.5
    right.axvspan(float(inside[0]), float(inside[-1]), color=LATE, alpha=0.15, linewidth=0)
    right.axhspan(-level, level, color=LATE, alpha=0.15, linewidth=0)
    right.fill_between(w, slope - error, slope + error, color=TRUE, alpha=0.2, linewidth=0)
    right.plot(w, slope, color=TRUE)
    right.plot(w, own, color=TRAIN, linestyle="--")
    right.axhline(0, color="0.4", linewidth=0.8)
    right.set(xlabel="weight", title="gradient", ylim=(-2.5, 2.5))
    best = float((x * y).sum() / x.square().sum())
    print(f"sketch: the rows' own minimum is at {best:.2f}, the true one at 1.00")


# --- the toy regression ----------------------------------------------------------------------


def waves(x: Tensor) -> Tensor:
    """1, x, sin(x / 2), cos(x / 2), sin(2 x / 2), ..."""
    angles = x[:, None] * torch.arange(1, 25) / 2
    each = torch.stack([angles.sin(), angles.cos()], -1).flatten(1)
    return torch.cat([torch.ones_like(x)[:, None], x[:, None], each], 1)


def toy(figure: Any) -> None:
    """The paper's Sec. 3.1: a line, 20 points and 50 features."""
    torch.manual_seed(1)
    n, steps = 20, 1500
    x = 8 * torch.rand(n) - 4
    y = 0.5 + x + torch.randn(n)
    line = torch.linspace(-4, 4, 401)
    model = nn.Linear(50, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    training, true, fits = [], [], {}
    paper = Evidence.paper(parameter_groups="all", smoothing=0.0)
    with EvidenceStopping(model, paper) as stopping:
        for step in range(1, steps + 1):
            loss = (model(waves(x)) - y[:, None]).square().mean() / 2
            with torch.no_grad():
                fit = model(waves(line))[:, 0]
            loss.backward()
            stopping.step()
            training.append(loss.item())
            true.append(((fit - 0.5 - line).square().mean().item() + 1) / 2)
            if step in (3, stopping.stopped_step, steps):
                fits[step] = fit
            optimizer.step()
            optimizer.zero_grad()
    stop = stopping.stopped_step or steps
    left, right = figure.subfigures(1, 2, width_ratios=[1.3, 1])
    top, bottom = left.subplots(2, 1, sharex=True)
    top.loglog(range(1, steps + 1), training, color=TRAIN, linestyle="--", label="training loss")
    top.loglog(range(1, steps + 1), true, color=TRUE, label="true loss")
    top.legend(fontsize=8, frameon=False)
    stopping.history.plot(bottom)
    bottom.set_xscale("log")
    for step, colour in zip(fits, ("0.5", STOP, LATE), strict=True):
        for ax in (top, bottom):
            ax.axvline(step, color=colour, linewidth=3, alpha=0.5)
    for ax, (step, fit), colour in zip(
        right.subplots(3, 1, sharex=True), fits.items(), ("0.5", STOP, LATE), strict=True
    ):
        ax.plot(line, 0.5 + line, color=TRUE, linewidth=1)
        ax.plot(x, y, "x", color="0.4", markersize=4)
        ax.plot(line, fit, color=colour)
        ax.set_title(f"step {step}", fontsize=8, loc="left", color=colour)
        ax.set_ylim(-7, 7)
    print(
        f"toy: stop at step {stop} with a true loss of {true[stop - 1]:.2f}; lowest "
        f"{min(true):.2f} at step {true.index(min(true)) + 1}; {true[-1]:.2f} after {steps} steps"
    )


# --- leave-one-out along the path ------------------------------------------------------------


def leave_one_out(figure: Any) -> None:
    """The estimate beside 60 real runs, each without one row."""
    torch.manual_seed(0)
    n, d, rate, steps = 60, 40, 0.02, 3000
    truth = torch.zeros(d, 1)
    truth[:5] = 1.0
    x, test_x = torch.randn(n, d), torch.randn(5000, d)
    y, test_y = (a @ truth + 2 * torch.randn(len(a), 1) for a in (x, test_x))
    loss_fn = nn.MSELoss()
    model = nn.Linear(d, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    keep = 1 - torch.eye(n)  # run i does not see row i
    apart = torch.zeros(n, d)
    real, true = {}, {}
    parts = (model, optimizer, loss_fn, (x, y))
    with follow(LeaveOneOut(), *parts, patience=None) as stopping:
        for step in range(1, steps + 1):
            loss_fn(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            checks = len(stopping.history)
            stopping.step()
            errors = (apart @ x.T - y[:, 0]) * keep  # (runs, rows)
            apart = apart - rate * 2 * errors @ x / n
            if len(stopping.history) > checks:
                real[step] = ((apart * x).sum(1) - y[:, 0]).square().mean().item()
                with torch.no_grad():
                    true[step] = loss_fn(model(test_x), test_y).item()
        best = stopping.best_step
    table = stopping.history.columns()
    ax = figure.add_subplot()
    ax.plot(table["step"], table["training_loss"], color=TRAIN, linestyle="--", label="training")
    ax.plot(table["step"], table["estimate"], color=STOP, label="leave-one-out, estimated")
    ax.plot(real.keys(), real.values(), "o", color=STOP, markersize=4, label="..., retrained")
    ax.plot(true.keys(), true.values(), color=TRUE, label="5,000 new rows")
    ax.axvline(best, color=STOP, linewidth=3, alpha=0.4)
    ax.set(xscale="log", xlabel="step", ylabel="loss", ylim=(0, None))
    ax.legend(fontsize=8, frameon=False)
    after = dict(zip(table["step"], table["estimate"], strict=True))
    worst = max(abs(after[step] / value - 1) for step, value in real.items())
    least = min(true, key=lambda step: true[step])
    print(
        f"leave-one-out: best step {best} with an estimate of {after[best]:.2f} and a true loss of "
        f"{true[best]:.2f}; lowest {true[least]:.2f} at step {least}; never more than "
        f"{100 * worst:.1f} % from retraining"
    )


# --- smoothing -------------------------------------------------------------------------------


def smoothing(figure: Any) -> None:
    """One run of minibatch descent, watched with three decays."""
    torch.manual_seed(0)
    n, d = 400, 30
    truth = torch.zeros(d, 1)
    truth[:3] = 1.0
    x = torch.randn(n, d)
    y = (x @ truth + torch.randn(n, 1) > 0).float()
    model = nn.Linear(d, 1)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rules = {b: EvidenceStopping(model, Evidence(smoothing=b)) for b in (0.0, 0.9, 0.99)}
    for _ in range(100):
        for rows in torch.randperm(n).split(50):
            loss = nn.functional.binary_cross_entropy_with_logits(model(x[rows]), y[rows])
            loss.backward()
            for rule in rules.values():
                rule.step()
            optimizer.step()
            optimizer.zero_grad()
    ax = figure.add_subplot()
    for (b, rule), colour in zip(rules.items(), ("0.75", TRAIN, STOP), strict=True):
        table = rule.history.columns()
        ax.plot(table["step"], table["criterion"], color=colour, label=f"smoothing={b}")
        if rule.stopped_step:
            ax.axvline(rule.stopped_step, color=colour, linewidth=3, alpha=0.5)
        print(f"smoothing {b}: stop at step {rule.stopped_step}")
        rule.close()
    ax.axhline(0, color="0.4", linewidth=0.8)
    ax.set_yscale("symlog", linthresh=1.0)
    ax.set(xlabel="step", ylabel="criterion")
    ax.legend(fontsize=8, frameon=False)


# --- batch size ------------------------------------------------------------------------------


def batch_size(figure: Any) -> None:
    """At the minimum of the training loss, batches drawn from the training rows."""
    torch.manual_seed(0)
    n, d = 1000, 200
    x = torch.randn(n, d)
    y = torch.randn(n, 1)
    model = nn.Linear(d, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.linalg.lstsq(x, y).solution.T)
    sizes = [16, 32, 64, 128, 256, 512]
    found: dict[str, list[float]] = {"None": [], "'symmetric'": []}
    for m in sizes:
        values: dict[str, list[float]] = {"None": [], "'symmetric'": []}
        for _ in range(40):
            for rows in torch.randperm(n).split(m)[: n // m]:
                with heldin.observe(model) as seen:
                    (model(x[rows]) - y[rows]).square().mean().backward()
                values["None"].append(heldin.evidence(seen).criterion)
                values["'symmetric'"].append(
                    heldin.evidence(seen, correction="symmetric").criterion
                )
        for name, each in values.items():
            found[name].append(sum(each) / len(each))
    ax = figure.add_subplot()
    line = torch.linspace(sizes[0], sizes[-1], 500)
    ax.plot(line, line / n - 2 / (line - 3), color=TRAIN, label="m/M - 2/(m-3)")
    ax.plot(line, (line - 1) / (n - 1), color=STOP, label="(m-1)/(M-1)")
    for (name, each), colour in zip(found.items(), (TRAIN, STOP), strict=True):
        ax.plot(sizes, each, "o", color=colour, label=f"correction={name}")
        print(f"batch size, correction={name}: " + ", ".join(f"{v:.3f}" for v in each))
    ax.axhline(0, color="0.4", linewidth=0.8)
    ax.axvline((2 * n) ** 0.5, color="0.4", linestyle=":", label="m = sqrt(2 M)")
    ax.set(xscale="log", xlabel="batch size m", ylabel="mean criterion", xticks=sizes)
    ax.set_xticklabels([str(m) for m in sizes])
    ax.minorticks_off()
    ax.legend(fontsize=8, frameon=False)


FIGURES: dict[str, tuple[Callable[[Any], None], tuple[float, float]]] = {
    "sketch": (sketch, (7.5, 2.8)),
    "toy": (toy, (7.5, 4.0)),
    "leave-one-out": (leave_one_out, (6.0, 3.4)),
    "smoothing": (smoothing, (6.0, 2.8)),
    "batch-size": (batch_size, (6.0, 2.8)),
}


def main(arguments: list[str] | None = None) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(FIGURES)}")
    parser.add_argument("--out", type=Path, default=IMAGES)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for name in options.names or FIGURES:
        draw, size = FIGURES[name]
        figure = pyplot.figure(figsize=size, layout="constrained")
        draw(figure)
        figure.savefig(options.out / f"how-{name}.png", dpi=110)
        pyplot.close(figure)


if __name__ == "__main__":
    main()
