"""heldin in fastai: `Learner(..., cbs=AutoStopping())`, or `EvidenceStopping()`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

from heldin.capture.arguments import BatchDim
from heldin.capture.collector import BUDGET, Estimator
from heldin.criterion.evidence import Across, Correction, Dead, Groups, grouping
from heldin.rules.evidence import EvidenceStopping as Stopping

from .adapters.epochs import Epochs
from .adapters.session import Guard, StoppingSession, length, missing_framework
from .adapters.settings import chosen, spelled_out
from .rules.ranks import ProcessGroup

try:
    from fastai.callback.core import Callback, CancelFitException, CancelTrainException
    from fastai.callback.fp16 import MixedPrecision
    from fastai.learner import ValueMetric
    from fastai.torch_core import get_model

    from .adapters.auto_fastai import CANCELLED, AutoStopping
except ImportError as error:
    raise missing_framework("fastai", "fastai", error) from error

__all__ = ["AutoStopping", "EvidenceStopping"]


class EvidenceStopping(Callback):
    """Stops a fit by evidence, in the middle of an epoch if need be; no validation set.

    The step that asks for the stop leaves the weights as they are. The epoch is still recorded. The
    criterion is one of the metrics of the Recorder, `heldin/criterion`, so that it is in the table
    and in what fastai's loggers write.

    Args:
        patience: number of consecutive checks that must ask for a stop.
        verbose: tell of the stop.
        log_groups: also make a metric of each group of parameters.
        reset_on_fit: each fit starts anew; False: it goes on where the last one was, or where
            `load_state_dict` says.
        window: number of steps whose sums add up before a value is formed; "epoch": those of an
            epoch, by the number of its batches, which is better on few data.
        groups, smoothing and the others: see `heldin.EvidenceStopping`.

    Attributes:
        stopping: the `heldin.EvidenceStopping` of the last fit, with its history.

    >>> from heldin.fastai import EvidenceStopping
    >>> callback = EvidenceStopping(patience=3)
    """

    order = MixedPrecision.order - 2  # after accumulation has decided, before gradients are scaled
    run_valid = False

    @spelled_out
    def __init__(
        self,
        patience: int = 1,
        verbose: bool = False,
        log_groups: bool = False,
        reset_on_fit: bool = True,
        *,
        groups: Groups = "tensor",
        smoothing: float = 0.9,
        window: int | Literal["epoch"] = 1,
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
        budget: int = BUDGET,
        seed: int = 0,
        batch_dim: BatchDim = 0,
        parameters: Callable[[str], bool] | None = None,
        process_group: ProcessGroup = "auto",
        history: int = 4096,
    ) -> None:
        options = chosen(locals())
        super().__init__()
        self._watch = StoppingSession("EvidenceStopping", options)
        self._begin_guard()
        self._due = False  # the fit that begins with the next epoch
        self.verbose, self.log_groups, self.reset_on_fit = verbose, log_groups, reset_on_fit

    @property
    def stopping(self) -> Stopping | None:
        """The `heldin.EvidenceStopping` of the last fit, with its history."""
        return self._watch.stopping

    # -- the fit

    def _begin_guard(self) -> None:
        self._epochs = Epochs("heldin.fastai.EvidenceStopping")
        self._guard = Guard(self._end, CANCELLED)

    def before_fit(self) -> None:
        """Look out for errors, but not while a learning rate is searched for."""
        learn = self.learn
        self._due = False
        self.run = not hasattr(learn, "lr_finder") and not hasattr(learn, "gather_preds")
        if not self.run:
            return
        if not self.reset_on_fit:
            self._watch.load_state_dict(self._watch.state_dict())
        model = get_model(learn.model)
        self._watch.end()
        self._due = True
        metrics = [ValueMetric(self._criterion, "heldin/criterion")]
        if self.log_groups:
            group_of = grouping(self._watch.options.get("groups", "tensor"))
            names = dict.fromkeys(group_of(n) for n, p in model.named_parameters())
            metrics += [ValueMetric(partial(self._group, n), f"heldin/group/{n}") for n in names]
        learn.metrics = self._others() + metrics
        self._guard.close()
        self._guard.over(learn, "_with_events", "_call_one")

    def before_train(self) -> None:
        """Look out for passes."""
        self._epochs.begin(self.stopping)

    def after_batch(self) -> None:
        """Count."""
        self._epochs.batch()

    def _criterion(self) -> float:
        return self.stopping.criterion if self.stopping is not None else math.nan

    def _group(self, name: str) -> float:
        found = self.stopping.evidence.groups if self.stopping is not None else {}
        return found.get(name, math.nan)

    def _others(self) -> Any:
        own = "heldin/"
        return self.learn.metrics.filter(lambda m: not m.name.startswith(own))

    def before_step(self) -> None:
        """Weigh the evidence of all batches since the last step."""
        stopping = self.stopping
        if stopping is None or not stopping.watching:
            return
        if stopping.step():
            if self.verbose:
                print(f"No more evidence ({stopping.reason}): early stopping")
            self.learn.opt.zero_grad()  # nobody else would, before the next fit
            raise CancelTrainException

    def after_train(self) -> None:
        """Let the Recorder record the losses of the epoch that was cut short."""
        self._epochs.end(self.stopping)
        if self._stopped():
            self.learn.recorder.cancel_train = False

    def before_epoch(self) -> None:
        """End the fit after a stop; the epoch of the stop was ended by all other callbacks.

        The first one begins to watch the model, after all callbacks have begun: they may fail.
        """
        if self._due:
            self._due = False
            self._watch.begin(get_model(self.learn.model), self._epoch_steps())
            self._epochs.reset()
        if self._stopped():
            raise CancelFitException

    def _epoch_steps(self) -> float | None:
        loader, together = self.learn.dls.train, getattr(self.learn, "gradient_accumulation", None)
        steps = length(loader)
        if steps is None or together is None or not self._watch.by_epoch:
            return steps
        size = getattr(loader, "bs", None) or getattr(loader, "batch_size", None)
        return None if size is None else steps / math.ceil(together.n_acc / size)

    def _stopped(self) -> bool:
        return self.stopping is not None and self.stopping.should_stop

    def after_fit(self) -> None:
        """Watch no more."""
        self._end()

    def _end(self) -> None:
        self._guard.close()
        self._watch.end()
        self.learn.metrics = self._others()

    # -- saving

    def state_dict(self) -> dict[str, Any]:
        """To be saved beside the learner, as `Learner.save` keeps no callbacks."""
        return self._watch.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there in the next fit (with `reset_on_fit=False` also in those after it)."""
        self._watch.load_state_dict(state)

    def __getstate__(self) -> dict[str, Any]:
        state = {**super().__getstate__(), "_watch": (self._watch.options, self.state_dict())}
        return {name: value for name, value in state.items() if name not in ("_guard", "_epochs")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        options, saved = state.pop("_watch")
        super().__setstate__(state)
        self._watch = StoppingSession("EvidenceStopping", options)
        self._watch.load_state_dict(saved)
        self._begin_guard()
