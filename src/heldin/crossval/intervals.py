"""Confidence intervals over held-out rows, for means with a long tail and for any metric."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from heldin.errors import HeldinError
from heldin.state.schema import check_int, shown

__all__ = [
    "Estimates",
    "Interval",
    "mean_interval",
    "resampled_rows",
    "row_groups",
    "statistic_interval",
]

# Both were chosen on development draws and measured on others by
# `heldin_lab.study.interval_coverage`; docs/results/interval-coverage.json has the coverage.
REACH = 1.5  # distance of the added row from the mean, in distances of the largest row
FLOOR = 0.05  # added to the squared standard error of every resampling, in that of the rows
FEWEST_UNITS = 5  # fewest rows or groups that an interval is given for
MOST_UNITS = 2_000  # more rows than these are merged into blocks at random
RESAMPLINGS = 999
MOST_UNDEFINED = 0.2  # largest share of resamplings in which a metric may be undefined


@dataclass(frozen=True)
class Interval:
    """A number with an interval around it.

    Attributes:
        value: the estimate.
        low, high: the ends of the interval; nan if there is none.
        coverage: share of the runs of our study in which such an interval held the truth; None: not
            measured for this configuration.

    >>> interval = Interval(0.48, 0.39, 0.57)
    >>> interval
    Interval(value=0.48, low=0.39, high=0.57, coverage=None)
    >>> print(interval)
    0.48 [0.39, 0.57]
    >>> value, low, high = interval
    """

    value: float
    low: float
    high: float
    coverage: float | None = None

    def widened(self, factor: float, error: float = 0.0) -> Interval:
        """Return an interval that allows for errors which the rows do not show.

        On other training rows the losses of all rows would differ: for K folds Nadeau and Bengio
        (2003) give a factor for the variance.

        Args:
            factor: of the distances between the value and the ends.
            error: another, independent error; the squares of the distances are added.

        >>> print(Interval(0.5, 0.4, 0.7).widened(2))
        0.50 [0.30, 0.90]
        >>> print(Interval(0.5, 0.2, 0.9).widened(1, error=0.4))
        0.50 [0.00, 1.07]
        """
        low = self.value - math.hypot(factor * (self.value - self.low), error)
        high = self.value + math.hypot(factor * (self.high - self.value), error)
        return Interval(self.value, low, high, self.coverage)

    def __iter__(self) -> Iterator[float]:
        return iter((self.value, self.low, self.high))

    def __str__(self) -> str:
        if math.isnan(self.low) and math.isnan(self.high):
            return f"{self.value:.3g}"
        # two digits of the width and of the value
        sizes = [abs(size) for size in (self.high - self.low, self.value) if size]
        if all(map(math.isfinite, self)) and sizes:
            places = 1 - math.floor(math.log10(min(sizes)))
            if 0 <= places <= 6:
                value, low, high = (f"{number:.{places}f}" for number in self)
                return f"{value} [{low}, {high}]"
        return f"{self.value:.3g} [{self.low:.3g}, {self.high:.3g}]"


class Estimates(Mapping[str, Interval]):
    """Intervals by name; each is computed when it is first asked for.

    >>> estimates = Estimates({"loss": lambda: Interval(0.48, 0.39, 0.57)})
    >>> "loss" in estimates, estimates["loss"].value
    (True, 0.48)
    >>> estimates
    {'loss': Interval(value=0.48, low=0.39, high=0.57, coverage=None)}
    """

    def __init__(self, functions: Mapping[str, Callable[[], Interval]]) -> None:
        self._functions = dict(functions)
        self._known: dict[str, Interval] = {}

    def __getitem__(self, name: str) -> Interval:
        if name not in self._known:
            self._known[name] = self._functions[name]()
        return self._known[name]

    def __contains__(self, name: object) -> bool:
        return name in self._functions

    def __iter__(self) -> Iterator[str]:
        return iter(self._functions)

    def __len__(self) -> int:
        return len(self._functions)

    def __repr__(self) -> str:
        return repr(dict(self))


def row_groups(groups: Any, rows: int) -> Tensor:
    """Return numbers 0, 1, ... of the groups of rows; None: every row is its own group."""
    if groups is None:
        return torch.arange(rows)
    names = groups.tolist() if hasattr(groups, "tolist") else list(groups)
    if len(names) != rows:
        raise HeldinError(
            f"groups has {len(names)} entries, but there are {rows} rows; give one name or number "
            "for each row"
        )
    numbers: dict[Any, int] = {}
    return torch.tensor([numbers.setdefault(name, len(numbers)) for name in names])


def mean_interval(
    row_losses: Tensor,
    weights: Tensor | None = None,
    groups: Any = None,
    level: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Return the mean of row losses with a confidence interval that long tails do not break.

    A sample of 20 losses often misses the rare large ones, so that its mean and its spread are both
    too small. The interval is that of a bootstrap-t (Efron 1981), which follows the skewness of
    the losses, with two changes. The upper end is that of the rows and one more row, half as far
    again from the mean as the largest. And the squared standard errors of the resamplings are
    raised by a twentieth of that of the rows, because a resampling without the few rows that differ
    has none. The lower end is not below the smallest loss.

    On fresh draws of 20 to 200 losses (lognormal with sigma 0.8 and 1.2, exponential, Weibull, log
    losses, squared errors) intervals of 95 % held the mean in 95 to 98 %, and in 88 to 95 % with
    sigma 2. No interval knows of losses that are not in the sample: where a tenth of the rows lose
    15 times as much as the others, 20 rows give 86 %, and where 2 % lose 50 times as much, 20 or 50
    rows give 61 to 67 %. The interval is about the rows only; see `Interval.widened`.

    Args:
        row_losses: (n,) losses of held-out rows. The ends are nan if one is not finite, if all are
            equal, or for fewer than five rows or groups.
        weights: (n,) weights of the rows in the mean, not negative.
        groups: (n,) names or numbers; rows of one group are drawn jointly.
        level: of confidence.
        seed: of the resamplings.
    """
    losses, row_weights = _checked_rows(row_losses, weights)
    _check_level("mean_interval", level)
    units = _blocks(row_groups(groups, len(losses)), seed)
    used = row_weights > 0
    losses, row_weights, units = losses[used], row_weights[used], units[used]
    value = float((row_weights * losses).sum() / row_weights.sum())
    units = torch.unique(units, return_inverse=True)[1]
    count = int(units.max()) + 1 if len(units) else 0
    if count < FEWEST_UNITS or not math.isfinite(value) or bool((losses == losses[0]).all()):
        return Interval(value, math.nan, math.nan)
    sizes = torch.zeros(count, dtype=torch.float64).index_add_(0, units, row_weights)
    excess = row_weights * (losses - value)
    deviations = torch.zeros(count, dtype=torch.float64).index_add_(0, units, excess)
    low, high = studentised_ends(deviations[None], sizes[None], level=level, seed=seed)
    if not float(low) < float(high):  # the groups' means are all equal
        return Interval(value, math.nan, math.nan)
    return Interval(value, max(value + float(low), float(losses.min())), value + float(high))


