"""What a run with shadows gives beside its stop: metrics, records and a committee."""

from __future__ import annotations

import copy
import math
import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from heldin.capture.sharding import unwrapped
from heldin.crossval import Committee, Interval, OutOfFold, RunRecord
from heldin.errors import HeldinError
from heldin.pages import Report
from heldin.rules.leave_one_out import LeaveOneOutStopping
from heldin.rules.path import PathStopping
from heldin.shadows.bare_model import copy_without_hooks

__all__ = ["Check", "Plan", "RunResults"]

NAME = "heldin.EarlyStopping"


@dataclass(frozen=True)
class Plan:
    """The length of a run to repeat without heldin: other seeds, or a final model.

    Attributes:
        steps: number of optimiser steps until the lowest estimate.
        epochs: number of epochs that these steps lie in; None if they are unknown.
        temperature: to divide the logits by; 1: none.
        rate_steps: sum of the learning rates of the steps (of the first parameter group), to choose
            the steps of a run with another rate or schedule; None: not known, as after resuming.

    >>> Plan(steps=340, epochs=17, temperature=1.3, rate_steps=3.4)
    Plan(steps=340, epochs=17, temperature=1.3, rate_steps=3.4)
    """

    steps: int
    epochs: int | None
    temperature: float
    rate_steps: float | None = None


class Check(NamedTuple):
    """A check of a run.

    Attributes:
        step: number of optimiser steps.
        value: of what is monitored, the estimated loss or a metric.
        larger_is_better: whether a larger value is better.
    """

    step: int
    value: float
    larger_is_better: bool


class _OnCheck:
    """A call of a user's function with the results of a run, as long as these are there."""

    def __init__(self, results: RunResults, function: Callable[[Any], Any]) -> None:
        self._results, self._function = weakref.ref(results), function

    def __call__(self) -> None:
        results = self._results()
        if results is not None:
            self._function(results)

    def __deepcopy__(self, memo: dict[int, Any]) -> _OnCheck:
        results = self._results()
        return self if results is None else _OnCheck(copy.deepcopy(results, memo), self._function)


