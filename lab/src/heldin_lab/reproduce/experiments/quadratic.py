"""Sec. 3.2: large quadratics with known minimum, for three kinds of spectra."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from heldin_lab.reproduce.experiment import NEAR, SLIGHT, Claim, Experiment, Results, Tables
from heldin_lab.reproduce.figures import GREY, RED, bar, criterion, logarithmic, new
from heldin_lab.reproduce.readings import Choice, Value
from heldin_lab.reproduce.run import Run
from heldin_lab.reproduce.tables import at, least, step_of
from heldin_lab.rules import Evidence, EvidenceStopping

__all__ = [
    "EIGENVALUES",
    "EXPERIMENT",
    "NOISE",
    "SPECTRA",
    "Quadratic",
    "Settings",
    "draw",
    "problem",
    "spectrum",
    "train",
]


@dataclass(frozen=True)
class Settings:
    """Of a quadratic problem and its descent."""

    seeds: int = 5
    steps: int = 400
    dimension: int = 1000
    noise: float = 10.0  # Lambda = noise * I
    rate: float = 0.02
    start: float = 0.5


START = Choice(
    "start",
    'What the factor 0.5 of the file name "initFactor0-5" multiplies.',
    (
        Value("opposite", "zeta: the path passes by the true minimiser", "opposite"),
        Value("random", "a draw of the law of zeta that knows nothing of it", "random"),
        Value("unit", "a draw of N(0, I)", "unit"),
    ),
    replayed=False,
)
NOISE = Choice(
    "noise level",
    'The "different noise levels" Lambda for which "this worked well".',
    (
        Value("10", "that of the figure", 10.0),
        Value("1", "a tenth of it", 1.0),
        Value("100", "ten times as much", 100.0),
    ),
    replayed=False,
    added=True,
)
EIGENVALUES = Choice(
    "eigenvalues",
    "Which eigenvalues the three spectra have.",
    (
        Value("ours", "1 to 0.01; 1 to 0.001 in equal ratios; 2 % at 1, the others at 0.01", 1.0),
        Value("steeper", "the same with all logarithms doubled: partially ill-conditioned", 2.0),
    ),
    replayed=False,
)
SPECTRA = ("uniform", "exponential", "structured")


def spectrum(kind: str, dimension: int) -> Tensor:
    """Eigenvalues in (0, 1].

    >>> spectrum("exponential", 4)
    tensor([1.0000, 0.1000, 0.0100, 0.0010], dtype=torch.float64)
    """
    place = torch.linspace(0.0, 1.0, dimension, dtype=torch.float64)
    if kind == "uniform":
        return 1.0 - 0.99 * place
    if kind == "exponential":
        return torch.pow(1e-3, place)
    large = torch.arange(dimension) < max(1, dimension // 50)  # "structured": 2 % large ones
    return torch.where(large, 1.0, 0.01).double()


class Quadratic(nn.Module):
    """The loss L_D(w) = 1/2 (w + zeta)^T B (w + zeta), as that of two samples.

    The paper does not draw samples, it defines the error of the gradient: Sigma / |D| is the
    diagonal of B Lambda B^T. Two samples whose gradients lie one such error above and below the
    gradient of L_D have just this mean and this estimated error, so heldin's rules give Eq. 10
    with the paper's Sigma.
    """

    def __init__(self, b: Tensor, zeta: Tensor, noise: float, start: Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(start.clone())
        self.b, self.zeta = b, zeta
        self.error = (noise * b.square().sum(1)).sqrt()  # of each coordinate of the gradient

    def forward(self, side: Tensor) -> Tensor:
        """The losses of samples on the given sides, -1 or 1."""
        shift = self.w + self.zeta
        return 0.5 * shift @ (self.b @ shift) + side * (self.error @ self.w)

    @torch.no_grad()
    def losses(self) -> tuple[float, float]:
        """The training loss and the exact test loss, 1/2 w^T B w."""
        shift = self.w + self.zeta
        return float(0.5 * shift @ (self.b @ shift)), float(0.5 * self.w @ (self.b @ self.w))


def problem(seed: int, kind: str, settings: Settings) -> tuple[Tensor, Tensor, Tensor]:
    """B, zeta, and a third draw, of the same law as zeta: N(0, Lambda)."""
    generator = torch.Generator().manual_seed(seed)
    d = settings.dimension
    gauss = torch.randn(d, d, generator=generator, dtype=torch.float64)
    q, r = torch.linalg.qr(gauss)
    rotation = q * r.diagonal().sign()  # makes it uniform over all rotations (Haar)
    b = (rotation * spectrum(kind, d)) @ rotation.T
    scale = math.sqrt(settings.noise)
    zeta, other = scale * torch.randn(2, d, generator=generator, dtype=torch.float64)
    return b, zeta, other


def train(run: Run, b: Tensor, zeta: Tensor, start: Tensor, *, weights: bool = False) -> None:
    """Gradient descent with the rule watching; both losses, and perhaps w, at every step."""
    settings = run.settings
    model = Quadratic(b.float(), zeta.float(), settings.noise, start.float()).to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.rate)
    sides = torch.tensor([-1.0, 1.0], device=run.device)
    paper = Evidence.paper(parameter_groups="all", smoothing=0.0)
    with EvidenceStopping(model, paper) as rule:
        for step in run.steps(settings.steps, model=model, optimizer=optimizer, rule=rule):
            model(sides).mean().backward()
            rule.step()
            trained, tested = model.losses()
            run.note(step, train_loss=trained, test_loss=tested, criterion=rule.criterion)
            if weights:
                run.note(step, **{f"w{k}": w for k, w in enumerate(model.w.tolist(), 1)})
            optimizer.step()
            optimizer.zero_grad()
        run.mark(rule.stopped_step, "stop")


def descend(run: Run, kind: str, start: str) -> None:
    """One spectrum from one start."""
    b, zeta, other = problem(run.seed, kind, run.settings)
    train(run, b, zeta, run.settings.start * (zeta if start == "opposite" else other))


def parts(settings: Settings) -> Mapping[str, Mapping[str, Any]]:
    """One run for each spectrum and each reading of "factor 0.5"."""
    return {
        f"{kind}, {start} start": {"kind": kind, "start": start}
        for start in ("opposite", "random")
        for kind in SPECTRA
    }


def draw(results: Results, settings: Settings) -> Any:
    """Top row the spectra, middle row losses, bottom row the criterion; columns: spectra."""
    tables = list(next(iter(results.values())).values())[: len(SPECTRA)]
    figure = new(5.0)
    grid = figure.subplots(3, len(SPECTRA))
    for (top, middle, bottom), kind, table in zip(grid.T, SPECTRA, tables, strict=True):
        top.hist(spectrum(kind, settings.dimension).numpy(), bins=40, color=GREY)
        top.set_title(kind, fontsize=9)
        top.set_xlabel("eigenvalue")
        top.set_yscale("log")
        middle.plot(table.step, table.train_loss, color=GREY, label="train")
        middle.plot(table.step, table.test_loss, color=RED, label="test (exact)")
        logarithmic(middle, "")
        criterion(bottom, table)
        bar(middle, step_of(table), "#000082")
        middle.sharex(bottom)
        bottom.set_xlabel("step")
    for axes, label in zip(grid[:, 0], ("number", "loss", "criterion"), strict=True):
        axes.set_ylabel(label)
    grid[1, 0].legend(fontsize=7, frameon=False)
    return figure


def _near(part: str) -> Claim:
    def value(tables: Tables) -> float:
        return at(tables[part], "test_loss") / least(tables[part], "test_loss")

    return Claim(
        f"spectrum {part}: the rule stops near the minimum of the exact test loss "
        "(test loss at the stop / least on the path)",
        "a meaningful stop",
        value,
        most=SLIGHT,
        beside=NEAR,
    )


EXPERIMENT = Experiment(
    name="quadratic",
    title="Synthetic quadratic problems",
    place="Sec. 3.2, Fig. SythLin",
    settings={"quick": Settings(), "full": Settings(seeds=10)},
    parts=parts,
    run=descend,
    figure=draw,
    caption=(
        "Columns: spectra, starting opposite. Top: eigenvalues. Middle: training loss (grey) "
        "and exact test loss (red). Bottom: the criterion and the stop (bar)."
    ),
    claims=lambda settings: [_near(part) for part in parts(settings)],
    choices=(
        "Eigenvalues: uniform, equally spaced from 1 to 0.01; exponential, from 1 to 0.001 in "
        "equal ratios; structured, 2 % at 1 and 98 % at 0.01.",
        "Start: the paper's file names have a factor 0.5, not what it multiplies. Two readings: "
        "opposite, w_0 = 0.5 zeta, on the far side of the true minimiser 0 as seen from the "
        "minimiser -zeta of the training loss, so that the path passes by 0 (drawn in the figure); "
        "and random, 0.5 times a draw from N(0, Lambda) that knows nothing of zeta.",
        "Learning rate 0.02, no smoothing: Eq. 10 as it stands.",
        "The paper defines the error of the gradient instead of drawing samples; two samples, one "
        "error above and one below, give the rule the same numbers.",
    ),
    readings=lambda settings: (START, EIGENVALUES),
    added=(NOISE,),
    left_out=(
        "Learning rate and length: as long as the descent is stable, twice the rate is half the "
        "length; neither is varied.",
    ),
)
