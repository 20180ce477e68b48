"""heldin in PyTorch-Ignite: `EvidenceStopping(model).attach(trainer)`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import nn

from heldin.rules.evidence import EvidenceStopping as Stopping

from .adapters.session import (
    BeforeStep,
    StoppingSession,
    flat_metrics,
    forget_gradients,
    missing_framework,
)

try:
    from ignite.engine import Engine, Events
except ImportError as error:
    raise missing_framework("PyTorch-Ignite", "ignite", error) from error

__all__ = ["EvidenceStopping"]

logger = logging.getLogger(__name__)


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
        options: any other argument of `heldin.EvidenceStopping`.

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

    def __init__(
        self, model: nn.Module, patience: int = 1, log_groups: bool = False, **options: Any
    ) -> None:
        self._run = StoppingSession("EvidenceStopping", {"patience": patience, **options})
        self.log_groups = log_groups
        self._model = model
        self._before: BeforeStep | None = None

    @property
    def stopping(self) -> Stopping | None:
        """The `heldin.EvidenceStopping` of the last run, with its history."""
        return self._run.stopping

    def attach(self, trainer: Engine) -> EvidenceStopping:
        """Watch the runs of a trainer."""
        trainer.add_event_handler(Events.STARTED, self._begin)
        trainer.add_event_handler(Events.ITERATION_COMPLETED, self._iterated)
        for event in (Events.COMPLETED, Events.TERMINATE):
            trainer.add_event_handler(event, self._end)
        return self

    def _begin(self, trainer: Engine) -> None:
        if trainer.state.iteration:  # the run before goes on
            self._run.load_state_dict(self._run.state_dict())
        self._end(trainer)
        self._run.begin(self._model)
        self._before = BeforeStep(self._model, lambda: self._weigh(trainer))

    def _weigh(self, trainer: Engine) -> None:
        stopping = self.stopping
        if stopping is None or not stopping.watching:
            return
        known = stopping.should_stop
        if stopping.step():
            forget_gradients(self._model.parameters())
            trainer.terminate()
            if not known:
                logger.info(f"EvidenceStopping: Stop training ({stopping.reason})")
        trainer.state.metrics.update(flat_metrics(stopping, self.log_groups))

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
