"""Stopping a training run by evidence (Eq. 5, Eq. 10 and Sec. 3.3 of the paper)."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

from torch import nn

from heldin.capture.collector import COORDINATES, Collector
from heldin.capture.moments import Moments
from heldin.capture.observation import Observation
from heldin.capture.sharding import unwrapped
from heldin.criterion.average import STATE_SCHEMA as AVERAGE
from heldin.criterion.average import Average, weight
from heldin.criterion.evidence import Dead, Evidence, grouping
from heldin.criterion.running import STATE_SCHEMA as RUNNING
from heldin.criterion.running import RunningEvidence, why_none
from heldin.distributed.ranks import Joinable, ProcessGroup, ranks_of
from heldin.errors import HeldinError
from heldin.pages import Section, Table, csv_link
from heldin.pages.charts import Series, chart
from heldin.state.history import STATE_SCHEMA as HISTORY
from heldin.state.history import History, Record
from heldin.state.schema import Saved, check_int, model_signature

from . import options
from .base import StoppingRule
from .evidence_checks import StepOrderCheck, VanishedGradientCheck
from .reporting import Advice, advice_on_evidence

__all__ = ["Decision", "EvidenceStopping"]

T = TypeVar("T")
DEFAULT = options.Evidence()
RESUMED = (  # options that a resumed run must share with the saved one
    "smoothing", "window", "check_every", "weight_by_batch_size", "initial_average",
    "group_reduction", "correction", "dead_coordinates", "loss_reduction", "estimator",
)  # fmt: skip
RECENT = 0.9  # decay of the average that arms the rule: about ten checks


class Decision(Saved):
    """The smoothed criterion, and the decision to stop.

    During an initial plateau the criterion stays near zero, where it may be positive by chance: the
    rule is armed once an average over the last checks, which starts at zero, has left it.
    """

    _saved: ClassVar[dict[str, Any]] = {
        "armed": bool,
        "_streak": int,
        "_average": AVERAGE,
        "_recent": AVERAGE,
    }

    def __init__(self, rule: options.Evidence) -> None:
        self._rule, self.armed = rule, rule.arm_threshold is None
        self._average = Average(rule.smoothing, rule.initial_average)
        self._recent = Average(RECENT, start=0.0)
        self._streak = 0

    @property
    def value(self) -> float:
        """The smoothed criterion; nan before the first value."""
        return self._average.value if self._average.count else math.nan

    def add(self, step: int, raw: float, weight: float = 1.0) -> tuple[bool, str]:
        """Add the criterion of a step; return whether to stop, and the reason in words."""
        rule, value, recent = self._rule, self._average.add(raw, weight), self._recent.add(raw)
        if rule.arm_threshold is not None and abs(recent) > rule.arm_threshold:
            self.armed = True
        text = f"criterion {value:.4g}"
        if not value > 0:
            self._streak = 0
            return False, f"{text}, not above 0"
        if not self.armed:
            return False, f"{text} > 0, but it has not left zero yet (arming={rule.arm_threshold})"
        if step <= rule.warmup:
            return False, f"{text} > 0, but in the warm-up of {rule.warmup} steps"
        self._streak += 1
        reached = f"{text} > 0, check {self._streak} of {rule.checks}"
        return self._streak >= rule.checks, reached


class EvidenceStopping(StoppingRule, Joinable):
    """Stops training when the gradients carry no more evidence than noise.

    Call `step()` after `backward()` and before `optimizer.step()`, so that the weights that
    triggered the stop are kept. All backward passes since the last `step()` count as one step, so
    accumulated micro-batches need no special treatment. If the optimiser takes a closure, call
    `step()` in the closure, after `backward()`.

    Args:
        model: the model that is trained. It is neither wrapped nor changed.
        rule: the options; its window is a number of steps.
        seed: of the coordinates that are drawn again at every check.
        process_group: the data-parallel processes whose samples make up a step; they all make the
            same decision. "auto": those of DistributedDataParallel or `fully_shard`, else all
            processes if torch.distributed is initialised. None: this process only.
        history: maximum number of records, see `heldin.state.History`.
    """

    _state_version = 4
    _saved: ClassVar[dict[str, Any]] = {"_decision": Decision.saved_schema(), "history": HISTORY}
    _state_schema: ClassVar[dict[str, Any]] = {"sampler": (dict, None), **RUNNING}

    def __init__(
        self,
        model: nn.Module,
        rule: options.Evidence = DEFAULT,
        *,
        seed: int = 0,
        process_group: ProcessGroup = "auto",
        history: int = 4096,
    ) -> None:
        super().__init__()
        self.rule, self.every = rule, rule.check_every
        self.history = History(check_int(self.owner, "history", history, 2))
        self._decision = Decision(rule)
        self._seen_step = 0
        self._vanished_gradients = VanishedGradientCheck()
        assert isinstance(rule.window, int)
        self._collector = Collector(
            model,
            rule.batch_dim,
            rule.parameters,
            rule.estimator,
            COORDINATES if rule.coordinates is None else rule.coordinates,
            seed,
            reuses_memory=rule.window == 1,  # a longer window keeps the sums of its first step
        )
        self._seen = Observation(self._collector)
        mean = rule.loss_reduction == "mean"
        self._ranks = ranks_of(model, process_group, self._collector, mean)
        self._model = unwrapped(model)
        self._signature = model_signature(self._model)
        self._groups = grouping(rule.parameter_groups)
        dead: Dead = "out" if rule.dead_coordinates == "exclude" else "zero"
        self._running = RunningEvidence(
            self._collector, self._groups, rule.correction, dead, rule.group_reduction,
            rule.window, mean,
        )  # fmt: skip
        for parameter in self._collector.trained():
            self._groups(parameter)  # refuse a mapping without an entry now, not in a step
        self._order = StepOrderCheck(self._model, self._collector)
        weakref.finalize(self, self._order.close)
        self._release = weakref.finalize(self, self._seen.close)
        self._prepare()

    # -- the loop

    @property
    def criterion(self) -> float:
        """The smoothed criterion, which stops training above zero; nan before the first value."""
        return self._decision.value

    @property
    def armed(self) -> bool:
        """Whether the criterion has left zero, so that the rule may stop."""
        return self._decision.armed

    @property
    def evidence(self) -> Evidence:
        """The evidence of the last check."""
        return self._running.latest

    @property
    def best_step(self) -> int | None:
        """The step after which the weights were kept; None before a stop."""
        return None if self.stopped_step is None else self.stopped_step - 1

    @property
    def counts(self) -> tuple[int, int, int]:
        """Steps so far, the last step with a backward pass, and passes since the last step."""
        return self._step, self._seen_step, self._collector.passes

    def discard(self) -> None:
        """Ignore the backward passes since the last `step()`: their gradients were not used."""
        self._collector.clear(redraw=False)

    def call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run a function as if it were the model's forward pass, and return its result.

        For steps that do not go through the model's `forward`; see `heldin.Observation.call`.
        """
        return self._collector.call(function, *args, **kwargs)

    def step(self, scale: float = 1.0) -> bool:
        """Finish a training step; return True if training should stop.

        Args:
            scale: factor of the loss. Needed only if it changes within a window:
                `stopping.step(scale=scaler.get_scale())`.
        """
        self._notify_joined()
        return self._advance(scale)

    def _advance(self, scale: float = 1.0) -> bool:
        model = self._opened("step")
        self._step += 1
        due = self._step % self.every == 0
        if self._ranks is not None and self._ranks.should_compare_ranks(due):
            self._ranks.check_agreement(self._common())
        if due:
            self._observe_step(model, scale)
        self._prepare()
        return self.should_stop

    def _observe_step(self, model: nn.Module, scale: float) -> None:
        """Add all backward passes of all ranks since the last step, and check if one is due."""
        self._order.closing()
        seen: Mapping[str, Moments] = self._seen
        count = self._collector.count
        if self._ranks is not None:
            pooled = self._ranks.pool(scale)
            seen, count, scale = pooled.moments, pooled.count, pooled.scale
        if not count and self.history.checks == self._running.waiting == 0:
            raise HeldinError(
                "heldin.EarlyStopping.step: no backward pass through the model was seen. Call "
                "step() after loss.backward(), and create the EvidenceStopping before the "
                "forward pass"
            )
        self._seen_step = self._step if count else self._seen_step
        due = self._running.add(seen, count, model, scale)
        if due is not None:
            self._check(*due)
        self._collector.clear(redraw=self._running.waiting == 0)  # one block for a whole window

    def take(self, moments: Mapping[str, Moments], steps: int = 1) -> bool:
        """Finish steps whose moments were computed elsewhere; return True to stop training.

        A replacement of `step()` for loops that compute per-sample sums themselves.

        Args:
            moments: moments by parameter name.
            steps: number of optimiser steps that they cover.
        """
        self._opened("take")
        self._step += check_int("heldin.EarlyStopping.take", "steps", steps, 1)
        self._check(moments, max((each.count for each in moments.values()), default=0))
        return self.should_stop

    def _prepare(self) -> None:
        """Attach the hooks if the next step is observed, else remove them."""
        if (self._step + 1) % self.every == 0:
            if not self._collector.watching:
                self._seen.resume()
        elif self._collector.watching:
            self._seen.pause()

    def _check(
        self, seen: Mapping[str, Moments], count: int, skipped: tuple[str, ...] = ()
    ) -> None:
        """Compute a value of the criterion, decide, and record the check."""
        evidence = self._running.form(seen, count)
        raw, bad = evidence.criterion, evidence.nonfinite or skipped
        if evidence.nonfinite or not math.isfinite(raw):
            self.reason = f"step {self._step}: no value, {why_none(count, bad)}"
            raw = math.nan
        else:
            weighs = self.rule.weight_by_batch_size
            batch_weight = weight(count, self._running.correction) if weighs else 1.0
            stop, why = self._decision.add(self._step, raw, batch_weight)
            if not self.should_stop:
                self.reason = f"step {self._step}: {why}"
                if stop:
                    self.should_stop, self.stopped_step = True, self._step
        hopeless = self._vanished_gradients.update(seen, count) and not self.should_stop
        if hopeless and self._step > self.rule.warmup and not (self.armed and self.criterion > 0):
            self._vanished_gradients.warn(self._step, self.criterion, self.armed)
        record = Record(self._step, count, raw, self.criterion, evidence.groups, bad)
        self.history.append(record, stopped=self.stopped_step == self._step)

    # -- reports

    def _headline(self) -> tuple[str, str]:
        if self.stopped_step is None:
            return f"Evidence: no stop in {self._step:,} steps", self.reason
        return f"Evidence: stop at {self.run.place(self.stopped_step)}", self.reason

    def _sections(self) -> list[Section]:
        facts = [
            ("steps", f"{self._step:,}"),
            ("criterion", f"{self.criterion:.4g} (smoothed; training stops above 0)"),
            ("value of the last check", f"{self.evidence.criterion:.4g}"),
            ("samples in it", str(self.evidence.count)),
            ("may stop", "yes" if self.armed else "not yet: the criterion has never left zero"),
            *((f"criterion of {n}", f"{v:.4g}") for n, v in self.evidence.groups.items()),
        ]
        columns = self.history.columns()
        series = [
            Series("one check", columns["step"], columns["raw"], "soft"),
            Series("smoothed", columns["step"], columns["criterion"], "b"),
        ]
        marks = [] if self.stopped_step is None else [(self.stopped_step, "stop")]
        figure = chart(
            series, "Criterion", y="criterion", signed=True, marks=marks, **self.run.step_axis()
        )
        files = {"history.csv": csv_link(columns)}
        return [Section("Criterion", "", [figure], [Table([], facts)], files)]

    def _advice(self) -> list[Advice]:
        return advice_on_evidence(self.history, self.should_stop, self.armed)

    def metrics(self) -> dict[str, float]:
        """Return the current values as a flat mapping for a tracker, without missing ones."""
        values = {
            "heldin/criterion": self.criterion,
            "heldin/raw": self.evidence.criterion,
            "heldin/count": float(self.evidence.count),
            "heldin/armed": float(self.armed),
            "heldin/should_stop": float(self.should_stop),
        }
        if self._ranks is not None:
            values["heldin/bytes_sent"] = float(self.bytes_sent)
        values |= {f"heldin/group/{name}": value for name, value in self.evidence.groups.items()}
        return {name: value for name, value in values.items() if not math.isnan(value)}

    # -- saving and closing

    def _settings(self) -> dict[str, Any]:
        rule, sampler = self.rule, self._collector.sampler
        if self._model is not None:
            self._signature = model_signature(self._model)
        settings = {name: getattr(rule, name) for name in RESUMED}
        if sampler is not None:
            settings |= {"coordinates": sampler.coordinates, "seed": sampler.seed}
        return {**settings, "model": self._signature}

    def _common(self) -> dict[str, Any]:
        """Return the values that must be the same on all ranks, so that their decisions agree."""
        return {
            **self._settings(),
            **{name: getattr(self.rule, name) for name in ("checks", "warmup", "arm_threshold")},
            "should_stop": self.should_stop,
            "parameter_groups": [f"{n}: {self._groups(n)}" for n in self._collector.trained()],
            "step": self._step,
            **self._decision.state_dict(),
        }

    def _own_state(self) -> dict[str, Any]:
        sampler = self._collector.sampler
        saved = None if sampler is None else sampler.state_dict()
        return {"sampler": saved, **self._running.state_dict()}

    def _take_own_state(self, state: Mapping[str, Any]) -> None:
        self._running.load_state_dict(state, self._opened("load_state_dict"))
        self._collector.clear()
        if (sampler := self._collector.sampler) is not None:
            sampler.load_state_dict(state["sampler"])
        if self._ranks is not None:
            self._ranks.forget()
        self._prepare()

    def close(self) -> None:
        """Stop observing and release the model. Results remain available."""
        self._release()
        self._order.close()
        self._model = None
