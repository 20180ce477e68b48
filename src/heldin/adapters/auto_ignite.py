"""`heldin.ignite.AutoStopping`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

from ignite.engine import Engine, Events
from torch import nn
from torch.optim import Optimizer

from heldin.errors import HeldinError
from heldin.rules.estimated.base import Average, PathStopping
from heldin.rules.estimated.curves import Patience
from heldin.rules.estimated.losses import LossFunction
from heldin.rules.estimated.separate import BatchLoss, Clip
from heldin.rules.estimated.shadows import PATIENCE

from .estimating import EstimatingSession, own_loader
from .session import MethodWrapper
from .settings import refuse_stranger, spelled_out

__all__ = ["AutoStopping"]

logger = logging.getLogger("heldin.ignite")
NAME = "heldin.ignite.AutoStopping"


class AutoStopping:
    """Terminates a trainer by an estimated test loss, and puts the best weights into the model.

    The model trains on all rows. Shadows of it train beside it, each without some of the rows, and
    their loss on these is the estimate: no evaluator, no rows lost. The estimate and its standard
    error are in `trainer.state.metrics` as `heldin/estimate` and `heldin/standard_error`. The state
    goes into a `Checkpoint` like that of a model: `Checkpoint({"stopping": stopping})`.

    The trainer runs over a DataLoader; its optimiser may step once in several iterations.
    `trainer.interrupt()` is a pause, in which the rule stays.

    Args:
        model: the model that the trainer trains.
        optimizer: the optimiser that trains it.
        loss_fn: (outputs, targets) -> loss, of batches (inputs ..., targets).
        rule: "auto", "folds" or "shadow", see `heldin.stopping`.
        budget: for "auto": how many times the time of a plain run training may take (6).
        groups: (n,) names or numbers of the rows; equal ones are held out together.
        restore: put the weights of the best estimate into the model at the end.
        batch_loss: (model, batch) -> loss, in place of loss_fn, for any batch.
        clip: how the trainer clips gradients: the largest norm, or a function of the parameters.
        memory: for "auto": bytes that the shadows may take (1 GiB).
        stratify: (n,) classes; each fold gets its share of every class.
        eval_data: the same rows without augmentation: a Dataset, or a DataLoader over one.
        eval_loss: (model, batch) -> the loss to estimate (default: that of training).
        average, grid, patience, engine, seed: see `heldin.FoldStopping`; average=None is the
            rule's own.

    Attributes:
        stopping: the rule of the last run, with its history and estimate.

    >>> import torch
    >>> from ignite.engine import create_supervised_trainer
    >>> from heldin.ignite import AutoStopping
    >>> model, loss_fn = torch.nn.Linear(4, 2), torch.nn.functional.cross_entropy
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> trainer = create_supervised_trainer(model, optimizer, loss_fn)
    >>> stopping = AutoStopping(model, optimizer, loss_fn, budget=4).attach(trainer)
    """

    @spelled_out
    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss_fn: LossFunction | None = None,
        rule: Literal["auto", "folds", "shadow"] = "auto",
        budget: float | None = None,
        groups: Any = None,
        restore: bool = True,
        *,
        batch_loss: BatchLoss | None = None,
        clip: Clip | None = None,
        memory: int | None = None,
        stratify: Any = None,
        eval_data: Any = None,
        eval_loss: BatchLoss | None = None,
        average: Average | None = None,
        grid: float = 1.2,
        patience: Patience | None = PATIENCE,
        engine: Literal["auto", "copies", "swap"] = "auto",
        seed: int = 0,
    ) -> None:
        refuse_stranger(NAME, "model", model, nn.Module, "the model that is trained")
        refuse_stranger(NAME, "optimizer", optimizer, Optimizer, "the one that trains the model")
        self._run = EstimatingSession(NAME, locals())
        if (loss_fn is None) == (batch_loss is None):
            raise HeldinError(
                f"{NAME}: give either loss_fn, a function of (outputs, targets), or batch_loss, a "
                "function of (model, batch)"
            )
        self._loss = batch_loss or partial(_usual, loss_fn)
        self._model, self._optimizer, self._clip = model, optimizer, clip
        self._paused = False

    @property
    def stopping(self) -> PathStopping | None:
        """The rule of the last run, with its history and estimate."""
        return self._run.stopping

    def attach(self, trainer: Engine) -> AutoStopping:
        """Follow the runs of a trainer."""
        refuse_stranger(f"{NAME}.attach", "trainer", trainer, Engine, "the trainer, an Engine")
        trainer.add_event_handler(Events.STARTED, self._begin)
        trainer.add_event_handler(Events.INTERRUPT, self._pause)
        MethodWrapper(trainer, "_process_function", self._process)
        MethodWrapper(trainer, "run", self._around)
        return self

    def _around(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A run of the trainer, whichever way it ends."""
        self._paused = False
        try:
            state = run(*args, **kwargs)
            if not self._paused:
                self._run.finish()
        finally:
            if not self._paused:
                self._run.end()
        return state

    def _pause(self, trainer: Engine) -> None:
        self._paused = True

    def _begin(self, trainer: Engine) -> None:
        goes_on = bool(trainer.state.iteration)
        if goes_on:
            self._run.load_state_dict(self._run.state_dict())
        self._run.end()
        loader = own_loader(NAME, trainer.state.dataloader)
        self._run.follow(loader)
        rule = self._run.begin(
            self._model, self._optimizer, self._loss, loader, clip=self._clip, resumed=goes_on
        )
        logger.info(f"AutoStopping: {rule.reason_chosen}")

    def _process(self, process: Callable[..., Any], trainer: Engine, batch: Any) -> Any:
        """An iteration, before all handlers that may save what it has changed."""
        output = process(trainer, batch)
        if self._run.running:
            assert self.stopping is not None
            known = self.stopping.should_stop
            self._run.add(batch)
            stop = self._run.step()
            trainer.state.metrics.update(self._run.metrics())
            if stop:
                trainer.terminate()
                if not known:
                    logger.info(f"AutoStopping: Stop training ({self.stopping.reason})")
        return output

    def state_dict(self) -> dict[str, Any]:
        """For Ignite's `Checkpoint`."""
        return self._run.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where the checkpoint was made."""
        self._run.load_state_dict(state_dict)


def _usual(loss_fn: Any, model: nn.Module, batch: Any) -> Any:
    *inputs, targets = batch
    return loss_fn(model(*inputs), targets)
