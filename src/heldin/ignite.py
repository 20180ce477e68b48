"""heldin in PyTorch-Ignite: `AutoStopping(model, optimizer, loss_fn).attach(trainer)`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

from torch import nn

from heldin.capture.arguments import BatchDim
from heldin.capture.collector import BUDGET, Estimator
from heldin.criterion.evidence import Across, Correction, Dead, Groups
from heldin.rules.evidence import EvidenceStopping as Stopping

from .adapters.epochs import Epochs
from .adapters.session import (
    BeforeStep,
    MethodWrapper,
    StoppingSession,
    flat_metrics,
    forget_gradients,
    missing_framework,
)
from .adapters.settings import chosen, refuse_stranger, spelled_out
from .rules.ranks import ProcessGroup

try:
    from ignite.engine import Engine, Events

    from .adapters.auto_ignite import AutoStopping
except ImportError as error:
    raise missing_framework("PyTorch-Ignite", "ignite", error) from error

__all__ = ["AutoStopping", "EvidenceStopping"]

logger = logging.getLogger(__name__)
NAME = "heldin.ignite.EvidenceStopping"


class EvidenceStopping:
    """Terminates a trainer by evidence, in the middle of an epoch if need be; no evaluator.

    The evidence is weighed right before the optimiser steps, however many iterations its gradients
    were accumulated over, and the step that asks for the stop leaves the weights as they are.
    Values are in `trainer.state.metrics` as `heldin/criterion` and others, for Ignite's loggers.
    The state goes into a `Checkpoint` like that of a model: `Checkpoint({"stopping": stopping})`.

    Args:
        model: the model that the trainer trains.
        patience: number of consecutive checks that must ask for a stop.
        log_groups: also give the value of each group of parameters.
        window: number of steps whose sums add up before a value is formed; "epoch": those of an
            epoch, by the number of its batches, which is better on few data.
        groups, smoothing and the others: see `heldin.EvidenceStopping`.

    Attributes:
        stopping: the `heldin.EvidenceStopping` of the last run, with its history.

    >>> import torch
    >>> from ignite.engine import create_supervised_trainer
    >>> from heldin.ignite import EvidenceStopping
    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> trainer = create_supervised_trainer(model, optimizer, torch.nn.functional.cross_entropy)
    >>> stopping = EvidenceStopping(model, patience=3).attach(trainer)
    """

    @spelled_out
    def __init__(
        self,
        model: nn.Module,
        patience: int = 1,
        log_groups: bool = False,
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
        refuse_stranger(NAME, "model", model, nn.Module, "the model that is trained")
        self._run = StoppingSession(NAME, chosen(locals()))
        self.log_groups = log_groups
        self._model = model
        self._before: BeforeStep | None = None
        self._epochs = Epochs(NAME)
        self._interrupted = False

    @property
    def stopping(self) -> Stopping | None:
        """The `heldin.EvidenceStopping` of the last run, with its history."""
        return self._run.stopping

    def attach(self, trainer: Engine) -> EvidenceStopping:
        """Watch the runs of a trainer."""
        refuse_stranger(f"{NAME}.attach", "trainer", trainer, Engine, "the trainer, an Engine")
        trainer.add_event_handler(Events.STARTED, self._begin)
        trainer.add_event_handler(Events.INTERRUPT, self._interrupt)
        trainer.add_event_handler(Events.ITERATION_STARTED, self._iterating)
        trainer.add_event_handler(Events.ITERATION_COMPLETED, self._iterated)
        trainer.add_event_handler(Events.EPOCH_STARTED, self._begin_epoch)
        trainer.add_event_handler(Events.EPOCH_COMPLETED, self._end_epoch)
        for event in (Events.COMPLETED, Events.TERMINATE):
            trainer.add_event_handler(event, self._end)
        MethodWrapper(trainer, "run", partial(self._around, trainer))
        return self

    def _around(self, trainer: Engine, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A run of the trainer, whichever way it ends."""
        if self._interrupted:  # it goes on where it was, without an event
            self._begin(trainer)
        try:
            return run(*args, **kwargs)
        finally:
            self._end(trainer)

    def _interrupt(self, trainer: Engine) -> None:
        self._interrupted = True

    def _begin(self, trainer: Engine) -> None:
        if trainer.state.iteration:  # the run before goes on
            self._run.load_state_dict(self._run.state_dict())
        self._end(trainer)
        self._interrupted = False
        self._epochs.reset()
        self._run.begin(self._model, trainer.state.epoch_length)
        self._before = BeforeStep(self._model, lambda: self._weigh(trainer))

    def _begin_epoch(self, trainer: Engine) -> None:
        self._epochs.begin(self.stopping)

    def _end_epoch(self, trainer: Engine) -> None:
        self._epochs.end(self.stopping)

    def _iterating(self, trainer: Engine) -> None:
        self._epochs.batch()
        if self._before is not None:
            self._before.next_iteration()

    def _weigh(self, trainer: Engine) -> bool:
        stopping = self.stopping
        if stopping is None or not stopping.watching:
            return False
        known = stopping.should_stop
        if stopping.step():
            forget_gradients(self._model.parameters())
            trainer.terminate()
            if not known:
                logger.info(f"EvidenceStopping: Stop training ({stopping.reason})")
        trainer.state.metrics.update(flat_metrics(stopping, self.log_groups))
        return stopping.should_stop

    def _iterated(self, trainer: Engine) -> None:
        if self._before is not None and self._before.missed:  # it stepped with a closure
            self._weigh(trainer)
            self._before.missed = False

    def _end(self, trainer: Engine) -> None:
        self._run.end()
        if self._before is not None:
            self._before.close()
        self._before = None

    def state_dict(self) -> dict[str, Any]:
        """For Ignite's `Checkpoint`."""
        return self._run.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where the checkpoint was made."""
        self._run.load_state_dict(state_dict)
