"""heldin in Lightning: `Trainer(callbacks=[EvidenceStopping()])`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from heldin.rules.evidence import EvidenceStopping as Stopping

from .adapters.session import (
    MethodWrapper,
    StoppingSession,
    flat_metrics,
    forget_gradients,
    missing_framework,
)
from .rules.elementwise import ElementwiseStopping as Elementwise

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.utilities.rank_zero import rank_prefixed_message, rank_zero_info
except ImportError as error:
    raise missing_framework("Lightning", "lightning", error) from error

__all__ = ["ElementwiseStopping", "EvidenceStopping"]


class EvidenceStopping(Callback):
    """Stops a `Trainer` by evidence, in the middle of an epoch if need be; no validation loop.

    `min_epochs` and `min_steps` of the Trainer are respected. The step that asks for the stop
    leaves the weights as they are. State is kept in the Trainer's checkpoints, values are logged
    to its loggers as `heldin/criterion` and others.

    Args:
        patience: number of consecutive checks that must ask for a stop.
        verbose: tell of the stop.
        log_groups: also log the value of each group of parameters.
        log_rank_zero_only: tell on one process only.
        options: any other argument of `heldin.EvidenceStopping`.

    Attributes:
        stopping: the `heldin.EvidenceStopping` of the last run, with its history.
        stopped_epoch: the epoch in which training was stopped, 0 if it was not.
        stopping_reason_message: why.

    >>> import lightning
    >>> from heldin.lightning import EvidenceStopping
    >>> trainer = lightning.Trainer(
    ...     callbacks=[EvidenceStopping(patience=3)], barebones=True, max_epochs=100
    ... )
    """

    def __init__(
        self,
        patience: int = 1,
        verbose: bool = False,
        log_groups: bool = False,
        log_rank_zero_only: bool = False,
        **options: Any,
    ) -> None:
        self._run = StoppingSession("EvidenceStopping", {"patience": patience, **options})
        self.verbose, self.log_groups = verbose, log_groups
        self.log_rank_zero_only = log_rank_zero_only
        self.stopped_epoch = 0
        self.stopping_reason_message: str | None = None
        self._detour: MethodWrapper | None = None

    @property
    def stopping(self) -> Stopping | None:
        """The `heldin.EvidenceStopping` of the last run, with its history."""
        return self._run.stopping

    # -- the run

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Watch the module."""
        if trainer.global_step:  # fit() goes on with the run before
            self._run.load_state_dict(self._run.state_dict())
        self._detour = watched_step(pl_module, self._run.begin(pl_module).call)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Any
    ) -> None:
        """Weigh the evidence of all batches since the last step."""
        stopping = self.stopping
        if stopping is None or not stopping.watching:
            return
        known = stopping.should_stop
        stop = trainer.strategy.reduce_boolean_decision(stopping.step(), all=False)
        values = flat_metrics(stopping, self.log_groups)
        pl_module.log_dict(values, on_step=True, on_epoch=False)
        if not stop:
            return
        trainer.should_stop = True
        if not known:
            self.stopped_epoch = trainer.current_epoch
            self.stopping_reason_message = f"{stopping.reason}. Signaling Trainer to stop."
            self._tell(trainer, self.stopping_reason_message)
        if _may_stop(trainer) and _scaler(trainer) is None:
            forget_gradients(pl_module.parameters())

    def _tell(self, trainer: Trainer, message: str) -> None:
        if self.verbose:
            rank = trainer.global_rank if trainer.world_size > 1 else None
            if rank is None or not self.log_rank_zero_only or rank == 0:
                rank_zero_info(rank_prefixed_message(f"Evidence: {message}", rank))

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Watch no more."""
        self._end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: Any) -> None:
        """Watch no more."""
        self._end()

    def _end(self) -> None:
        self._run.end()
        if self._detour is not None:
            self._detour.close()

    # -- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Kept in the checkpoint."""
        return {
            "run": self._run.state_dict(),
            "stopped_epoch": self.stopped_epoch,
            "stopping_reason_message": self.stopping_reason_message,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where the checkpoint was made."""
        self._run.load_state_dict(state_dict["run"])
        self.stopped_epoch = state_dict["stopped_epoch"]
        self.stopping_reason_message = state_dict["stopping_reason_message"]


class ElementwiseStopping(Callback):
    """Stops single weights by evidence: wraps the optimisers that the module configures.

    The averages are kept with the optimiser's state in the Trainer's checkpoints, the fraction of
    stopped weights is logged as `heldin/stopped`.

    Args:
        log_groups: also log the stopped fraction of each parameter.
        options: arguments of `heldin.ElementwiseStopping`.

    Attributes:
        optimizers: the `heldin.ElementwiseStopping` around each optimiser of the last run.

    >>> import lightning
    >>> from heldin.lightning import ElementwiseStopping
    >>> callback = ElementwiseStopping(smoothing=0.99)
    >>> trainer = lightning.Trainer(callbacks=[callback], barebones=True, max_epochs=100)
    """

    def __init__(self, log_groups: bool = False, **options: Any) -> None:
        self.log_groups = log_groups
        self.optimizers: list[Elementwise] = []
        self._options = options
        self._wrappers: list[MethodWrapper | None] = []

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wrap the optimisers; their state is restored after this."""
        self.optimizers = [Elementwise(o, pl_module, **self._options) for o in trainer.optimizers]
        trainer.strategy.optimizers = list(self.optimizers)
        self._wrappers = [watched_step(pl_module, each.call) for each in self.optimizers]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the stopped fractions; of several optimisers, that of the first."""
        due = trainer.global_step % max(1, trainer.log_every_n_steps) == 0
        if due or trainer.should_stop:  # counting them takes time
            values = flat_metrics(self.optimizers[0], self.log_groups)
            pl_module.log_dict(values, on_step=True, on_epoch=False)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Watch no more."""
        self._end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: Any) -> None:
        """Watch no more."""
        self._end()

    def _end(self) -> None:
        for optimizer in self.optimizers:
            optimizer.close()
        for wrapper in self._wrappers:
            if wrapper is not None:
                wrapper.close()


def watched_step(module: LightningModule, call: Callable[..., Any]) -> MethodWrapper | None:
    """Let a module's `training_step`, which need not call its `forward`, count the samples.

    With manual optimisation the backward pass lies inside of it, so `forward` has to be called.
    """
    if not module.automatic_optimization:
        return None

    def around(step: Callable[..., Any], batch: Any, *rest: Any, **named: Any) -> Any:
        return call(lambda batch: step(batch, *rest, **named), batch)  # no numbers of batches

    return MethodWrapper(module, "training_step", around)


def _may_stop(trainer: Trainer) -> bool:
    """Whether a request to stop after this step will be met."""
    epoch, step = trainer.current_epoch, trainer.global_step + 1
    return bool(epoch >= (trainer.min_epochs or 0) and step >= (trainer.min_steps or 0))


def _scaler(trainer: Trainer) -> Any:
    """The gradient scaler of 16-bit precision, which does not take a step without gradients."""
    return getattr(trainer.precision_plugin, "scaler", None)
