"""Stopping a training run by evidence (Eq. 5, Eq. 10 and Sec. 3.3 of the paper)."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, TypeVar

from torch import nn

from heldin.capture.arguments import BatchDim
from heldin.capture.collector import COORDINATES, Collector, Estimator
from heldin.capture.moments import Moments
from heldin.capture.observation import Observation
from heldin.capture.sharding import unwrapped
from heldin.criterion.average import weight
from heldin.criterion.evidence import (
    Across,
    Correction,
    Dead,
    Evidence,
    Groups,
    check_options,
    grouping,
)
from heldin.criterion.running import STATE_SCHEMA as RUNNING
from heldin.criterion.running import RunningEvidence, why_none
from heldin.distributed.ranks import Joinable, ProcessGroup, ranks_of
from heldin.errors import HeldinError
from heldin.state.history import STATE_SCHEMA as HISTORY
from heldin.state.history import History, Record
from heldin.state.schema import check_fraction, check_int, model_signature

from .base import StoppingRule
from .decision import STATE_SCHEMA as DECISION
from .decision import Decision, check_arming
from .outlook import VanishedGradientCheck
from .reporting import EvidenceReport
from .step_order import StepOrderCheck

__all__ = ["EvidenceStopping"]

T = TypeVar("T")


class EvidenceStopping(EvidenceReport, StoppingRule, Joinable):
    """A rule that stops training when the gradients carry no more evidence than noise.

    Call `step()` after `backward()` and before `optimizer.step()`, so that the weights that
    triggered the stop are kept. All backward passes since the last `step()` count as one step, so
    accumulated micro-batches need no special treatment. If the optimiser takes a closure, call
    `step()` in the closure, after `backward()`.

    Use this rule if a second model is not affordable, or as a diagnostic; otherwise
    the rule "auto" ends with better models (docs/which-rule.md). The criterion is 1 - mean f per
    group, the median over groups, smoothed; a value above zero stops training. The first block of
    arguments belongs to the paper's rule, the second adds robustness; `EvidenceStopping.paper`
    disables the second.

    Args:
        model: the model that is trained. It is neither wrapped nor changed.
        parameter_groups: "tensor" (each parameter is a group), "all" (one group), or a mapping or
            function from names of parameters to names of groups.
        smoothing: decay b of the exponential average, in [0, 1). 0 gives the values of Eq. 5, or
            Eq. 10 if each step uses the whole training set.
        window: number of observed steps that are summed for one value. The steps of an epoch give
            minibatch training the resolution of Eq. 10.
        patience: number of consecutive checks with a criterion above zero before training stops.
        warmup: number of first steps at which training is never stopped.
        every: observe every n-th step only; the others have no overhead.

        arming: the rule may stop only after the criterion has clearly left zero, where it stays
            during an initial plateau: an average over about ten checks (decay 0.9, started at zero)
            must have exceeded this distance from zero once. Values below zero show a signal, values
            above zero fitted noise. None: armed from the start.
        across: the "median" of the groups' values, or their "mean", as in the paper. On unseen
            tables and networks the median ended with better models (docs/which-rule.md).
        weighted: weight each value in the average by the size of its batch.
        start: None for a bias-corrected average. A number is the initial value of the plain
            recursion c = b c + (1-b) x, without weights.
        correction: None, "gaussian" or "symmetric": see `heldin.evidence`.
        dead: "out" or "zero": see `heldin.evidence`.
        reduction: whether the loss is a "mean" or a "sum" over the samples of a step. It matters
            only if batches within a window, or on different ranks, differ in size.
        estimator, coordinates, seed: "sampled" observes a random block of coordinates of each
            parameter, drawn again at every check; "exact" and "microbatch": see `heldin.observe`.
        batch_dim, parameters: see `heldin.observe`.
        process_group: the data-parallel processes whose samples make up a step; they all make the
            same decision. "auto": those of DistributedDataParallel or `fully_shard`, else all
            processes if torch.distributed is initialised. None: this process only.
        history: maximum number of records, see `heldin.state.History`.

    >>> import heldin, torch
    >>> _ = torch.manual_seed(0)
    >>> x = torch.randn(20, 30)
    >>> y = x[:, :1] + torch.randn(20, 1)
    >>> model = torch.nn.Linear(30, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.03)
    >>> with EvidenceStopping(model) as stopping:
    ...     for step in range(1000):
    ...         torch.nn.functional.mse_loss(model(x), y).backward()
    ...         if stopping.step():
    ...             break
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    >>> stopping.stopped_step < 100
    True
    """

    _state_version = 3
    _state_schema: ClassVar[dict[str, Any]] = {
        "decision": DECISION,
        "sampler": (dict, None),
        "history": HISTORY,
        **RUNNING,
    }

    def __init__(
        self,
        model: nn.Module,
        parameter_groups: Groups = "tensor",
        *,
        smoothing: float = 0.9,
        window: int = 1,
        patience: int = 1,
        warmup: int = 0,
        every: int = 1,
        arming: float | None = 0.5,
        across: Across = "median",
        weighted: bool = True,
        start: float | None = None,
        correction: Correction = None,
        dead: Dead = "out",
        reduction: Literal["mean", "sum"] = "mean",
        estimator: Estimator = "sampled",
        coordinates: int = COORDINATES,
        seed: int = 0,
        batch_dim: BatchDim = 0,
        parameters: Callable[[str], bool] | None = None,
        process_group: ProcessGroup = "auto",
        history: int = 4096,
    ) -> None:
        super().__init__()
        name = self.owner
        self.smoothing = check_fraction(name, "smoothing", smoothing)
        self.window = check_int(name, "window", window, 1)
        self.patience = check_int(name, "patience", patience, 1)
        self.warmup = check_int(name, "warmup", warmup, 0)
        self.every = check_int(name, "every", every, 1)
        check_arming(name, arming)
        if reduction not in ("mean", "sum"):
            raise HeldinError(f"{name}: reduction must be 'mean' or 'sum', got {reduction!r}")
        self.arming, self.weighted, self.start, self.across = arming, weighted, start, across
        self.correction, self.dead, self.reduction = correction, dead, reduction
        check_options(correction, dead, across)

        self.history = History(check_int(name, "history", history, 2))
        self._decision = Decision(self.smoothing, start, arming, self.warmup, self.patience)
        self._seen_step = 0
        self._vanished_gradients = VanishedGradientCheck()

        is_single_step = self.window == 1  # a longer window keeps the sums of its first step
        self._collector = Collector(
            model, batch_dim, parameters, estimator, coordinates, seed, reuses_memory=is_single_step
        )
        self._seen = Observation(self._collector)
        self._ranks = ranks_of(model, process_group, self._collector, reduction == "mean")
        self._model = unwrapped(model)
        self._signature = model_signature(self._model)
        self._groups = grouping(parameter_groups)
        self._running = RunningEvidence(
            self._collector, self._groups, correction, dead, across, self.window,
            mean=reduction == "mean",
        )  # fmt: skip
        for parameter in self._collector.trained():
            self._groups(parameter)  # refuse a mapping without an entry now, not in a step
        self._order = StepOrderCheck(self._model, self._collector)
        weakref.finalize(self, self._order.close)
        self._release = weakref.finalize(self, self._seen.close)
        self._prepare()

    @classmethod
    def paper(
        cls,
        model: nn.Module,
        parameter_groups: Groups = "tensor",
        *,
        smoothing: float = 0.9,
        start: float = 0.0,
        **options: Any,
    ) -> EvidenceStopping:
        """Make the paper's rule, which stops as soon as the smoothed criterion is above zero.

        It uses every coordinate, the mean over groups, no arming, no weights, no correction, and
        the plain recursion c = b c + (1-b) x. The paper does not specify b (here 0.9), the start of
        the average (here zero) and the meaning of 0/0 (here dead coordinates are excluded;
        `docs/reproduction.md` shows the alternatives). Arguments are those of the class.

        >>> import heldin, torch
        >>> stopping = EvidenceStopping.paper(torch.nn.Linear(3, 1), smoothing=0.99)
        >>> stopping.armed, stopping.start
        (True, 0.0)
        >>> stopping.close()
        """
        settings: dict[str, Any] = {
            "arming": None, "across": "mean", "weighted": False, "estimator": "exact", **options
        }  # fmt: skip
        return cls(model, parameter_groups, smoothing=smoothing, start=start, **settings)

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
    def watching(self) -> bool:
        """Whether the rule has a model: from the beginning until `close`."""
        return self._model is not None

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

        >>> import heldin, torch
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> stopping = EvidenceStopping(model, arming=None, estimator="exact")
        >>> stopping.take({"weight": heldin.Moments(torch.ones(1, 1), torch.full((1, 1), 9.0), 2)})
        True
        >>> stopping.close()
        """
        self._opened("take")
        self._step += check_int("heldin.EarlyStopping.take", "steps", steps, 1)
        self._check(
            moments,
            max((parameter_moments.count for parameter_moments in moments.values()), default=0),
        )
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
            batch_weight = weight(count, self._running.correction) if self.weighted else 1.0
            stop, why = self._decision.add(self._step, raw, batch_weight)
            if not self.should_stop:
                self.reason = f"step {self._step}: {why}"
                if stop:
                    self.should_stop, self.stopped_step = True, self._step
        hopeless = self._vanished_gradients.update(seen, count) and not self.should_stop
        if hopeless and self._step > self.warmup and not (self.armed and self.criterion > 0):
            self._vanished_gradients.warn(self._step, self.criterion, self.armed)
        record = Record(self._step, count, raw, self.criterion, evidence.groups, bad)
        self.history.append(record, stopped=self.stopped_step == self._step)

    # -- reports

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
        names = ("smoothing", "window", "every", "weighted", "start", "across", "correction")
        values = {n: getattr(self, n) for n in (*names, "dead", "reduction")}
        sampler = self._collector.sampler
        sampling = (
            {"coordinates": sampler.coordinates, "seed": sampler.seed}
            if sampler is not None
            else {}
        )
        if self._model is not None:
            self._signature = model_signature(self._model)
        return {
            **values,
            "estimator": self._collector.estimator,
            **sampling,
            "model": self._signature,
        }

    def _common(self) -> dict[str, Any]:
        """Return the values that must be the same on all ranks, so that their decisions agree."""
        decision_settings = {
            n: getattr(self, n) for n in ("patience", "warmup", "arming", "should_stop")
        }
        groups = [f"{name}: {self._groups(name)}" for name in self._collector.trained()]
        decision = self._decision.state_dict()
        return {
            **self._settings(),
            **decision_settings,
            "parameter_groups": groups,
            "step": self._step,
            **decision,
        }

    def _own_state(self) -> dict[str, Any]:
        sampler = self._collector.sampler
        return {
            "decision": self._decision.state_dict(),
            "sampler": None if sampler is None else sampler.state_dict(),
            "history": self.history.state_dict(),
            **self._running.state_dict(),
        }

    def _take_own_state(self, state: Mapping[str, Any]) -> None:
        self._running.load_state_dict(state, self._opened("load_state_dict"))
        self._decision.load_state_dict(state["decision"])
        self.history.load_state_dict(state["history"])
        self._step = state["step"]
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
