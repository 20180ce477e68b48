"""Out-of-fold outputs along a run: metrics, a temperature, and the check that is chosen."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from heldin.crossval import (
    Calibrated,
    Interval,
    Metric,
    OutOfFold,
    are_probabilities,
    calibrate,
    numbered,
    statistic_interval,
    temperature_losses,
)
from heldin.crossval.temperature import HOTTEST
from heldin.errors import HeldinError
from heldin.rules.policy import best_check, densest_check
from heldin.state.schema import check_schema

__all__ = ["STATE_SCHEMA", "Outcome", "check_monitor"]

COMPARED = 4  # checks whose losses are compared with the cross-entropy of the outputs
MOST_FOLDS = 20  # more folds than these are merged to fit a temperature
PARTS = 10  # folds after merging

STATE_SCHEMA = {
    "outputs": {int: Tensor},
    "temperatures": [float],
    "monitored": [float],
    "members": [{str: Tensor}],
}


def check_monitor(metrics: Mapping[str, Metric], monitor: str, mode: str | None) -> bool | None:
    """Return whether a larger value of the monitored metric is better; None: it is the loss."""
    if mode not in (None, "min", "max"):
        raise HeldinError(f"heldin.EarlyStopping: mode must be 'min' or 'max', got {mode!r}")
    if monitor == "loss":
        if mode == "max":
            raise HeldinError(
                "heldin.EarlyStopping: mode='max' would look for the largest loss; give monitor= "
                "the name of a metric"
            )
        return None
    if monitor not in metrics:
        names = ", ".join(map(repr, ("loss", *metrics)))
        raise HeldinError(
            f"heldin.EarlyStopping: monitor must be one of {names}, got {monitor!r}; give the "
            "metric in metrics="
        )
    if mode is not None:
        return mode == "max"
    larger = metrics[monitor].larger_is_better
    if larger is None:
        raise HeldinError(
            f"heldin.EarlyStopping: it is unknown whether a larger {monitor!r} is better; give "
            "mode='max' or mode='min'"
        )
    return larger


class Outcome:
    """Outputs of held-out rows at the checks of a run, and what follows from them.

    Args:
        metrics: by name.
        monitor: "loss", or the metric that chooses the check.
        larger_is_better: of the monitored metric; None for the loss.
        temperature: whether to calibrate: True, False, or "auto" (if the loss is the cross-entropy
            of the outputs).
        memory: bytes of outputs that are kept.

    Attributes:
        required: whether it is an error if there is no temperature.
        calibrates: whether a temperature is fitted, if the loss is a cross-entropy.
        binary: whether the outputs are logits of a sigmoid, not of a softmax; None: of neither.
        uncalibrated: why there is no temperature, in words.
        members: weights and buffers of the shadows at the chosen check, for a committee.
    """

    def __init__(
        self,
        metrics: Mapping[str, Metric],
        monitor: str,
        larger_is_better: bool | None,
        temperature: bool | str,
        memory: int,
    ) -> None:
        self.metrics, self.monitor = dict(metrics), monitor
        self._larger, self._memory = larger_is_better, memory
        self.required, self.calibrates = temperature is True, temperature is not False
        self.binary: bool | None = None
        self.uncalibrated = ""
        self._probabilities = True  # whether all outputs of a loss that is none of logits look so
        self._calibrated: tuple[int, Calibrated] | None = None  # of the latest check
        self.members: list[dict[str, Tensor]] = []
        self._outputs: dict[int, Tensor] = {}  # by number of the check
        self._temperatures: list[float] = []
        self._monitored: list[float] = []
        self._held: OutOfFold | None = None  # of the first check
        self._folds = torch.zeros(0)  # of its rows, to fit a temperature without each of them
        self._weights: Tensor | None = None
        self._groups: Tensor | None = None

    # -- checks

    def begin(self, held: OutOfFold, weights: Tensor | None, groups: Tensor | None) -> None:
        """Take over rows, folds and targets, which stay the same.

        Args:
            held: outputs of the first check.
            weights: (m,) weights of its rows in the loss.
            groups: (m,) their groups.
        """
        self._held, self._weights, self._groups = held, weights, groups
        many = len(torch.unique(held.folds)) > MOST_FOLDS
        self._folds = torch.arange(len(held.folds)) % PARTS if many else numbered(held.folds)

    def add(self, number: int, losses: Tensor, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Take the outputs of a check; return losses to choose the check by, and to estimate with.

        Args:
            number: of the check.
            losses: (m,) of the rows, or means over blocks.
            outputs: (m, ...) of the rows.
        """
        self._outputs[number] = outputs
        self._decide(number, losses)
        self._look_for_logits(number)
        fit, temperature, curve = self._calibration(number), 1.0, losses
        if fit is not None:
            temperature, curve, losses = (
                fit.temperature,
                *map(self._weighted, (fit.curve, fit.losses)),
            )
        self._temperatures.append(temperature)
        if self._larger is not None:
            self._monitored.append(self.value(number, self.monitor))
        return curve, losses

    def _look_for_logits(self, number: int) -> None:
        """Note outputs that are no probabilities, for all checks and resamplings to come."""
        held = self._first()
        if self._probabilities and not are_probabilities(self._outputs[number], held.targets):
            self._probabilities = False
            values = self._monitored
            known = [i for i in range(len(values)) if i in self._outputs]
            self._monitored = [
                self.value(i, self.monitor) if i in known else v for i, v in enumerate(values)
            ]

    def _decide(self, number: int, losses: Tensor) -> None:
        """Decide whether the loss is the cross-entropy of the outputs."""
        if number > 0 and (self.binary is None or number >= COMPARED):
            return
        if not bool(losses.isfinite().all()):
            return
        candidates = (False, True) if number == 0 else (self.binary,)
        self.binary = next((b for b in candidates if self._agrees(number, losses, b)), None)
        if self.binary is not None:
            return
        if not self._first().targets.is_floating_point() and not self.uncalibrated:
            self.uncalibrated = "the loss is not the cross-entropy of the outputs"
        if self.required:
            raise HeldinError(
                "temperature: the loss is not the cross-entropy of the outputs (class weights, "
                "label smoothing, another loss, or another predict=), so that a temperature would "
                "not fit it; leave temperature out"
            )
        self._temperatures = [1.0] * len(self._temperatures)

    @property
    def _has_temperature(self) -> bool:
        return self.calibrates and self.binary is not None

    def _agrees(self, number: int, losses: Tensor, binary: bool | None) -> bool:
        try:
            expected = self._log_losses(number, 1.0, binary)
        except HeldinError:
            return False
        return len(expected) == len(losses) and torch.allclose(
            losses, expected, rtol=1e-3, atol=1e-6
        )

    def _log_losses(self, number: int, temperature: float, binary: bool | None = None) -> Tensor:
        binary = self.binary if binary is None else binary
        targets = self._first().targets
        return self._weighted(
            temperature_losses(self._outputs[number], targets, temperature, binary=binary)
        )

    def _weighted(self, losses: Tensor) -> Tensor:
        return losses if self._weights is None else losses * self._weights

    def _calibration(self, number: int) -> Calibrated | None:
        """Return the temperatures of a check whose outputs are kept; None: it has none."""
        outputs, held = self._outputs.get(number), self._first()
        if not self._has_temperature or outputs is None:
            return None
        if not bool(torch.stack(outputs.aminmax()).isfinite().all()):
            return None
        if self._calibrated is None or self._calibrated[0] != number:
            start = self._temperatures[min(number, len(self._temperatures)) - 1] if number else 1.0
            fit = calibrate(
                outputs, held.targets, self._folds, self._weights, binary=self.binary, start=start
            )
            self._calibrated = number, fit
        return self._calibrated[1]

    def best(self, first: int = 0) -> int:
        """Return the number of the check with the best monitored metric.

        Args:
            first: number of the first check that counts.
        """
        values = torch.tensor(self._monitored[first:], dtype=torch.float64)
        return first + best_check(-values if self._larger else values)

    def thin(self, best: int, steps: list[int]) -> None:
        """Keep the outputs of the best check, and as many others as fit into half of the memory."""
        while len(self._outputs) > 1 and self._bytes() > self._memory // 2:
            kept = {number: steps[number] for number in sorted(self._outputs)}
            del self._outputs[densest_check(kept, best)]

    def _bytes(self) -> int:
        return sum(map(_size, self._outputs.values()))

    def take_members(self, members: list[dict[str, Tensor]]) -> None:
        """Keep the weights of the shadows, if they fit into the memory beside the outputs."""
        size = sum(_size(value) for member in members for value in member.values())
        self.members = members if size <= self._memory - self._bytes() else []

    @property
    def room(self) -> int:
        """The bytes that outputs and members leave for the weights of checks."""
        used = sum(_size(value) for member in self.members for value in member.values())
        return self._memory - self._bytes() - used

    # -- results

    @property
    def by_metric(self) -> bool:
        """Whether a metric chooses the check, not the loss."""
        return self._larger is not None

    @property
    def larger_is_better(self) -> bool | None:
        """Whether a larger value of the monitored metric is better; None: it is the loss."""
        return self._larger

    @property
    def monitored(self) -> list[float]:
        """The monitored metric at every check."""
        return self._monitored

    def temperature(self, number: int) -> float:
        """Return the temperature of a check; 1: none."""
        return self._temperatures[number]

    def has_outputs(self, number: int) -> bool:
        """Return whether the outputs of a check are kept."""
        return number in self._outputs

    def out_of_fold(self, number: int) -> OutOfFold:
        """Return the outputs at a check, divided by its temperature."""
        return self._divided(number, self._temperatures[number])

    def cross_fitted(self, number: int) -> OutOfFold:
        """Return the outputs at a check, those of each fold at the temperature of the others."""
        fit = self._calibration(number)
        return self._divided(number, 1.0 if fit is None else fit.row_temperatures)

    def _divided(self, number: int, temperature: float | Tensor) -> OutOfFold:
        held, outputs = self._first(), self._outputs[number]
        if isinstance(temperature, Tensor):
            temperature = temperature.reshape(-1, *[1] * (outputs.dim() - 1)).to(outputs.dtype)
        if not isinstance(temperature, float) or temperature != 1:
            normal = self.binary is False and bool((outputs.logsumexp(1).abs() < 1e-4).all())
            outputs = outputs / temperature
            if normal:  # log-probabilities
                outputs = outputs.log_softmax(1)
        return OutOfFold(outputs, held.rows, held.folds, held.targets)

    def row_losses(self, number: int, curve: Tensor) -> Tensor:
        """Return the losses behind the estimate of a check, if its outputs are kept."""
        fit = self._calibration(number)
        return curve if fit is None else self._weighted(fit.losses)

    @property
    def fixed_metrics(self) -> dict[str, Metric]:
        """The metrics, with outputs known to be logits or probabilities."""
        probabilities = self.binary is None and self._probabilities
        return {n: metric.of_probabilities(probabilities) for n, metric in self.metrics.items()}

    def value(self, number: int, name: str) -> float:
        """Return a metric at a check; nan where it is undefined."""
        held = self.cross_fitted(number)
        if held.outputs.is_floating_point() and not bool(held.outputs.isfinite().all()):
            return math.nan
        return self.fixed_metrics[name](held.outputs, held.targets, self._weights)

    def intervals(self, number: int) -> dict[str, Callable[[], Interval]]:
        """Return functions that compute the metrics at a check with their intervals."""
        held = self.cross_fitted(number)
        arguments = (held.outputs, held.targets, self._groups)
        return {
            name: functools.partial(statistic_interval, metric, *arguments, weights=self._weights)
            for name, metric in self.fixed_metrics.items()
        }

    def doubt(self, number: int) -> str:
        """Return why the probabilities at a check are of no use; "": they are of some."""
        fit, targets = self._calibration(number), self._first().targets
        if fit is None:
            return ""
        if fit.temperature >= HOTTEST:
            return "the largest temperature fits best, so the logits tell nothing of held-out rows"
        if targets.dim() > 1 or targets.is_floating_point() or self.binary:
            return ""
        weights = torch.ones(len(targets)) if self._weights is None else self._weights
        shares = torch.bincount(targets, weights.double())
        shares = shares[shares > 0] / shares.sum()
        entropy = -float((shares * shares.log()).sum())
        loss = float(self._weighted(fit.losses).mean())
        if loss < entropy:
            return ""
        return (
            f"the estimated loss, {loss:.3g}, is not below {entropy:.3g}, that of answering with "
            "the shares of the classes alone"
        )

    @property
    def weights(self) -> Tensor | None:
        """The weights of the rows in the loss."""
        return self._weights

    @property
    def groups(self) -> Tensor | None:
        """The groups of the rows."""
        return self._groups

    def _first(self) -> OutOfFold:
        assert self._held is not None
        return self._held

    # -- saving

    def state_dict(self) -> dict[str, Any]:
        """Return tensors and numbers only."""
        return {
            "outputs": dict(self._outputs),
            "temperatures": list(self._temperatures),
            "monitored": list(self._monitored),
            "members": [dict(member) for member in self.members],
        }

    def load_state_dict(self, state: Mapping[str, Any], checks: int) -> None:
        """Continue where `state_dict` was taken."""
        check_schema(state, STATE_SCHEMA, "['outcome']")
        monitored = checks if self._larger is not None else 0
        if len(state["temperatures"]) != checks or len(state["monitored"]) != monitored:
            raise ValueError(f"outputs of another number of checks than {checks}")
        form = next(iter(self._outputs.values()))
        for number, outputs in state["outputs"].items():
            check_schema(outputs, form, f"['outcome']['outputs'][{number}]")
        self._outputs = dict(state["outputs"])
        self._temperatures = list(state["temperatures"])
        self._monitored = list(state["monitored"])
        self.members = [dict(member) for member in state["members"]]
        self._calibrated, targets = None, self._first().targets
        self._probabilities = all(are_probabilities(o, targets) for o in self._outputs.values())


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
