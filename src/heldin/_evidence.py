"""The evidence-based criterion (Eq. 5, Eq. 10 and Sec. 3.3 of the paper)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from ._errors import HeldinError
from ._moments import Moments, Sums, ratio_sums
from ._observe import Observation

__all__ = ["Correction", "Dead", "Evidence", "Groups", "evidence", "grouping"]

Groups = Literal["tensor", "all"] | Mapping[str, str] | Callable[[str], str]
Correction = Literal["gaussian", "symmetric"] | None
Dead = Literal["out", "zero"]


@dataclass(frozen=True)
class Evidence:
    """The criterion of one step.

    Attributes:
        criterion: mean over groups of 1 - mean_k f_k. Above 0: the gradient is no larger than its
            own error, stop. nan if there is no evidence (a single sample, no live coordinate).
        groups: the same per group; groups without a live coordinate are absent.
        count: number of samples.
        live: number of coordinates per group that carry evidence.
        nonfinite: parameters with an inf or nan contribution; they are left out.
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
        """Whether micro-batches were taken for samples."""
        return self.estimator == "microbatch"


def _itself(name: str) -> str:
    return name


def grouping(groups: Groups) -> Callable[[str], str]:
    """The function from a parameter's name to its group's."""
    if groups == "tensor":
        return _itself
    if groups == "all":
        return lambda name: "all"
    if isinstance(groups, Mapping):
        table = dict(groups)

        def look_up(name: str) -> str:
            if name not in table:
                raise HeldinError(
                    f"groups: parameter {name!r} has no entry; the mapping must name a group for "
                    f"every trainable parameter (it has {', '.join(sorted(table)) or 'none'})"
                )
            return table[name]

        return look_up
    if callable(groups):
        return groups
    raise HeldinError(
        f"groups: expected 'tensor', 'all', a mapping or a function from parameter names to group "
        f"names, got {groups!r}"
    )


def evidence(
    seen: Mapping[str, Moments],
    groups: Groups = "tensor",
    *,
    correction: Correction = None,
    dead: Dead = "out",
) -> Evidence:
    """The criterion from observed moments.

    Args:
        seen: moments by parameter name, as `heldin.observe` gives them.
        groups: "tensor" (each parameter is a group), "all" (one group), or a mapping or function
            from parameter names to group names.
        correction: for few samples. Without signal the mean of f is not 1 but (m-1)/(m-3), if the
            contributions are Gaussian: "gaussian" divides by that (no value for m <= 3),
            "symmetric" puts q = f m / (m - 1 + f) in the place of f, which has mean 1 for
            symmetric contributions and any m.
        dead: coordinates to which no sample contributed are 0/0 (and hardly better known if the
            contributions are so small that their squares are lost, 1e-17 in single precision).
            "out" leaves them out of the mean, "zero" counts them as f = 0, so that many of them
            alone ask for a stop.

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
    if correction not in (None, "gaussian", "symmetric"):
        raise HeldinError(
            f"correction: expected None, 'gaussian' or 'symmetric', got {correction!r}"
        )
    if dead not in ("out", "zero"):
        raise HeldinError(f"dead: expected 'out' or 'zero', got {dead!r}")
    estimator = seen.estimator if isinstance(seen, Observation) else "exact"
    if estimator == "microbatch" and correction is None:
        correction = "gaussian"  # few of them: the ratio of Gaussian means is too large otherwise
    return Evidence(*gathered(seen, grouping(groups), correction, dead, estimator))


Values = tuple[float, dict[str, float], int, dict[str, int], tuple[str, ...], str]  # of `Evidence`


def gathered(
    seen: Mapping[str, Moments],
    group_of: Callable[[str], str],
    correction: Correction,
    dead: Dead,
    estimator: str,
) -> Values:
    """`evidence`, for arguments that were looked at before: what a step has to wait for."""
    symmetric = correction == "symmetric"
    if type(seen) is Observation and seen.reduced:
        count = seen.count
        if seen.passes != 1 or seen.reducing != symmetric:  # ratios of passes do not add up
            return math.nan, {}, count, {}, (), estimator
        if seen.plain is not None and group_of is _itself and dead == "out":
            if correction != "gaussian":  # there is nothing to do
                values, live = seen.plain
                return math.fsum(values.values()) / len(values), values, count, live, (), estimator
        found = _formed(seen, symmetric) if seen.sums else []
        found += [(name, *reduced, count) for name, reduced in seen.reduced.items()]
    else:
        found = _formed(seen, symmetric)
        count = max([m for *_, m in found], default=0)
    sums: dict[str, float] = {}
    sizes: dict[str, float] = {}
    live = {}
    nonfinite: list[str] = []
    spoilt: set[str] = set()
    fewest = 4 if correction == "gaussian" else 2
    for name, (summed, number, finite), whole, weight, m in found:
        group = group_of(name)
        if not finite:
            nonfinite.append(name)
            spoilt.add(group)
            continue
        size = whole if dead == "zero" else number
        if size and m >= fewest:
            if correction == "gaussian":
                summed *= (m - 3) / (m - 1)
            sums[group] = sums.get(group, 0.0) + summed * weight
            sizes[group] = sizes.get(group, 0.0) + size * weight
            live[group] = live.get(group, 0) + int(number)
    for group in spoilt:
        sums.pop(group, None)
        live.pop(group, None)
    values = {group: 1.0 - summed / sizes[group] for group, summed in sums.items()}
    criterion = math.fsum(values.values()) / len(values) if values else math.nan
    return criterion, values, count, live, tuple(nonfinite), estimator


def _formed(
    seen: Mapping[str, Moments], symmetric: bool
) -> list[tuple[str, Sums, int, float, int]]:
    """Name, sums of ratios, coordinates, what each one stands for and count of each parameter."""
    if isinstance(seen, Observation):
        given = seen.stored()
    else:
        given = [(n, m.total, m.squares, m.count, m.weight) for n, m in seen.items()]
    found = []
    for m in {m for _, _, _, m, _ in given}:  # one, but for a window with thawed weights
        part = [each for each in given if each[3] == m]
        formed = ratio_sums([(total, squares) for _, total, squares, _, _ in part], m, symmetric)
        for (name, total, _, _, weight), ratios in zip(part, formed, strict=True):
            found.append((name, ratios, total.numel(), weight, m))
    return found
