"""The checks of a run whose test loss is estimated, and the results that follow from them."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from heldin.crossval import Estimates, Interval, RunRecord, described, mean_interval
from heldin.errors import HeldinError, docs
from heldin.pages import Section, Table, csv_link
from heldin.pages.charts import Series, chart
from heldin.pages.predictions import Predictions, prediction_sections
from heldin.rules.base import StoppingRule
from heldin.rules.inputs import RunInputs
from heldin.rules.options import Folds, LeaveOneOut
from heldin.rules.outcome import Outcome
from heldin.rules.policy import (
    Patience,
    best_check,
    bootstrap_shares,
    matched_checks,
    next_check,
)
from heldin.rules.reporting import Advice, advice_on_estimates
from heldin.state.estimates import EstimateHistory
from heldin.state.schema import check_int

__all__ = ["EstimatedRun", "check_patience"]

LIGHT_ERROR = 0.1  # of the estimate: what the rows of light shadows do not show, measured


class EstimatedRun(StoppingRule):
    """The checks of a run: estimates, held-out losses and outputs, and weights that are kept."""

    history: EstimateHistory
    name: ClassVar[str]  # by which users ask for the rule
    _count: int  # of the training rows
    _same_loss = True  # whether the training loss is of the same kind as the estimated one

    def __init__(self, inputs: RunInputs, rule: Folds | LeaveOneOut) -> None:
        self.grid, self.average = float(rule.check_spacing), rule.average
        self.memory, self.resamples = rule.snapshot_memory, rule.resamples
        self.patience: Patience | int | None = check_patience(self.owner, inputs.patience)
        self.epoch_steps: float | None = None  # of the loop; None: counted in rows
        self.seed = check_int(self.owner, "seed", inputs.seed, 0)
        super().__init__()
        self.reason_chosen = ""  # why "auto" has chosen the rule
        self.history = EstimateHistory(self.name)
        self.finish: bool | None = None  # keep the last weights; None: warn of fixed schedules
        self._curves: list[Tensor] = []  # one (rows,) for each check
        self._kept: dict[int, dict[str, Tensor]] = {}  # number of the check -> the model's weights
        self._outcome = Outcome({}, "loss", None, False, self.memory)  # see `follow_outputs`
        self._keeps_outputs = False
        self.no_outcome = "heldin.EarlyStopping keeps them"  # why there are no outputs
        loss = inputs.eval_loss or inputs.batch_loss or inputs.loss_fn
        self._loss_name = "" if loss is None else described(loss)
        self._rates: dict[int, float] = {}  # by step of the checks: sum of learning rates x steps
        self._intervals: dict[int, Estimates] = {}  # by number of the check, until the next one
        self._values: dict[int, dict[str, float]] = {}  # the same for metrics
        self._levels: list[tuple[float, float]] = []  # of light shadows, see `matched_checks`
        self._void = 0  # first checks that do not count, as shadows have started again
        self._behind = 0  # steps that shadows are behind the model, since then

    # -- what a rule brings

    @abstractmethod
    def _held_per_trained(self) -> float:
        """Return the rows that are held out, over those that each model was trained on."""

    @abstractmethod
    def _missing(self) -> float:
        """Share of the rows that each model behind the estimate was not trained on."""

    def _coverage(self) -> float | None:
        """Return the coverage of an interval of the loss in our study; None: not measured."""
        return None

    def _epochs(self) -> float:
        """Return the number of epochs so far."""
        return 0.0

    def _steps_of_an_epoch(self) -> float:
        """Return the number of steps in an epoch, by the rows so far; 0 before the first step."""
        epochs = self._epochs()
        return (self._step - self._behind) / epochs if epochs else 0.0

    # -- the choice

    @property
    def best_number(self) -> int:
        """The number of the check whose weights are restored: the lowest, or the last one."""
        return len(self._curves) - 1 if self.finish else self._lowest()

    def _lowest(self) -> int:
        """Return the number of the check with the lowest estimate, or the best metric."""
        first = min(self._void, len(self._curves) - 1)  # its shadows have started again since
        if self._outcome.by_metric:
            return self._outcome.best(first)
        return first + best_check(torch.stack([curve.mean() for curve in self._curves[first:]]))

    def _matched(self) -> list[int]:
        """Return the check whose weights belong to each check of the curves."""
        if not self._levels:
            return list(range(len(self.history)))
        if self._behind:
            logs = {i: math.log1p(self.history[i].step) for i in sorted(self._kept)}
            own = [math.log1p(max(0, r.step - self._behind)) for r in self.history]
            return [min(logs, key=lambda i: abs(logs[i] - log)) for log in own]
        return matched_checks(self.history.columns()["step"], self._levels, sorted(self._kept))

    @property
    def best_step(self) -> int:
        """The step with the lowest estimated test loss so far.

        With light shadows, the step of the model that belongs to it.
        """
        assert self.history.best_step is not None
        return self.history.best_step

    @property
    def _averages_none(self) -> bool:
        """Whether the weights of a single check are restored."""
        return self.average == "best" or self._outcome.by_metric

    @property
    def shares(self) -> dict[int, float]:
        """The weights of which step go into the restored model with which share."""
        if self.finish:
            return {self.history.last().step: 1.0}
        if self._averages_none:
            return {self.best_step: 1.0}
        numbers = sorted(self._kept)
        if self._levels:
            numbers = list(range(min(self._void, len(self._curves) - 1), len(self._curves)))
        curves = torch.stack([self._curves[i] for i in numbers], dim=1)
        voted = bootstrap_shares(curves, self.resamples, self.seed, self._held_per_trained())
        matched = self._matched()
        shares: dict[int, float] = {}
        for number, share in zip(numbers, voted.tolist(), strict=True):
            step = self.history[matched[number]].step
            if share > 0:
                shares[step] = shares.get(step, 0.0) + share
        return shares

    def rate_steps(self, step: int) -> float | None:
        """Return the sum of the learning rates of the steps to one of a check; None: not known."""
        rate = self._rates.get(step, math.nan)
        return None if math.isnan(rate) else rate

    # -- patience

    def _patience_in_steps(self) -> Patience | None:
        """Return the patience, as far as the length of an epoch is known."""
        if not isinstance(self.patience, int):
            return self.patience
        steps = self.epoch_steps or self._steps_of_an_epoch()
        return Patience.of_epochs(self.patience, steps) if steps else None

    def _course(self, best: int) -> tuple[list[int], int, Tensor | None]:
        """Return what patience is decided by: steps of the checks, the best one, their curves.

        Checks before shadows have started again do not count.
        """
        first = min(self._void, len(self._curves) - 1)
        steps = [step - self._behind for step in self.history.columns()["step"][first:]]
        curves = None if self._outcome.by_metric else torch.stack(self._curves[first:], dim=1)
        return steps, best - first, curves

    def stop_limit(self) -> int | None:
        """Return the step by which training stops unless the estimate falls; None: not known."""
        patience = self._patience_in_steps()
        if patience is None or self.should_stop:
            return None
        steps, best, curves = self._course(self._lowest())
        limit = patience.step_limit(steps[patience.reference(best, curves)]) + self._behind
        step = self.history.last().step
        if isinstance(self.patience, int):  # which has a check there
            return limit
        while step < limit:  # a stop is found at a check
            step = next_check(step, self.grid)
        return step

    # -- results

    @property
    def estimate(self) -> float:
        """Estimated test loss at the best step."""
        return self.history[self.best_number].estimate

    @property
    def standard_error(self) -> float:
        """Of the estimate: the test loss lay within one in 2 of 3 runs of our study.

        See docs/which-rule.md for how it is computed, and how often the truth lies within it.
        """
        return self.history[self.best_number].standard_error

    @property
    def outcome(self) -> Outcome:
        """The outputs of held-out rows."""
        if not self._keeps_outputs:
            raise HeldinError(
                f"{self.owner}: no outputs of held-out rows were kept; {self.no_outcome}"
            )
        return self._outcome

    @property
    def temperature(self) -> float:
        """By which logits at the best step have to be divided to be calibrated; 1: by none."""
        return self._outcome.temperature(self.best_number)

    @property
    def uncalibrated(self) -> str:
        """Why the logits of a classifier have no temperature, in words; "": they have, or may."""
        return self._outcome.uncalibrated

    @property
    def lowest_temperature(self) -> float:
        """The temperature at the best step, which is not that of the kept weights with `finish`."""
        return self._outcome.temperature(self._lowest())

    def monitored(self, number: int = -1) -> float:
        """Return what chooses the weights at a check: the estimated loss, or a metric."""
        outcome = self._outcome
        return outcome.monitored[number] if outcome.by_metric else self.history[number].estimate

    @property
    def larger_is_better(self) -> bool:
        """Whether a larger value of what chooses the weights is better."""
        return self._outcome.larger_is_better is True

    def metric_values(self, number: int | None = None) -> dict[str, float]:
        """Return the metrics at a check (default: the chosen one), if its outputs are kept."""
        number, outcome = self.best_number if number is None else number, self._outcome
        if number not in outcome.outputs:
            return {}
        if number not in self._values:
            self._values[number] = {name: outcome.value(number, name) for name in outcome.metrics}
        return dict(self._values[number])

    def intervals(self) -> Estimates:
        """Return the estimated test loss and the metrics, with their intervals."""
        number = self.best_number
        if number not in self._intervals:
            loss = self.loss_interval()
            metrics = self._outcome.intervals(number)
            self._intervals[number] = Estimates({"loss": lambda: loss, **metrics})
        return self._intervals[number]

    def row_losses(self, number: int | None = None) -> Tensor:
        """Return the losses of rows, or of blocks, behind a check (default: the chosen one)."""
        number = self.best_number if number is None else number
        return self._outcome.row_losses(number, self._curves[number])

    def loss_interval(self, number: int | None = None) -> Interval:
        """Return the estimated test loss at a check (default: the chosen one) with its interval."""
        number = self.best_number if number is None else number
        best, losses = self.history[number], self.row_losses(number)
        groups = self._outcome.groups
        if groups is not None and len(groups) != len(losses):
            groups = None  # means over blocks of rows
        missing = self._missing() if self._same_loss else 0.0
        interval = mean_interval(losses, groups=groups).widened(
            math.sqrt(1 + self._held_per_trained() / 2),
            math.hypot(
                missing * max(0.0, best.estimate - best.training_loss),
                2 * self._light_error() * best.estimate,
            ),
        )
        low = max(interval.low, float(losses.min()))  # no mean is below all of them
        return replace(interval, low=low, coverage=self._coverage() if groups is None else None)

    def _light_error(self) -> float:
        """Return the share of the estimate that the rows of light shadows do not show."""
        return LIGHT_ERROR if self._levels and not self._behind else 0.0

    def renumber(self, numbers: Tensor) -> None:
        """Give row i the number `numbers[i]` in all results of a finished run."""
        self.intervals()  # resample the rows in their order so far
        if self._keeps_outputs:
            order = self._outcome.renumber(numbers)
            self._curves = [curve[order] for curve in self._curves]

    def record(self) -> RunRecord:
        """Return the out-of-fold losses and outputs at the chosen check."""
        outcome = self.outcome
        held, losses = outcome.cross_fitted(self.best_number), self.row_losses()
        if len(losses) != len(held):
            raise HeldinError(
                f"heldin.EarlyStopping.record: the loss is that of {len(losses)} blocks of rows, "
                "because batch_loss does not give it row by row; give eval_loss=(model, batch) -> "
                "one loss for each row"
            )
        logits = outcome.binary is not None
        return RunRecord(
            losses,
            held.outputs,
            held.targets,
            held.rows,
            held.folds,
            outcome.fixed_metrics,
            outcome.groups,
            f"{'sigmoid ' * bool(outcome.binary)}cross-entropy" if logits else self._loss_name,
            outcome.weights,
        )

    def metrics(self) -> dict[str, float]:
        """Return the state as a flat mapping for any tracker, without values that do not exist."""
        last, number = self.history.last(), len(self.history) - 1
        values = {
            "heldin/estimate": last.estimate,
            "heldin/standard_error": last.standard_error,
            "heldin/training_loss": last.training_loss,
            "heldin/best_estimate": self.estimate,
            "heldin/best_step": float(self.best_step),
            "heldin/should_stop": float(self.should_stop),
            **{f"heldin/{n}": value for n, value in self.metric_values(number).items()},
            **{f"heldin/best_{n}": value for n, value in self.metric_values().items()},
        }
        return {name: value for name, value in values.items() if not math.isnan(value)}

    # -- reports

    def _headline(self) -> tuple[str, str]:
        title, best = f"Test loss {self.intervals()['loss']}", self.run.place(self.best_step)
        if self.finish:
            end = self.run.place(self._step)
            return title, f"Kept weights: {end} (the end); lowest estimate at {best}."
        stop = f"training had not stopped after {self._step:,} steps"
        if self.stopped_step is not None:
            stop = f"training stopped at {self.run.place(self.stopped_step)}"
        return title, f"The weights are those of {best}; {stop}."

    def conclusions(self) -> list[str]:
        """Return why the run ended, what was chosen and the temperature, in words."""
        reason = self.reason.partition(": ")[2].partition("; stops by")[0]
        if self.stopped_step is None:
            words = [f"not stopped after {self.run.place(self._step)}: {reason}"]
        else:
            since = f"no improvement since step {self.history[self._lowest()].step:,}"
            words = [f"stopped after {self.run.place(self.stopped_step)}: {since}, {reason}"]
        averaged = "the average of those around " if len(self.shares) > 1 else "those of "
        if self.finish:
            words.append(f"kept weights: step {self._step:,} (the end)")
            words.append(f"lowest estimate at step {self.best_step:,}")
        else:
            words.append(f"the chosen weights are {averaged}step {self.best_step:,}")
        if self.temperature != 1:
            words.append(f"temperature {self.temperature:.3g}")
        elif self.uncalibrated:
            words.append(f"no temperature, as {self.uncalibrated}")
        return words

    def _estimates(self) -> list[tuple[str, str]]:
        names = {"loss": "test loss"}
        return [(names.get(name, name), str(i)) for name, i in self.intervals().items()]

    def _method(self) -> str:
        return (
            f"The numbers with 95 % intervals are estimates for new rows by [heldin]({docs('')}): "
            f"the model was trained on all {self._count:,} rows, and each row was evaluated on a "
            "model that was trained beside it without that row."
        )

    def _sections(self) -> list[Section]:
        estimates = [
            (name, f"{interval.value:.4g}", _ends(text))
            for (name, text), interval in zip(
                self._estimates(), self.intervals().values(), strict=True
            )
        ]
        columns, best = self.history.columns(), self.history[self.best_number]
        bands = [self.loss_interval(number) for number in range(len(self.history))]
        columns |= {"low": [i.low for i in bands], "high": [i.high for i in bands]}
        if self.run.epoch_ends:
            columns["epoch"] = [self.run.epoch(step) for step in columns["step"]]
        series = [
            Series("training loss", columns["step"], columns["training_loss"], "soft"),
            Series(
                "estimated test loss with its 95 % interval", columns["step"],
                columns["estimate"], "a", columns["low"], columns["high"],
            ),
        ]  # fmt: skip
        marks = [(float(self.best_step), "lowest" if self.finish else "chosen")]
        if self.stopped_step is not None:
            marks.append((float(self.stopped_step), "stopped"))
        figure = chart(
            series, "Losses over the steps", y="loss", steps=True, marks=marks, **self._step_axis()
        )
        facts = [
            ("rows", f"{self._count:,}, all of them trained on"),
            ("training loss at the chosen weights", f"{best.training_loss:.4g}"),
            ("steps", f"{self._step:,}, with {len(self.history)} checks"),
            *([("choice of the rule", self.reason_chosen)] if self.reason_chosen else []),
            *([("temperature", f"none, as {self.uncalibrated}")] if self.uncalibrated else []),
        ]
        header = ["to expect on new rows", "estimate", "95 % interval"]
        files = {"history.csv": csv_link(columns)}
        return [
            Section("", tables=[Table(header, estimates)]),
            Section("Losses", "", [figure], [Table([], facts)], files),
            *(prediction_sections(self._predictions()) if self._keeps_outputs else []),
        ]

    def _predictions(self) -> Predictions:
        """Return the out-of-fold outputs as probabilities of classes, or as numbers."""
        held, losses = self._outcome.out_of_fold(self.best_number), self.row_losses()
        rows, outputs, targets = held.rows.tolist(), held.outputs.cpu(), held.targets.cpu()
        row_losses = losses.tolist() if len(losses) == len(rows) else []
        if not outputs.is_floating_point() or not bool(outputs.isfinite().all()):
            return Predictions(rows, losses=row_losses)
        outputs = outputs.double()
        single = outputs.numel() == targets.numel() == len(rows)
        if single and self._outcome.binary and set(targets.flatten().tolist()) <= {0, 1}:
            ones = outputs.flatten().sigmoid()
            truth, both = targets.flatten().tolist(), torch.stack([1 - ones, ones], 1).tolist()
            return Predictions(rows, truth, row_losses, both, (), ("0", "1"))
        if single and targets.is_floating_point():
            values = outputs.flatten().tolist()
            return Predictions(rows, targets.double().flatten().tolist(), row_losses, (), values)
        whole = targets.dim() == 1 and not targets.is_floating_point()
        if whole and outputs.dim() == 2 and 0 <= targets.min() <= targets.max() < outputs.shape[1]:
            names = [str(i) for i in range(outputs.shape[1])]
            sums = outputs.sum(1)
            if bool((outputs < 0).any()) or not torch.allclose(sums, torch.ones_like(sums)):
                outputs = outputs.softmax(1)
            return Predictions(rows, targets.tolist(), row_losses, outputs.tolist(), (), names)
        return Predictions(rows, losses=row_losses)

    def _advice(self) -> list[Advice]:
        return advice_on_estimates(self.history, self.should_stop)


def _ends(interval: str) -> str:
    """Return the ends of an interval, in the digits of its text."""
    return interval.partition(" ")[2].strip("[]").replace(", ", " to ") or "none"


def check_patience(owner: str, patience: Any, finish: Any = None) -> Any:
    """Return "default", a number of epochs, a `Patience` or None to never stop; refuse the rest."""
    if finish not in (None, True, False):
        raise HeldinError(f"{owner}: finish must be True, False or None, got {finish!r}")
    if finish and patience not in ("default", None):
        raise HeldinError(f"{owner}: patience has no effect with finish=True; leave it out")
    whole = isinstance(patience, int) and not isinstance(patience, bool) and patience >= 1
    if not whole and patience not in ("default", None) and not isinstance(patience, Patience):
        raise HeldinError(
            f"{owner}: patience must be a number of epochs >= 1, a heldin.Patience, or None to "
            f"never stop, got {patience!r}"
        )
    return None if finish else patience
