"""The evidence-based criterion (Eq. 5, Eq. 10 and Sec. 3.3 of the paper)."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Literal, NamedTuple

import torch

from heldin.capture.moments import Moments, ratio_sums
from heldin.capture.observation import Observation
from heldin.errors import HeldinError
from heldin.state.schema import shown

__all__ = [
    "Across", "Correction", "Dead", "Evidence", "Groups", "Ratio", "centre", "check_options",
    "evidence", "evidence_of", "grouping", "ratios",
]  # fmt: skip

Groups = Literal["tensor", "all"] | Mapping[str, str] | Callable[[str], str]
Correction = Literal["gaussian", "symmetric"] | None
Dead = Literal["out", "zero"]
Across = Literal["mean", "median"]


@dataclass(frozen=True)
class Evidence:
    """The criterion of one check: of a step, or of a window of several steps.

    Attributes:
        criterion: mean (or median) over groups of 1 - mean_k f_k. Above 0, the gradient is no
            larger than its standard error: stop. nan if there is no evidence (a single sample, no
            live coordinate). If parameters are sampled in turn, over those of the current draw.
        groups: 1 - mean_k f_k per group; groups without a live coordinate are absent.
        count: number of samples.
        live: number of live coordinates per group.
        nonfinite: parameters with an inf or nan contribution, which are excluded.
        estimator: how the moments were observed: "exact", "sampled" (from a block of coordinates
            of each parameter) or "microbatch" (approximate; `count` is that of micro-batches).

    >>> import heldin, torch
    >>> contributions = torch.tensor([[1.0], [-1.0], [1.0], [0.0]])
    >>> seen = {"w": heldin.Moments(contributions.sum(0), contributions.square().sum(0), 4)}
    >>> found = heldin.evidence(seen)
    >>> round(found.criterion, 3), found.count, found.live
    (0.727, 4, {'w': 1})
    """

    criterion: float
    groups: dict[str, float]
    count: int
    live: dict[str, int] = field(default_factory=dict)
    nonfinite: tuple[str, ...] = ()
    estimator: str = "exact"

    @property
    def approximate(self) -> bool:
        """Whether micro-batches were treated as samples."""
        return self.estimator == "microbatch"


def grouping(groups: Groups) -> Callable[[str], str]:
    """Return the function that maps a parameter's name to the name of its group."""
    if groups == "tensor":
        return lambda name: name
    if groups == "all":
        return lambda name: "all"
    if isinstance(groups, Mapping):
        table = dict(groups)

        def look_up(name: str) -> str:
            if name not in table:
                raise HeldinError(
                    f"parameter_groups: {name!r} has no entry; the mapping must name a group for "
                    f"every trainable parameter (it has {', '.join(sorted(table)) or 'none'})"
                )
            return table[name]

        return look_up
    if callable(groups):
        return groups
    raise HeldinError(
        "parameter_groups: expected 'tensor', 'all', a mapping or a function from parameter names "
        f"to group names, got {shown(groups)}"
    )


def evidence(
    seen: Mapping[str, Moments],
    parameter_groups: Groups = "tensor",
    *,
    correction: Correction = None,
    dead: Dead = "out",
    across: Across = "mean",
) -> Evidence:
    """Compute the criterion from observed moments.

    Args:
        seen: moments by parameter name, as `heldin.observe` yields them.
        parameter_groups: "tensor" (each parameter is a group), "all" (one group), or a mapping or
            function from parameter names to group names.
        correction: small-sample correction. Without signal and with Gaussian contributions, the
            mean of f is (m-1)/(m-3) instead of 1. "gaussian" divides by that (no value for
            m <= 3). "symmetric" replaces f by q = f m / (m - 1 + f), which has mean 1 for
            symmetric contributions and any m.
        dead: treatment of dead coordinates, for which f is 0/0: no sample contributed, or the
            squares of the contributions underflow (1e-17 in single precision). "out" excludes
            them from the mean. "zero" counts them as f = 0, so that many dead coordinates alone
            stop training.
        across: the "mean" of the groups, as in the paper, or their "median", the default of
            `EvidenceStopping`, with which a few groups far from zero do not decide alone.

    >>> import heldin, torch
    >>> model = torch.nn.Linear(1, 1, bias=False)
    >>> x = torch.tensor([[1.0], [2.0]])
    >>> with heldin.observe(model) as seen:
    ...     model(x).sum().backward()              # contributions 1 and 2
    >>> e = heldin.evidence(seen)
    >>> round(e.criterion, 3)                      # f = 1 * 3^2 / (2 * 5 - 3^2) = 9
    -8.0
    >>> list(e.groups)
    ['weight']
    """
    check_options(correction, dead, across)
    estimator = seen.estimator if isinstance(seen, Observation) else "exact"
    if estimator == "microbatch" and correction is None:
        correction = "gaussian"  # with few micro-batches, f is biased upwards
    parameter_ratios = ratios(seen, correction)
    count = max((ratio.m for ratio in parameter_ratios.values()), default=0)
    return evidence_of(
        parameter_ratios, count, grouping(parameter_groups), correction, dead, estimator, across
    )


