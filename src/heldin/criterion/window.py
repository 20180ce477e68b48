"""Moments that are summed over several steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from heldin.capture.moments import Moments, as_real, which_finite
from heldin.capture.sampling import Sampler
from heldin.errors import HeldinError

__all__ = ["STATE_SCHEMA", "Window"]

STATE_SCHEMA = {  # of a saved state
    "steps": int,
    "unit": float,
    "nonfinite": [str],
    "counts": {str: int},
    "sums": {str: [(Tensor, float)]},
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
        self._sums: dict[str, tuple[Tensor, Tensor, float]] = {}  # the last: Moments.weight
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
        factor = unit / self._unit
        for name in trainable:  # parameters without a contribution in this step included
            self._counts[name] = self._counts.get(name, 0) + count
        for name, moments in step.items():
            total, squares = moments.total, moments.squares
            if factor != 1.0:
                total, squares = total * factor, squares * factor**2
            weight = moments.weight
            if name in self._sums:
                first, second, before = self._sums[name]
                if first.shape != total.shape:  # one of the steps was not sampled
                    assert sampler is not None
                    cut = sampler.cutter(name, first.shape, total.shape)
                    total, squares, first, second = map(cut, (total, squares, first, second))
                total, squares, weight = first + total, second + squares, max(weight, before)
            self._sums[name] = (total, squares, weight)

    def moments(self) -> dict[str, Moments]:
        """Return the moments of the window; a parameter frozen in some steps has a lower count."""
        return {
            name: Moments(total, squares, self._counts[name], weight)
            for name, (total, squares, weight) in self._sums.items()
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state as tensors, numbers and strings."""
        return {
            "steps": self.steps,
            "unit": self._unit,
            "nonfinite": list(self.nonfinite),
            "counts": dict(self._counts),
            "sums": {name: list(sums) for name, sums in self._sums.items()},
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
            self._sums[name] = (total.to(device), squares.to(device), weight)
        self.steps, self._unit = state["steps"], state["unit"]
        self.nonfinite = dict.fromkeys(state["nonfinite"])
        self._counts = dict(state["counts"])
