"""The settings among which the defaults of heldin's networks are chosen, and their comparison."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from heldin_lab.rules import Patience

from .compare import Row, by_problem, floored, interval
from .rivals import Method, ours

__all__ = ["SETTINGS", "against", "write_settings"]

BASE = "default"


def _best_check(
    curves: Any, resamples: int = 100, seed: int = 0, held_per_trained: float = 0.0
) -> Any:
    """In the place of an average of the weights around the best check."""
    shares = torch.zeros(curves.shape[1], dtype=torch.float64)
    shares[curves.mean(0).argmin()] = 1.0
    return shares


# options of the estimators, and constants that are none
_CHOICES: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    BASE: ({}, {}),
    "relu": ({"activation": "relu"}, {}),
    "tanh": ({"activation": "tanh"}, {}),
    "5 folds": ({"cv": 5}, {}),
    "10 folds": ({"cv": 10}, {}),
    "tanh and 10 folds": ({"activation": "tanh", "cv": 10}, {}),
    "rate 0.001": ({"learning_rate_init": 0.001}, {}),
    "rate 0.01": ({"learning_rate_init": 0.01}, {}),
    "no decay": ({"weight_decay": 0.0}, {}),
    "decay 1": ({"weight_decay": 1.0}, {}),
    "decay 3": ({"weight_decay": 3.0}, {}),
    "30 units": ({"hidden_layer_sizes": (30,)}, {}),
    "300 units": ({"hidden_layer_sizes": (300,)}, {}),
    "two layers of 100": ({"hidden_layer_sizes": (100, 100)}, {}),
    "batches of 32": ({"batch_size": 32}, {}),
    "clip 2.5": ({}, {"heldin.sklearn.base.CLIP": 2.5}),
    "no clip": ({}, {"heldin.sklearn.base.CLIP": None}),
    "longer patience": (
        {},
        {"heldin.rules.inputs.PATIENCE": Patience(factor=3.0, slack=400, checks=3, errors=2.0)},
    ),
    "best check": ({}, {"heldin.rules.path.bootstrap_shares": _best_check}),
}

SETTINGS: Mapping[str, Method] = {
    name: Method(ours(**options), "network", constants=constants)
    for name, (options, constants) in _CHOICES.items()
}


def against(rows: Sequence[Row], name: str, base: str = BASE) -> dict[str, Any]:
    """A setting beside the default, on the problems that have both.

    Returns:
        problems, and of the ratios of the losses: their geometric mean ("ratio") with its 95 %
        "interval" over tables, "median", "worst", and the share below 1 ("better"); "parts" has
        geometric means by number of rows and by kind of targets; all but the first only if there
        is a problem.
    """
    ratios: dict[tuple[Any, ...], float] = {}
    kinds: dict[tuple[Any, ...], str] = {}
    for key, each in by_problem(rows, [base, name] if name != base else [base]).items():
        constant = next(r["constant"] for r in each.values() if "constant" in r)
        ratios[key] = floored(each[name], constant) / floored(each[base], constant)
        kinds[key] = "classes" if each[base].get("classes") else "numbers"
    found: dict[str, Any] = {"problems": len(ratios)}
    if not ratios:
        return found
    per_table: dict[str, list[float]] = {}
    parts: dict[Any, list[float]] = {}
    for key, ratio in ratios.items():
        per_table.setdefault(key[0], []).append(ratio)
        for part in (key[1], kinds[key]):
            parts.setdefault(part, []).append(ratio)
    values = list(ratios.values())
    return found | {
        "ratio": _mean(values),
        "interval": interval(per_table),
        "median": statistics.median(values),
        "worst": max(values),
        "better": statistics.fmean(value < 1 for value in values),
        "parts": {part: _mean(some) for part, some in parts.items()},
    }


def _mean(values: Sequence[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))


def write_settings(rows: Sequence[Row], names: Sequence[str], out: str | Path) -> str:
    """A table of `against`, the best first; kept in the folder `out` as table.md, too."""
    found = {name: against(rows, name) for name in names}
    found = {name: each for name, each in found.items() if each["problems"]}
    if not found:
        return "no setting has a result beside that of the default yet"
    tables = {row["table"] for row in rows}
    sizes = sorted({row["n"] for row in rows})
    parts: list[Any] = [*sizes, "classes", "numbers"]
    heads = ["setting", "problems", "loss, of the default's [95 %]", "median", "worst", "better in"]
    heads += [*(f"n = {n}" for n in sizes), "classes", "numbers"]
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)]]
    for name, each in sorted(found.items(), key=lambda item: float(item[1]["ratio"])):
        low, high = each["interval"]
        cells = [name, str(each["problems"]), f"{each['ratio']:.3f} [{low:.2f}, {high:.2f}]"]
        cells += [f"{each['median']:.3f}", f"{each['worst']:.2f}", f"{each['better']:.0%}"]
        cells += [f"{each['parts'][p]:.3f}" if p in each["parts"] else "" for p in parts]
        lines.append(cells)
    text = f"{len(found)} settings, the default among them, on {len(tables)} tables.\n\n"
    text += "".join("| " + " | ".join(cells) + " |\n" for cells in lines)
    (Path(out) / "table.md").write_text(text, encoding="utf-8")
    return text
