"""heldin in PyTorch-Ignite: `EarlyStopping(model, optimizer, loss_fn).attach(trainer)`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from heldin.shadows.losses import LossFunction

from .adapters.arguments import check_type, needs_framework, strict_kwargs
from .adapters.patches import MethodWrapper
from .adapters.stopping import FrameworkStopping
from .errors import HeldinError
from .rules.options import Rule
from .shadows.held_out import BatchLoss, loss_of_pairs
from .shadows.replayed import Clip

with needs_framework("PyTorch-Ignite", "ignite"):
    from ignite.engine import Engine, Events
    from ignite.handlers import EMAHandler

__all__ = ["EarlyStopping"]

NAME = "heldin.ignite.EarlyStopping"


class EarlyStopping(FrameworkStopping):
    """Terminates a trainer without an evaluator, in the middle of an epoch if need be.

    Rules by an estimated test loss: the model trains on all rows. Shadows of it train beside it,
    each without some of the rows, and their loss on these is the estimate. It is in
    `trainer.state.metrics` as `heldin/estimate` and `heldin/standard_error`. The trainer runs over
    a DataLoader; its optimiser may step once in several iterations. The best weights are put into
    the model at the end.

    Evidence: it is formed right before the optimiser steps, however many iterations its gradients
    were accumulated over, and the step that asks for the stop leaves the weights as they are.
    Values are in `trainer.state.metrics` as `heldin/criterion` and others.

    The state goes into a `Checkpoint` like that of a model: `Checkpoint({"stopping": stopping})`.
    `trainer.interrupt()` is a pause, after which the rule continues.

    Args:
        model: the model that the trainer trains.
        optimizer: the optimiser that trains it.
        loss_fn: (outputs, targets) -> loss, of batches (inputs ..., targets).
        rule: "auto", "folds", "shadow", "evidence", or one of `heldin.rules`.
        batch_loss: (model, batch) -> loss, in place of loss_fn, for any batch.
        clip: how the trainer clips gradients: the largest norm, or a function of the parameters.
        restore: put the weights of the best estimate into the model at the end.
        verbose: print at the end what was chosen, why it stopped and what to expect.
        log_groups: also give the value of each group of parameters, for evidence.
        others: see `heldin.EarlyStopping`.

    Attributes:
        stopping: the rule of the last run, with its history and estimate.
        estimates, out_of_fold, temperature: results, see `heldin.EarlyStopping`.

    >>> import torch
    >>> from ignite.engine import create_supervised_trainer
    >>> from heldin.ignite import EarlyStopping
    >>> model, loss_fn = torch.nn.Linear(4, 2), torch.nn.functional.cross_entropy
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> trainer = create_supervised_trainer(model, optimizer, loss_fn)
    >>> stopping = EarlyStopping(model, optimizer, loss_fn, budget=4).attach(trainer)
    """

    name = NAME
    _paused = False

    @strict_kwargs(extends=FrameworkStopping.__init__)
    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        loss_fn: LossFunction | None = None,
        rule: str | Rule = "auto",
        *,
        batch_loss: BatchLoss | None = None,
        clip: Clip | None = None,
        **options: Any,
    ) -> None:
        check_type(NAME, "model", model, nn.Module, "the model that is trained")
        super().__init__(rule, **options)
        self._model, self._optimizer, self._clip = model, optimizer, clip
        self._loss = batch_loss if loss_fn is None else loss_of_pairs(loss_fn)
        if self.by_evidence:
            options = {"loss_fn": loss_fn, "batch_loss": batch_loss, "clip": clip}
            self._run.rule.refuse_unused(NAME, options, {})
            return
        check_type(NAME, "optimizer", optimizer, Optimizer, "the one that trains the model")
        if (loss_fn is None) == (batch_loss is None):
            raise HeldinError(
                f"{NAME}: give either loss_fn, a function of (outputs, targets), or batch_loss, a "
                "function of (model, batch)"
            )

    def attach(self, trainer: Engine) -> EarlyStopping:
        """Follow the runs of a trainer."""
        check_type(f"{NAME}.attach", "trainer", trainer, Engine, "the trainer, an Engine")
        trainer.add_event_handler(Events.STARTED, self._start)
        trainer.add_event_handler(Events.INTERRUPT, self._pause)
        trainer.add_event_handler(Events.EPOCH_COMPLETED, self._run.end_epoch)
        MethodWrapper(trainer, "_process_function", self._iterate)
        MethodWrapper(trainer, "run", partial(self._run_trainer, trainer))
        return self

    def _run_trainer(
        self, trainer: Engine, run: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Run the trainer, and end the session whichever way the run ends."""
        if self._paused and self.by_evidence:  # a continued run has no event
            self._start(trainer)
        self._paused = False
        try:
            state = run(*args, **kwargs)
            if not self._paused:
                trainer.state.metrics.update(self._conclude())
        finally:
            if self.by_evidence or not self._paused:  # shadows follow the loader's iterator
                self._run.end()
        return state

    def _pause(self, trainer: Engine) -> None:
        self._paused = True

    def _start(self, trainer: Engine) -> None:
        if not self.by_evidence:
            _refuse_averages(trainer)
        resumed = bool(trainer.state.iteration)
        if resumed:
            self._run.carry_over()
        self._run.end()
        self._run.follow(trainer.state.dataloader)
        self._run.begin(
            self._model,
            self._optimizer,
            self._loss,
            trainer.state.dataloader,
            clip=self._clip,
            resumed=resumed,
            hook=True,
            epoch_steps=trainer.state.epoch_length,
        )

    def _iterate(self, process: Callable[..., Any], trainer: Engine, batch: Any) -> Any:
        """Run an iteration, before all handlers that may save what it has changed."""
        run = self._run
        run.begin_batch()
        output = process(trainer, batch)
        if run.running:
            run.add(batch)
            stop = run.step()
            trainer.state.metrics.update(run.metrics())
            if stop:
                trainer.terminate()
        return output


def _refuse_averages(trainer: Engine) -> None:
    """Refuse an average of the weights, which shadows would not have."""
    for handler in (entry[0] for entries in trainer._event_handlers.values() for entry in entries):
        filtered = getattr(handler, "_parent", None)  # of an event such as ITERATION(every=2)
        if isinstance(getattr(filtered() if filtered else handler, "__self__", None), EMAHandler):
            raise HeldinError(
                f"{NAME}: EMAHandler keeps an average of the weights, which shadows do not have, "
                "so that estimates would not be its own; use heldin.EarlyStopping(averaged_model=) "
                "in a loop of your own, rule='evidence', or leave it out"
            )
