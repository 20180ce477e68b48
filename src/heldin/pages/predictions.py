"""Predictions of rows that were not trained on: errors, calibration, the worst rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from . import Section, Table, csv_link
from .charts import Series, chart

__all__ = ["Predictions", "prediction_sections"]

MOST_CLASSES = 20  # in a table of errors
MOST_POINTS = 1_000  # in a chart
MOST_ROWS = 20_000  # in a file inside of the page
WORST = 8  # rows that are listed
BINS = 8  # of predicted probabilities, with as many rows each
FEWEST = 10  # rows in a bin


@dataclass(frozen=True)
class Predictions:
    """Out-of-fold predictions as plain numbers."""

    rows: Sequence[int]  # their numbers in the training data
    truth: Sequence[float] = ()  # numbers of classes, or numbers; empty if they are neither
    losses: Sequence[float] = ()  # empty if they are unknown
    probabilities: Sequence[Sequence[float]] = ()  # of the classes; empty: no classification
    values: Sequence[float] = ()  # predicted numbers; empty: this is no regression
    classes: Sequence[str] = ()  # their names


def prediction_sections(seen: Predictions) -> list[Section]:
    """Return the sections about out-of-fold predictions."""
    if seen.probabilities:
        return [*_confusion(seen), *_reliability(seen), *_worst(seen)]
    return [*([_against_truth(seen)] if seen.values else []), *_worst(seen)]


def _guess(probabilities: Sequence[float]) -> int:
    return max(range(len(probabilities)), key=lambda i: probabilities[i])


def _confusion(seen: Predictions) -> list[Section]:
    """Return how often each class was taken for each other, with the number of rows per class."""
    count = len(seen.classes)
    if count > MOST_CLASSES:
        return []
    table = [[0] * count for _ in range(count)]
    for truth, probabilities in zip(seen.truth, seen.probabilities, strict=True):
        table[int(truth)][_guess(probabilities)] += 1
    rows, shades = [], []
    for place, (name, numbers) in enumerate(zip(seen.classes, table, strict=True)):
        total = sum(numbers)
        shares = [number / max(total, 1) for number in numbers]
        rows.append([name, *map(str, numbers), str(total), f"{shares[place]:.0%}"])
        shades.append([0.0, *shares, 0.0, 0.0])
    header = ["true class", *(f"as {name}" for name in seen.classes), "rows", "right"]
    text = "Each row was predicted by a model that was not trained on it."
    return [Section("Confusion matrix", text, tables=[Table(header, rows, shades)])]


def _reliability(seen: Predictions) -> list[Section]:
    """Return how often predictions of a given probability came true."""
    if len(seen.classes) == 2:
        pairs = [(p[1], float(t == 1)) for p, t in zip(seen.probabilities, seen.truth, strict=True)]
        x, y = f"predicted probability of {seen.classes[1]}", f"share of {seen.classes[1]}"
    else:
        both = zip(seen.probabilities, seen.truth, strict=True)
        pairs = [(max(p), float(_guess(p) == t)) for p, t in both]
        x, y = "probability of the predicted class", "share that was right"
    pairs.sort()
    bins = min(BINS, len(pairs) // FEWEST)
    if bins < 2:
        return []
    edges = [len(pairs) * i // bins for i in range(bins + 1)]
    parts = [pairs[a:b] for a, b in pairwise(edges)]
    predicted, observed = ([sum(p[i] for p in part) / len(part) for part in parts] for i in (0, 1))
    errors = [(m * (1 - m) / len(part)) ** 0.5 for m, part in zip(observed, parts, strict=True)]
    low, high = ([m + k * e for m, e in zip(observed, errors, strict=True)] for k in (-2, 2))
    series = [
        Series("", predicted, observed, "b", low, high),
        Series("", predicted, observed, "b", points=True),
    ]
    figure = chart(series, "Calibration", x, y, diagonal=True, limits=(0.0, 1.0))
    text = "Points on the dashed line are calibrated; the band is two standard errors."
    return [Section("Calibration", text, [figure])]


def _against_truth(seen: Predictions) -> Section:
    step = -(-len(seen.rows) // MOST_POINTS)
    points = Series("", seen.values[::step], seen.truth[::step], "b", points=True)
    figure = chart([points], "Predicted and true", "predicted", "true", diagonal=True)
    text = "Each row was predicted by a model that was not trained on it."
    if step > 1:
        text += f" One row in {step} is shown."
    return Section("Predicted against true", text, [figure])


def _worst(seen: Predictions) -> list[Section]:
    """Return the rows with the largest losses, and all rows as a file."""
    if not seen.losses:
        return []
    columns: dict[str, Sequence[object]] = {"row": seen.rows}
    shown: dict[str, list[str]] = {"row": [str(row) for row in seen.rows]}
    if seen.probabilities:
        columns["true"] = [seen.classes[int(t)] for t in seen.truth]
        columns["predicted"] = [seen.classes[_guess(p)] for p in seen.probabilities]
        for number, name in enumerate(seen.classes):
            columns[f"p({name})"] = [p[number] for p in seen.probabilities]
        shown |= {name: [str(v) for v in columns[name]] for name in ("true", "predicted")}
        both = zip(seen.probabilities, seen.truth, strict=True)
        shown["probability of the true class"] = [f"{p[int(t)]:.3g}" for p, t in both]
    elif seen.values:
        columns |= {"true": seen.truth, "predicted": seen.values}
        shown |= {name: [f"{v:.4g}" for v in columns[name]] for name in ("true", "predicted")}
    columns["loss"] = seen.losses
    shown["loss"] = [f"{loss:.3g}" for loss in seen.losses]
    order = sorted(range(len(seen.rows)), key=lambda i: -seen.losses[i])[:WORST]
    table = Table([*shown], [[cells[i] for cells in shown.values()] for i in order])
    files = {"out-of-fold.csv": csv_link(columns)} if len(seen.rows) <= MOST_ROWS else {}
    text = "Wrong labels, rare kinds of rows and broken inputs are often among them."
    return [Section("Worst rows", text, tables=[table], files=files)]
