"""What a run logs so that readings of the criterion can be replayed, and replaying them.

For each step and each tensor: means over all its coordinates of whether a coordinate is live, of
f, of f with a constant added to the variance, and of q. From these the criterion follows for every
treatment of 0/0, every such constant, every grouping of tensors and every correction; smoothing
and the start of the average act on the criterion itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from heldin.capture.moments import Moments, smallest_square

__all__ = ["EPSILONS", "Ledger", "Log", "criteria", "first_above", "ratio", "smooth"]

EPSILONS = (1e-10, 1e-8, 1e-5)
COLUMNS = ("live", "f", *(f"f+{epsilon:g}" for epsilon in EPSILONS), "q")


def ratio(seen: Moments, epsilon: float = 0.0) -> Tensor:
    """f of every coordinate, with a constant added to the variance; 0 where it is 0/0.

    Contributions are on the scale of a mean loss, so a sample's own gradient is `count` times its
    contribution.

    >>> seen = Moments(torch.tensor([1.0]), torch.tensor([1.0]), 2)   # gradients 0 and 2
    >>> ratio(seen), ratio(seen, 2.0)                       # 2 * 1 / 2 and 2 * 1 / (2 + 2)
    (tensor([1.]), tensor([0.5000]))
    """
    m, total, squares = seen.count, seen.total, seen.squares
    info = torch.finfo(squares.dtype)
    spread = torch.addcmul(squares, total, total, value=-1 / m)
    spread = spread.maximum(squares * (4 * info.eps))
    if epsilon:
        variance = spread.mul_(m * m / (m - 1)).add_(epsilon)
        return total.square().mul_(m).div_(variance)
    live = squares >= smallest_square(squares.dtype)
    found = total.square().mul_(1 - 1 / m).div_(spread.clamp_min_(info.tiny))
    return torch.where(live, found, 0.0)


def _row(seen: Moments) -> Tensor:
    """The columns for one tensor."""
    live = seen.squares >= smallest_square(seen.squares.dtype)
    q = seen.total.square().div_(seen.squares.clamp_min(torch.finfo(seen.squares.dtype).tiny))
    means = [live.double().mean(), ratio(seen).double().mean()]
    means += [ratio(seen, epsilon).double().mean() for epsilon in EPSILONS]
    return torch.stack([*means, torch.where(live, q, 0.0).double().mean()]).float().cpu()


class Ledger:
    """The rows of a run; a part of its checkpoints.

    >>> ledger = Ledger({"w": 2})
    >>> ledger.add(1, {"w": Moments(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 0.0]), 2)})
    >>> found = ledger.arrays()
    >>> found["table"].shape, criteria(found, "out"), criteria(found, "zero")
    ((1, 1, 6), array([0.]), array([0.5]))
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes = dict(sizes)
        self._steps: list[int] = []
        self._counts: list[int] = []
        self._rows: list[Tensor] = []

    def add(self, step: int, seen: Mapping[str, Moments]) -> None:
        """Log a step."""
        self._steps.append(step)
        self._counts.append(next(iter(seen.values())).count)
        self._rows.append(torch.stack([_row(seen[name]) for name in self.sizes]))

    def arrays(self) -> dict[str, Any]:
        """What is written to disk, as numpy arrays."""
        import numpy

        shape = (0, len(self.sizes), len(COLUMNS))
        return {
            "steps": numpy.array(self._steps, dtype="int32"),
            "counts": numpy.array(self._counts, dtype="int32"),
            "names": numpy.array(list(self.sizes)),
            "sizes": numpy.array(list(self.sizes.values()), dtype="int64"),
            "table": torch.stack(self._rows).numpy() if self._rows else numpy.zeros(shape, "f4"),
        }

    def state_dict(self) -> dict[str, Any]:
        """Tensors and numbers only."""
        rows = torch.stack(self._rows) if self._rows else torch.zeros(0)
        return {"steps": self._steps, "counts": self._counts, "rows": rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self._steps, self._counts = list(state["steps"]), list(state["counts"])
        self._rows = list(state["rows"].cpu().unbind())


# --- watching a model ------------------------------------------------------------------------


@dataclass
class Log:
    """Observes a model's steps for a ledger, and for the averages of some of its weights.

    With `budget` only a new random block of so many coordinates of each tensor is looked at in
    each step, and all of them in the first `stretch` of every `period` steps: these are logged
    from both, so that one sees how far the sampled criterion can stand for the exact one.

    Args:
        model: the model.
        budget: None for all coordinates.
        averages: of fixed coordinates, see `heldin_lab.reproduce.averages`.
        period, stretch: when the exact criterion is logged beside the sampled one.
    """

    model: nn.Module
    budget: int | None = None
    averages: Any = None
    period: int = 1000
    stretch: int = 20

    def __post_init__(self) -> None:
        from heldin import observe

        sizes = {name: p.numel() for name, p in self.model.named_parameters()}
        self.ledger, self.exact = Ledger(sizes), Ledger(sizes)
        if self.budget is None:
            self._seen = observe(self.model)
        else:
            self._seen = observe(self.model, estimator="sampled", coordinates=self.budget)
            self._whole = observe(self.model)
        self._seen.resume()
        self._fixed = None
        if self.averages is not None:
            self._fixed = observe(self.model, estimator="sampled", coordinates=self.averages.budget)
            self._fixed.resume()

    def before(self, step: int) -> None:
        """Get ready for a step's backward passes."""
        if self.budget is not None and (step - 1) % self.period < self.stretch:
            self._whole.resume()

    def after(self, step: int) -> dict[str, Moments]:
        """Log a step after its backward passes; returns what was seen."""
        seen = dict(self._seen)
        self.ledger.add(step, seen)
        if self.budget is not None and (step - 1) % self.period < self.stretch:
            self.exact.add(step, self._whole)
            self._whole.clear()
            self._whole.pause()
        self._seen.clear()
        if self._fixed is not None:
            self.averages.add(dict(self._fixed))
            self._fixed.clear(redraw=False)
        return seen

    def arrays(self) -> dict[str, Any]:
        """All that was logged."""
        found = self.ledger.arrays()
        if self.budget is not None:
            exact = self.exact.arrays()
            found |= {"exact_steps": exact["steps"], "exact_table": exact["table"]}
        return found | ({} if self.averages is None else self.averages.arrays())

    def state_dict(self) -> dict[str, Any]:
        """Of the ledgers and averages."""
        parts = {"ledger": self.ledger, "exact": self.exact}
        if self.averages is not None:
            parts["averages"] = self.averages
        return {name: part.state_dict() for name, part in parts.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken (sampled blocks are drawn anew)."""
        self.ledger.load_state_dict(state["ledger"])
        self.exact.load_state_dict(state["exact"])
        if self.averages is not None:
            self.averages.load_state_dict(state["averages"])

    def close(self) -> None:
        """Let go of the model."""
        self._seen.close()
        if self.budget is not None:
            self._whole.close()
        if self._fixed is not None:
            self._fixed.close()


# --- replaying -------------------------------------------------------------------------------


def criteria(
    log: Mapping[str, Any],
    division: str | float,
    groups: str = "tensor",
    correction: str | None = None,
    exact: bool = False,
) -> Any:
    """The unsmoothed criterion of every logged step.

    Args:
        log: what `Ledger.arrays` gave.
        division: "out", "zero" or a constant of `EPSILONS`.
        groups: "tensor" or "all".
        correction: None, "gaussian" or "symmetric", as for `heldin.evidence`.
        exact: those of the stretches in which all coordinates were looked at.
    """
    import numpy

    table = log["exact_table" if exact else "table"].astype("float64")
    sizes = log["sizes"].astype("float64")
    column = "f" if isinstance(division, str) else f"f+{division:g}"
    if correction == "symmetric":
        column = "q"
    above = table[:, :, COLUMNS.index(column)]
    below = table[:, :, 0] if division == "out" else numpy.ones_like(above)
    if correction == "gaussian":
        m = log["counts"].astype("float64")[: len(above), None]
        above = above * (m - 3) / (m - 1)
    if groups == "all":
        return 1 - (above * sizes).sum(1) / (below * sizes).sum(1)
    with numpy.errstate(invalid="ignore", divide="ignore"):
        each = numpy.where(below > 0, 1 - above / below, numpy.nan)
    return numpy.nanmean(each, axis=1)


def smooth(values: Any, smoothing: Any, start: Any, steps: Any = None) -> Any:
    """Running averages c = b c + (1-b) x along the first axis; nan changes nothing.

    Args:
        values: (steps, ...).
        smoothing, start: numbers, or arrays that fit the other axes.
        steps: of the values, if some are left out: a value stands for all steps since the one
            before it.

    >>> import numpy
    >>> smooth(numpy.array([2.0, 4.0]), 0.5, 0.0)
    array([1. , 2.5])
    >>> smooth(numpy.array([2.0, 4.0]), 0.5, 0.0, steps=[1, 3])   # as 2, 4, 4
    array([1.  , 3.25])
    """
    import numpy

    gaps = numpy.ones(len(values)) if steps is None else numpy.diff(steps, prepend=steps[0] - 1)
    if isinstance(smoothing, float) and (gaps == 1).all() and not numpy.isnan(values).any():
        from scipy.signal import lfilter

        before = numpy.full((1, *values.shape[1:]), smoothing * start)
        filtered, _ = lfilter([1 - smoothing], [1, -smoothing], values, axis=0, zi=before)
        return filtered
    b = numpy.asarray(smoothing, dtype="float64")
    now = numpy.zeros(values.shape[1:]) + start
    found = numpy.empty(values.shape)
    for t, (value, gap) in enumerate(zip(values, gaps, strict=True)):
        kept = b**gap
        now = numpy.where(numpy.isnan(value), now, kept * now + (1 - kept) * value)
        found[t] = now
    return found


def first_above(smoothed: Any, steps: Any) -> Any:
    """The first step at which each series is above zero; nan if none is.

    >>> import numpy
    >>> first_above(numpy.array([[-1.0, -1.0], [1.0, -1.0]]), [10, 20])
    array([20., nan])
    """
    import numpy

    above = smoothed > 0
    place = above.argmax(0)
    return numpy.where(above.any(0), numpy.asarray(steps, dtype="float64")[place], numpy.nan)
