"""heldin in Lightning: `Trainer(callbacks=[AutoStopping()])`, or `EvidenceStopping()`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from heldin.capture.arguments import BatchDim
from heldin.capture.collector import BUDGET, Estimator
from heldin.criterion.evidence import Across, Correction, Dead, Groups
from heldin.rules.evidence import EvidenceStopping as Stopping

from .adapters.epochs import Epochs
from .adapters.session import (
    MethodWrapper,
    StoppingSession,
    flat_metrics,
    forget_gradients,
    forget_passes,
    missing_framework,
)
from .adapters.settings import check_elementwise, chosen, spelled_out
from .rules.elementwise import ElementwiseStopping as Elementwise
from .rules.ranks import ProcessGroup

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.utilities.rank_zero import rank_prefixed_message, rank_zero_info

    from .adapters.auto_lightning import AutoStopping
except ImportError as error:
    raise missing_framework("Lightning", "lightning", error) from error

__all__ = ["AutoStopping", "ElementwiseStopping", "EvidenceStopping"]


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
        window: number of steps whose sums add up before a value is formed; "epoch": those of an
            epoch, by the number of its batches, which is better on few data.
        groups, smoothing and the others: see `heldin.EvidenceStopping`.

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

    @spelled_out
    def __init__(
        self,
        patience: int = 1,
        verbose: bool = False,
        log_groups: bool = False,
        log_rank_zero_only: bool = False,
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
        self._run = StoppingSession("EvidenceStopping", chosen(locals()))
        self.verbose, self.log_groups = verbose, log_groups
        self.log_rank_zero_only = log_rank_zero_only
        self.stopped_epoch = 0
        self.stopping_reason_message: str | None = None
        self._detour: MethodWrapper | None = None
        self._closed = False  # the step of this batch
        self._epochs = Epochs("heldin.lightning.EvidenceStopping")

    @property
    def stopping(self) -> Stopping | None:
        """The `heldin.EvidenceStopping` of the last run, with its history."""
        return self._run.stopping

    # -- the run

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Watch the module."""
        if trainer.global_step:  # fit() goes on with the run before
            self._run.load_state_dict(self._run.state_dict())
        self._epochs.reset()
        if not self._run.by_epoch:
            self._detour = watched_step(pl_module, self._run.begin(pl_module).call)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Watch the module, if the window is an epoch: now its length is known."""
        if self._run.by_epoch:
            steps = trainer.num_training_batches / trainer.accumulate_grad_batches
            self._detour = watched_step(pl_module, self._run.begin(pl_module, steps).call)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look out for passes."""
        self._epochs.begin(self.stopping)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """The next step of an optimiser is a new one."""
        self._closed = False
        self._epochs.batch()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Drop what a line search has tried after the step was weighed."""
        if self._closed and pl_module.automatic_optimization and self.stopping is not None:
            forget_passes(self.stopping)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say so if nothing was seen."""
        self._epochs.end(self.stopping)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Any
    ) -> None:
        """Weigh the evidence since the last step, once for all optimisers of a batch."""
        stopping = self.stopping
        if stopping is None or not stopping.watching:
            return
        if self._closed:
            if stopping.should_stop:
                self._keep_weights(trainer, pl_module)
            return
        self._closed = True
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
        self._keep_weights(trainer, pl_module)

    def _keep_weights(self, trainer: Trainer, pl_module: LightningModule) -> None:
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
        greedy, smoothing and the others: see `heldin.ElementwiseStopping`.

    Attributes:
        optimizers: the `heldin.ElementwiseStopping` around each optimiser of the last run.

    >>> import lightning
    >>> from heldin.lightning import ElementwiseStopping
    >>> callback = ElementwiseStopping(smoothing=0.99)
    >>> trainer = lightning.Trainer(callbacks=[callback], barebones=True, max_epochs=100)
    """

    @spelled_out
    def __init__(
        self,
        log_groups: bool = False,
        *,
        greedy: bool = True,
        smoothing: float = 0.999,
        start: float = 10.0,
        every: int = 1,
        correction: Correction = None,
        dead: Dead = "out",
        batch_dim: BatchDim = 0,
        parameters: Callable[[str], bool] | None = None,
        reduction: Literal["mean", "sum"] = "mean",
        process_group: ProcessGroup = "auto",
    ) -> None:
        self._options = chosen(locals(), Elementwise)
        check_elementwise("ElementwiseStopping", self._options)
        self.log_groups = log_groups
        self.optimizers: list[Elementwise] = []
        self._detours: list[MethodWrapper | None] = []

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wrap the optimisers; their state is restored after this."""
        self.optimizers = [Elementwise(o, pl_module, **self._options) for o in trainer.optimizers]
        trainer.strategy.optimizers = list(self.optimizers)
        self._detours = [watched_step(pl_module, each.call) for each in self.optimizers]

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
        for detour in self._detours:
            if detour is not None:
                detour.close()


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
