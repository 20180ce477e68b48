"""Coverage of heldin's confidence intervals for means of row losses and for metrics.

    python -m heldin_lab.study.interval_coverage --out docs/results/interval-coverage.json

The two constants of `heldin.crossval.intervals` are chosen on development draws: among the
candidates that fall short of their level by at most one point in the mean, the one with the
narrowest intervals. Coverage is then measured on fresh draws from other distributions. A truth
lies in its interval or not; a sample whose losses are all equal has no interval and is left out.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from heldin.crossval.intervals import FLOOR, REACH, statistic_interval, studentised_ends

Draw = Callable[[int, int, torch.Generator], Tensor]
Ends = Callable[[Tensor], tuple[Tensor, Tensor]]

LEVEL = 0.95
SIZES = (20, 50, 200)
SHORTFALL = 0.01  # largest mean shortfall that a candidate may have
CANDIDATES = [(reach, floor) for reach in (0.0, 1.0, 1.5, 2.0) for floor in (0.02, 0.05, 0.1)]


def normal(samples: int, rows: int, generator: torch.Generator) -> Tensor:
    """Draw standard normal losses."""
    return torch.randn(samples, rows, generator=generator, dtype=torch.float64)


def uniform(samples: int, rows: int, generator: torch.Generator) -> Tensor:
    """Draw losses between 0 and 1."""
    return torch.rand(samples, rows, generator=generator, dtype=torch.float64)


def lognormal(sigma: float) -> Draw:
    """Make draws of exp(sigma z)."""
    return lambda samples, rows, generator: (sigma * normal(samples, rows, generator)).exp()


def student(freedom: int, power: int = 1) -> Draw:
    """Make draws of Student's t, or of its square: squared errors with a long tail."""

    def draw(samples: int, rows: int, generator: torch.Generator) -> Tensor:
        squares = normal(samples * freedom, rows, generator).square()
        spread = squares.reshape(freedom, samples, rows).mean(0).sqrt()
        return (normal(samples, rows, generator) / spread) ** power

    return draw


def exponential(shape: float = 1.0) -> Draw:
    """Make draws of Weibull's distribution: an exponential to the power 1 / shape."""
    return lambda samples, rows, generator: (
        (-uniform(samples, rows, generator).log()) ** (1 / shape)
    )


def mixture(share: float, factor: float) -> Draw:
    """Make draws of exponential losses, a share of which is larger by a factor."""

    def draw(samples: int, rows: int, generator: torch.Generator) -> Tensor:
        large = uniform(samples, rows, generator) < share
        return exponential()(samples, rows, generator) * torch.where(large, factor, 1.0)

    return draw


def log_loss(mean: float, spread: float) -> Draw:
    """Make draws of log losses of a classifier with normal margins."""
    return lambda samples, rows, generator: softplus(
        -(mean + spread * normal(samples, rows, generator))
    )


def zero_one(share: float) -> Draw:
    """Make draws of losses 0 and 1."""
    return lambda samples, rows, generator: (uniform(samples, rows, generator) < share).double()


DEVELOPMENT: dict[str, Draw] = {
    "normal": normal,
    "lognormal 1": lognormal(1.0),
    "lognormal 1.5": lognormal(1.5),
    "Student 3": student(3),
    "exponential": exponential(),
    "5 % x 20": mixture(0.05, 20.0),
    "20 % x 10": mixture(0.2, 10.0),
    "squared Student 5": student(5, power=2),
    "log loss (2, 3)": log_loss(2.0, 3.0),
    "zero-one 0.1": zero_one(0.1),
    "zero-one 0.3": zero_one(0.3),
}
FRESH: dict[str, Draw] = {
    "lognormal 0.8": lognormal(0.8),
    "lognormal 1.2": lognormal(1.2),
    "lognormal 2": lognormal(2.0),
    "Student 4": student(4),
    "exponential": exponential(),
    "Weibull 0.5": exponential(0.5),
    "10 % x 15": mixture(0.1, 15.0),
    "2 % x 50": mixture(0.02, 50.0),
    "squared Student 6": student(6, power=2),
    "log loss (3, 4)": log_loss(3.0, 4.0),
    "log loss (1, 1)": log_loss(1.0, 1.0),
    "zero-one 0.2": zero_one(0.2),
}