class RunResults:
    """Results of a run, for `heldin.EarlyStopping` and for those of the frameworks."""

    _owner: ClassVar[str] = NAME  # for errors
    _has_copies: ClassVar[bool] = True  # whether the model can be copied for a committee

    @abstractmethod
    def _followed(self) -> Any:
        """Return the object that follows the run; None before it begins."""

    @property
    def best_epoch(self) -> int | None:
        """The epoch, from 0 on, in which the best step lies; None if epochs are not known."""
        step, run = self.best_step, getattr(self._followed(), "run", None)
        epoch = None if step is None or run is None else run.epoch(step)
        return None if epoch is None else max(0, epoch - 1)

    @property
    def estimates(self) -> Mapping[str, Interval]:
        """The estimated test loss, by the name "loss", and every metric, with their intervals.

        Intervals of 95 %: of the loss by a bootstrap over rows that allows for long tails, widened
        because other training rows would change the losses of all rows; of metrics by a bootstrap
        over rows, or over groups, which is not widened. An interval is computed when it is asked
        for. Metrics are those of `out_of_fold` but for the temperature: each fold has that of the
        others. rule="evidence" estimates no loss.
        """
        inner = self._followed()
        estimates: Mapping[str, Interval] = {} if inner is None else inner.intervals()
        return estimates

    @property
    def out_of_fold(self) -> OutOfFold:
        """Outputs at the chosen check, for each row of a model that was not trained on it.

        What `sklearn.model_selection.cross_val_predict` returns, for a confusion matrix, a ROC
        curve, wrong labels or conformal prediction. Logits are divided by `temperature`, so that
        softmax or sigmoid make calibrated probabilities of them; times `temperature` they are as
        the shadows gave them.
        """
        inner = self._estimating("out_of_fold")
        return inner.outcome.out_of_fold(inner.best_number)

    def record(self) -> RunRecord:
        """Return the out-of-fold losses and outputs, as `heldin.compare` takes them."""
        return self._estimating("record").record()

    def committee(self, model: nn.Module | None = None) -> Committee:
        """Return a model that averages the restored model and its shadows at the chosen check.

        The members are copies; parameters that are not trained are shared. Classifiers are
        averaged by their probabilities.

        Args:
            model: the restored model, if it is no longer the one that was trained.
        """
        inner = self._estimating("committee")
        if not self._has_copies:
            raise HeldinError(
                f"{self._owner}.committee: models of this framework cannot be copied to hold the "
                "weights of the shadows; train a torch.nn.Module with heldin.EarlyStopping for one"
            )
        chosen = inner.trained_model() if model is None else model
        if chosen is None:
            raise HeldinError(
                f"{self._owner}.committee: the model is gone; pass the restored model"
            )
        return _committee(inner, unwrapped(chosen), self._owner)

    @property
    def temperature(self) -> float:
        """The temperature T >= 1 of the logits at the chosen check; 1: none.

        "Refine, then calibrate": weights are chosen by the out-of-fold log loss after T, which is
        fitted on the same rows, and the last layer of the restored model is divided by T.
        Estimates are cross-fitted: each fold at the T of the others.
        """
        return self._temperature()

    def _temperature(self) -> float:
        inner = self._followed()
        return inner.temperature if isinstance(inner, PathStopping) else 1.0

    @property
    def best_step(self) -> int | None:
        """The step whose weights are restored (with averaging: the lowest estimate)."""
        step: int | None = getattr(self._followed(), "best_step", None)
        return step

    @property
    def last_check(self) -> Check:
        """The last check, for `on_check`."""
        inner = self._estimating("last_check")
        return Check(inner.history.last().step, inner.monitored(), inner.larger_is_better)

    def _bound_on_check(self, on_check: Callable[[Any], Any] | None) -> Callable[[], Any] | None:
        """Return a function that calls the user's with this object, as long as it is there."""
        if on_check is None:
            return None
        if not callable(on_check):
            raise HeldinError(
                f"{self._owner}: on_check must be a function of this object, got {on_check!r}"
            )
        return _OnCheck(self, on_check)

    def plan(self) -> Plan:
        """Return the length and the temperature of this run, to repeat it without heldin.

        For other seeds, or a final model, at the cost of a plain run. The steps count from the
        first one; a run with another batch size needs another plan. A plain run of that length ends
        with the weights of one step, where this one averaged those around the best step, and may
        be a little worse. With finish=True the plan is that of the lowest estimate, not of the end.
        """
        step, epoch = self.best_step, self.best_epoch
        if step is None:
            raise HeldinError(f"{self._owner}.plan: the run has no best step yet; train first")
        inner, epochs = self._followed(), None if epoch is None else epoch + 1
        if not isinstance(inner, PathStopping):
            return Plan(step, epochs, 1.0)
        temperature = inner._outcome.temperature(inner._lowest())  # with `finish` not the last one
        return Plan(step, epochs, temperature, inner.rate_steps(step))

    def summary(self) -> dict[str, float]:
        """Return the results as a flat mapping, for the summary of a run in a tracker.

        Each estimate has three entries: `heldin/loss`, `heldin/loss_low` and `heldin/loss_high`.
        """
        values: dict[str, float] = {"heldin/temperature": self._temperature()}
        if self.best_step is not None:
            values["heldin/best_step"] = float(self.best_step)
        for name, interval in self.estimates.items():
            values[f"heldin/{name}"] = interval.value
            values |= {f"heldin/{name}_low": interval.low, f"heldin/{name}_high": interval.high}
        return {name: value for name, value in values.items() if not math.isnan(value)}

    @property
    def conclusion(self) -> str:
        """What was chosen, why training stopped and what to expect, in one sentence."""
        inner = self._followed()
        if inner is None:
            return "no run yet"
        words = inner.conclusions()
        expected = ", ".join(f"{name} {interval}" for name, interval in self.estimates.items())
        return "; ".join([*words, f"expect {expected}"] if expected else words)

    def report(
        self, path: str | Path | None = None, *, beside: Mapping[str, Any] | None = None
    ) -> Report:
        """Return a page about the run: estimates, curves, out-of-fold predictions, settings.

        The page is one file that needs no network; the numbers behind its charts are in it as CSV.
        Works during a run and after it. Notebooks show the page.

        Args:
            path: a file that the page is written to as well.
            beside: other runs by name, to show beside this one.
        """
        others = {
            name: other._started("report") if isinstance(other, RunResults) else other
            for name, other in (beside or {}).items()
        }
        page: Report = self._started("report").report(path, beside=others)
        return page

    def model_card(self) -> str:
        """Return the run as Markdown: a section of the model card of a hub."""
        return str(self._started("model_card").model_card())

    def _started(self, what: str) -> Any:
        inner = self._followed()
        if inner is None:
            raise HeldinError(f"{self._owner}.{what}: there was no run yet; train first")
        return inner

    def _estimating(self, what: str) -> PathStopping:
        inner = self._started(what)
        if not isinstance(inner, PathStopping):
            raise HeldinError(
                f"{self._owner}.{what}: {type(inner).__name__} has no models that were trained "
                'without some rows; use rule="auto"'
            )
        return inner


def _committee(inner: PathStopping, model: nn.Module, owner: str) -> Committee:
    """Return the average of a restored model and its shadows at the chosen check."""
    outcome = inner.outcome
    if not outcome.members:
        if isinstance(inner, LeaveOneOutStopping):
            raise HeldinError(
                f"{owner}.committee: leave-one-out has no shadows to average; use rule='folds'"
            )
        raise HeldinError(
            f"{owner}.committee: the weights of the shadows at the chosen check were not kept, as "
            "they do not fit beside the outputs into snapshot_memory of the rule "
            f"({inner.memory:,} bytes); raise it"
        )
    members = [_copy(model)]
    names = set(inner.scaled_names)
    for state in outcome.members:
        member = _copy(model)
        places = dict(member.named_parameters()) | dict(member.named_buffers())
        with torch.no_grad():
            for name, value in state.items():
                places[name].copy_(value)
                if name in names:
                    places[name].div_(inner.temperature)
        members.append(member)
    average = {None: "outputs", False: "softmax", True: "sigmoid"}[outcome.binary]
    return Committee(members, average, 1, 1.0 if names else inner.temperature).eval()


def _copy(model: nn.Module) -> nn.Module:
    """Return a copy without hooks that shares the parameters which are not trained."""
    bare = copy_without_hooks(model)  # shares all parameters
    memo: dict[int, Any] = {id(p): p for p in bare.parameters() if not p.requires_grad}
    return copy.deepcopy(bare, memo)
