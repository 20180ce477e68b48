"""A run whose test loss is estimated: its checks, the weights of the best one, and results."""

from __future__ import annotations

import functools
import math
import warnings
import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from heldin.capture.sharding import unwrapped
from heldin.crossval import Estimates, Interval, RunRecord, described, mean_interval
from heldin.distributed.shadow_group import refuse_unpooled_ddp, shadow_group_for
from heldin.errors import HeldinError, HeldinWarning, more
from heldin.loop.events import OptimizerStep
from heldin.loop.observer import LoopObserver
from heldin.pause import paused
from heldin.rules import path_report
from heldin.rules.base import StoppingRule, copied, trained_tensors
from heldin.rules.calibration import is_scalable, scale_outputs
from heldin.rules.inputs import RunInputs
from heldin.rules.options import Folds, LeaveOneOut
from heldin.rules.outcome import Outcome, OutputOptions
from heldin.rules.policy import (
    Patience,
    best_check,
    bootstrap_shares,
    densest_check,
    matched_checks,
    mean_and_error,
    next_check,
)
from heldin.rules.reporting import Advice, advice_on_estimates
from heldin.rules.schedules import fixed_schedule, warn_of_schedule
from heldin.shadows.exchange import group_settings
from heldin.shadows.models import check_trainable, note_trained, warn_of_training
from heldin.shadows.replayed import has_evaluation_mode
from heldin.shadows.step_check import StepCheck
from heldin.state.estimates import STATE_SCHEMA as HISTORY
from heldin.state.estimates import Estimate, EstimateHistory
from heldin.state.schema import check_schema, model_signature

__all__ = ["PathStopping"]

STEP_HOOKS = ("on_call", "on_step", "on_stepped")  # of `StepCheck`
LIGHT_ERROR = 0.1  # of the estimate: what the rows of light shadows do not show, measured
NO_OUTPUTS = OutputOptions("", temperature=False)
STATE_SCHEMA = {  # of a saved state
    "curves": Tensor,
    "kept": {int: {str: Tensor}},
    "outcome": dict,
    "levels": Tensor,
    "rule": dict,
}


