"""The evidence of a run, check by check: windows of steps, and parameters sampled in turn."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

from torch import Tensor, nn

from heldin.capture.collector import Collector
from heldin.capture.moments import Moments, as_real, which_finite
from heldin.capture.passes import ParameterSums
from heldin.capture.sampling import Sampler
from heldin.errors import HeldinError

from .evidence import Across, Correction, Dead, Evidence, Ratio, centre, evidence_of, ratios

__all__ = ["STATE_SCHEMA", "RunningEvidence", "Window", "why_none"]

STATE_SCHEMA = {  # of a saved state
    "evidence": {
        "criterion": float,
        "groups": {str: float},
        "count": int,
        "live": {str: int},
        "nonfinite": [str],
        "estimator": str,
    },
    "ratios": {str: [(float, int, bool)]},
    "window": {
        "steps": int,
        "unit": float,
        "nonfinite": [str],
        "counts": {str: int},
        "sums": {str: [(Tensor, float)]},
    },
}


class Window:
    """Sums over the steps of a window, per parameter.

    Contributions of steps with different numbers of samples are put on a common scale: a loss that
    is a mean divides each contribution by the size of the batch, which would give a sample of a
    small batch more weight.
    """

    def __init__(self, mean: bool) -> None:
        self._mean = mean
        self.clear()

    def clear(self) -> None:
        """Start a new window."""
        self.steps = 0
        self.nonfinite: dict[str, None] = {}
        self._unit = 0.0
        self._sums: dict[str, ParameterSums] = {}
        self._counts: dict[str, int] = {}

    def add(
        self,
        seen: Mapping[str, Moments],
        trainable: Iterable[str],
        scale: float,
        sampler: Sampler | None = None,
    ) -> None:
        """Add a step. A step with an inf or nan is counted, but its sums are not added."""
        self.steps += 1
        step = dict(seen.items())
        finite = which_finite(list(step.values()))
        bad = [name for name, fine in zip(step, finite, strict=True) if not fine]
        self.nonfinite.update(dict.fromkeys(bad))
        if bad or not step:
            return
        count = next(iter(step.values())).count
        unit = count / scale if self._mean else 1.0 / scale
        self._unit = self._unit or unit
        for name in trainable:  # parameters without a contribution in this step included
            self._counts[name] = self._counts.get(name, 0) + count
        for name, moments in step.items():
            new = ParameterSums(moments.total, moments.squares, None, moments.weight)
            new, old = new.scaled(unit / self._unit), self._sums.get(name)
            self._sums[name] = new if old is None else old.plus(new, name, sampler)

    def moments(self) -> dict[str, Moments]:
        """Return the moments of the window; a parameter frozen in some steps has a lower count."""
        return {
            name: Moments(sums.total, sums.squares, self._counts[name], sums.weight)
            for name, sums in self._sums.items()
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state as tensors, numbers and strings."""
        return {
            "steps": self.steps,
            "unit": self._unit,
            "nonfinite": list(self.nonfinite),
            "counts": dict(self._counts),
            "sums": {name: [s.total, s.squares, s.weight] for name, s in self._sums.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any], model: nn.Module) -> None:
        """Restore a state from `state_dict`, on the devices of the model's parameters."""
        self.clear()
        parameters = dict(model.named_parameters())
        for name, (total, squares, weight) in state["sums"].items():
            if name not in parameters or as_real(parameters[name]).numel() < total.numel():
                raise HeldinError(
                    f"the saved window holds sums for parameter {name!r} of shape "
                    f"{tuple(total.shape)}, which this model does not have; load the state of a "
                    "run with the same model"
                )
            if total.shape != squares.shape or name not in state["counts"]:
                raise ValueError(f"the total, squares and count of {name!r} do not match")
            device = parameters[name].device
            self._sums[name] = ParameterSums(total.to(device), squares.to(device), None, weight)
        self.steps, self._unit = state["steps"], state["unit"]
        self.nonfinite = dict.fromkeys(state["nonfinite"])
        self._counts = dict(state["counts"])


