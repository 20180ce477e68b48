"""Two runs compared on the same out-of-fold rows, and several runs side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from heldin.errors import HeldinError
from heldin.state.schema import check_int, shown

from .intervals import (
    MOST_UNDEFINED,
    Interval,
    defined,
    mean_interval,
    resampled_rows,
    row_groups,
    statistic_interval,
)
from .metrics import Metric, are_probabilities, described
from .out_of_fold import check_rows

__all__ = ["Comparison", "Difference", "RunRecord", "compare"]


@dataclass(frozen=True, eq=False, repr=False)
class RunRecord:
    """Out-of-fold losses and outputs of a run: what a comparison needs.

    Attributes:
        row_losses: (m,) losses of the rows.
        outputs: (m, ...) outputs for the rows; None if there are no metrics.
        targets: (m, ...) of the rows; None if there are no metrics.
        rows: (m,) numbers of the rows in the training data, ascending.
        folds: (m,) number of the fold that each row is in.
        metrics: metrics by name, see `resolve_metrics`.
        groups: (m,) names or numbers; rows of one group are drawn jointly.
        loss: what the losses are, in words; losses with different words are not compared.
        weights: (m,) of the rows in the metrics.

    >>> rows = torch.arange(5)
    >>> RunRecord(torch.rand(5), None, None, rows, folds=rows % 2)
    <heldin.RunRecord: 5 rows in 2 folds>
    """

    row_losses: Tensor
    outputs: Tensor | None
    targets: Tensor | None
    rows: Tensor
    folds: Tensor
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    groups: Any = None
    loss: str = ""
    weights: Tensor | None = None

    def __post_init__(self) -> None:
        check_rows(self.rows, self.folds)
        for name in ("row_losses", "outputs", "targets", "groups", "weights"):
            entries = getattr(self, name)
            if entries is not None and len(entries) != len(self.rows):
                raise HeldinError(f"{name} has {len(entries)} entries for {len(self.rows)} rows")
        if self.metrics and (self.outputs is None or self.targets is None):
            raise HeldinError("metrics are computed from outputs and targets; give both")
        if self.metrics:
            probabilities = are_probabilities(*self._parts()[:2])
            fixed = {n: each.of_probabilities(probabilities) for n, each in self.metrics.items()}
            object.__setattr__(self, "metrics", fixed)

    def __repr__(self) -> str:
        folds = len(torch.unique(self.folds))
        names = "".join(f", {name}" for name in self.metrics)
        return (
            f"<heldin.RunRecord: {len(self.rows)} rows in {folds} fold{'s' * (folds != 1)}{names}>"
        )

    def estimates(self) -> dict[str, Interval]:
        """Return the loss and every metric with their intervals."""
        intervals = {"loss": mean_interval(self.row_losses, groups=self.groups)}
        for name, metric in self.metrics.items():
            outputs, targets = self._parts()[:2]
            intervals[name] = statistic_interval(
                metric, outputs, targets, self.groups, weights=self.weights
            )
        return intervals

    def _parts(self) -> list[Tensor]:
        """Return outputs, targets and weights."""
        return [part for part in (self.outputs, self.targets, self.weights) if part is not None]


@dataclass(frozen=True)
class Difference:
    """The difference between two runs in one number.

    Attributes:
        name: "loss" or the name of a metric.
        a, b: the number for each run.
        difference: a - b.
        standard_error: of the difference, over resampled rows; nan for fewer than two rows.
        probability: share of the resamplings in which `a` is better; ties count half. nan if it is
            unknown whether larger is better.

    >>> print(Difference("loss", 0.5, 0.6, -0.1, 0.04, 0.99))
    loss 0.5 against 0.6, a difference of -0.10 [-0.18, -0.02], better in 99 % of the resamplings
    """

    name: str
    a: float
    b: float
    difference: float
    standard_error: float
    probability: float

    @property
    def interval(self) -> Interval:
        """The difference with its interval of 95 %."""
        reach = 1.96 * self.standard_error
        return Interval(self.difference, self.difference - reach, self.difference + reach)

    def __str__(self) -> str:
        text = f"{self.name} {self.a:.3g} against {self.b:.3g}, a difference of {self.interval}"
        if math.isnan(self.probability):
            return text
        percent = math.floor(100 * self.probability + 0.5)
        percent = min(99, percent) if self.probability < 1 else percent
        percent = max(1, percent) if self.probability > 0 else percent
        return f"{text}, better in {percent} % of the resamplings"


class Comparison(dict[str, Difference]):
    """Two runs on the same rows and folds, paired row by row.

    A dict of "loss" and the metrics' names to a `Difference`; `difference`, `standard_error` and
    `probability` are those of the loss. The standard error is over rows. That the same training
    with another seed would give another model is not in it. What cannot be compared, because the
    runs measure different things by the same name, is missing, and asking for it says why.

    >>> rows = torch.arange(40)
    >>> losses = torch.linspace(0, 1, 40)
    >>> a = RunRecord(losses, None, None, rows, rows % 5)
    >>> b = RunRecord(losses + 0.1, None, None, rows, rows % 5)
    >>> compare(a, b)
    a is better than b on 40 rows: loss 0.5 against 0.6, a difference of -0.1 [-0.1, -0.1],
    better in 100 % of the resamplings
    """

    def __init__(
        self,
        differences: Mapping[str, Difference],
        names: tuple[str, str],
        rows: int,
        refused: Mapping[str, str],
    ) -> None:
        super().__init__(differences)
        self.names, self.rows, self.refused = names, rows, refused

    def __missing__(self, name: str) -> Difference:
        if name in self.refused:
            raise HeldinError(f"heldin.compare: {self.refused[name]}")
        raise KeyError(name)

    @property
    def difference(self) -> float:
        """The loss of the first run minus that of the second."""
        return self["loss"].difference

    @property
    def standard_error(self) -> float:
        """The standard error of the difference in loss."""
        return self["loss"].standard_error

    @property
    def probability(self) -> float:
        """The share of the resamplings in which the first run has the smaller loss."""
        return self["loss"].probability

    def __repr__(self) -> str:
        (first, second), decisive = self.names, next(iter(self.values()))
        verdict = f"there is no clear difference between {first} and {second}"
        if decisive.probability >= 0.95:
            verdict = f"{first} is better than {second}"
        elif decisive.probability <= 0.05:
            verdict = f"{first} is worse than {second}"
        numbers = "; ".join([*map(str, self.values()), *self.refused.values()])
        return f"{verdict} on {self.rows} rows: {numbers}"


def compare(
    a: RunRecord | Any,
    b: RunRecord | Any,
    *,
    names: tuple[str, str] = ("a", "b"),
    resamplings: int = 999,
    seed: int = 0,
) -> Comparison:
    """Compare two runs on the same rows and folds by a paired bootstrap over rows or groups.

    Args:
        a, b: records of runs, or objects with a method `record()`.
        names: of the runs, in the text.
        resamplings: number of resamplings.
        seed: of the resamplings.

    Returns:
        Differences in loss and in every metric that both runs have. Losses of different kinds, such
        as a squared and an absolute error, are not compared; without a metric that is an error.

    >>> rows = torch.arange(40)
    >>> a = RunRecord(torch.linspace(0, 1, 40), None, None, rows, rows % 5)
    >>> b = RunRecord(torch.linspace(1, 0, 40), None, None, rows, rows % 5)
    >>> comparison = compare(a, b)
    >>> abs(comparison.difference) < 1e-6
    True
    >>> 0.3 < comparison.probability < 0.7
    True
    """
    first, second = _record(a), _record(b)
    check_int("heldin.compare", "resamplings", resamplings, 2)
    _check_pair(first, second)
    groups = row_groups(first.groups, len(first.rows))
    refused = {}
    if first.loss and second.loss and first.loss != second.loss:
        refused["loss"] = (
            f"the losses are different ones ({first.loss} and {second.loss}), so compare metrics, "
            "or give both runs the same eval_loss"
        )
    for name in first.metrics.keys() & second.metrics.keys():
        if described(first.metrics[name].function) != described(second.metrics[name].function):
            refused[name] = f"the runs have different functions for the metric {name!r}"
    differences = {}
    if "loss" not in refused:
        losses = [run.row_losses.detach().to("cpu", torch.float64) for run in (first, second)]
        gaps = losses[0] - losses[1]
        draws = resampled_rows(groups, resamplings, seed)
        resampled = torch.stack([gaps[rows].mean() for rows in draws])
        means = [float(each.mean()) for each in losses]
        differences["loss"] = _difference("loss", means, float(gaps.mean()), resampled, False)
    for name, metric in first.metrics.items():
        if name not in second.metrics or name in refused:
            continue
        values = [run.metrics[name](*run._parts()) for run in (first, second)]
        draws = resampled_rows(groups, resamplings, seed)
        resampled = torch.tensor(
            [
                defined(metric, first._parts(), rows)
                - defined(second.metrics[name], second._parts(), rows)
                for rows in draws
            ],
            dtype=torch.float64,
        )
        gap = values[0] - values[1]
        differences[name] = _difference(name, values, gap, resampled, metric.larger_is_better)
    if not differences:
        raise HeldinError(f"heldin.compare: {'; '.join(refused.values())}")
    return Comparison(differences, names, len(first.rows), refused)


def _difference(
    name: str, values: list[float], gap: float, resampled: Tensor, larger_is_better: bool | None
) -> Difference:
    """Summarise the differences of the resamplings."""
    finite = resampled[resampled.isfinite()]
    error = probability = math.nan
    if len(finite) >= (1 - MOST_UNDEFINED) * len(resampled) and math.isfinite(gap):
        error = float(finite.std())
        if larger_is_better is not None:
            better = finite > 0 if larger_is_better else finite < 0
            probability = float((better.double() + 0.5 * (finite == 0)).mean())
    return Difference(name, values[0], values[1], gap, error, probability)


def _record(run: Any) -> RunRecord:
    if isinstance(run, RunRecord):
        return run
    if not hasattr(run, "record"):
        raise HeldinError(
            f"heldin.compare: {shown(run)} has no record of its rows; give two finished runs with "
            "out-of-fold losses"
        )
    record: RunRecord = run.record()
    return record


def _check_pair(a: RunRecord, b: RunRecord) -> None:
    """Refuse runs whose rows, folds, groups or targets differ."""
    if not torch.equal(a.rows.cpu(), b.rows.cpu()):
        raise HeldinError(
            f"heldin.compare: the runs have losses for different rows ({len(a.rows)} and "
            f"{len(b.rows)}); train both on the same data with the same rule and seed"
        )
    if not torch.equal(row_groups(a.folds, len(a.rows)), row_groups(b.folds, len(b.rows))):
        raise HeldinError(
            "heldin.compare: the runs have different folds, so that a row's losses are of models "
            "with different rows; use the same seed, folds=, groups= and stratify= in both"
        )
    groups = [row_groups(run.groups, len(run.rows)) for run in (a, b)]
    if not torch.equal(*groups):
        raise HeldinError("heldin.compare: the runs have different groups; use the same in both")
    if a.targets is not None and b.targets is not None:
        if not torch.equal(a.targets.cpu(), b.targets.cpu()):
            raise HeldinError(
                "heldin.compare: the runs have different targets; train both on the same data"
            )
