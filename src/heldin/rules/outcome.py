"""Out-of-fold outputs along a run: metrics, a temperature, and the check that is chosen."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from heldin.crossval import (
    Calibrated,
    Calibrator,
    Interval,
    Metric,
    OutOfFold,
    are_probabilities,
    numbered,
    resolve_metrics,
    statistic_interval,
    temperature_losses,
)
from heldin.crossval.temperature import HOTTEST
from heldin.errors import HeldinError
from heldin.rules.policy import best_check, densest_check
from heldin.shadows.outputs import OutputRecipe
from heldin.state.schema import Saved, check_schema

__all__ = ["OUTPUTS", "Outcome", "OutputOptions"]

# Arguments of `heldin.EarlyStopping` that need outputs of held-out rows.
OUTPUTS = ("metrics", "predict", "targets", "monitor", "mode", "temperature")

COMPARED = 4  # checks whose losses are compared with the cross-entropy of the outputs
MOST_FOLDS = 20  # more folds than these are merged to fit a temperature
PARTS = 10  # folds after merging


@dataclass(eq=False)
class OutputOptions:
    """The arguments of `heldin.EarlyStopping` that need outputs of held-out rows.

    Attributes:
        owner: the public name, for errors.
        fallback: (model, batch) -> outputs, where a call of the model does not show them.
        resolved: the metrics by name.
        larger_is_better: whether a larger value of the monitored metric is better; None: it is the
            loss.
    """

    owner: str
    metrics: Any = None
    predict: Any = None
    targets: Any = None
    monitor: str = "loss"
    mode: str | None = None
    temperature: bool | str = "auto"
    fallback: Any = None
    resolved: dict[str, Metric] = field(init=False)
    larger_is_better: bool | None = field(init=False)

    def __post_init__(self) -> None:
        if self.temperature not in (True, False, "auto"):
            raise HeldinError(
                f"{self.owner}: temperature must be True, False or 'auto', got {self.temperature!r}"
            )
        for name in ("predict", "targets"):
            function = getattr(self, name)
            if function is not None and not callable(function):
                raise HeldinError(f"{self.owner}: {name} must be a function, got {function!r}")
        self.resolved = resolve_metrics(self.metrics)
        self.larger_is_better = self._compares()

    def _compares(self) -> bool | None:
        """Return whether a larger value of what is monitored is better; None: it is the loss."""
        owner, monitor, mode = self.owner, self.monitor, self.mode
        if mode not in (None, "min", "max"):
            raise HeldinError(f"{owner}: mode must be 'min' or 'max', got {mode!r}")
        if monitor == "loss":
            if mode == "max":
                raise HeldinError(
                    f"{owner}: mode='max' would look for the largest loss; give monitor= the name "
                    "of a metric"
                )
            return None
        if monitor not in self.resolved:
            names = ", ".join(map(repr, ("loss", *self.resolved)))
            raise HeldinError(
                f"{owner}: monitor must be one of {names}, got {monitor!r}; give the metric in "
                "metrics="
            )
        larger = self.resolved[monitor].larger_is_better if mode is None else mode == "max"
        if larger is None:
            raise HeldinError(
                f"{owner}: it is unknown whether a larger {monitor!r} is better; give mode='max' "
                "or mode='min'"
            )
        return larger

    @property
    def insists(self) -> bool:
        """Whether something was asked for that cannot do without outputs."""
        functions = self.predict is not None or self.targets is not None
        return bool(self.resolved) or functions or self.temperature is True

    def recipe(self, memory: int) -> OutputRecipe:
        """Return how outputs and targets of a batch are made; memory: bytes that they may take."""
        return OutputRecipe(memory, self.predict, self.targets, self.fallback)


class Outcome(Saved):
    """Outputs of held-out rows at the checks of a run, and what follows from them.

    Args:
        options: which metrics there are, what chooses the check, and whether to calibrate.
        memory: bytes of outputs that are kept.
    """

    _saved: ClassVar[dict[str, Any]] = {
        "outputs": {int: Tensor},
        "_temperatures": [float],
        "monitored": [float],
        "members": [{str: Tensor}],
        "binary": (bool, None),
        "calibrates": bool,
        "uncalibrated": str,
        "_probabilities": bool,
    }

    def __init__(self, options: OutputOptions, memory: int) -> None:
        self.metrics, self.monitor = options.resolved, options.monitor
        self.larger_is_better, self._memory = options.larger_is_better, memory
        temperature = options.temperature
        self.required = temperature is True  # it is an error if there is none
        self.calibrates = temperature is not False  # if the loss is a cross-entropy
        self.binary: bool | None = None  # logits of a sigmoid, not of a softmax; None: of neither
        self.uncalibrated = ""  # why there is no temperature, in words
        self._probabilities = True  # whether all outputs of a loss that is none of logits look so
        self._calibrator: Calibrator | None = None
        self._calibrated: tuple[int, Calibrated] | None = None  # of the latest check
        self.members: list[dict[str, Tensor]] = []  # shadows at the chosen check: their tensors
        self.outputs: dict[int, Tensor] = {}  # by number of the check, as far as they are kept
        self.monitored: list[float] = []  # the metric that chooses the check, at every check
        self._temperatures: list[float] = []
        self._held: Any = None  # `OutOfFold` of the first check
        self._folds = torch.zeros(0)  # of its rows, to fit a temperature without each of them
        self.weights: Tensor | None = None  # (m,) of its rows in the loss; None: all are equal
        self.groups: Tensor | None = None  # (m,) of its rows

    @property
    def by_metric(self) -> bool:
        """Whether a metric chooses the check, not the loss."""
        return self.larger_is_better is not None

    # -- checks

    def begin(self, held: OutOfFold, weights: Tensor | None, groups: Tensor | None) -> None:
        """Take over rows, folds and targets of the first check, which stay the same."""
        self._held, self.weights, self.groups = held, weights, groups
        many = len(torch.unique(held.folds)) > MOST_FOLDS
        self._folds = torch.arange(len(held.folds)) % PARTS if many else numbered(held.folds)

    def renumber(self, numbers: Tensor) -> Tensor:
        """Give row i the number `numbers[i]`; return the order of the rows by these."""
        held, rows = self._held, numbers[self._held.rows]
        order = rows.argsort()
        parts = held.outputs[order], rows[order], held.folds[order], held.targets[order]
        self._held, self._folds = OutOfFold(*parts), self._folds[order]
        self.outputs = {number: outputs[order] for number, outputs in self.outputs.items()}
        self.weights = None if self.weights is None else self.weights[order]
        self.groups = None if self.groups is None else self.groups[order]
        self._calibrator = self._calibrated = None
        return order

    def add(self, number: int, losses: Tensor, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Take the outputs of a check; return losses to choose the check by, and to estimate with.

        losses: (m,) of the rows, or means over blocks; outputs: (m, ...) of the rows.
        """
        self.outputs[number] = outputs
        self._decide(number, losses)
        self._look_for_logits(number)
        fit, curve = self._calibration(number), losses
        if fit is not None:
            curve, losses = self._weighted(fit.curve), self._weighted(fit.losses)
        self._temperatures.append(1.0 if fit is None else fit.temperature)
        if self.by_metric:
            self.monitored.append(self.value(number, self.monitor))
        return curve, losses

    def _look_for_logits(self, number: int) -> None:
        """Note outputs that are no probabilities, for all checks and resamplings to come."""
        if self._probabilities and not are_probabilities(self.outputs[number], self._held.targets):
            self._probabilities = False
            for i in self.outputs.keys() & range(len(self.monitored)):
                self.monitored[i] = self.value(i, self.monitor)

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
        if not self._held.targets.is_floating_point() and not self.uncalibrated:
            self.uncalibrated = "the loss is not the cross-entropy of the outputs"
        if self.required:
            raise HeldinError(
                "temperature: the loss is not the cross-entropy of the outputs (class weights, "
                "label smoothing, another loss, or another predict=), so that a temperature would "
                "not fit it; leave temperature out"
            )
        self._temperatures = [1.0] * len(self._temperatures)

    def _agrees(self, number: int, losses: Tensor, binary: bool | None) -> bool:
        """Return whether losses are the log losses of the outputs."""
        targets = self._held.targets
        try:
            expected = temperature_losses(self.outputs[number], targets, 1.0, binary=binary)
        except HeldinError:
            return False
        expected = self._weighted(expected)
        return len(expected) == len(losses) and torch.allclose(
            losses, expected, rtol=1e-3, atol=1e-6
        )

    def _weighted(self, losses: Tensor) -> Tensor:
        return losses if self.weights is None else losses * self.weights

    def _calibration(self, number: int) -> Calibrated | None:
        """Return the temperatures of a check whose outputs are kept; None: it has none."""
        outputs = self.outputs.get(number)
        if outputs is None or self.binary is None or not self.calibrates:
            return None
        if self._calibrated is None or self._calibrated[0] != number:
            start = self._temperatures[min(number, len(self._temperatures)) - 1] if number else 1.0
            if self._calibrator is None:
                targets = self._held.targets
                self._calibrator = Calibrator(
                    outputs, targets, self.binary, self.weights, self._folds
                )
            self._calibrated = number, self._calibrator(outputs, start)
        return self._calibrated[1]

    def best(self, first: int = 0) -> int:
        """Return the number of the check with the best monitored metric, from `first` on."""
        values = torch.tensor(self.monitored[first:], dtype=torch.float64)
        return first + best_check(-values if self.larger_is_better else values)

    def thin(self, best: int, steps: list[int]) -> None:
        """Keep the outputs of the best check, and as many others as fit into half of the memory."""
        while len(self.outputs) > 1 and _bytes(self.outputs) > self._memory // 2:
            places = {number: steps[number] for number in sorted(self.outputs)}
            del self.outputs[densest_check(places, best)]

    def take_members(self, members: list[dict[str, Tensor]]) -> None:
        """Keep the weights of the shadows, if they fit into the memory beside the outputs."""
        self.members = members
        if self.room < 0:
            self.members = []

    @property
    def room(self) -> int:
        """The bytes that outputs and members leave for the weights of checks."""
        return self._memory - _bytes(self.outputs) - sum(map(_bytes, self.members))

    # -- results

    def temperature(self, number: int) -> float:
        """Return the temperature of a check; 1: none."""
        return self._temperatures[number] if self._temperatures else 1.0

    def out_of_fold(self, number: int) -> OutOfFold:
        """Return the outputs at a check, divided by its temperature."""
        return self._divided(number, self._temperatures[number])

    def cross_fitted(self, number: int) -> OutOfFold:
        """Return the outputs at a check, those of each fold at the temperature of the others."""
        fit = self._calibration(number)
        return self._divided(number, 1.0 if fit is None else fit.row_temperatures)

    def _divided(self, number: int, temperature: float | Tensor) -> OutOfFold:
        held, outputs = self._held, self.outputs[number]
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
        return self.fixed_metrics[name](held.outputs, held.targets, self.weights)

    def intervals(self, number: int) -> dict[str, Callable[[], Interval]]:
        """Return functions that compute the metrics at a check with their intervals."""
        if not self.metrics:
            return {}
        held = self.cross_fitted(number)
        arguments = (held.outputs, held.targets, self.groups)
        return {
            name: functools.partial(statistic_interval, metric, *arguments, weights=self.weights)
            for name, metric in self.fixed_metrics.items()
        }

    def doubt(self, number: int) -> str:
        """Return why the probabilities at a check are of no use; "": they are of some."""
        fit = self._calibration(number)
        if fit is None:
            return ""
        targets = self._held.targets
        if fit.temperature >= HOTTEST:
            return "the largest temperature fits best, so the logits tell nothing of held-out rows"
        if targets.dim() > 1 or targets.is_floating_point() or self.binary:
            return ""
        weights = torch.ones(len(targets)) if self.weights is None else self.weights
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

    # -- saving

    def take(self, state: Mapping[str, Any], checks: int) -> None:
        """Restore a state from `state_dict`; checks: number of checks of its run."""
        check_schema(state, self.saved_schema(), "['outcome']")
        monitored = checks if self.by_metric else 0
        if len(state["temperatures"]) != checks or len(state["monitored"]) != monitored:
            raise ValueError(f"outputs of another number of checks than {checks}")
        form = next(iter(self.outputs.values()))
        for number, outputs in state["outputs"].items():
            check_schema(outputs, form, f"['outcome']['outputs'][{number}]")
        self.load_state_dict(state)
        self._calibrated, targets = None, self._held.targets
        self._probabilities = all(are_probabilities(o, targets) for o in self.outputs.values())


def _bytes(tensors: Mapping[Any, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