def studentised_ends(
    deviations: Tensor,
    sizes: Tensor,
    *,
    level: float = 0.95,
    seed: int = 0,
    resamplings: int = RESAMPLINGS,
    reach: float = REACH,
    floor: float = FLOOR,
) -> tuple[Tensor, Tensor]:
    """Return the ends of intervals around means, as distances from these means.

    Args:
        deviations: (samples, units) sums over the rows of each unit of weight x (loss - mean).
        sizes: (samples, units) sums of the weights.
        level, seed, resamplings: see `mean_interval`.
        reach, floor: see the constants `REACH` and `FLOOR`; 0: the plain bootstrap-t.
    """
    low, high = _bootstrap_t(deviations, sizes, level, seed, resamplings, floor)
    if reach:
        largest = deviations.argmax(1, keepdim=True)
        more = torch.cat([deviations, reach * deviations.gather(1, largest)], 1)
        more_sizes = torch.cat([sizes, sizes.gather(1, largest)], 1)
        shift = more.sum(1, keepdim=True) / more_sizes.sum(1, keepdim=True)
        ends = _bootstrap_t(more - shift * more_sizes, more_sizes, level, seed, resamplings, floor)
        high = torch.maximum(high, shift[:, 0] + ends[1])
    return low, high


def _bootstrap_t(
    deviations: Tensor, sizes: Tensor, level: float, seed: int, resamplings: int, floor: float
) -> tuple[Tensor, Tensor]:
    """Return the ends of the bootstrap-t, as distances from the mean of every sample."""
    units = deviations.shape[1]
    factor = units / (units - 1)
    total = sizes.sum(1, keepdim=True)
    variance = factor * deviations.square().sum(1, keepdim=True) / total.square()
    ratios = []
    generator = torch.Generator().manual_seed(seed)
    rows_at_once = max(1, 4_000_000 // units)
    for start in range(0, resamplings, rows_at_once):
        drawn = _counts(min(rows_at_once, resamplings - start), units, generator).T
        total_drawn = sizes @ drawn
        mean = deviations @ drawn / total_drawn
        squares = deviations.square() @ drawn
        squares += mean * (mean * (sizes.square() @ drawn) - 2 * ((deviations * sizes) @ drawn))
        spread = factor * squares.clamp_min(0) / total_drawn.square()
        ratios.append(mean / (spread + floor * variance).clamp_min(1e-300).sqrt())
    ordered = torch.cat(ratios, 1).sort(1).values
    place = max(0, round((1 - level) / 2 * (resamplings + 1)) - 1)
    error = ((1 + floor) * variance[:, 0]).sqrt()
    return -ordered[:, resamplings - 1 - place] * error, -ordered[:, place] * error


def _counts(resamplings: int, units: int, generator: torch.Generator) -> Tensor:
    """Draw (resamplings, units): how often each unit is in each resampling."""
    drawn = torch.randint(units, (resamplings, units), generator=generator)
    counts = torch.zeros(resamplings, units, dtype=torch.float64)
    return counts.scatter_add_(1, drawn, torch.ones_like(drawn, dtype=torch.float64))


def _blocks(units: Tensor, seed: int) -> Tensor:
    """Merge units at random into at most `MOST_UNITS` blocks."""
    count = int(units.max()) + 1 if len(units) else 0
    if count <= MOST_UNITS:
        return units
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return order[units] % MOST_UNITS


def _checked_rows(row_losses: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    if not isinstance(row_losses, Tensor) or row_losses.dim() != 1 or len(row_losses) == 0:
        raise HeldinError(
            "mean_interval: row_losses must be a tensor of shape (n,) with at least one row, got "
            f"{_shape(row_losses)}"
        )
    losses = row_losses.detach().to("cpu", torch.float64)
    if weights is None:
        return losses, torch.ones_like(losses)
    row_weights = torch.as_tensor(weights).detach().to("cpu", torch.float64)
    if row_weights.shape != losses.shape:
        raise HeldinError(
            f"mean_interval: weights has shape {tuple(row_weights.shape)}, but row_losses has "
            f"{tuple(losses.shape)}; give one weight for each row"
        )
    if not bool((row_weights >= 0).all()) or not 0 < float(row_weights.sum()) < math.inf:
        raise HeldinError(
            "mean_interval: weights must be finite, not negative, and not all of them 0"
        )
    return losses, row_weights


def _check_level(owner: str, level: float) -> None:
    if not isinstance(level, (int, float)) or not 0 < level < 1:
        raise HeldinError(f"{owner}: level must lie between 0 and 1, got {shown(level)}")


def _shape(value: Any) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else shown(value)


def resampled_rows(groups: Tensor, resamplings: int, seed: int) -> Iterable[Tensor]:
    """Draw the rows of each resampling, whole groups at a time.

    Args:
        groups: (n,) numbers of the rows' groups, see `row_groups`.
        resamplings: number of resamplings.
        seed: of the draws.
    """
    count = int(groups.max()) + 1
    generator = torch.Generator().manual_seed(seed)
    order = groups.argsort(stable=True)
    members = order.split(torch.bincount(groups, minlength=count).tolist())
    single = len(groups) == count
    for _ in range(resamplings):
        drawn = torch.randint(count, (count,), generator=generator)
        yield order[drawn] if single else torch.cat([members[i] for i in drawn.tolist()])


def statistic_interval(
    function: Callable[..., float],
    outputs: Tensor,
    targets: Tensor,
    groups: Any = None,
    level: float = 0.95,
    resamplings: int = 499,
    seed: int = 0,
    weights: Tensor | None = None,
) -> Interval:
    """Return a metric on all rows with a bootstrap interval over rows, or over groups.

    The ends are percentiles of the metric's values on resampled rows, moved so that the value on
    all rows is their median (bias correction, Efron 1987), and outwards as Student's distribution
    is wider than the normal one (Hesterberg 2015). Resamplings in which the metric is undefined (an
    AUC of rows of one class) are left out. The ends are nan if these are more than a fifth, or for
    fewer than five rows or groups. If the metric has the same value in all (an accuracy of 1), one
    end is that of four rows or groups with targets of other rows: so many may be wrong with none
    of them in the sample (the rule of three).
    For a mean of row losses with a long tail `mean_interval` is the better one.

    Args:
        function: (outputs, targets) -> number.
        outputs: (n, ...) outputs of the model.
        targets: (n, ...) what is true.
        groups: (n,) names or numbers; rows of one group are drawn jointly.
        level: of confidence.
        resamplings: number of resamplings.
        seed: of the resamplings.
        weights: (n,) of the rows, the third argument of the function.
    """
    _check_level("statistic_interval", level)
    check_int("statistic_interval", "resamplings", resamplings, 1)
    if len(outputs) != len(targets):
        raise HeldinError(
            f"statistic_interval: there are {len(outputs)} outputs, but {len(targets)} targets; "
            "give one of each for each row"
        )
    units = row_groups(groups, len(outputs))
    parts = [outputs, targets] if weights is None else [outputs, targets, weights]
    value = float(function(*parts))
    count = int(units.max()) + 1 if len(units) else 0
    if count < FEWEST_UNITS or not math.isfinite(value):
        return Interval(value, math.nan, math.nan)
    draws = (defined(function, parts, rows) for rows in resampled_rows(units, resamplings, seed))
    values = sorted(number for number in draws if math.isfinite(number))
    if len(values) < (1 - MOST_UNDEFINED) * resamplings:
        return Interval(value, math.nan, math.nan)
    if values[0] == values[-1]:
        few = math.ceil(-math.log((1 - level) / 2))
        parts[1] = _with_wrong(targets, units, few, seed)
        end = defined(function, parts, torch.arange(len(units)))
        return Interval(value, *((math.nan,) * 2 if end == value else sorted((end, value))))
    low, high = _percentiles(values, value, (1 - level) / 2, count)
    return Interval(value, min(value, low), max(value, high))


def _with_wrong(targets: Tensor, units: Tensor, few: int, seed: int) -> Tensor:
    """Return targets of which a few units' are those of other rows."""
    order = targets.reshape(len(targets), -1).double().mean(1).argsort(stable=True)
    others = targets.clone()  # from the other half of the rows, when these are sorted by targets
    others[order] = targets[order.roll(len(order) // 2)]
    differs = (others != targets).reshape(len(targets), -1).any(1).cpu()
    wrong = units[differs].unique()
    wrong = wrong[torch.randperm(len(wrong), generator=torch.Generator().manual_seed(seed))[:few]]
    rows = (torch.isin(units, wrong) & differs).to(targets.device)
    return torch.where(rows.reshape(-1, *[1] * (targets.dim() - 1)), others, targets)


def defined(function: Callable[..., float], parts: Iterable[Any], rows: Tensor) -> float:
    """Call a metric on some rows of outputs, targets and weights; nan where it is undefined."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # each of some hundred resamplings would give its warning
        try:
            return float(function(*(part[rows.to(part.device)] for part in parts)))
        except (ArithmeticError, HeldinError, RuntimeError, ValueError):
            return math.nan


def _percentiles(
    values: list[float], value: float, share: float, units: int
) -> tuple[float, float]:
    """Return the ends of an interval from the sorted values on resampled rows."""
    normal = NormalDist()
    below = sum(number < value for number in values) + 0.5 * values.count(value)
    median = normal.inv_cdf(min(0.9, max(0.1, below / len(values))))  # of `value`, in normal units
    width = _student(-normal.inv_cdf(share), units - 1) * math.sqrt(units / (units - 1))
    shares = normal.cdf(2 * median - width), normal.cdf(2 * median + width)
    low, high = (round(each * (len(values) + 1)) - 1 for each in shares)
    last = len(values) - 1
    return values[min(last, max(0, low))], values[min(last, max(0, high))]


def _student(z: float, freedom: int) -> float:
    """Return Student's quantile for a normal one, by the expansion of Cornish and Fisher."""
    second = (z**3 + z) / (4 * freedom)
    return z + second + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