def check_options(correction: Correction, dead: Dead, across: Across = "mean") -> None:
    """Refuse unknown values of the options."""
    for name, value, choices in (
        ("correction", correction, (None, "gaussian", "symmetric")),
        ("dead", dead, ("out", "zero")),
        ("across", across, ("mean", "median")),
    ):
        if value not in choices:
            *others, last = map(repr, choices)
            raise HeldinError(f"{name}: expected {', '.join(others)} or {last}, got {value!r}")


class Ratio(NamedTuple):
    """The sum of the ratios of one parameter."""

    summed: float  # sum of f (or q) over the live coordinates
    live: float  # number of live coordinates
    size: int  # number of observed coordinates
    weight: float  # number of the parameter's coordinates that each of them represents
    m: int  # number of samples
    finite: bool  # whether no contribution was inf or nan


def ratios(seen: Mapping[str, Moments], correction: Correction = None) -> dict[str, Ratio]:
    """Return the summed ratios of every parameter; synchronises with the device once."""
    by_count: dict[int, dict[str, Moments]] = {}
    for name, moments in seen.items():
        if moments.total.numel():
            by_count.setdefault(moments.count, {})[name] = moments
    if not by_count:
        return {}
    rows = [  # counts differ only in a window during which weights were unfrozen
        ratio_sums([(m.total, m.squares) for m in part.values()], count, correction == "symmetric")
        for count, part in by_count.items()
    ]
    table = rows[0] if len(rows) == 1 else torch.cat([row.double() for row in rows])
    values = iter(table.tolist())  # the only synchronisation
    return {
        name: Ratio(summed, live, m.total.numel(), m.weight, count, math.isfinite(largest))
        for count, part in by_count.items()
        for (name, m), (summed, live, largest) in zip(part.items(), values, strict=False)
    }


def centre(values: Collection[float], across: Across) -> float:
    """Return the mean or the median of the groups' values; nan if there is none.

    >>> centre([-9.0, 0.5, 1.0], "mean"), centre([-9.0, 0.5, 1.0], "median")
    (-2.5, 0.5)
    """
    if not values:
        return math.nan
    return median(values) if across == "median" else math.fsum(values) / len(values)


def evidence_of(
    parameter_ratios: Mapping[str, Ratio],
    count: int,
    group_of: Callable[[str], str],
    correction: Correction,
    dead: Dead,
    estimator: str,
    across: Across,
) -> Evidence:
    """Compute the criterion from the ratios of the parameters."""
    sums: dict[str, float] = {}
    sizes: dict[str, float] = {}
    live: dict[str, int] = {}
    nonfinite: list[str] = []
    fewest = 4 if correction == "gaussian" else 2
    for name, ratio in parameter_ratios.items():
        group = group_of(name)
        if not ratio.finite:
            nonfinite.append(name)
            continue
        summed, m = ratio.summed, ratio.m
        size = ratio.size if dead == "zero" else ratio.live
        if size and m >= fewest:
            if correction == "gaussian":
                summed *= (m - 3) / (m - 1)
            sums[group] = sums.get(group, 0.0) + summed * ratio.weight
            sizes[group] = sizes.get(group, 0.0) + size * ratio.weight
            live[group] = live.get(group, 0) + int(ratio.live)
    for group in map(group_of, nonfinite):
        sums.pop(group, None)
        live.pop(group, None)
    values = {group: 1.0 - summed / sizes[group] for group, summed in sums.items()}
    criterion = centre(values.values(), across)
    return Evidence(criterion, values, count, live, tuple(nonfinite), estimator)
