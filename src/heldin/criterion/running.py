"""The evidence of a run, check by check: windows of steps, and parameters looked at in turns."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

from torch import nn

from heldin.capture.collector import Collector
from heldin.capture.moments import Moments

from .evidence import Across, Correction, Dead, Evidence, Ratio, centre, evidence_of, ratios
from .window import STATE_SCHEMA as WINDOW
from .window import Window

__all__ = ["STATE_SCHEMA", "RunningEvidence", "why_none"]

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
    "window": WINDOW,
}


class RunningEvidence:
    """Forms `Evidence` from the sums of a model's backward passes.

    Args:
        collector: collects the sums, and knows whose turn it is.
        group_of: from names of parameters to names of groups.
        correction, dead, across: see `heldin.evidence`.
        window: number of steps whose sums add up before a value is formed.
        mean: whether the loss is a mean over the samples of a step.

    Attributes:
        latest: the last one that was formed.
        correction: as given, or what the estimator needs.
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
        # a few micro-batches in the place of samples: the ratio of Gaussian means is too large
        if collector.estimator == "microbatch" and correction is None:
            correction = "gaussian"
        self.correction, self._dead, self._across = correction, dead, across
        self._steps, self._window = window, Window(mean)
        self._ratios: dict[str, Ratio] = {}  # the last ones of every parameter

    @property
    def waiting(self) -> int:
        """Number of steps in the window that is not full yet."""
        return self._window.steps

    def add(
        self, seen: Mapping[str, Moments], count: int, model: nn.Module, scale: float
    ) -> tuple[Mapping[str, Moments], int, tuple[str, ...]] | None:
        """Take in a step; the sums for a check, if one is due.

        Returns:
            The sums, the number of samples, and the parameters whose steps were left out because
            of an inf or nan.
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
        return sums, max((each.count for each in sums.values()), default=0), skipped

    def form(self, sums: Mapping[str, Moments], count: int) -> Evidence:
        """The evidence in these sums; of parameters whose turn it was not, the last ratios.

        What a batch adds by chance is much the same in all parameters, so that the centre of those
        of the turn is nearer to that of all of them than one with values of other batches in it.
        Groups of several parameters need these, to be whole.
        """
        fresh, turn = ratios(sums, self.correction), self._collector.turn()
        found, estimator = fresh, self._collector.estimator
        if turn is None or count > 1:  # else there is no value: earlier ones alone tell nothing
            if turn is not None:
                others = set(self._collector.trained()) - turn
                kept = {n: r for n, r in self._ratios.items() if n in others and r.finite}
                found = {**kept, **fresh}
            found = {name: found[name] for name in self._collector.in_order(found)}
            self._ratios = found
        self.latest = evidence_of(
            found, count, self._group_of, self.correction, self._dead, estimator, self._across
        )
        if len(fresh) < len(found) == len(set(map(self._group_of, found))):
            groups = self.latest.groups
            values = [groups[group] for group in map(self._group_of, fresh) if group in groups]
            if values:
                self.latest = replace(self.latest, criterion=centre(values, self._across))
        return self.latest

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers and strings only."""
        latest = asdict(self.latest)
        return {
            "evidence": {**latest, "nonfinite": list(latest["nonfinite"])},
            "ratios": {name: list(ratio) for name, ratio in self._ratios.items()},
            "window": self._window.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], model: nn.Module) -> None:
        """Take over what `state_dict` gave."""
        self._window.load_state_dict(state["window"], model)
        latest = state["evidence"]
        self.latest = Evidence(**{**latest, "nonfinite": tuple(latest["nonfinite"])})
        self._ratios = {name: Ratio(*values) for name, values in state["ratios"].items()}


def why_none(count: int, nonfinite: tuple[str, ...]) -> str:
    """Why a check has no value, in words.

    >>> why_none(0, ())
    'no backward pass was seen'
    """
    if nonfinite:
        more = f" and {len(nonfinite) - 3} more" if len(nonfinite) > 3 else ""
        return f"inf or nan in the contributions to {', '.join(map(repr, nonfinite[:3]))}{more}"
    if count == 0:
        return "no backward pass was seen"
    if count == 1:
        return "a single sample has no variance (window=k puts k steps together)"
    return "no coordinate had a contribution"