def chosen(reach: float = REACH, floor: float = FLOOR) -> Ends:
    """Make the interval of `heldin.crossval.mean_interval`."""

    def ends(losses: Tensor) -> tuple[Tensor, Tensor]:
        mean = losses.mean(1)
        deviations = losses - mean[:, None]
        sizes = torch.ones_like(deviations)
        low, high = studentised_ends(deviations, sizes, level=LEVEL, reach=reach, floor=floor)
        return mean + low, mean + high

    return ends


def two_errors(losses: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean -+ 2 plain standard errors."""
    mean, error = losses.mean(1), losses.std(1) / math.sqrt(losses.shape[1])
    return mean - 2 * error, mean + 2 * error


def two_long_tailed_errors(losses: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean -+ 2 errors of `mean_and_error`, in which the largest loss counts twice."""
    rows, mean = losses.shape[1], losses.mean(1)
    squares = (losses - mean[:, None]).square()
    largest = squares.gather(1, losses.argmax(1, keepdim=True))[:, 0]
    error = ((squares.sum(1) + largest) / (rows - 3) / rows).sqrt()
    return mean - 2 * error, mean + 2 * error


METHODS: dict[str, Ends] = {
    "two standard errors": two_errors,
    "two errors, largest twice": two_long_tailed_errors,
    "bootstrap-t": chosen(reach=0.0, floor=0.0),
    "heldin": chosen(),
}


def truth(draw: Draw, generator: torch.Generator) -> tuple[float, float]:
    """Return mean and standard deviation of a distribution, from four million draws."""
    losses = torch.cat([draw(400, 1000, generator).reshape(-1) for _ in range(10)])
    return float(losses.mean()), float(losses.std())


def coverage(
    methods: dict[str, Ends], draws: dict[str, Draw], samples: int, seed: int
) -> list[dict[str, Any]]:
    """Measure the coverage of each method at each size and distribution.

    Returns:
        One entry for each: size, distribution, method, coverage, and the median width as a share of
        4 x 0.98 standard errors of the distribution, the width of an ideal interval.
    """
    generator = torch.Generator().manual_seed(seed)
    entries = []
    for name, draw in draws.items():
        mean, spread = truth(draw, generator)
        for size in SIZES:
            losses = draw(samples, size, generator)
            losses = losses[losses.std(1) > 0]
            ideal = 2 * NormalDist().inv_cdf((1 + LEVEL) / 2) * spread / math.sqrt(size)
            for method, ends in methods.items():
                low, high = ends(losses)
                held = float(((low <= mean) & (mean <= high)).double().mean())
                width = float((high - low).median()) / ideal
                entry = {"rows": size, "distribution": name, "method": method}
                entries.append({**entry, "coverage": round(held, 3), "width": round(width, 2)})
    return entries


def choose(entries: list[dict[str, Any]]) -> tuple[str, dict[str, dict[str, float]]]:
    """Return the name of the best candidate, and shortfall and width of each."""
    scores: dict[str, dict[str, float]] = {}
    for method in dict.fromkeys(entry["method"] for entry in entries):
        of_method = [entry for entry in entries if entry["method"] == method]
        shortfall = sum(max(0.0, LEVEL - e["coverage"]) for e in of_method) / len(of_method)
        width = math.exp(sum(math.log(e["width"]) for e in of_method) / len(of_method))
        scores[method] = {"shortfall": round(shortfall, 4), "width": round(width, 3)}
    allowed = [method for method, score in scores.items() if score["shortfall"] <= SHORTFALL]
    return min(allowed or scores, key=lambda method: scores[method]["width"]), scores


def accuracy(outputs: Tensor, targets: Tensor) -> float:
    """Return the share of outputs > 0 where the target is 1, and the other way round."""
    return float(((outputs > 0) == (targets == 1)).double().mean())


def area(outputs: Tensor, targets: Tensor) -> float:
    """Return the area under the ROC curve; nan if there is one class only."""
    return float((outputs[targets == 1][:, None] > outputs[targets == 0]).double().mean())


def r_squared(outputs: Tensor, targets: Tensor) -> float:
    """Return the share of the targets' variance that is explained."""
    residual = (outputs - targets).square().sum()
    return float(1 - residual / (targets - targets.mean()).square().sum())


def classified(rows: int, generator: torch.Generator, distance: float) -> tuple[Tensor, Tensor]:
    """Draw outputs and targets of a classifier: normal, `distance` between the classes."""
    targets = (uniform(1, rows, generator)[0] < 0.4).long()
    return normal(1, rows, generator)[0] + distance * (targets - 0.5), targets


def regressed(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw outputs and targets of a regression with R2 = 1 / 1.49."""
    outputs = normal(1, rows, generator)[0]
    return outputs, outputs + 0.7 * normal(1, rows, generator)[0]


def metric_coverage(samples: int, seed: int) -> list[dict[str, Any]]:
    """Measure the coverage of `heldin.crossval.statistic_interval`."""
    generator = torch.Generator().manual_seed(seed)
    normal_share = NormalDist().cdf
    cases: list[tuple[str, Any, Any, float]] = []
    for distance in (1.2, 2.4):
        draw = lambda rows, distance=distance: classified(rows, generator, distance)  # noqa: E731
        right = normal_share(distance / 2)
        cases.append((f"accuracy {right:.2f}", accuracy, draw, right))
        above = normal_share(distance / math.sqrt(2))
        cases.append((f"AUC {above:.2f}", area, draw, above))
    cases.append(("R2 0.67", r_squared, lambda rows: regressed(rows, generator), 1 / 1.49))
    entries = []
    for name, function, draw, value in cases:
        for size in SIZES:
            drawn = [draw(size) for _ in range(samples)]
            intervals = [statistic_interval(function, *rows) for rows in drawn]
            given = [each for each in intervals if math.isfinite(each.low)]
            held = sum(each.low <= value <= each.high for each in given) / len(given)
            entry = {"rows": size, "metric": name, "coverage": round(held, 3)}
            entries.append({**entry, "without": samples - len(given)})
    return entries


def compact(
    entries: list[dict[str, Any]], method: str = "", key: str = "distribution"
) -> dict[str, str]:
    """Return the coverage at each size as one text for each distribution."""
    of_method = [entry for entry in entries if entry.get("method", method) == method]
    names = dict.fromkeys(entry[key] for entry in of_method)
    return {
        name: " ".join(f"{entry['coverage']:.3f}" for entry in of_method if entry[key] == name)
        for name in names
    }


def table(entries: list[dict[str, Any]], method: str, key: str = "distribution") -> str:
    """Return the coverage of a method as a Markdown table, distributions by sizes."""
    lines = [
        f"| {method} | " + " | ".join(f"n = {size}" for size in SIZES) + " |",
        "|---" * 4 + "|",
    ]
    for name, numbers in compact(entries, method, key).items():
        lines.append(f"| {name} | " + " | ".join(numbers.split()) + " |")
    return "\n".join(lines)


def main() -> None:
    """Choose on development draws, measure on fresh ones, print tables and store a JSON file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument("--samples", type=int, default=1000, help="of each size and distribution")
    options = parser.parse_args()
    samples = options.samples
    candidates = {f"reach {r}, floor {f}": chosen(r, f) for r, f in CANDIDATES}
    best, scores = choose(coverage(candidates, DEVELOPMENT, max(2, samples // 2), seed=1))
    for name, score in scores.items():
        print(f"{name}: shortfall {score['shortfall']:.4f}, width {score['width']:.2f}")
    print(f"chosen on development draws: {best}; in use: reach {REACH}, floor {FLOOR}\n")
    fresh = coverage(METHODS, FRESH, samples, seed=3001)
    for method in METHODS:
        print(table(fresh, method), end="\n\n")
    metrics = metric_coverage(max(2, samples // 10), seed=2001)
    print(table(metrics, "metrics", key="metric"))
    if options.out:
        result = {"level": LEVEL, "samples": samples, "chosen": best, "development": scores}
        by_method = {method: compact(fresh, method) for method in METHODS}
        entries = {"rows": SIZES, "fresh": by_method, "metrics": compact(metrics, key="metric")}
        text = json.dumps({**result, **entries}, indent=1)
        options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
