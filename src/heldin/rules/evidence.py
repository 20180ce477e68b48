"""Stopping a training run by evidence (Eq. 5, Eq. 10 and Sec. 3.3 of the paper)."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from types import TracebackType
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from heldin.capture.collector import BUDGET, Collector, Estimator
from heldin.capture.forward import BatchDim
from heldin.capture.moments import Moments
from heldin.capture.observation import Observation
from heldin.capture.sharding import unwrapped
from heldin.criterion.average import FORM as AVERAGE
from heldin.criterion.average import Average, weight
from heldin.criterion.evidence import (
    Correction,
    Dead,
    Evidence,
    Groups,
    Ratio,
    check_options,
    evidence_of,
    grouping,
    ratios,
)
from heldin.criterion.window import FORM as WINDOW
from heldin.criterion.window import Window
from heldin.errors import HeldinError
from heldin.state.history import FORM as HISTORY
from heldin.state.history import History
from heldin.state.schema import all_or_nothing, same_settings, share, signature, state_of, whole

from .foreign import PlainLoopOnly
from .order import CallOrder
from .outlook import Outlook
from .ranks import JoinHook, ProcessGroup, ranks_of

__all__ = ["EvidenceStopping"]

T = TypeVar("T")
NOTHING = Evidence(math.nan, {}, 0)
STATE_SCHEMA = {
    "settings": dict,
    "step": int,
    "armed": bool,
    "streak": int,
    "should_stop": bool,
    "stopped_step": (int, None),
    "reason": str,
    "evidence": {
        "criterion": float,
        "groups": {str: float},
        "count": int,
        "live": {str: int},
        "nonfinite": [str],
        "estimator": str,
    },
    "average": AVERAGE,
    "recent": AVERAGE,
    "ratios": {str: [(float, int, bool)]},
    "sampler": (dict, None),
    "window": WINDOW,
    "history": HISTORY,
}


CALLBACKS = {
    **{
        name: f"heldin.{name}.EvidenceStopping"
        for name in ("lightning", "skorch", "keras", "ignite", "fastai")
    },
    "transformers": "heldin.transformers.EvidenceStoppingCallback",
}


class EvidenceStopping(PlainLoopOnly):
    """Stops training when the gradients carry no more evidence than noise would.

    Call `step()` after `backward()` and before `optimizer.step()`, so that the weights that
    triggered the stop are kept. All backward passes since the last `step()` count as one step, so
    accumulated micro-batches need nothing special. Where the optimiser takes a closure, `step()`
    belongs into it, after `backward()`.

    The criterion is 1 - mean f per group, averaged over the groups and smoothed; above zero, it
    asks to stop. The first block of arguments is the paper's rule and its pace, the second makes it
    robust where the plain rule is not; `EvidenceStopping.paper` switches that off.

    Args:
        model: the model that is trained. It is neither wrapped nor changed.
        groups: "tensor" (each parameter is a group), "all" (one group), or a mapping or function
            from parameter names to group names.
        smoothing: decay b of the exponential average, in [0, 1). 0 gives the values of Eq. 5, or
            Eq. 10 if each step sees the whole training set.
        window: number of observed steps whose sums add up before a value is formed. An epoch's
            worth gives minibatch training the resolution of Eq. 10.
        patience: number of consecutive checks with a criterion above zero before training stops.
        warmup: number of first steps at which training is never stopped.
        every: observe every so many steps only; the others cost nothing.

        arming: the rule may stop only after the criterion has clearly left zero, where a plateau at
            the start keeps it: an average over the last ten checks or so (decay 0.9, started
            at zero) must have been this far from zero once. Below: a signal was seen. Above: noise
            was fitted already. None: armed from the start.
        weighted: a value counts in the average by the size of its batch.
        start: None for a bias-corrected average. A number lets the plain recursion
            c = b c + (1-b) x start there, without weights.
        correction: None, "gaussian" or "symmetric": see `heldin.evidence`.
        dead: "out" or "zero": see `heldin.evidence`.
        reduction: whether the loss is a "mean" or a "sum" over the samples of a step. Matters only
            for windows over batches of different sizes, and for ranks with such.
        estimator, budget, seed: "sampled" looks at a random block of coordinates of each parameter,
            new at every check; see `heldin.observe`, where also "exact" and "microbatch" are
            explained.
        batch_dim, parameters: see `heldin.observe`.
        process_group: the data-parallel processes whose samples make up a step; they all come to
            the same decision. "auto": those of DistributedDataParallel or `fully_shard`, else all
            processes if torch.distributed is initialised. None: this process on its own.
        history: how many records to keep, see `heldin.state.History`.

    >>> import heldin, torch
    >>> _ = torch.manual_seed(0)
    >>> x = torch.randn(20, 30)
    >>> y = x[:, :1] + torch.randn(20, 1)
    >>> model = torch.nn.Linear(30, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.03)
    >>> with heldin.EvidenceStopping(model) as stopping:
    ...     for step in range(1000):
    ...         torch.nn.functional.mse_loss(model(x), y).backward()
    ...         if stopping.step():
    ...             break
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    >>> stopping.stopped_step < 100
    True
    """

    _callbacks = CALLBACKS

    def __init__(
        self,
        model: nn.Module,
        groups: Groups = "tensor",
        *,
        smoothing: float = 0.9,
        window: int = 1,
        patience: int = 1,
        warmup: int = 0,
        every: int = 1,
        arming: float | None = 0.5,
        weighted: bool = True,
        start: float | None = None,
        correction: Correction = None,
        dead: Dead = "out",
        reduction: Literal["mean", "sum"] = "mean",
        estimator: Estimator = "sampled",
        budget: int = BUDGET,
        seed: int = 0,
        batch_dim: BatchDim = 0,
        parameters: Callable[[str], bool] | None = None,
        process_group: ProcessGroup = "auto",
        history: int = 4096,
    ) -> None:
        name = type(self).__name__
        self.smoothing = share(name, "smoothing", smoothing)
        self.window = whole(name, "window", window, 1)
        self.patience = whole(name, "patience", patience, 1)
        self.warmup = whole(name, "warmup", warmup, 0)
        self.every = whole(name, "every", every, 1)
        if arming is not None and not arming >= 0:
            raise HeldinError(f"{name}: arming must be a number >= 0 or None, got {arming!r}")
        if reduction not in ("mean", "sum"):
            raise HeldinError(f"{name}: reduction must be 'mean' or 'sum', got {reduction!r}")
        self.arming, self.weighted, self.start = arming, weighted, start
        self.correction, self.dead, self.reduction = correction, dead, reduction
        check_options(correction, dead)

        self.evidence = NOTHING
        self.should_stop = False
        self.stopped_step: int | None = None
        self.reason = "no check yet"
        self.history = History(whole(name, "history", history, 2))
        self.armed = arming is None
        self._average = Average(self.smoothing, start)
        self._recent = Average(0.9, start=0.0)
        self._window = Window(mean=reduction == "mean")
        self._streak = 0
        self._step = self._seen_step = 0
        self._outlook = Outlook()
        self._ratios: dict[str, Ratio] = {}  # the last ones of every parameter

        self._collector = Collector(model, batch_dim, parameters, estimator, budget, seed)
        self._seen = Observation(self._collector)
        self._ranks = ranks_of(model, process_group, self._collector, reduction == "mean")
        self._join_config: Any = None  # set by torch.distributed.algorithms.Join
        self._model: nn.Module | None = unwrapped(model)
        self._signature = signature(self._model)
        self._groups = grouping(groups)
        # a few micro-batches in the place of samples: the ratio of Gaussian means is too large
        self._correction: Correction = correction
        if estimator == "microbatch" and correction is None:
            self._correction = "gaussian"
        for each, parameter in self._model.named_parameters():
            if parameter.requires_grad and (parameters is None or parameters(each)):
                self._groups(each)  # a mapping without an entry is refused now, not in a step
        self._order = CallOrder(self._model, self._collector)
        weakref.finalize(self, self._order.close)
        self._release = weakref.finalize(self, self._seen.close)
        self._prepare()

    @classmethod
    def paper(
        cls,
        model: nn.Module,
        groups: Groups = "tensor",
        *,
        smoothing: float = 0.9,
        start: float = 0.0,
        **options: Any,
    ) -> EvidenceStopping:
        """The paper's rule: stop at the first step at which the smoothed criterion is above zero.

        Every coordinate, no arming, no weights, no correction, the plain recursion
        c = b c + (1-b) x. The paper leaves b, the start value and the meaning of 0/0 open: b = 0.9,
        a start at zero (which stops at the same step as a bias-corrected average does) and dead
        coordinates left out (counted as zeros, they would stop the paper's own MNIST runs at the
        first step).

        Args:
            model, groups, smoothing: as for the class.
            start: where the average starts.
            options: any other argument of the class.

        >>> import heldin, torch
        >>> stopping = heldin.EvidenceStopping.paper(torch.nn.Linear(3, 1), smoothing=0.99)
        >>> stopping.armed, stopping.start
        (True, 0.0)
        >>> stopping.remove()
        """
        settings: dict[str, Any] = {
            "arming": None, "weighted": False, "estimator": "exact", **options
        }  # fmt: skip
        return cls(model, groups, smoothing=smoothing, start=start, **settings)

    # -- the loop

    @property
    def criterion(self) -> float:
        """The smoothed criterion; above zero, it asks to stop. nan before the first value."""
        return self._average.value if self._average.count else math.nan

    @property
    def watching(self) -> bool:
        """Whether a model is watched: from the beginning until `remove`."""
        return self._model is not None

    @property
    def progress(self) -> tuple[int, int, int]:
        """Steps so far, the last one with a backward pass, and passes since the last step."""
        return self._step, self._seen_step, self._collector.passes

    def discard(self) -> None:
        """Forget the backward passes since the last `step()`: their gradients were not used."""
        self._collector.clear(redraw=False)

    def call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run a function as if it were the model's forward pass, and return its result.

        For training steps that do not go through the model's own `forward`, see
        `heldin.Observation.call`.
        """
        return self._collector.call(function, *args, **kwargs)

    def step(self, scale: float = 1.0) -> bool:
        """Close a training step; True if training should stop.

        Args:
            scale: what the loss was multiplied by. Needed only for windows during which it
                changes: `stopping.step(scale=scaler.get_scale())`.
        """
        if self._ranks is not None:
            self._ranks.notify(self._join_config, self)
        return self._advance(scale)

    def _advance(self, scale: float = 1.0) -> bool:
        model = self._model
        if model is None:
            raise HeldinError("EvidenceStopping.step: called after remove(); make a new one")
        self._step += 1
        due = self._step % self.every == 0
        if self._ranks is not None and self._ranks.must_meet(due):
            self._ranks.check_agreement(self._common())
        if due:
            self._observe_step(model, scale)
        self._prepare()
        return self.should_stop

    def _observe_step(self, model: nn.Module, scale: float) -> None:
        """Take in all backward passes since the last step, of all ranks."""
        self._order.closing()
        seen: Mapping[str, Moments] = self._seen
        count = self._collector.count
        if self._ranks is not None:
            pooled = self._ranks.pool(scale)
            seen, count, scale = pooled.moments, pooled.count, pooled.scale
        if not count and self.history.checks == self._window.steps == 0:
            raise HeldinError(
                "EvidenceStopping.step: no backward pass through the model was seen. Call "
                "step() after loss.backward(), and make the EvidenceStopping before the "
                "forward pass"
            )
        if count:
            self._seen_step = self._step
        if self.window == 1:
            self._check(seen, count)
        else:
            trainable = [n for n, p in model.named_parameters() if p.requires_grad]
            self._window.add(seen, trainable, scale)
            if self._window.steps == self.window:
                moments = self._window.moments()
                count = max((each.count for each in moments.values()), default=0)
                self._check(moments, count, tuple(self._window.nonfinite))
                self._window.clear()
        self._collector.clear(redraw=self._window.steps == 0)  # one block for a whole window

    def take(self, moments: Mapping[str, Moments], steps: int = 1) -> bool:
        """Close steps whose per-sample sums were formed elsewhere; True if training should stop.

        In place of `step()`, for loops that form the sums themselves.

        Args:
            moments: by parameter name.
            steps: how many optimiser steps are in them.

        >>> import heldin, torch
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> stopping = heldin.EvidenceStopping(model, arming=None, estimator="exact")
        >>> stopping.take({"weight": heldin.Moments(torch.ones(1, 1), torch.full((1, 1), 9.0), 2)})
        True
        >>> stopping.remove()
        """
        if self._model is None:
            raise HeldinError("EvidenceStopping.take: called after remove(); make a new one")
        self._step += whole("EvidenceStopping.take", "steps", steps, 1)
        self._check(moments, max((each.count for each in moments.values()), default=0))
        return self.should_stop

    def _prepare(self) -> None:
        """Observe the coming step, or let it pass at no cost."""
        if (self._step + 1) % self.every == 0:
            if not self._collector.watching:
                self._seen.resume()
        elif self._collector.watching:
            self._seen.pause()

    def _check(
        self, seen: Mapping[str, Moments], count: int, skipped: tuple[str, ...] = ()
    ) -> None:
        """Form a value and decide."""
        parts = self._with_earlier(ratios(seen, self._correction), count)
        self.evidence = found = evidence_of(
            parts, count, self._groups, self._correction, self.dead, self._collector.estimator
        )
        raw, bad = found.criterion, found.nonfinite or skipped
        if found.nonfinite or not math.isfinite(raw):
            self.reason = f"step {self._step}: no value, {_why_none(count, bad)}"
            raw = math.nan
        else:
            by = weight(count, self._correction) if self.weighted else 1.0
            self._decide(self._average.add(raw, by), self._recent.add(raw))
        hopeless = self._outlook.look(seen, count) and not self.should_stop
        if hopeless and self._step > self.warmup and not (self.armed and self.criterion > 0):
            self._outlook.warn(self._step, self.criterion, self.armed)
        stopped = self.should_stop and self.stopped_step == self._step
        self.history.note((self._step, count, raw, self.criterion, found.groups, bad), stopped)

    def _with_earlier(self, found: dict[str, Ratio], count: int) -> dict[str, Ratio]:
        """The ratios in the model's order, with those of parameters whose turn it was not."""
        turn = self._collector.turn()
        if turn is None:
            names: Iterable[str] = self._collector.parameters() if self._model else found
        elif count < 2:
            return found  # no value: earlier ones alone say nothing about this step
        else:
            names = self._collector.trained()
            kept = {n: r for n, r in self._ratios.items() if n not in turn and r.finite}
            found = {**kept, **found}
        self._ratios = {name: found[name] for name in names if name in found}
        return self._ratios if len(self._ratios) == len(found) else {**self._ratios, **found}

    def _decide(self, value: float, recent: float) -> None:
        if self.arming is not None and abs(recent) > self.arming:
            self.armed = True
        if self.should_stop:
            return
        why = ", not above 0"
        if not value > 0:
            self._streak = 0
        elif not self.armed:
            why = f" > 0, but it has not left zero yet (arming={self.arming})"
        elif self._step <= self.warmup:
            why = f" > 0, but in the warm-up of {self.warmup} steps"
        else:
            self._streak += 1
            why = f" > 0, check {self._streak} of {self.patience}"
            if self._streak >= self.patience:
                self.should_stop, self.stopped_step = True, self._step
        self.reason = f"step {self._step}: criterion {value:.4g}{why}"

    # -- in a `Join` context, see torch.distributed.algorithms.Join

    def join_hook(self, **options: Any) -> JoinHook:
        """What a rank that ran out of data does: it follows the steps of the others."""
        return JoinHook(self._advance)

    @property
    def join_device(self) -> torch.device:
        """The device of the model."""
        assert self._model is not None
        return next(self._model.parameters()).device

    @property
    def join_process_group(self) -> Any:
        """The data-parallel processes."""
        return None if self._ranks is None else self._ranks.groups[0]

    # -- reports

    @property
    def bytes_sent(self) -> int:
        """What this rank put into all-reduces for the last step; 0 for a process on its own."""
        return 0 if self._ranks is None else self._ranks.bytes

    def metrics(self) -> dict[str, float]:
        """The state as a flat mapping for any tracker; values that do not exist are left out."""
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

    def __repr__(self) -> str:
        return f"<heldin.EvidenceStopping: {self.reason}>"

    # -- saving and closing

    def _settings(self) -> dict[str, Any]:
        """What decides how values are formed; a resumed run must have the same."""
        names = ("smoothing", "window", "every", "weighted", "start")
        values = {n: getattr(self, n) for n in (*names, "correction", "dead", "reduction")}
        sampler = self._collector.sampler
        how = {"budget": sampler.budget, "seed": sampler.seed} if sampler is not None else {}
        if self._model is not None:
            self._signature = signature(self._model)
        return {**values, "estimator": self._collector.estimator, **how, "model": self._signature}

    def _common(self) -> dict[str, Any]:
        """All that must be the same on all ranks, or they would part."""
        names = ("patience", "warmup", "arming", "armed", "should_stop")
        own = {name: getattr(self, name) for name in names}
        groups = [f"{name}: {self._groups(name)}" for name in self._collector.trained()]
        average = self._average.state_dict()
        return {**self._settings(), **own, "groups": groups, "step": self._step, "average": average}

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs; loads with `torch.load(..., weights_only=True)`."""
        found, sampler = asdict(self.evidence), self._collector.sampler
        return {
            "heldin": "EvidenceStopping",
            "version": 2,
            "settings": self._settings(),
            "step": self._step,
            "armed": self.armed,
            "streak": self._streak,
            "should_stop": self.should_stop,
            "stopped_step": self.stopped_step,
            "reason": self.reason,
            "evidence": {**found, "nonfinite": list(found["nonfinite"])},
            "average": self._average.state_dict(),
            "recent": self._recent.state_dict(),
            "ratios": {name: list(ratio) for name, ratio in self._ratios.items()},
            "sampler": None if sampler is None else sampler.state_dict(),
            "window": self._window.state_dict(),
            "history": self.history.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken: all later values are the same to the last bit."""
        name = "EvidenceStopping"
        all_or_nothing(name, self._take, state_of(name, state, 2, STATE_SCHEMA), self.state_dict())

    def _take(self, state: Mapping[str, Any]) -> None:
        same_settings("EvidenceStopping", state["settings"], self._settings())
        if self._model is None:
            raise HeldinError(
                "EvidenceStopping.load_state_dict: called after remove(); make a new one"
            )
        self._window.load_state_dict(state["window"], self._model)
        self._average.load_state_dict(state["average"])
        self._recent.load_state_dict(state["recent"])
        self.history.load_state_dict(state["history"])
        found = state["evidence"]
        self.evidence = Evidence(**{**found, "nonfinite": tuple(found["nonfinite"])})
        self._ratios = {name: Ratio(*values) for name, values in state["ratios"].items()}
        self._step, self._streak = state["step"], state["streak"]
        self.armed, self.reason = state["armed"], state["reason"]
        self.should_stop, self.stopped_step = state["should_stop"], state["stopped_step"]
        self._collector.clear()
        if self._collector.sampler is not None:
            self._collector.sampler.load_state_dict(state["sampler"])
        if self._ranks is not None:
            self._ranks.forget()
        self._prepare()

    def remove(self) -> None:
        """Stop observing and let go of the model. What was found stays readable."""
        self._release()
        self._order.close()
        self._model = None

    def __enter__(self) -> EvidenceStopping:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()


def _why_none(count: int, bad: tuple[str, ...]) -> str:
    if bad:
        return f"inf or nan in the contributions to {', '.join(map(repr, bad[:3]))}" + (
            f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        )
    if count == 0:
        return "no backward pass was seen"
    if count == 1:
        return "a single sample has no variance (window=k puts k steps together)"
    return "no coordinate had a contribution"