class PathStopping(StoppingRule):
    """Follows an estimated test loss at log-spaced checks and keeps the weights of the best one.

    A rule says how to follow an optimiser step (`_follow`); its backend estimates the loss of rows
    that were not trained on.
    """

    _state_version = 3
    _state_schema = STATE_SCHEMA
    _saved: ClassVar[dict[str, Any]] = {
        "history": HISTORY,
        "_void": int,
        "_behind": int,
        "_next_look": int,
    }
    _is_light = False  # whether shadows are trained on a share of the rows of each batch
    _same_loss = True  # whether the training loss is of the same kind as the estimated one
    _count: int  # of the training rows
    history: EstimateHistory
    name: ClassVar[str]  # by which users ask for the rule

    def __init__(self, inputs: RunInputs, rule: Folds | LeaveOneOut) -> None:
        super().__init__()
        self.owner = inputs.owner
        name, optimizer = self.owner, inputs.optimizer
        if not isinstance(optimizer, Optimizer):
            raise HeldinError(
                f"{name}: optimizer must be a torch.optim.Optimizer, got {type(optimizer)!r}"
            )
        self._process_group = shadow_group_for(name, inputs.model, inputs.process_group)
        self._resumes = inputs.resumes
        model = unwrapped(inputs.model)
        self._device = check_trainable(name, model).device
        self.grid, self.average = float(rule.check_spacing), rule.average
        self.memory, self.resamples = rule.snapshot_memory, rule.resamples
        self.patience = inputs.stop_patience
        self.seed = inputs.seed
        self.finish = inputs.finish  # keep the last weights; None: warn of fixed schedules
        self.reason_chosen = ""  # why "auto" has chosen the rule
        self.on_check = inputs.on_check
        self.schedule = inputs.schedule  # of a framework, with a fixed end, in words
        loss = inputs.eval_loss or inputs.batch_loss or inputs.loss_fn
        self._loss_name = "" if loss is None else described(loss)
        # the run
        self._model: nn.Module | None = model
        self.trained_model: Callable[[], nn.Module | None] = weakref.ref(model)
        self._optimizer: Any = optimizer
        self._average: nn.Module | None = None  # an average of its weights, which is estimated
        self._signature = model_signature(model)
        self.run.describe(model, optimizer)
        self._backend: Any = None  # the shadows, or what stands in for them
        # compares the loop's steps with those that the rule takes them for
        self.step_check: StepCheck | None = None
        self._release: Any = None
        self._rate_sum, self._rated = 0.0, 0  # of the steps so far, and their number
        self._leads = False  # whether shadows are ahead of the model
        self._next_look = 0  # step of the next check for patience in epochs; 0: none
        # the checks
        self.history = EstimateHistory(self.name)
        self._curves: list[Tensor] = []  # one (rows,) for each check
        self._kept: dict[int, dict[str, Tensor]] = {}  # number of the check -> the model's weights
        self._outputs = inputs.outputs
        self._outcome = Outcome(NO_OUTPUTS, self.memory)
        self._keeps_outputs = False
        self.no_outcome = "heldin.EarlyStopping keeps them"  # why there are no outputs
        self._rates: dict[int, float] = {}  # by step of the checks: sum of learning rates x steps
        self._intervals: dict[int, Estimates] = {}  # by number of the check, until the next one
        self._values: dict[int, dict[str, float]] = {}  # the same for metrics
        self._levels: list[tuple[float, float]] = []  # of light shadows, see `matched_checks`
        self._void = 0  # first checks that do not count, as shadows have started again
        self._behind = 0  # steps that shadows are behind the model, since then
        # what `restore` has done
        self.scaled_names: list[str] = []  # of parameters that were divided by the temperature
        self._frozen: list[tuple[nn.Parameter, Tensor]] = []  # of them, and their values before
        self._doubted = False  # whether a warning was given that nothing was learnt

    def _start(self) -> None:
        """Make the check at step 0; a rule calls this at the end of its constructor."""
        assert self._model is not None
        name, alone, hooks = self.owner, self._process_group is None, {}
        if self.step_check is not None:
            hooks = {each: getattr(self.step_check, each) for each in STEP_HOOKS}
        refuse = functools.partial(refuse_unpooled_ddp, name) if alone else None
        self.observer = LoopObserver(name, group_settings, refuse=refuse, **hooks)
        self._release = weakref.finalize(self, self.observer.close)
        self._check_ranks_agree()
        self.first_check()
        self.observer.attach(self._model, self._optimizer)
        if not self._resumes:
            warn_of_training(name, self._model)

    @property
    def backend(self) -> Any:
        """The shadows; `backend.weights_of(number)` are the weights of one."""
        return self._backend

    def _check_ranks_agree(self) -> None:
        """Make sure that all processes do the same."""
        if self._process_group is not None and self._model is not None:
            self._process_group.meet(self._facts, self._model)

    def _facts(self) -> dict[str, Any]:
        """Return the settings that must be the same in all processes, by name."""
        names = ("patience", "memory", "resamples", "seed")
        options = {name: getattr(self, name) for name in names}
        return {**self._settings(), **options, "step": self._step}

    # -- what a rule brings

    @abstractmethod
    def _held_per_trained(self) -> float:
        """Return the rows that are held out, over those that each model was trained on."""

    @abstractmethod
    def _missing(self) -> float:
        """Return the share of the rows that each model behind the estimate was not trained on."""

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

    @abstractmethod
    def _follow(self, taken: OptimizerStep, index: Tensor | None) -> None:
        """Follow an optimiser step on rows; index: their numbers, where they are known."""

    def _row_groups(self, rows: Tensor) -> Tensor | None:
        """Return the groups of rows."""
        return None

    @abstractmethod
    def _own_settings(self) -> dict[str, Any]:
        """Return the arguments that a resumed run must share."""

    # -- the loop

    def step(self, indices: Tensor | Sequence[int] | None = None) -> bool:
        """Follow the optimiser step just taken; True if training should stop.

        Args:
            indices: numbers of the rows in the minibatch, where they cannot be recognised.
        """
        self._opened("step")
        taken = self.observer.take()
        if not taken:
            if self._step == 0:
                raise HeldinError(
                    f"{self.owner}.step: no step of the optimiser was seen. Call it after "
                    "optimizer.step(), with the optimiser that was given to the constructor"
                )
            return self.should_stop  # a gradient scaler skipped the step
        if indices is not None and len(taken) != 1:
            raise HeldinError(
                f"step: indices belong to one optimiser step, but {len(taken)} were taken since "
                "the last call; call step() after each"
            )
        index = self._numbers(indices)
        self._check_ranks_agree()
        for one in taken:
            self._step += 1
            self._note_rate(one.settings, 1)
            self._follow(one, index)
        if self._due():
            self._check_and_tell()
        return self.should_stop

    def _due(self) -> bool:
        """Whether it is time for a check."""
        return self._patience_asks or self._step >= next_check(self.history.last().step, self.grid)

    @property
    def _patience_asks(self) -> bool:
        """Whether patience in epochs asks for a check."""
        return 0 < self._next_look <= self._step

    def _numbers(self, indices: Tensor | Sequence[int] | None) -> Tensor | None:
        if indices is None:
            return None
        index = torch.as_tensor(indices, device=self._device).flatten()
        if index.dtype == torch.bool or index.is_floating_point():
            raise HeldinError(f"step: indices must be whole numbers, got {index.dtype}")
        low, high = index.aminmax() if index.numel() else (0, 0)
        if not 0 <= int(low) <= int(high) < self._count:
            raise HeldinError(f"step: indices must lie in 0 ... {self._count - 1}")
        return index.long()

    def _check(self) -> None:
        self._intervals, self._values = {}, {}
        if self._step and self.finish is None:
            self.finish = False  # one warning is enough
            warn_of_schedule(self.owner, self.schedule or fixed_schedule(self._optimizer))
        losses = self._backend.held_out().detach().cpu().double()
        number, estimated, outcome = len(self._curves), losses, self._outcome
        self._note_rate(self._optimizer.param_groups, self._step - self._rated)
        self._rates[self._step] = self._rate_sum
        if self._keeps_outputs:
            held = self._backend.held_out_outputs()
            if number == 0:
                weights = self._backend.row_weights(held.rows)
                outcome.begin(held, weights, self._row_groups(held.rows))
                self._try_temperature()
            losses, estimated = outcome.add(number, losses, held.outputs)
        levels = self._backend.levels() if self._is_light else None
        seen = self._backend.training_loss()
        if levels is not None:
            self._levels.append(levels)
            seen = levels[1]
        missing = self._missing() if self._same_loss else 0.0
        middle, error = mean_and_error(estimated, self._held_per_trained(), missing, seen)
        error = math.hypot(error, self._light_error() * middle)
        self._curves.append(losses)
        self._kept[number] = {} if self._leads else self._snapshot()
        self.history.append(Estimate(self._step, middle, error, seen))
        lowest, chosen = self._lowest(), self.best_number
        best = self._matched()[lowest]
        self.history.best_step = self.history[best].step
        outcome.thin(chosen, self.history.columns()["step"])
        if self._keeps_outputs and chosen == number:
            fits = self._backend.copies * self._snapshot_bytes() <= self.memory
            outcome.take_members(self._backend.members() if fits else [])
        self._thin(number if self.finish else best)
        self._next_look, patience = 0, self._patience_in_steps()
        if self.should_stop:  # the reason is that of the stop
            return
        self.reason = f"step {self._step}: {self._compared(number, lowest)}"
        if patience is None:
            return
        if not patience.stops(*self._course(lowest), self._epochs()):
            if isinstance(self.patience, int):
                limit = patience.step_limit(self.history[lowest].step - self._behind) + self._behind
                spacing = patience.slack // patience.checks
                self._next_look = max(self._step + 1, min(self._step + spacing, limit))
            self.reason += f"; stops by step {self.stop_limit()}, unless the estimate falls"
        else:
            self.should_stop, self.stopped_step = True, self._step
            self.history.stopped_step = self._step

    def _compared(self, number: int, best: int) -> str:
        """Return what is monitored at a check, and at the best one, in words."""
        name, word = "estimated loss", "lowest"
        if self._outcome.by_metric:
            name, word = self._outcome.monitor, "best"
        now, then = (f"{self.monitored(i):.4g}" for i in (number, best))
        return f"{name} {now}, {word} {then} at step {self.history[best].step}"

    def _note_rate(self, groups: Any, steps: int) -> None:
        """Add steps with the learning rates of now to the sum for `plan`."""
        if steps and groups and "lr" in groups[0]:
            self._rate_sum += float(groups[0]["lr"]) * steps
            self._rated += steps

    def _check_and_tell(self) -> None:
        self._check()
        if self.on_check is not None:
            self.on_check()

    def first_check(self) -> None:
        """Check at step 0, with the outputs of held-out rows if they can be had.

        Outputs that cannot be had are an error only where something was asked for that needs them.
        """
        options = self._outputs
        if options is not None:
            self._forget_checks()
            self._outcome, self._keeps_outputs = Outcome(options, self.memory), True
            try:
                self._backend.keep_outputs(options.recipe(self.memory))
                self._check()
                self.metric_values()  # an error now, not after the training
                return
            except HeldinError as error:
                if options.insists:
                    cause = str(error).removeprefix(f"{options.owner}: ")
                    raise HeldinError(f"{options.owner}: {cause}") from error
                self.no_outcome = str(error)
            self._backend.keep_outputs(None)
            self._outcome = Outcome(NO_OUTPUTS, self.memory)
            self._keeps_outputs = False
        self._forget_checks()
        self._check()

    def _forget_checks(self) -> None:
        self._curves, self._kept, self._levels = [], {}, []
        self.history = EstimateHistory(self.history.rule)

    def _try_temperature(self) -> None:
        """Note whether a temperature can be put into the model, unless it is asked for."""
        outcome, model = self._outcome, self._average or self._opened("predict")
        if not outcome.calibrates or outcome.required:
            return
        try:
            with self._backend.trial():
                outcome.calibrates = is_scalable(model, *self._backend.example())
        finally:
            self._backend.check.renew()  # weights were scaled to try it, and put back bit for bit
        if not outcome.calibrates:
            outcome.uncalibrated = "the last layer cannot be scaled exactly"

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
            shadow_logs = [math.log1p(max(0, r.step - self._behind)) for r in self.history]
            return [min(logs, key=lambda i: abs(logs[i] - log)) for log in shadow_logs]
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
        steps = self.run.epoch_steps or self._steps_of_an_epoch()
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

    _headline, _method = path_report.headline, path_report.method
    _sections, conclusions = path_report.sections, path_report.conclusions

    def named_intervals(self) -> dict[str, Interval]:
        """Return the estimates by the names that reports show."""
        return {"test loss" if n == "loss" else n: each for n, each in self.intervals().items()}

    def _advice(self) -> list[Advice]:
        return advice_on_estimates(self.history, self.should_stop)

    # -- the model

    def _state(self) -> dict[str, Tensor]:
        """Return what is kept at a check and restored: trained weights, and buffers."""
        assert self._model is not None
        if self._average is None:
            return trained_tensors(self._model)
        averages = dict(self._average.named_parameters())
        trained = [name for name, p in self._model.named_parameters() if p.requires_grad]
        return {name: averages[name] for name in trained} | dict(self._average.named_buffers())

    def _snapshot(self) -> dict[str, Tensor]:
        snapshot = copied(self._state())
        if self._process_group is not None and self._model is not None:
            self._process_group.copy_first(
                snapshot[name] for name, _ in self._model.named_buffers()
            )
        return snapshot

    def _snapshot_bytes(self) -> int:
        return sum(value.numel() * value.element_size() for value in self._state().values())

    def _thin(self, best: int) -> None:
        """Keep the best weights, and as many others as the memory allows, evenly in log steps."""
        if (self.finish or self._averages_none) and not self._levels:
            self._kept = {best: self._kept[best]}
            return
        snapshot_bytes = self._snapshot_bytes()
        while len(self._kept) > 1 and len(self._kept) * snapshot_bytes > self._outcome.room:
            steps = {number: self.history[number].step for number in sorted(self._kept)}
            del self._kept[densest_check(steps, best)]

    def restore(self) -> None:
        """Put the chosen weights (averaged, if so asked) into the model."""
        self._opened("restore")
        if self._step > self.history.last().step:
            self._check()  # the last weights are a candidate too
        if has_evaluation_mode(self._optimizer):
            self._optimizer.eval()  # the weights that are restored are those of evaluation
        untrained = self.best_step == 0 and self._step > 0 and not self.finish
        if untrained and self.estimate != 0:  # 0 cannot be bettered
            warnings.warn(
                f"{self.owner}: in {self._step} steps the estimated loss never fell below "
                f"that of the model before training ({self.estimate:.4g}), so its untrained "
                "weights are restored. Is the learning rate too high, do the inputs tell nothing "
                "about the targets, or does a fold take all rows of a kind away? "
                + more("never-better-than-untrained"),
                HeldinWarning,
                stacklevel=2,
            )
        numbers = {self.history[i].step: i for i in self._kept}
        parts = [(share, self._kept[numbers[step]]) for step, share in self.shares.items()]
        heaviest = max(parts, key=lambda part: part[0])[1]
        with torch.no_grad():
            for name, value in self._state().items():
                whole = not (value.is_floating_point() or value.is_complex())
                if isinstance(value, nn.Parameter) and not whole:
                    mixed = sum(share * kept[name] for share, kept in parts)
                    value.copy_(mixed)  # type: ignore[arg-type]
                else:  # statistics and other buffers belong to the weights of one check
                    value.copy_(heaviest[name])
        self._calibrate()
        if self._average is not None:
            self._opened("restore").load_state_dict(self._average.state_dict())
        if not untrained:
            note_trained(self._opened("restore"))

    def _calibrate(self) -> None:
        """Divide the outputs of the restored model by the temperature."""
        with torch.no_grad():
            for p, old in self._frozen:
                p.copy_(old)
        self.scaled_names, self._frozen = [], []
        if self.temperature != 1:
            model = self._average or self._opened("restore")
            with paused():
                scaled = scale_outputs(model, self.temperature, *self._backend.example())
            self.scaled_names, self._frozen = scaled
        over = bool(self.should_stop or self.finish)
        doubt = self._outcome.doubt(self.best_number) if over and not self._doubted else ""
        if doubt and self.best_step:
            self._doubted = True
            warnings.warn(
                f"{self.owner}: {doubt}: the model has learnt nothing that holds on other rows. Do "
                "the inputs say anything about the targets? " + more("no-better-than-a-constant"),
                HeldinWarning,
                stacklevel=3,
            )

    # -- saving and closing

    def __getstate__(self) -> dict[str, Any]:
        if self._model is not None:
            raise HeldinError(
                f"{self.owner}: a rule that follows a run belongs to its model, optimiser "
                "and loader, and a copy would follow nothing; make another one for the other model "
                "and give it the state: other.load_state_dict(stopping.state_dict())"
            )
        return {**vars(self), "trained_model": _no_model}

    def _settings(self) -> dict[str, Any]:
        shared = {"grid": self.grid, "average": self.average, "rows": self._count}
        shared["finish"] = bool(self.finish)
        monitor = {"monitor": self._outcome.monitor} if self._keeps_outputs else {}
        return {**shared, **monitor, **self._own_settings(), "model": self._signature}

    def _own_state(self) -> dict[str, Any]:
        return {
            "curves": torch.stack(self._curves, dim=1),
            "kept": {number: dict(weights) for number, weights in self._kept.items()},
            "outcome": self._outcome.state_dict() if self._keeps_outputs else {},
            "levels": torch.tensor(self._levels, dtype=torch.float64).reshape(-1, 2),
            "rule": self._backend.state_dict(),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return all that a resumed run needs; take it before `close()`."""
        self._opened("state_dict")
        return super().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken: all later values are the same to the last bit."""
        self._opened("load_state_dict")
        super().load_state_dict(state)
        if self._process_group is not None:
            self._process_group.forget()
        self.observer.forget()

    def _take_own_state(self, state: Mapping[str, Any]) -> None:
        device = self._device
        checks = len(state["history"]["records"])
        check_schema(
            state["curves"], self._curves[0].new_empty(len(self._curves[0]), checks), "['curves']"
        )
        if not state["kept"] or not all(0 <= number < checks for number in state["kept"]):
            raise ValueError(f"weights of the checks {list(state['kept'])} of {checks}")
        levels = state["levels"].tolist()
        if len(levels) != (checks if self._levels else 0):
            raise ValueError(f"training losses of {len(levels)} of {checks} checks")
        form = self._state()
        for number, weights in state["kept"].items():
            check_schema(weights, form, f"['kept'][{number}]")
        if self._keeps_outputs:
            self._outcome.take(state["outcome"], checks)
        self._backend.load_state_dict(state["rule"])
        self._curves = list(state["curves"].unbind(1))
        self._rate_sum = math.nan  # rates before the state are not known
        self._intervals, self._values = {}, {}
        self._levels = [(shadows, model) for shadows, model in levels]
        self._kept = {
            number: {key: value.to(device) for key, value in weights.items()}
            for number, weights in state["kept"].items()
        }

    def close(self) -> None:
        """Remove all hooks and release the model. Results (history, estimate) remain available."""
        self._release()
        self._outputs = self.step_check = None
        if self._model is not None:
            self._backend.close()
        self._frozen = []
        self._kept = {number: {} for number in self._kept}
        self._model = self._optimizer = self._average = None

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None and self._model is not None:
            self.restore()
        self.close()


def _no_model() -> None:
    """Stand in for the weak reference to a model, which cannot be pickled."""