class RunningEvidence:
    """The `Evidence` of a run, computed from the sums of a model's backward passes.

    Args:
        collector: collects the sums, and draws the parameters of a check.
        group_of: maps names of parameters to names of groups.
        correction, dead, across: see `heldin.evidence`.
        window: number of steps that are summed for one value.
        mean: whether the loss is a mean over the samples of a step.

    Attributes:
        latest: the evidence of the last check.
        correction: the correction in use; the "microbatch" estimator needs one.
    """

    def __init__(
        self,
        collector: Collector,
        group_of: Callable[[str], str],
        correction: Correction,
        dead: Dead,
        across: Across,
        window: int,
        mean: bool,
    ) -> None:
        self.latest = Evidence(math.nan, {}, 0)
        self._collector, self._group_of = collector, group_of
        # With few micro-batches in place of samples, f is biased upwards.
        if collector.estimator == "microbatch" and correction is None:
            correction = "gaussian"
        self.correction, self._dead, self._across = correction, dead, across
        self._steps, self._window = window, Window(mean)
        self._ratios: dict[str, Ratio] = {}  # the latest ratios of every parameter

    @property
    def waiting(self) -> int:
        """Number of steps in the current, incomplete window."""
        return self._window.steps

    def add(
        self, seen: Mapping[str, Moments], count: int, model: nn.Module, scale: float
    ) -> tuple[Mapping[str, Moments], int, tuple[str, ...]] | None:
        """Add a step, and return the sums for a check if one is due.

        Returns:
            The sums, the number of samples, and the parameters for which steps were skipped because
            of an inf or nan; None while the window is incomplete.
        """
        if self._steps == 1:
            return seen, count, ()
        window = self._window
        trained = [n for n, p in model.named_parameters() if p.requires_grad]
        window.add(seen, trained, scale, self._collector.sampler)
        if window.steps < self._steps:
            return None
        sums, skipped = window.moments(), tuple(window.nonfinite)
        window.clear()
        return sums, max((moments.count for moments in sums.values()), default=0), skipped

    def form(self, sums: Mapping[str, Moments], count: int) -> Evidence:
        """Compute the evidence in these sums, with earlier ratios for parameters not drawn.

        The noise of a batch is similar in all parameters. So the centre over the drawn parameters
        is closer to that over all parameters of this batch than a centre that includes values of
        earlier batches. Only groups of several parameters need the earlier ratios.
        """
        drawn, turn = ratios(sums, self.correction), self._collector.turn()
        current = drawn
        if turn is None or count > 1:  # else there is no new value
            if turn is not None:
                not_drawn = set(self._collector.trained()) - turn
                earlier = {n: r for n, r in self._ratios.items() if n in not_drawn and r.finite}
                current = {**earlier, **drawn}
            current = {name: current[name] for name in self._collector.in_order(current)}
            self._ratios = current
        self.latest = evidence_of(
            current, count, self._group_of, self.correction, self._dead, self._collector.estimator,
            self._across,
        )  # fmt: skip
        if len(drawn) < len(current) == len(set(map(self._group_of, current))):
            groups = self.latest.groups
            values = [groups[group] for group in map(self._group_of, drawn) if group in groups]
            if values:
                self.latest = replace(self.latest, criterion=centre(values, self._across))
        return self.latest

    def state_dict(self) -> dict[str, Any]:
        """Return the state as tensors, numbers and strings."""
        latest = asdict(self.latest)
        return {
            "evidence": {**latest, "nonfinite": list(latest["nonfinite"])},
            "ratios": {name: list(ratio) for name, ratio in self._ratios.items()},
            "window": self._window.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], model: nn.Module) -> None:
        """Restore a state from `state_dict`."""
        self._window.load_state_dict(state["window"], model)
        latest = state["evidence"]
        self.latest = Evidence(**{**latest, "nonfinite": tuple(latest["nonfinite"])})
        self._ratios = {name: Ratio(*values) for name, values in state["ratios"].items()}


def why_none(count: int, nonfinite: tuple[str, ...]) -> str:
    """Explain in words why a check has no value.

    >>> why_none(0, ())
    'no backward pass was seen'
    """
    if nonfinite:
        more = f" and {len(nonfinite) - 3} more" if len(nonfinite) > 3 else ""
        return f"inf or nan in the contributions to {', '.join(map(repr, nonfinite[:3]))}{more}"
    if count == 0:
        return "no backward pass was seen"
    if count == 1:
        return "a single sample has no variance (window=k sums k steps)"
    return "no coordinate had a contribution"
