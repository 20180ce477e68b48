"""Gradient descent on WDBC and the toy problem for many seeds at once, to see every reading.

The experiments themselves train one seed after the other with heldin's rules. There are hundreds
of readings and twenty seeds here, so the same mathematics is written for all seeds together; tests
compare both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from . import data as _data
from .experiments import toy as _toy
from .experiments import wdbc as _wdbc
from .ledger import EPSILONS

__all__ = ["Path", "toy_paths", "wdbc_paths"]

DIVISIONS: tuple[str | float, ...] = ("out", *EPSILONS)


@dataclass(frozen=True)
class Path:
    """What was recorded along the descents of all seeds, as arrays (records, seeds).

    Attributes:
        steps: of the records.
        losses: by name.
        criteria: the unsmoothed criterion by treatment of the division.
    """

    steps: Any
    losses: Mapping[str, Any]
    criteria: Mapping[str | float, Any]


def recorded(steps: int, dense: int = 100, growth: float = 1.02) -> list[int]:
    """Steps that are recorded: all at first, then ever fewer, as the descent becomes slow.

    >>> recorded(20, dense=3, growth=1.5)
    [1, 2, 3, 4, 6, 9, 13, 19, 20]
    """
    found = list(range(1, min(dense, steps) + 1))
    while found[-1] < steps:
        found.append(min(steps, max(found[-1] + 1, int(found[-1] * growth))))
    return found


def _criterion(g: Tensor, squares: Tensor, n: int, epsilon: float) -> Tensor:
    """1 - mean f over the second axis, from mean gradients and mean squares."""
    spread = (squares - g.square()).clamp_min(0.0)
    variance = spread.mul_(n / (n - 1)).add_(epsilon or torch.finfo(g.dtype).tiny)
    return 1 - (n * g.square() / variance).mean(1)


# --- logistic regression on WDBC -------------------------------------------------------------


def _scaled(x: Tensor, rows: tuple[Tensor, ...], scaling: str, by: str) -> list[Tensor]:
    """Features for training, validation and test."""
    own = rows[0] if by == "train" else torch.arange(len(x))

    def standard(table: Tensor) -> Tensor:
        mean, std = table[own].mean(0), table[own].std(0)
        return (table - mean) / std

    table = _wdbc.expand(standard(x) if scaling in ("before", "both") else x)
    if scaling in ("after", "both"):
        table = standard(table)
    return [table[each] for each in rows]


def wdbc_paths(
    method: str,
    *,
    scaling: str,
    by: str,
    settings: Sequence[tuple[float, float]],
    steps: int,
    seeds: int,
    dtype: torch.dtype = torch.float32,
) -> list[Path]:
    """Descents of all seeds; weights move in the space that the training rows span.

    Args:
        method: "validation" or "evidence".
        scaling, by: see the choices of WDBC.
        settings: deviations of the initial weights and rates, side by side: a path for each.
        steps: of each.
        seeds: number of seeds.
        dtype: of the descents.
    """
    s = _wdbc.EXPERIMENT.settings["quick"]
    x, y = _data.wdbc()
    held = s.validation if method == "validation" else 0
    split = [len(x) - s.test - held, held, s.test]
    parts: list[list[Tensor]] = [[], [], []]
    answers: list[list[Tensor]] = [[], [], []]
    firsts = []
    for seed in range(seeds):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
        rows = order.split(split)
        for k, table in enumerate(_scaled(x, rows, scaling, by)):
            parts[k].append(table)
            answers[k].append(y[rows[k]])
        generator = torch.Generator().manual_seed(10_000 + seed)
        firsts.append(torch.randn(parts[0][0].shape[1], generator=generator, dtype=x.dtype))
    train, val, test = (torch.stack(each) for each in parts)
    initial, rates = torch.tensor(settings, dtype=torch.float64).T
    w0 = torch.stack(firsts)[:, :, None] * initial  # seeds x features x settings
    rates = rates.to(dtype)
    start = [(table @ w0).to(dtype) for table in (train, val, test)]
    kernels = [(table @ train.mT).to(dtype) for table in (train, val, test)]
    targets = [torch.stack(each)[..., None].to(dtype) for each in answers]
    features, squares = train.mT.to(dtype), train.mT.square().to(dtype)
    n = train.shape[1]
    a = torch.zeros(seeds, n, len(settings), dtype=dtype)
    bias = torch.zeros(seeds, 1, len(settings), dtype=dtype)

    def loss(which: int) -> Tensor:
        z = torch.baddbmm(start[which], kernels[which], a) + bias
        answer = targets[which].expand_as(z)
        return F.binary_cross_entropy_with_logits(z, answer, reduction="none").mean(1)

    kept = recorded(steps)
    losses: dict[str, list[Tensor]] = {"test_loss": []}
    if held:
        losses["validation_loss"] = []
    criteria: dict[str | float, list[Tensor]] = {} if held else {d: [] for d in DIVISIONS}
    marks = set(kept)
    for step in range(1, steps + 1):
        z = torch.baddbmm(start[0], kernels[0], a).add_(bias)
        r = z.sigmoid_().sub_(targets[0])
        if step in marks:
            losses["test_loss"].append(loss(2))
            if held:
                losses["validation_loss"].append(loss(1))
            else:
                g, q = torch.bmm(features, r).div_(n), torch.bmm(squares, r.square()).div_(n)
                gb, qb = r.mean(1, keepdim=True), r.square().mean(1, keepdim=True)
                for division in DIVISIONS:
                    epsilon = division if isinstance(division, float) else 0.0
                    both = _criterion(g, q, n, epsilon) + _criterion(gb, qb, n, epsilon)
                    criteria[division].append(both / 2)
        bias -= rates * r.mean(1, keepdim=True)
        a -= rates / n * r

    def column(values: Sequence[Tensor], place: int) -> Any:
        return torch.stack(list(values))[..., place].double().numpy()

    return [
        Path(
            torch.tensor(kept).numpy(),
            {name: column(values, place) for name, values in losses.items()},
            {name: column(values, place) for name, values in criteria.items()},
        )
        for place in range(len(settings))
    ]


# --- the toy problem -------------------------------------------------------------------------


def toy_paths(
    *, reach: float, frequency: float, noise: float, initial: float, steps: int, seeds: int
) -> Path:
    """Descents of all seeds, recorded at every step."""
    from dataclasses import replace

    s = replace(_toy.EXPERIMENT.settings["quick"], reach=reach, frequency=frequency, noise=noise)
    tables: list[list[Tensor]] = [[], [], []]
    answers: list[list[Tensor]] = [[], [], []]
    firsts = []
    for seed in range(seeds):
        for k, (x, y) in enumerate(_toy.data(seed, s)):
            tables[k].append(_toy.features(x, s).double())
            answers[k].append(y.double())
        generator = torch.Generator().manual_seed(10_000 + seed)
        firsts.append(torch.randn(2 + 2 * s.pairs, generator=generator))
    x, y = torch.stack(tables[0]), torch.stack(answers[0])
    n = x.shape[1]
    w = initial * torch.stack(firsts).double()
    # mean losses as quadratic forms, so that ten thousand test points cost what fifty would
    forms = []
    for table, answer in zip(tables, answers, strict=True):
        t, target = torch.stack(table), torch.stack(answer)
        rows = t.shape[1]
        forms.append(
            (t.mT @ t / rows, (t.mT @ target[..., None])[..., 0] / rows, target.square().mean(1))
        )
    names = ("train_loss", "validation_loss", "test_loss")
    losses: dict[str, list[Tensor]] = {name: [] for name in names}
    values = []
    for _ in range(steps):
        r = (x @ w[..., None])[..., 0] - y
        each = r[..., None] * x
        g = each.mean(1)
        values.append(_criterion(g, each.square().mean(1), n, 0.0))
        for name, (second, first, zero) in zip(names, forms, strict=True):
            product = (second @ w[..., None])[..., 0]
            losses[name].append(0.5 * ((w * product).sum(1) - 2 * (w * first).sum(1) + zero))
        w = w - s.rate * g
    return Path(
        torch.arange(1, steps + 1).numpy(),
        {name: torch.stack(found).numpy() for name, found in losses.items()},
        {"out": torch.stack(values).numpy()},
    )
